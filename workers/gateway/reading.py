"""A prompt on its way through the stations: piece after piece, each station busy with another one.

Embedding is the first stage. So that a long prompt is never in memory whole, it is embedded a stretch at a
time, and only as many pieces are under way as there are stations to be at, and one; fewer, where memory is
short.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack
from typing import Any

from protocol.steps import Rows
from shared import EMBED_BYTES, F32, Shared

Embed = Callable[[int, Sequence[int]], Awaitable[bytes | bytearray]]
# Takes rows through one station: its number, position, rows, their count, and which are wanted of the exit.
Forward = Callable[[int, int, bytes, int, Rows], Awaitable[bytes]]
# Is told of the rows that came of a piece: where it began, and the rows.
Seen = Callable[[int, bytes], Awaitable[None]]


class Reader:
    """Reads one session's prompt. `rows` says which rows of each piece are wanted, of all or of the last."""

    def __init__(self, shared: Shared, name: str, embed: Embed, forward: Forward, seen: Seen | None = None):
        self._shared = shared
        self._name = name
        self._embed = embed
        self._forward = forward
        self._seen = seen
        self._row_bytes = F32 * shared.route.hidden_size
        self._stages = [asyncio.Lock() for _ in shared.route.stations]

    async def read(self, ids: Sequence[int], start: int) -> bytes:
        """Everything from `start` on; returns the last row as the exit station has it. Raises `Refusal`."""
        count = len(ids) - start
        piece = self._shared.route.chunk(count)
        async with self._shared.prompt(piece) as at_once:
            began = self._shared.clock()
            last = await self._pieces(ids, start, piece, at_once)
        if not self._shared.rounds.writers:
            self._shared.rounds.read(count, self._shared.clock() - began)
        return last[-self._row_bytes :]

    async def _pieces(self, ids: Sequence[int], start: int, whole: int, at_once: int) -> bytes:
        rounds = self._shared.rounds
        under_way = asyncio.Semaphore(at_once)
        crew = Crew()
        stretch, at = memoryview(b""), start
        try:
            while at < len(ids):
                await crew.wait_for(under_way.acquire())
                count = min(rounds.piece_rows(whole), len(ids) - at)
                if len(stretch) < count * self._row_bytes:
                    have = len(stretch) // self._row_bytes
                    more = self._more(ids, at + have, max(whole, count))
                    found = await crew.wait_for(self._embed(at + have, more))
                    stretch = memoryview(bytes(stretch) + found)
                    count = min(count, len(stretch) // self._row_bytes)
                piece, stretch = bytes(stretch[: count * self._row_bytes]), stretch[count * self._row_bytes :]
                crew.add(self._piece(at, piece, count, at + count == len(ids), under_way))
                at += count
            return (await crew.all())[-1]
        finally:
            await crew.dismiss()

    def _more(self, ids: Sequence[int], start: int, piece: int) -> Sequence[int]:
        """The next ids to embed: several pieces' together."""
        most = min(EMBED_BYTES // self._row_bytes, self._shared.route.max_tokens)
        return ids[start : start + max(1, most // piece) * piece]

    async def _piece(
        self, at: int, data: bytes, count: int, last: bool, under_way: asyncio.Semaphore
    ) -> bytes:
        wanted = Rows.ALL if self._seen else Rows.LAST if last else Rows.NONE
        async with AsyncExitStack() as ends:
            ends.callback(under_way.release)
            # Locks are served in order, so a piece never overtakes the one before it at any stage.
            for index, stage in enumerate(self._stages):
                async with stage:
                    if index == 0 and self._shared.rounds.shared:
                        group = await ends.enter_async_context(self._shared.rounds.seat(self._name, count))
                        await group.together()
                    async with self._shared.at_station[index].take(count):
                        data = await self._forward(index, at, data, count, wanted)
        if self._seen:
            await self._seen(at, data)
        return data


class Crew:
    """Tasks that work on one thing: when one fails, so does the whole, and the others are stopped."""

    def __init__(self) -> None:
        self._tasks: list[asyncio.Task[bytes]] = []

    def add(self, work: Coroutine[Any, Any, bytes]) -> None:
        """Starts a task."""
        self._tasks.append(asyncio.ensure_future(work))

    async def wait_for(self, work: Awaitable[Any]) -> Any:
        """The result of something else, unless a task fails before."""
        waited = asyncio.ensure_future(work)
        pending: set[asyncio.Future[Any]] = {waited, *self._tasks}
        try:
            while True:
                done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                for task in done - {waited}:
                    task.result()
                if waited in done:
                    return waited.result()
        finally:
            if not waited.done():
                waited.cancel()
                await asyncio.wait([waited])

    async def all(self) -> list[bytes]:
        """All results, in order."""
        return list(await asyncio.gather(*self._tasks))

    async def dismiss(self) -> None:
        """Stops whatever is not done, and waits for it."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
