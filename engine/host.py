"""What a place that runs the crate must offer: calls, and bytes in and out of the engine's region."""

from __future__ import annotations

from typing import Protocol

ABI_VERSION = 1

# The calls after which the region lies elsewhere and has another size.
RESERVING = frozenset(("engine_reserve_arena", "station_configure", "shard_configure"))


class EngineHost(Protocol):
    """One engine, wherever it runs. Offsets count from the region's first byte."""

    def call(self, name: str, *args: int) -> int:
        """Calls a function of the ABI; returns its value ≥ 0 or raises an `EngineError`."""
        ...

    async def compute(self, name: str, *args: int) -> int:
        """Like `call`, for calls that take long: a host with threads may let others run meanwhile.

        It does not return before the call has ended, not even when it is cancelled.
        """
        ...

    def write(self, offset: int, data: bytes | bytearray | memoryview) -> None:
        """Copies `data` into the region."""
        ...

    def read(self, offset: int, length: int) -> bytes:
        """Copies `length` bytes out of the region."""
        ...

    def memory_bytes(self) -> int:
        """Bytes of memory the engine holds from its host: wasm pages, or the native region."""
        ...
