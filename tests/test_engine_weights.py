"""Weights on their way into the arena: checked, in order, two blocks at a time, and nothing left behind."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from contextlib import aclosing
from typing import Any

import pytest
from core_support import grouped, run
from engine_support import make_host
from fake_cluster import FileBlobs

from engine.blocks import Arena, Block, Unit, arena_bytes, largest_block, phase_units
from engine.client import Engine
from engine.weights import BadWeights, Placed, Weights
from knot.bucket import BucketKnot
from knot.header import PHASES
from protocol.bodies import BytesInflow
from protocol.calls import Inflow, ShortBody
from protocol.ports import BlobChanged, BlobFailed, PeerLost

KNOT = grouped()
BLOCK_BYTES = 9000


class Stream(BytesInflow):
    """A body that takes its time, and remembers what became of it."""

    def __init__(self, data: bytes, source: Source) -> None:
        super().__init__(data)
        self.source = source
        self.pours = 0
        self.cancelled = 0

    async def pour(self, host: Any, offset: int, length: int) -> None:
        self.pours += 1
        half = length // 2
        for at, part in ((offset, half), (offset + half, length - half)):
            await asyncio.sleep(0)
            self.source.gate(self)
            await super().pour(host, at, part)

    async def cancel(self) -> None:
        self.cancelled += 1
        await asyncio.sleep(0)
        await super().cancel()


class Source:
    """The knot's payload, spoiled at will. `near` and `origin` change what is read; `gate` may raise."""

    def __init__(self, knot: BucketKnot) -> None:
        self.knot = knot
        self.streams: list[Stream] = []
        self.origins: list[Block] = []
        self.near: Callable[[int, bytes], bytes] = lambda offset, data: data
        self.origin: Callable[[int, bytes], bytes] = lambda offset, data: data
        self.gate: Callable[[Stream], None] = lambda stream: None

    async def open(self, blocks: Sequence[Block]) -> Inflow:
        return await self._stream(blocks[0].offset, sum(block.length for block in blocks), self.near)

    async def open_origin(self, block: Block) -> Inflow:
        self.origins.append(block)
        return await self._stream(block.offset, block.length, self.origin)

    async def _stream(self, offset: int, length: int, spoil: Callable[[int, bytes], bytes]) -> Inflow:
        data = spoil(offset, await self.knot.read(offset, length))
        self.streams.append(Stream(data, self))
        return self.streams[-1]


