"""Bodies made of what is at hand: bytes, and pieces that are opened when their turn comes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final

from protocol.calls import Inflow, ShortBody

PIECE: Final = 256 * 1024


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
    """Bytes that are kept as Python's own, from the moment when they begin to arrive."""

    def __init__(self, data: bytes | bytearray, there: int | None = None) -> None:
        self._data = data
        self._there = len(data) if there is None else there
        self._error: BaseException | None = None
        self._more = asyncio.Event()

    def __len__(self) -> int:
        return len(self._data)

    def part(self, start: int, end: int) -> Inflow:
        """Some of them as a body."""
        return _PartOfHeld(self, start, end)

    def drop(self) -> None:
        """Python frees them when nobody has them any more."""

    async def fill(self, inflow: Inflow) -> None:
        """Brings those that are still to come. Raises `ShortBody` and what the body raises."""
        data = self._data
        assert isinstance(data, bytearray)
        try:
            while self._there < len(data):
                piece = await inflow.read(min(PIECE, len(data) - self._there))
                data[self._there : self._there + len(piece)] = piece
                self._there += len(piece)
                self._wake()
        except BaseException as error:
            self._error = error
            self._wake()
            raise

    async def stretch(self, start: int, end: int) -> memoryview:
        """The bytes [start, end), which are waited for. Raises `ShortBody` when they will not come."""
        while self._there < end:
            if self._error is not None:
                raise ShortBody(f"the bytes [{start}, {end}) did not come: {self._error}")
            if self._there == len(self._data):
                raise ShortBody(f"the bytes [{start}, {end}) were asked for, {self._there} are kept")
            await self._more.wait()
        return memoryview(self._data)[start:end]

    def _wake(self) -> None:
        self._more.set()
        self._more = asyncio.Event()


class _PartOfHeld:
    """A stretch of kept bytes as a body."""

    def __init__(self, held: HeldBytes, start: int, end: int) -> None:
        self._held = held
        self._at = start
        self._end = end
        self.length = end - start

    async def pour(self, host: Any, offset: int, length: int) -> None:
        host.write(offset, await self._take(length))

    async def read(self, length: int) -> bytes:
        return bytes(await self._take(length))

    async def cancel(self) -> None:
        self._at = self._end

    async def _take(self, length: int) -> memoryview:
        if length > self._end - self._at:
            raise ShortBody(f"{length} bytes were asked for, {self._end - self._at} are left")
        data = await self._held.stretch(self._at, self._at + length)
        self._at += length
        return data


def hold_bytes(inflow: Inflow, length: int) -> tuple[HeldBytes, Awaitable[None]]:
    """Keeps the next `length` bytes of a body; whoever calls it awaits their arrival."""
    held = HeldBytes(bytearray(length), 0)
    return held, held.fill(inflow)


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
