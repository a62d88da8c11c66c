"""Bodies made of what is at hand: bytes, and pieces that are opened when their turn comes."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from protocol.calls import Inflow, ShortBody


class BytesInflow:
    """A body that is there already."""

    def __init__(self, data: bytes | memoryview) -> None:
        self._data = memoryview(data)
        self.length = len(data)

    async def pour(self, host: Any, offset: int, length: int) -> None:
        """Copies the next bytes into an engine's region."""
        host.write(offset, self._take(length))

    async def read(self, length: int) -> bytes:
        """The next bytes."""
        return bytes(self._take(length))

    async def cancel(self) -> None:
        """Forgets the rest."""
        self._data = self._data[:0]

    def _take(self, length: int) -> memoryview:
        if length > len(self._data):
            raise ShortBody(f"{length} bytes were asked for, {len(self._data)} are left")
        taken, self._data = self._data[:length], self._data[length:]
        return taken


class HeldBytes:
    """Bytes that are kept as Python's own."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def __len__(self) -> int:
        return len(self._data)

    def part(self, start: int, end: int) -> Inflow:
        """Some of them as a body."""
        return BytesInflow(memoryview(self._data)[start:end])

    def drop(self) -> None:
        """Python frees them when nobody has them any more."""


async def hold_bytes(inflow: Inflow, length: int) -> HeldBytes:
    """Keeps the next `length` bytes of a body."""
    return HeldBytes(await inflow.read(length))


# A piece of a body: its bytes, and how to open it.
Piece = tuple[int, Callable[[], Awaitable[Inflow]]]


class JoinedInflow:
    """Several bodies as one; each is opened when the one before it is used up."""

    def __init__(self, pieces: Sequence[Piece]) -> None:
        self._pieces = list(pieces)
        self._open: Inflow | None = None
        self._left = 0
        self.length = sum(length for length, _ in pieces)

    def take(self) -> list[Piece]:
        """The pieces of a body that nobody has read from, for somebody else to read."""
        pieces, self._pieces = self._pieces, []
        return pieces

    async def pour(self, host: Any, offset: int, length: int) -> None:
        """Moves the next bytes into an engine's region, from as many pieces as they lie in."""
        while length:
            inflow, here = await self._next(length)
            await inflow.pour(host, offset, here)
            self._left -= here
            offset, length = offset + here, length - here

    async def read(self, length: int) -> bytes:
        """The next bytes."""
        found: list[bytes] = []
        while length:
            inflow, here = await self._next(length)
            found.append(await inflow.read(here))
            self._left -= here
            length -= here
        return b"".join(found)

    async def cancel(self) -> None:
        """Gives up the rest."""
        self._pieces.clear()
        self._left = 0
        if self._open is not None:
            opened, self._open = self._open, None
            await opened.cancel()

    async def _next(self, length: int) -> tuple[Inflow, int]:
        while not self._left:
            if not self._pieces:
                raise ShortBody(f"{length} bytes were asked for, none is left")
            if self._open is not None:
                await self._open.cancel()
                self._open = None
            length_of_piece, open_piece = self._pieces.pop(0)
            self._open = await open_piece()
            self._left = length_of_piece
        assert self._open is not None
        return self._open, min(length, self._left)