class Bench:
    """A knot's weights over a source, with a recorder of what is in the arena."""

    weights: Weights
    units: list[Unit]
    arena: Arena
    source: Source

    def __init__(self, residency: str = "fluid", room: float = 1.0) -> None:
        self.residency, self.room = residency, room
        self.engine = Engine(make_host("native", 8 << 20))
        self.held: dict[tuple[int, int], int] = {}
        self.most_held = 0
        self.bytes_held = 0

    async def open(self) -> Bench:
        knot = await BucketKnot.open(FileBlobs(KNOT.parent), KNOT.name)
        self.payload = KNOT.read_bytes()[knot.header.payload_offset :]
        self.units = phase_units(knot.header, range(3), PHASES, BLOCK_BYTES)
        size = (
            int(arena_bytes(self.units) * self.room)
            if self.residency != "fluid"
            else 2 * largest_block(self.units)
        )
        self.engine.host.call("engine_reserve_arena", size)
        self.arena = Arena.plan(self.units, self.residency, self.engine.arena_at, size)
        self.source = Source(knot)
        digests = await knot.digests(block.tensor for blocks in self.units for block in blocks)
        self.weights = Weights(
            self.engine,
            KNOT.name,
            self.units,
            self.arena,
            self.source,
            lambda block: digests.of(block.first_digest, block.groups),
            self.watch,
        )
        return self

    def pinned(self, unit: int, block: Block) -> bool:
        return self.arena.places[unit][self.units[unit].index(block)] is not None

    def watch(self, unit: int, block: Block, delta: int) -> None:
        assert abs(delta) == block.length
        self.bytes_held += delta
        if self.pinned(unit, block):
            return
        key = (unit, self.units[unit].index(block))
        self.held[key] = self.held.get(key, 0) + (1 if delta > 0 else -1)
        assert self.held[key] in (0, 1), "a block arrives once and leaves once"
        present = [key for key, count in self.held.items() if count]
        assert len({unit for unit, _ in present}) <= 1, "blocks of one phase only"
        self.most_held = max(self.most_held, len(present))

    def bytes_of(self, placed: Placed) -> bytes:
        return self.engine.host.read(placed.at, placed.block.row_bytes)

    def expected(self, block: Block) -> bytes:
        start, length = block.tensor.row_range(block.start, block.end)
        return self.payload[start : start + length]

    async def drain(self, unit: int) -> list[Block]:
        """All blocks of a unit, each checked while it is held."""
        seen: list[Block] = []
        async with aclosing(self.weights.blocks(unit)) as blocks:
            async for placed in blocks:
                # Time for the next block to arrive in full beside this one.
                for _ in range(8):
                    await asyncio.sleep(0)
                assert self.bytes_of(placed) == self.expected(placed.block)
                seen.append(placed.block)
        return seen

    async def cycle(self) -> None:
        for unit, blocks in enumerate(self.units):
            assert await self.drain(unit) == list(blocks)

    @property
    def settled(self) -> int:
        """Bytes held when nothing is going on: those of the pinned blocks that have been loaded."""
        return sum(
            block.length
            for unit, blocks in enumerate(self.units)
            for block, loaded in zip(blocks, self.weights._loaded[unit], strict=True)
            if loaded
        )

    def at_rest(self) -> None:
        assert self.bytes_held == self.settled
        assert not any(self.held.values())
        assert all(stream.cancelled for stream in self.source.streams), "every body was closed"


def case(
    body: Callable[[Bench], Coroutine[Any, Any, None]], residency: str = "fluid", room: float = 1.0
) -> Bench:
    bench = Bench(residency, room)

    async def main() -> None:
        await body(await bench.open())
        bench.at_rest()

    run(main())
    return bench


@pytest.mark.parametrize(
    ("residency", "room"), [("fluid", 1.0), ("pinned-prefix", 0.5), ("pinned-prefix", 1.0), ("resident", 1.0)]
)
def test_every_block_comes_in_order_with_the_knots_own_bytes_pass_after_pass(
    residency: str, room: float
) -> None:
    async def body(bench: Bench) -> None:
        for _ in range(3):
            await bench.cycle()
            bench.at_rest()

    bench = case(body, residency, room)
    assert bench.bytes_held == sum(
        block.length
        for unit, blocks in enumerate(bench.units)
        for block in blocks
        if bench.pinned(unit, block)
    )


def test_in_fluid_memory_never_more_than_two_blocks_of_one_phase_are_held() -> None:
    bench = case(Bench.cycle)
    assert bench.most_held == 2, "the next block arrives while one is multiplied"
    assert bench.bytes_held == 0


def test_a_phase_is_one_read_and_reads_are_counted() -> None:
    async def body(bench: Bench) -> None:
        await bench.cycle()
        reads, total = bench.weights.reads, sum(b.length for blocks in bench.units for b in blocks)
        assert (reads.opened, reads.bytes, reads.again, reads.pinned) == (len(bench.units), total, 0, 0)
        await bench.cycle()
        assert (reads.opened, reads.bytes, reads.pinned) == (2 * len(bench.units), 2 * total, 0)

    case(body)


def test_what_is_resident_is_read_once() -> None:
    async def body(bench: Bench) -> None:
        await bench.cycle()
        opened, total = bench.weights.reads.opened, bench.weights.reads.bytes
        await bench.cycle()
        await bench.cycle()
        reads = bench.weights.reads
        assert (reads.opened, reads.bytes) == (opened, total)
        assert reads.pinned == 2 * sum(map(len, bench.units))

    case(body, "resident")


