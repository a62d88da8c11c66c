"""A station's weights come from the warden near it, and from the bucket where the warden does not serve."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from core_support import grouped, run
from fake_cluster import MIB, SECRET, Background, FakePeer, FileBlobs
from station_support import OneStation, embedded, station_on

import near
from durable_objects.budget import IsolateBudget
from durable_objects.layer_cache import LayerCache
from durable_objects.layer_warden_api import LayerWardenApi
from engine.blocks import phase_units
from knot.bucket import BucketKnot
from knot.header import PHASES
from near import LEFT_ALONE, pieces
from protocol.bodies import HeldBytes
from protocol.calls import Call, Inflow, Reply

PATH = grouped()
HIDDEN = embedded(PATH, [7, 260, 31, 299, 0])
PHASES_OF_ALL = 3 * len(PHASES)


class World:
    """A fluid station with a warden."""

    one: OneStation
    warden: LayerWardenApi
    peer: FakePeer

    async def open(self, budget: int = 8 * MIB) -> World:
        # Buckets of their own, so that it can be seen who has read.
        self.warden_blobs = FileBlobs(PATH.parent)
        cache = LayerCache("pinned-prefix", IsolateBudget(budget, time.monotonic))
        self.warden = LayerWardenApi(cache, lambda key: BucketKnot.open(self.warden_blobs, key), Background())
        self.peer = FakePeer(self.warden.answer)
        self.one = await station_on(PATH, warden=self.peer, RESIDENCY="fluid", USE_LAYER_WARDEN="on")
        self.one.blobs.reads.clear()
        return self

    async def rows(self, session: str) -> bytes:
        return (await self.one.forward(session, 0, HIDDEN)).tobytes()

    @property
    def counts(self) -> tuple[int, int, int]:
        counts = self.one.source.counts
        return counts.warden, counts.bucket, counts.invalidated


async def truth() -> bytes:
    return (await (await station_on(PATH)).forward("s", 0, HIDDEN)).tobytes()


def case(body: Callable[[World], Any], budget: int = 8 * MIB) -> None:
    async def main() -> None:
        world = await World().open(budget)
        await body(world)
        await world.one.background.drain()

    run(main())


def test_the_warden_is_asked_for_whole_phases_and_the_bucket_is_left_in_peace() -> None:
    async def body(world: World) -> None:
        assert await world.rows("a") == await truth()
        assert world.counts == (PHASES_OF_ALL, 0, 0)
        assert world.one.blobs.reads == []
        hits = world.warden.cache.counts.hits
        assert await world.rows("b") == await truth()
        assert world.warden.cache.counts.hits > hits, "the second pass comes from its memory"
        assert world.warden_blobs.reads[-1] is not None
        reads = len(world.warden_blobs.reads)
        await world.rows("c")
        assert len(world.warden_blobs.reads) == reads

    case(body)


def test_every_call_to_the_warden_says_whom_it_means_and_who_calls() -> None:
    async def body(world: World) -> None:
        await world.rows("a")
        header = world.one.knot.header
        for call in world.peer.calls:
            assert call.headers["x-knot-secret"] == SECRET
            assert call.headers["x-knot-id"] == f"{PATH.name}@{header.fingerprint}"
            assert call.headers["x-knot-key"] == PATH.name
            assert (call.headers["x-layer-start"], call.headers["x-layer-end"]) == ("0", "3")

    case(body)


def test_a_dead_warden_costs_nothing_but_reads() -> None:
    async def body(world: World) -> None:
        world.peer.dead = True
        assert await world.rows("a") == await truth()
        assert world.counts == (0, PHASES_OF_ALL, 0)

    case(body)


@pytest.mark.parametrize("status", [401, 404, 409, 500, 502, 503])
def test_a_warden_that_refuses_is_passed_by_and_not_told_anything(status: int) -> None:
    async def body(world: World) -> None:
        async def refuse(call: Call) -> Reply:
            return Reply(status, b"no")

        world.peer.answer = refuse
        assert await world.rows("a") == await truth()
        assert world.counts == (0, PHASES_OF_ALL, 0)

    case(body)


@pytest.mark.parametrize("spoil", [lambda data: data[:-1], lambda data: data + b"x", lambda data: b""])
def test_an_answer_of_the_wrong_length_is_not_used_and_the_warden_told_to_forget(
    spoil: Callable[[bytes], bytes],
) -> None:
    async def body(world: World) -> None:
        await world.rows("a")
        held = len(world.warden.cache)
        world.peer.spoil = lambda data: spoil(data) if len(data) > 100 else data
        assert await world.rows("b") == await truth()
        await world.one.background.drain()
        assert world.counts == (PHASES_OF_ALL, PHASES_OF_ALL, held)
        assert world.warden.cache.counts.invalidated == held
        assert len(world.warden.cache) == 0
        world.peer.spoil = lambda data: data
        assert await world.rows("c") == await truth()
        assert world.counts[0] == 2 * PHASES_OF_ALL

    case(body)


def test_poison_in_the_warden_is_read_past_and_forgotten_so_that_it_poisons_nobody_twice() -> None:
    async def body(world: World) -> None:
        await world.rows("a")
        tensors = world.warden.cache._tensors
        poisoned = ["blk_0_attn_k_weight", "blk_1_ffn_up_weight", "blk_2_ffn_down_weight"]
        for name in poisoned:
            data = bytearray(await tensors[name].part(0, len(tensors[name])).read(len(tensors[name])))
            data[len(data) // 2] ^= 1
            tensors[name] = HeldBytes(bytes(data))
        assert await world.rows("b") == await truth()
        await world.one.background.drain()
        assert world.warden.cache.counts.invalidated == len(poisoned)
        assert not set(poisoned) & set(tensors)
        again = world.one.station.weights.reads.again
        assert again == len(poisoned), "one block each"
        assert await world.rows("c") == await truth()
        assert world.one.station.weights.reads.again == again, "the poison is gone"

    case(body)


def test_a_tensor_that_the_warden_holds_too_short_is_made_up_for_and_forgotten() -> None:
    async def body(world: World) -> None:
        await world.rows("a")
        tensors = world.warden.cache._tensors
        whole = tensors["blk_1_ffn_up_weight"]
        short = await whole.part(0, len(whole) - 10).read(len(whole) - 10)
        tensors["blk_1_ffn_up_weight"] = HeldBytes(short)
        # The warden promises what the knot says, and its body breaks off.
        world.peer.open = _streaming(world)  # type: ignore[method-assign]
        assert await world.rows("b") == await truth()
        await world.one.background.drain()
        assert world.warden.cache.counts.invalidated == 1

    case(body)


def _streaming(world: World) -> Any:
    """A peer whose body is handed on as it is, not gathered first."""

    async def open(call: Call) -> tuple[Reply, Inflow]:
        reply = await world.warden.answer(call)
        assert not isinstance(reply.body, bytes)
        return Reply(reply.status, b"", reply.headers), reply.body  # type: ignore[return-value]

    return open


def test_a_warden_that_dies_while_it_is_told_to_forget_is_no_trouble() -> None:
    async def body(world: World) -> None:
        await world.rows("a")
        name = "blk_0_attn_k_weight"
        world.warden.cache._tensors[name] = HeldBytes(bytes(len(world.warden.cache._tensors[name])))
        world.peer.lose.append(f"/invalidate/{name}")
        assert await world.rows("b") == await truth()
        await world.one.background.drain()
        assert name in world.warden.cache._tensors, "it was not told"
        assert await world.rows("c") == await truth()
        await world.one.background.drain()
        assert name not in world.warden.cache._tensors

    case(body)


def test_a_warden_that_hangs_is_waited_for_once_a_pass_and_then_left_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(near, "PATIENCE", 0.01)

    async def body(world: World) -> None:
        async def hang(call: Call) -> Reply:
            await asyncio.Event().wait()
            raise AssertionError

        original, world.peer.answer = world.peer.answer, hang
        assert await world.rows("a") == await truth()
        assert len(world.peer.calls) == 1
        assert world.counts == (0, PHASES_OF_ALL, 0)
        world.peer.answer = original
        for number in range(LEFT_ALONE // PHASES_OF_ALL):
            await world.rows(f"b{number}")
        await world.rows("c")
        assert world.counts[0] > 0, "it gets another chance"

    case(body)


def test_what_does_not_fit_the_warden_passes_through_it_with_the_right_bytes() -> None:
    async def body(world: World) -> None:
        for session in "abc":
            assert await world.rows(session) == await truth()
        assert 0 < len(world.warden.cache) < 21
        assert world.warden.stats()["passed_bytes"]

    case(body, budget=60_000)


def test_blocks_are_asked_for_by_tensor_and_neighbouring_ones_in_one_piece() -> None:
    async def body(world: World) -> None:
        header = world.one.knot.header
        [attn, gate, *_] = phase_units(header, range(3), PHASES, 5000)
        names = ["q", "k", "v", "output"]
        assert pieces(attn) == [
            [f"blk_0_attn_{n}_weight", 0, header.tensor(f"blk_0_attn_{n}_weight").length] for n in names
        ]
        assert len(gate) > 2
        [[name, start, end]] = pieces(gate[1:])
        assert (name, start, end) == ("blk_0_ffn_gate_weight", gate[0].length, gate[0].tensor.length)

    case(body)


def test_without_a_warden_everything_comes_from_the_bucket() -> None:
    async def main() -> None:
        one = await station_on(PATH, RESIDENCY="fluid")
        rows = await one.forward("s", 0, HIDDEN)
        assert np.isfinite(rows).all()
        assert (one.source.counts.warden, one.source.counts.bucket) == (0, PHASES_OF_ALL)

    run(main())
