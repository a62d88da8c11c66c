//! The C ABI: plain functions of `u32` arguments, each returning a value ≥ 0 or `-(Kind)`.
//!
//! Every function takes an engine's handle first. Bytes go through the engine's region: arguments
//! named `*_at` are offsets from the region's first byte, whose address [`engine_base`] tells.
//! After an error, [`engine_error`] puts its sentence into the mailbox. The same functions serve
//! wasm and native hosts, by exported symbol or, for the Python module, by name from [`entries`].

mod core;
mod kernels;
mod shard;
mod station;
mod tokenizer;

use crate::{Engine, Error, Kind};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The version of this ABI. A host refuses a module of another version.
pub const ABI_VERSION: u32 = 1;

/// One function of the ABI, for hosts that call by name.
pub struct Entry {
    /// The exported symbol.
    pub name: &'static str,
    /// Arguments after the handle.
    pub arity: usize,
    /// The function; `args.len()` is `arity`.
    pub call: fn(&mut Slot, &[u32]) -> i32,
}

/// Every function of the ABI that works on an engine.
pub fn entries() -> impl Iterator<Item = &'static Entry> {
    [core::ENTRIES, kernels::ENTRIES, station::ENTRIES, shard::ENTRIES, tokenizer::ENTRIES]
        .into_iter()
        .flatten()
}

/// An engine and the sentence of its last error.
pub struct Slot {
    engine: Engine,
    error: String,
}

impl Slot {
    /// A fresh engine whose region may grow to `limit` bytes.
    pub fn new(limit: usize) -> crate::Result<Self> {
        Ok(Self { engine: Engine::new(limit)?, error: String::new() })
    }

    /// The engine.
    pub fn engine(&mut self) -> &mut Engine {
        &mut self.engine
    }

    /// Runs `body` on the engine; turns an error or a panic into its status.
    fn run(&mut self, body: impl FnOnce(&mut Engine) -> crate::Result<u32>) -> i32 {
        let outcome = catch_unwind(AssertUnwindSafe(|| body(&mut self.engine)));
        let error = match outcome {
            Ok(Ok(value)) => match i32::try_from(value) {
                Ok(value) => return value,
                Err(_) => Error::new(Kind::BadArgument, format!("the result {value} does not fit the ABI")),
            },
            Ok(Err(error)) => error,
            Err(panic) => {
                let text = panic
                    .downcast_ref::<String>()
                    .map(String::as_str)
                    .or_else(|| panic.downcast_ref::<&str>().copied())
                    .unwrap_or("no message");
                Error::new(Kind::Panic, format!("the engine panicked: {text}"))
            }
        };
        self.error = error.message;
        -(error.kind as i32)
    }
}

type Shared = Arc<Mutex<Slot>>;

static ENGINES: Mutex<Vec<Option<Shared>>> = Mutex::new(Vec::new());

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // A panic is caught inside `Slot::run`, so a poisoned lock holds nothing torn.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn find(handle: u32) -> Option<Shared> {
    lock(&ENGINES).get(handle as usize)?.clone()
}

/// Calls `entry` on the engine `handle`; the exported symbols all come through here.
fn call(handle: u32, args: &[u32], function: fn(&mut Slot, &[u32]) -> i32) -> i32 {
    match find(handle) {
        Some(slot) => function(&mut lock(&slot), args),
        None => -(Kind::BadHandle as i32),
    }
}

/// The version of the ABI that this module speaks.
#[unsafe(no_mangle)]
pub extern "C" fn engine_abi_version() -> u32 {
    ABI_VERSION
}

/// Makes an engine whose region may grow to `limit` bytes; returns its handle.
#[unsafe(no_mangle)]
pub extern "C" fn engine_create(limit: u32) -> i32 {
    let slot = match Slot::new(limit as usize) {
        Ok(slot) => Arc::new(Mutex::new(slot)),
        Err(error) => return -(error.kind as i32),
    };
    let mut engines = lock(&ENGINES);
    let free = engines.iter().position(Option::is_none);
    let handle = free.unwrap_or_else(|| {
        engines.push(None);
        engines.len() - 1
    });
    engines[handle] = Some(slot);
    handle as i32
}

/// Drops an engine and frees its region.
#[unsafe(no_mangle)]
pub extern "C" fn engine_destroy(handle: u32) -> i32 {
    match lock(&ENGINES).get_mut(handle as usize).and_then(Option::take) {
        Some(_) => 0,
        None => -(Kind::BadHandle as i32),
    }
}

/// Address of the region's first byte, or 0 for a handle that names no engine. It changes when
/// the engine is configured and at no other time.
#[unsafe(no_mangle)]
pub extern "C" fn engine_base(handle: u32) -> usize {
    find(handle).map_or(0, |slot| lock(&slot).engine.region.base() as usize)
}

/// Defines functions of the ABI: the exported symbol and its row in `ENTRIES`.
macro_rules! abi {
    ($($(#[$doc:meta])* fn $name:ident($engine:ident $(, $arg:ident)* $(,)?) $body:block)*) => {
        $(
            $(#[$doc])*
            #[unsafe(no_mangle)]
            pub extern "C" fn $name(handle: u32 $(, $arg: u32)*) -> i32 {
                $crate::abi::call(handle, &[$($arg),*], entry::$name)
            }
        )*
        mod entry {
            #[allow(unused_imports)]
            use super::*;
            $(
                pub(super) fn $name(slot: &mut $crate::abi::Slot, args: &[u32]) -> i32 {
                    let [$($arg),*] = *args else {
                        return -($crate::Kind::BadArgument as i32);
                    };
                    slot.run(|$engine| -> $crate::Result<u32> { $body })
                }
            )*
        }
        /// The functions of this file, for hosts that call by name.
        pub const ENTRIES: &[$crate::abi::Entry] = &[
            $($crate::abi::Entry {
                name: stringify!($name),
                arity: <[&str]>::len(&[$(stringify!($arg)),*]),
                call: entry::$name,
            }),*
        ];
    };
}
use abi;