def test_a_pinned_prefix_is_read_once_and_the_rest_every_time() -> None:
    async def body(bench: Bench) -> None:
        await bench.cycle()
        first = bench.weights.reads.bytes
        await bench.cycle()
        pinned = [b for u, blocks in enumerate(bench.units) for b in blocks if bench.pinned(u, b)]
        assert bench.weights.reads.pinned == len(pinned) > 3
        assert bench.weights.reads.bytes == 2 * first - sum(block.length for block in pinned)

    case(body, "pinned-prefix", 0.6)


@pytest.mark.parametrize("residency", ["fluid", "pinned-prefix"])
def test_a_body_that_breaks_off_anywhere_is_made_up_for_past_the_caches(residency: str) -> None:
    async def body(bench: Bench) -> None:
        length = sum(block.length for block in bench.units[0])
        edges = [0, 1, length - 1]
        for block in bench.units[0]:
            at = block.offset - bench.units[0][0].offset
            edges += [at + block.length // 3, at + block.length]
        for cut_at in sorted(edge for edge in edges if edge < length):
            bench.source.near = lambda offset, data, cut_at=cut_at: data[:cut_at]
            for loaded in bench.weights._loaded:
                loaded[:] = [False] * len(loaded)
            bench.bytes_held = 0
            before = len(bench.source.origins)
            await bench.drain(0)
            broken = [b for b in bench.units[0] if b.offset - bench.units[0][0].offset + b.length > cut_at]
            assert bench.source.origins[before:] == broken
        assert bench.weights.reads.again == len(bench.source.origins)

    case(body, residency, 0.6)


def flip(at: int) -> Callable[[int, bytes], bytes]:
    """Turns one bit of the byte at payload offset `at`."""

    def spoil(offset: int, data: bytes) -> bytes:
        if not offset <= at < offset + len(data):
            return data
        changed = bytearray(data)
        changed[at - offset] ^= 0x10
        return bytes(changed)

    return spoil


def test_one_bit_turned_on_the_way_is_read_again_and_nobody_multiplies_with_it() -> None:
    async def body(bench: Bench) -> None:
        for block in bench.units[0]:
            for at in (block.offset, block.offset + block.length // 2, block.offset + block.length - 1):
                bench.source.near = flip(at)
                before = len(bench.source.origins)
                await bench.drain(0)
                assert bench.source.origins[before:] == [block]
        bench.source.near = lambda offset, data: data
        before = bench.weights.reads.again
        await bench.drain(0)
        assert bench.weights.reads.again == before

    case(body)


def test_a_pinned_block_is_pinned_only_once_it_is_right() -> None:
    async def body(bench: Bench) -> None:
        block = bench.units[0][1]
        bench.source.near = bench.source.origin = flip(block.offset + 5)
        with pytest.raises(BadWeights):
            await bench.drain(0)
        bench.at_rest()
        bench.source.near = bench.source.origin = lambda offset, data: data
        await bench.drain(0)
        assert all(bench.weights._loaded[0])

    case(body, "resident")


def test_what_is_wrong_wherever_it_is_read_names_knot_tensor_and_rows() -> None:
    async def body(bench: Bench) -> None:
        # The third block of the unit, the second of its groups.
        block = next(b for b in bench.units[1] if b.groups > 1 and b.start)
        rows = block.tensor.group_rows
        bench.source.near = bench.source.origin = flip(block.offset + block.group_bytes + 3)
        first, last = block.start + rows, min(block.start + 2 * rows, block.tensor.rows)
        where = rf"knot tiny-qwen2\.knot, tensor {block.tensor.name}, rows \[{first}, {last}\)"
        sentence = rf"{where}: the digest is wrong"
        with pytest.raises(BadWeights, match=sentence):
            await bench.drain(1)

    case(body)


def test_a_knot_cut_short_in_the_bucket_names_knot_tensor_and_rows() -> None:
    async def body(bench: Bench) -> None:
        block = bench.units[0][-1]
        bench.source.near = bench.source.origin = lambda offset, data: data[: block.offset + 7 - offset]
        sentence = rf"tensor {block.tensor.name}, rows \[{block.start}, .*bytes were asked for"
        with pytest.raises(BadWeights, match=sentence):
            await bench.drain(0)

    case(body)


@pytest.mark.parametrize("lost", [PeerLost, BlobFailed, ShortBody])
def test_a_body_lost_on_the_way_is_read_again(lost: type[Exception]) -> None:
    async def body(bench: Bench) -> None:
        def gate(stream: Stream) -> None:
            if stream is bench.source.streams[0] and stream.pours == 2:
                raise lost("the other side went away")

        bench.source.gate = gate
        await bench.drain(0)
        assert bench.source.origins[0] == bench.units[0][1]

    case(body)


@pytest.mark.parametrize("error", [BlobChanged, PeerLost, BlobFailed, MemoryError])
def test_an_error_of_the_source_comes_through_and_leaves_nothing_behind(error: type[Exception]) -> None:
    async def body(bench: Bench) -> None:
        async def fails(*_: Any) -> Inflow:
            raise error("no")

        bench.source.near = flip(bench.units[0][1].offset)
        bench.source.open_origin = fails  # type: ignore[method-assign]
        with pytest.raises(error):
            await bench.drain(0)
        bench.at_rest()
        bench.source.open = fails  # type: ignore[method-assign]
        with pytest.raises(error):
            await bench.drain(1)

    case(body)


def test_a_defect_while_bytes_arrive_is_not_taken_for_a_broken_body() -> None:
    async def body(bench: Bench) -> None:
        def gate(stream: Stream) -> None:
            if stream.pours == 2:
                raise ZeroDivisionError

        bench.source.gate = gate
        with pytest.raises(ZeroDivisionError):
            await bench.drain(0)
        assert bench.source.origins == []

    case(body)


@pytest.mark.parametrize("residency", ["fluid", "pinned-prefix", "resident"])
@pytest.mark.parametrize("leave", ["break", "raise", "throw away"])
def test_a_consumer_that_leaves_early_leaves_nothing_behind(residency: str, leave: str) -> None:
    async def body(bench: Bench) -> None:
        for stop in range(len(bench.units[0])):

            async def use(placed: Placed, stop: int = stop) -> None:
                if placed.block == bench.units[0][stop]:
                    await asyncio.sleep(0)
                    raise KeyError("enough")

            if leave == "raise":
                with pytest.raises(KeyError):
                    await bench.weights.each(0, use)
            else:
                async with aclosing(bench.weights.blocks(0)) as blocks:
                    async for placed in blocks:
                        if placed.block == bench.units[0][stop]:
                            break
                if leave == "throw away":
                    generator = bench.weights.blocks(0)
                    await anext(generator)
                    await generator.aclose()
            bench.at_rest()
        await bench.cycle()

    case(body, residency, 0.6 if residency == "pinned-prefix" else 1.0)


@pytest.mark.parametrize("residency", ["fluid", "pinned-prefix"])
def test_cancelled_at_any_moment_nothing_writes_into_the_arena_any_more(residency: str) -> None:
    async def body(bench: Bench) -> None:
        turns = 0
        while True:
            turns += 1
            task = asyncio.ensure_future(bench.drain(0))
            for _ in range(turns):
                await asyncio.sleep(0)
            if task.done():
                break
            task.cancel()
            if turns % 2:
                # Once more, in the middle of the tidying up.
                await asyncio.sleep(0)
                task.cancel()
            await asyncio.wait([task])
            assert task.cancelled()
            bench.at_rest()
            size = bench.arena.used
            before = bench.engine.host.read(bench.engine.arena_at, size)
            for _ in range(4):
                await asyncio.sleep(0)
            assert bench.engine.host.read(bench.engine.arena_at, size) == before
        assert turns > 20
        assert await task == list(bench.units[0])

    case(body, residency, 0.5)


def test_bytes_are_poured_straight_into_the_engine_and_never_read() -> None:
    async def body(bench: Bench) -> None:
        async def read(self: Any, length: int) -> bytes:
            raise AssertionError("weights must not pass through Python objects")

        original = BytesInflow.read
        BytesInflow.read = read  # type: ignore[method-assign]
        try:
            await bench.drain(0)
        finally:
            BytesInflow.read = original  # type: ignore[method-assign]

    case(body)
