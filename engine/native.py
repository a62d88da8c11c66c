"""The crate as a native Python module."""

from __future__ import annotations

import asyncio
import ctypes

from engine.errors import EngineError, raise_for
from engine.host import ABI_VERSION

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

    def call(self, name: str, *args: int) -> int:
        """Calls a function of the ABI."""
        result = self._engine.call(name, args)
        if result < 0:
            raise_for(result, self._engine.error())
        return result

    async def compute(self, name: str, *args: int) -> int:
        """Runs a long call on a thread; the interpreter's lock is released meanwhile."""
        return await asyncio.to_thread(self.call, name, *args)

    def write(self, offset: int, data: bytes | bytearray | memoryview) -> None:
        """Copies `data` into the region."""
        self._engine.write(offset, bytes(data))

    def read(self, offset: int, length: int) -> bytes:
        """Copies `length` bytes out of the region."""
        return self._engine.read(offset, length)

    def view(self, offset: int, length: int) -> memoryview:
        """The region's own bytes, to read a file into; valid until the engine is configured anew."""
        if offset < 0 or length < 0 or offset + length > self.memory_bytes():
            raise EngineError(f"{length} bytes at offset {offset} leave the engine's region")
        return memoryview((ctypes.c_ubyte * length).from_address(self._engine.base() + offset)).cast("B")

    def memory_bytes(self) -> int:
        """Bytes of the region."""
        return self.call("engine_region_bytes")
