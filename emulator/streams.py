"""Bodies: bytes that are read once and in order, and that nobody holds whole.

A `ReadableStream` is what a Worker sees of a body. Behind it is a source: bytes, a range of a file, or code
of the Worker that makes the body, which is asked for a piece when a piece is wanted.
"""

from __future__ import annotations

import asyncio
import os
import weakref
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, Final, Protocol

from emulator.errors import StreamBroken
from engine.threads import run_to_end

# What passes at once: the piece that workerd's readers are given.
PIECE: Final = 256 << 10
# A read of more than this goes to a thread, since the disk may be slow.
INLINE: Final = 1 << 20


class Source(Protocol):
    """Where a body's bytes come from."""

    async def read(self, most: int) -> bytes:
        """The next bytes, at most `most`; empty at the end. Raises `StreamBroken`."""
        ...

    async def read_into(self, view: memoryview) -> int:
        """Fills `view` with the next bytes; returns how many there were before the end."""
        ...

    async def close(self) -> None:
        """Gives up the rest."""
        ...


class BytesSource:
    """Bytes that are there."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    async def read(self, most: int) -> bytes:
        """The next bytes."""
        found = self._data[self._at : self._at + most]
        self._at += len(found)
        return found

    async def read_into(self, view: memoryview) -> int:
        """Copies the next bytes."""
        found = memoryview(self._data)[self._at : self._at + len(view)]
        view[: len(found)] = found
        self._at += len(found)
        return len(found)

    def rest(self) -> bytes:
        """Everything that is left, without a copy if nothing was read yet."""
        found = self._data[self._at :] if self._at else self._data
        self._at = len(self._data)
        return found

    async def close(self) -> None:
        """Forgets the rest."""
        self._data, self._at = b"", 0


class FileSource:
    """A range of an open file, read when it is wanted, straight to where it is wanted.

    `check` is asked before each read and raises when the file is no longer what it was.
    """

    def __init__(self, descriptor: int, offset: int, length: int, check: Callable[[int], None]) -> None:
        self._descriptor = descriptor
        self._offset = offset
        self._left = length
        self._check = check
        self._reading = 0
        self._close = weakref.finalize(self, os.close, descriptor)
        self._closed = False

    async def read(self, most: int) -> bytes:
        """The next bytes."""
        buffer = bytearray(min(most, self._left))
        count = await self.read_into(memoryview(buffer))
        return bytes(buffer[:count])

    async def read_into(self, view: memoryview) -> int:
        """Reads the next bytes of the file into `view`."""
        wanted = min(len(view), self._left)
        if not wanted:
            return 0
        if self._closed:
            raise StreamBroken("the body was given up")
        self._check(self._descriptor)
        self._reading += 1
        try:
            if wanted > INLINE:
                count = await run_to_end(self._fill, view[:wanted])
            else:
                count = self._fill(view[:wanted])
        finally:
            self._reading -= 1
            if self._closed and not self._reading:
                self._close()
        self._offset += count
        self._left -= count
        if count < wanted:
            self._left = 0
        return count

    def _fill(self, view: memoryview) -> int:
        done = 0
        while done < len(view):
            count = os.preadv(self._descriptor, [view[done:]], self._offset + done)
            if not count:
                break
            done += count
        return done

    async def close(self) -> None:
        """Closes the file, once the read that is under way has ended."""
        self._left = 0
        self._closed = True
        if not self._reading:
            self._close()


# Starts a coroutine in the request that makes a body.
Spawn = Callable[[Coroutine[Any, Any, None], str], "asyncio.Task[None]"]


class PumpSource:
    """Pieces from code of the Worker that makes the body.

    One task of that Worker runs the iterator from beginning to end, one piece ahead of the reader; when the
    reader leaves, it is cancelled and the iterator's `aclose()` runs.
    """

    def __init__(self, pieces: AsyncIterator[bytes], spawn: Spawn) -> None:
        self._pieces = pieces
        self._spawn = spawn
        self._task: asyncio.Task[None] | None = None
        self._piece = b""
        self._error: BaseException | None = None
        self._ended = False
        self._filled = asyncio.Event()
        self._wanted = asyncio.Event()

    async def read(self, most: int) -> bytes:
        """The next bytes, as many as the maker gave at once."""
        await self._next()
        found = self._piece[:most]
        self._took(len(found))
        return found

    async def read_into(self, view: memoryview) -> int:
        """Copies pieces until `view` is full."""
        done = 0
        while done < len(view):
            await self._next()
            if not self._piece:
                break
            count = min(len(view) - done, len(self._piece))
            view[done : done + count] = self._piece[:count]
            self._took(count)
            done += count
        return done

    async def close(self) -> None:
        """Stops the maker and waits until it has cleaned up."""
        self._piece = b""
        if self._task is None:
            self._ended = True
            await _close_pieces(self._pieces)
        elif self._task is not asyncio.current_task():
            self._task.cancel()
            await asyncio.wait({self._task})

    async def _next(self) -> None:
        """Waits until there is a piece, or the end."""
        if self._piece or self._ended:
            return self._raise()
        if self._task is None:
            self._task = self._spawn(self._pump(), "body")
            self._task.add_done_callback(self._stopped)
        self._wanted.set()
        await self._filled.wait()
        return self._raise()

    def _raise(self) -> None:
        if not self._piece and self._error is not None:
            raise StreamBroken(f"the body broke off: {type(self._error).__name__}: {self._error}")

    def _took(self, count: int) -> None:
        self._piece = self._piece[count:]
        if not self._piece and not self._ended:
            self._filled.clear()
            self._wanted.set()

    async def _pump(self) -> None:
        try:
            async for piece in self._pieces:
                if not piece:
                    continue
                await self._wanted.wait()
                self._wanted.clear()
                self._piece = bytes(piece)
                self._filled.set()
        finally:
            await _close_pieces(self._pieces)

    def _stopped(self, task: asyncio.Task[None]) -> None:
        self._ended = True
        if task.cancelled():
            self._error = StreamBroken("its maker was stopped")
        else:
            self._error = task.exception()
        self._filled.set()


async def _close_pieces(pieces: AsyncIterator[bytes]) -> None:
    close = getattr(pieces, "aclose", None)
    if close is not None:
        await close()


class ReadableStream:
    """A body. `length` is what it was said to have, None where nobody said."""

    def __init__(self, source: Source, length: int | None = None) -> None:
        self.source = source
        self.length = length
        self.used = False
        self.finished = length == 0
        self._on_end: list[Callable[[], None]] = []
        self._dropped: (
            weakref.finalize[[asyncio.AbstractEventLoop, Source, list[Callable[[], None]]], Any] | None
        )
        self._dropped = None
        if not self.finished and not isinstance(source, BytesSource):
            loop = asyncio.get_running_loop()
            self._dropped = weakref.finalize(self, _give_up, loop, source, self._on_end)
            self._dropped.atexit = False

    @classmethod
    def of(cls, data: bytes) -> ReadableStream:
        """A body of bytes that are there."""
        return cls(BytesSource(data), len(data))

    @property
    def whole(self) -> bool:
        """Whether all bytes are there already."""
        return isinstance(self.source, BytesSource)

    def on_end(self, callback: Callable[[], None]) -> None:
        """Calls `callback` when the body has ended, or was given up; at once if it has."""
        if self.finished:
            callback()
        else:
            self._on_end.append(callback)

    async def read(self, most: int = PIECE) -> bytes:
        """The next bytes, at most `most`; empty at the end. Raises `StreamBroken`."""
        self.used = True
        if self.finished or most == 0:
            return b""
        try:
            found = await self.source.read(most)
        except Exception:
            await self.cancel()
            raise
        if not found:
            await self.cancel()
        return found

    async def read_into(self, view: memoryview) -> int:
        """Fills `view`; returns how many bytes there were before the end. Raises `StreamBroken`."""
        self.used = True
        if self.finished:
            return 0
        try:
            count = await self.source.read_into(view)
        except Exception:
            await self.cancel()
            raise
        if count < len(view):
            await self.cancel()
        return count

    async def read_all(self) -> bytes:
        """The rest, in one piece. Raises `StreamBroken`."""
        if isinstance(self.source, BytesSource):
            self.used = True
            found = self.source.rest()
            self._end()
            return found
        pieces: list[bytes] = []
        while piece := await self.read():
            pieces.append(piece)
        return b"".join(pieces)

    async def cancel(self) -> None:
        """Gives up the rest; a second time does nothing."""
        if self.finished:
            return
        self.finished = True
        try:
            await self.source.close()
        finally:
            self._run_callbacks()

    def _end(self) -> None:
        if not self.finished:
            self.finished = True
            self._run_callbacks()

    def _run_callbacks(self) -> None:
        if self._dropped is not None:
            self._dropped.detach()
        callbacks = list(self._on_end)
        self._on_end.clear()
        for callback in callbacks:
            callback()

    def __getattr__(self, name: str) -> Any:
        if name in ("getReader", "pipeTo", "pipeThrough", "tee", "locked"):
            raise NotImplementedError(f"ReadableStream.{name} is not emulated; bodies are read by `boundary`")
        raise AttributeError(name)


def _give_up(loop: asyncio.AbstractEventLoop, source: Source, callbacks: list[Callable[[], None]]) -> None:
    """Closes the source of a body that nobody refers to any more; garbage may be found by any thread."""

    async def close() -> None:
        await source.close()
        for callback in callbacks:
            callback()

    def start() -> None:
        _closing.add(task := loop.create_task(close()))
        task.add_done_callback(_closing.discard)

    if not loop.is_closed():
        loop.call_soon_threadsafe(start)


_closing: set[asyncio.Task[None]] = set()
