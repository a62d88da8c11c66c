//! The inner loops: dot products in one fixed order, and products of activations with weight rows.

pub mod dot;
pub mod matmul;
