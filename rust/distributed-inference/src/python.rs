//! The native Python module: an engine as an object, its region as a writable buffer.

use crate::abi::{ABI_VERSION, Entry, Slot, entries};
use pyo3::exceptions::{PyKeyError, PyMemoryError, PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyBytes;
use std::collections::HashMap;
use std::sync::{LazyLock, Mutex, PoisonError};

static BY_NAME: LazyLock<HashMap<&'static str, &'static Entry>> =
    LazyLock::new(|| entries().map(|entry| (entry.name, entry)).collect());

/// One engine, owned by Python.
#[pyclass(module = "engine._native", frozen)]
struct NativeEngine(Mutex<Slot>);

impl NativeEngine {
    fn slot(&self) -> std::sync::MutexGuard<'_, Slot> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[pymethods]
impl NativeEngine {
    #[new]
    fn new(limit: usize) -> PyResult<Self> {
        let slot = Slot::new(limit).map_err(|error| PyMemoryError::new_err(error.message))?;
        Ok(Self(Mutex::new(slot)))
    }

    /// Calls a function of the ABI by name; the interpreter is free to run other threads meanwhile.
    fn call(&self, py: Python<'_>, name: &str, args: Vec<u32>) -> PyResult<i32> {
        let entry = BY_NAME
            .get(name)
            .ok_or_else(|| PyKeyError::new_err(format!("the engine has no function {name:?}")))?;
        if args.len() != entry.arity {
            return Err(PyTypeError::new_err(format!(
                "{name} takes {} arguments after the handle, got {}",
                entry.arity,
                args.len()
            )));
        }
        Ok(py.detach(|| (entry.call)(&mut self.slot(), &args)))
    }

    /// The sentence of the last error.
    fn error(&self) -> String {
        let mut slot = self.slot();
        let length = slot.write_error().max(0) as usize;
        String::from_utf8_lossy(&slot.engine().region.bytes()[..length]).into_owned()
    }

    /// Copies `data` into the region at `offset`.
    fn write(&self, offset: u32, data: &[u8]) -> PyResult<()> {
        let length = u32::try_from(data.len()).map_err(|_| PyValueError::new_err("more than 4 GiB"))?;
        self.slot()
            .engine()
            .region
            .slice_mut("write", offset, length)
            .map_err(|error| PyValueError::new_err(error.message))?
            .copy_from_slice(data);
        Ok(())
    }

    /// Copies `length` bytes out of the region at `offset`.
    fn read<'py>(&self, py: Python<'py>, offset: u32, length: u32) -> PyResult<Bound<'py, PyBytes>> {
        let mut slot = self.slot();
        let bytes = slot
            .engine()
            .region
            .slice("read", offset, length)
            .map_err(|error| PyValueError::new_err(error.message))?;
        Ok(PyBytes::new(py, bytes))
    }

    /// Address of the region's first byte; it moves only when the engine is configured.
    fn base(&self) -> usize {
        self.slot().engine().region.base() as usize
    }
}

#[pymodule]
fn _native(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("ABI_VERSION", ABI_VERSION)?;
    module.add("FUNCTIONS", entries().map(|entry| (entry.name, entry.arity)).collect::<Vec<_>>())?;
    module.add_class::<NativeEngine>()
}
