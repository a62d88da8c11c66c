//! The arithmetic of knot, as one crate for every host.
//!
//! A host (a Worker's JavaScript, wasmtime or the native Python module) owns an [`Engine`]: one
//! region of memory reserved once, laid out as mailbox, persistent data, scratch and arena. The
//! host writes bytes at offsets of that region and calls functions of the C ABI in [`abi`]; every
//! offset and length it passes is checked against the region.

pub mod abi;
pub mod engine;
pub mod error;
mod fields;
pub mod kernels;
pub mod kv;
pub mod ops;
pub mod quants;
pub mod region;
pub mod shard;
pub mod station;
pub mod tokenizer;

#[cfg(feature = "python")]
mod python;

pub use engine::Engine;
pub use error::{Error, Kind, Result};
