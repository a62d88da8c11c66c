"""Brings weight blocks into an engine's arena: one long read a unit, each block checked before it is used.

Two blocks are held at most besides the pinned ones: while one is multiplied the next one arrives. A block
whose digests do not match is read again past the caches, and is an error if that does not help.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Final, Protocol

from engine.blocks import Arena, Block, Unit, UnitName
from engine.client import Engine
from protocol.calls import Inflow, ShortBody
from protocol.ports import BlobFailed, PeerLost
from protocol.recorder import Moved

# A body may break off on its way; the bytes behind it are still good.
ORIGIN_ATTEMPTS: Final = 4
PAUSE_SECONDS: Final = 0.05


class BadWeights(Exception):
    """Weights that do not match their digests wherever they were read from; names knot, tensor and rows."""


class PayloadSource(Protocol):
    """Where the bytes of blocks come from."""

    async def open(self, blocks: Sequence[Block]) -> Inflow:
        """Consecutive blocks as one body, from wherever is nearest."""
        ...

    async def open_origin(self, block: Block) -> Inflow:
        """One block past every cache; whatever held a bad copy of it is told so."""
        ...


@dataclass(slots=True)
class Reads:
    """What has been read since the start: operations, bytes, blocks read again, blocks found pinned."""

    opened: int = 0
    bytes: int = 0
    again: int = 0
    pinned: int = 0


@dataclass(frozen=True, slots=True)
class Placed:
    """A block that lies in the arena, checked: its rows [start, end) begin at region offset `at`."""

    block: Block
    at: int


class Weights:
    """The weights of one station or shard.

    `digests` tells a block's digests; `watch` is told of every block that arrives in the arena (+bytes) and
    of every one that leaves it (-bytes).
    """

    def __init__(
        self,
        engine: Engine,
        name: str,
        units: Sequence[Unit],
        arena: Arena,
        source: PayloadSource,
        digests: Callable[[Block], bytes],
        watch: Callable[[int, Block, int], None] | None = None,
    ) -> None:
        self._engine = engine
        self._name = name
        self._units = units
        self._arena = arena
        self.source = source
        self._digests = digests
        self._watch = watch
        self._loaded = [[False] * len(unit) for unit in units]
        self.reads = Reads()

    @property
    def arena(self) -> Arena:
        """Where the blocks lie."""
        return self._arena

    async def blocks(self, unit: int) -> AsyncGenerator[Placed, None]:
        """The blocks of a unit in order, each valid until the next one is asked for.

        Raises `BadWeights`, `ShortBody` and what the source raises. Close it (`aclosing`) when leaving early.
        """
        blocks, places, loaded = self._units[unit], self._arena.places[unit], self._loaded[unit]
        ready = 0
        while ready < len(blocks) and loaded[ready]:
            at = places[ready]
            assert at is not None
            self.reads.pinned += 1
            yield Placed(blocks[ready], at + blocks[ready].skip)
            ready += 1
        if ready == len(blocks):
            return
        inflow = await self._open(blocks[ready:])
        transit: list[Block] = []
        arriving = asyncio.ensure_future(self._arrive(unit, ready, inflow, transit))
        try:
            for index in range(ready, len(blocks)):
                block, at = blocks[index], self._place(unit, index)
                # Shielded: what arrives writes into the arena until the `finally` has seen it end.
                whole = await asyncio.shield(arriving)
                if not whole or await self._check(block, at) is not None:
                    await self._again(block, at)
                if places[index] is not None:
                    loaded[index] = True
                    transit.remove(block)
                if index + 1 < len(blocks):
                    arriving = asyncio.ensure_future(self._arrive(unit, index + 1, inflow, transit))
                yield Placed(block, at + block.skip)
                if places[index] is None:
                    transit.remove(block)
                    self._seen(unit, block, -block.length)
        finally:
            # Whatever ends the pass, it is over only when nobody writes into the arena any more.
            try:
                await inflow.cancel()
            finally:
                arriving.cancel()
                try:
                    await _ended(arriving)
                finally:
                    for block in transit:
                        self._seen(unit, block, -block.length)

    async def each(self, unit: int, use: Callable[[Placed], Awaitable[None]]) -> None:
        """Calls `use` with every block of a unit in order."""
        async with aclosing(self.blocks(unit)) as blocks:
            async for placed in blocks:
                await use(placed)

    def drop(self) -> None:
        """Forgets what is pinned: the engine has another use for the arena. No pass may be running."""
        for unit, loaded in enumerate(self._loaded):
            for index, block in enumerate(self._units[unit]):
                if loaded[index]:
                    loaded[index] = False
                    self._seen(unit, block, -block.length)

    def _place(self, unit: int, index: int) -> int:
        place = self._arena.places[unit][index]
        return self._arena.buffers[index % 2] if place is None else place

    async def _open(self, blocks: Sequence[Block]) -> Inflow:
        self.reads.opened += 1
        return await self.source.open(blocks)

    async def _arrive(self, unit: int, index: int, inflow: Inflow, transit: list[Block]) -> bool:
        """Moves the next block into the arena; False when the body broke off before its end."""
        block = self._units[unit][index]
        transit.append(block)
        self._seen(unit, block, block.length)
        try:
            await inflow.pour(self._engine.host, self._place(unit, index), block.length)
        except (ShortBody, PeerLost, BlobFailed):
            return False
        self.reads.bytes += block.length
        return True

    def _seen(self, unit: int, block: Block, delta: int) -> None:
        if self._watch:
            self._watch(unit, block, delta)

    async def _check(self, block: Block, at: int) -> int | None:
        return await self._engine.first_bad_group(at, block.length, block.group_bytes, self._digests(block))

    async def _again(self, block: Block, at: int) -> None:
        """Reads a block past the caches. Raises `BadWeights` when it is still not what the knot says."""
        for left in reversed(range(ORIGIN_ATTEMPTS)):
            self.reads.again += 1
            self.reads.opened += 1
            self.reads.bytes += block.length
            inflow = await self.source.open_origin(block)
            try:
                await inflow.pour(self._engine.host, at, block.length)
                break
            except ShortBody as error:
                if not left:
                    raise BadWeights(
                        f"{self._where(block, 0)}: {error}; verify the knot and upload it again"
                    ) from error
            except (PeerLost, BlobFailed):
                if not left:
                    raise
            finally:
                await inflow.cancel()
            await asyncio.sleep(PAUSE_SECONDS)
        bad = await self._check(block, at)
        if bad is not None:
            raise BadWeights(
                f"{self._where(block, bad)}: the digest is wrong, also when read past the caches; "
                "verify the knot and upload it again"
            )

    def _where(self, block: Block, group: int) -> str:
        tensor = block.tensor
        first = (block.start // tensor.group_rows + group) * tensor.group_rows
        last = min(first + tensor.group_rows, tensor.rows)
        return f"knot {self._name}, tensor {tensor.name}, rows [{first}, {last})"


def named(
    units: Sequence[Unit], names: Sequence[UnitName], arena: Arena, moved: Moved | None
) -> Callable[[int, Block, int], None] | None:
    """A `watch` of `Weights` that tells `moved` of blocks by layer, phase and rows."""
    if moved is None:
        return None

    def seen(unit: int, block: Block, delta: int) -> None:
        stays = arena.places[unit][units[unit].index(block)] is not None
        moved(*names[unit], block.name, delta, stays)

    return seen


async def _ended(task: asyncio.Future[bool]) -> None:
    """Waits for a cancelled task to end, however often the one who waits is cancelled meanwhile."""
    again: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as error:
            again = error
    if not task.cancelled():
        task.exception()
    if again is not None:
        raise again
