"""The crate as a native Python module."""

from __future__ import annotations

import ctypes
import threading

from engine.errors import EngineError, raise_for
from engine.host import ABI_VERSION, RESERVING
from engine.threads import run_to_end

try:
    from engine import _native
except ImportError as error:
    raise EngineError("the native engine is not built: run `pip install -e .` in the checkout") from error


class NativeEngine:
    """One engine in this process. `limit` bounds its region in bytes."""

    def __init__(self, limit: int):
        if _native.ABI_VERSION != ABI_VERSION:
            raise EngineError(
                f"the native engine speaks ABI {_native.ABI_VERSION}, expected {ABI_VERSION}: build it again"
            )
        self._engine = _native.NativeEngine(limit)
        self._lock = threading.Lock()  # an error's sentence belongs to its call
        self._look()

    def call(self, name: str, *args: int) -> int:
        """Calls a function of the ABI."""
        with self._lock:
            result = self._engine.call(name, args)
            if name in RESERVING:
                self._look()
            if result < 0:
                raise_for(result, self._engine.error())
        return result

    async def compute(self, name: str, *args: int) -> int:
        """Runs a long call on a thread; the interpreter's lock is released meanwhile.

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
        """Bytes of the region."""
        return self._region_bytes

    def _look(self) -> None:
        """Notes where the region is, so that bytes can be moved while another thread computes."""
        self._address = self._engine.base()
        self._region_bytes = self._engine.call("engine_region_bytes", ())
