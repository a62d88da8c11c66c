"""The crate as WebAssembly under wasmtime, as the emulator and the tests run it."""

from __future__ import annotations

import ctypes
import threading
from functools import lru_cache
from pathlib import Path
from typing import Any

import wasmtime

from engine.errors import EngineError, raise_for
from engine.host import ABI_VERSION, RESERVING
from engine.threads import run_to_end

PIPELINE = Path(__file__).resolve().parent.parent / "build" / "pipeline.wasm"


@lru_cache(maxsize=4)
def _compiled(path: Path, modified_ns: int) -> tuple[wasmtime.Engine, wasmtime.Module]:
    """Compiled once a process (and cached on disk by wasmtime): a cluster has a dozen instances."""
    config = wasmtime.Config()
    config.cache = True
    engine = wasmtime.Engine(config)
    return engine, wasmtime.Module(engine, path.read_bytes())


class WasmEngine:
    """One wasm instance with one engine in it.

    `limit` bounds the engine's region in bytes; `path` names the module.
    """

    def __init__(self, limit: int, path: Path = PIPELINE):
        if not path.exists():
            raise EngineError(f"{path} is missing: build it with `python scripts/build_wasm.py`")
        engine, module = _compiled(path, path.stat().st_mtime_ns)
        self._store = wasmtime.Store(engine)
        self._exports = wasmtime.Instance(self._store, module, []).exports(self._store)
        memory = self._exports["memory"]
        assert isinstance(memory, wasmtime.Memory)
        self._memory = memory
        self._functions: dict[str, Any] = {}
        # A store may be entered by one thread at a time, and an error's sentence belongs to its call.
        self._lock = threading.Lock()
        version = self._function("engine_abi_version")(self._store)
        if version != ABI_VERSION:
            raise EngineError(f"{path.name} speaks ABI {version}, expected {ABI_VERSION}: build it again")
        self._handle: int = self._function("engine_create")(self._store, _signed(limit))
        if self._handle < 0:
            raise_for(self._handle, f"an engine of {limit} bytes could not be made")
        self._look()

    def _function(self, name: str) -> Any:
        function = self._functions.get(name)
        if function is None:
            function = self._functions[name] = self._exports[name]
        return function

    def call(self, name: str, *args: int) -> int:
        """Calls a function of the ABI."""
        with self._lock:
            result: int = self._function(name)(self._store, self._handle, *map(_signed, args))
            if self._memory.data_len(self._store) != self._memory_bytes or name in RESERVING:
                self._look()
            if result < 0:
                raise_for(result, self._error())
        return result

    async def compute(self, name: str, *args: int) -> int:
        """Runs a long call on a thread: wasmtime releases the interpreter's lock meanwhile.

        Other calls of the same engine wait for it; a cancelled caller does so too.
        """
        return await run_to_end(self.call, name, *args)

    def write(self, offset: int, data: bytes | bytearray | memoryview) -> None:
        """Copies `data` into the region."""
        view = memoryview(data)
        if view.nbytes:
            self.view(offset, view.nbytes)[:] = view.cast("B")

    def read(self, offset: int, length: int) -> bytes:
        """Copies `length` bytes out of the region."""
        return bytes(self.view(offset, length))

    def view(self, offset: int, length: int) -> memoryview:
        """The region's own bytes, to read a file into; valid until the engine is configured anew."""
        if offset < 0 or length < 0 or offset + length > self._region_bytes:
            raise EngineError(f"{length} bytes at offset {offset} leave the engine's region")
        return memoryview((ctypes.c_ubyte * length).from_address(self._address + offset)).cast("B")

    def memory_bytes(self) -> int:
        """Bytes of linear memory."""
        return self._memory_bytes

    def _look(self) -> None:
        """Notes where the region is, so that bytes can be moved while another thread computes."""
        self._memory_bytes = self._memory.data_len(self._store)
        base = self._function("engine_base")(self._store, self._handle)
        self._address = ctypes.addressof(self._memory.data_ptr(self._store).contents) + base
        self._region_bytes: int = self._function("engine_region_bytes")(self._store, self._handle)

    def _error(self) -> str:
        length: int = self._function("engine_error")(self._store, self._handle)
        return self.read(0, length).decode() if length > 0 else ""


def _signed(value: int) -> int:
    """wasmtime takes i32 as signed; the ABI means u32."""
    if not 0 <= value < 1 << 32:
        raise EngineError(f"{value} is no 32-bit unsigned argument")
    return value - (1 << 32) if value >= 1 << 31 else value
