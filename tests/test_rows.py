"""A shard's embedding rows: warden, KV and bucket in turn, and right whatever is wrong with one of them."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable, Coroutine
from dataclasses import asdict
from typing import Any

import numpy as np
import pytest
from core_support import header_of, knot_of, run
from fake_cluster import Background, DictKv, FakePeer, FileBlobs
from shard_support import OneShard, row_warden, shard_on
from station_support import embedded

import rows
from durable_objects.cobordism_warden_api import CobordismWardenApi
from engine.rows import RowsUnavailable, runs
from protocol.calls import Call, Reply
from protocol.frames import Kind, Part, Tensor, decode, encode
from protocol.ports import BlobFailed
from rows import LEFT_ALONE, MOST_AT_ONCE

PATH = knot_of()
TABLE = header_of(PATH).embedding_tensor()
GROUP = 16 * TABLE.row_bytes


def row(token: int) -> bytes:
    """The exact row of a token, f32."""
    return embedded(PATH, [token]).tobytes()


class World:
    """A shard with all three tiers."""

    one: OneShard
    warden: CobordismWardenApi
    peer: FakePeer
    warden_blobs: FileBlobs

    async def open(self, background: Background | None = None, **variables: str) -> World:
        self.warden, self.peer, self.warden_blobs = row_warden(PATH.parent)
        self.kv, self.background = DictKv(), background or Background()
        self.one = await shard_on(PATH, warden=self.peer, kv=self.kv, background=self.background, **variables)
        self.one.blobs.reads.clear()
        return self

    async def fetch(self, *tokens: int) -> None:
        found = await self.one.rows.fetch(tokens)
        assert found == {token: row(token) for token in tokens}
        await self.background.drain()

    def counts(self) -> dict[str, int]:
        """Counters that are not zero."""
        return {name: n for name, n in asdict(self.one.rows.counts).items() if n}


def case(body: Callable[[World], Coroutine[Any, Any, None]], **more: Any) -> None:
    async def main() -> None:
        world = await World().open(**more)
        await body(world)
        await world.background.drain()

    run(main())


def test_rows_are_those_of_the_gguf_and_come_once_each() -> None:
    async def body(world: World) -> None:
        found = await world.one.rows.fetch([5, 3, 5, 299, 3])
        assert found == {token: row(token) for token in (3, 5, 299)}
        assert await world.one.rows.fetch([]) == {}

    case(body)


def test_each_tier_is_asked_in_its_turn_and_its_counter_moves() -> None:
    async def body(world: World) -> None:
        await world.fetch(1, 2, 3)
        assert world.counts() == {"filled": 3}
        await world.fetch(1, 2)
        assert world.counts() == {"filled": 3, "warden": 2, "kv_written": 2}, "seen twice, written once"
        assert sorted(world.kv.values) == [world.one.rows.kv_key(1), world.one.rows.kv_key(2)]
        # The warden forgets: KV has the rows that were seen twice, the bucket the others.
        world.warden.cache.clear()
        world.warden_blobs.reads.clear()
        await world.fetch(1, 2)
        assert world.counts() == {"filled": 3, "warden": 2, "kv_written": 2, "kv": 2}
        assert world.warden_blobs.reads == []
        await world.fetch(3)
        assert world.counts()["filled"] == 4
        assert world.one.blobs.reads == [], "rows come by way of the warden, which keeps them"

    case(body)


def test_a_row_is_written_to_kv_on_second_sight_and_never_again() -> None:
    async def body(world: World) -> None:
        puts: list[str] = []
        original = world.kv.put

        async def put(key: str, value: bytes, ttl: int) -> None:
            puts.append(key)
            assert ttl == 86_400
            await original(key, value, ttl)

        world.kv.put = put  # type: ignore[method-assign]
        await world.fetch(7)
        assert puts == []
        for _ in range(4):
            await world.fetch(7)
        assert puts == [world.one.rows.kv_key(7)]
        assert world.kv.values[puts[0]] == row(7)

    case(body)


def test_a_row_that_comes_from_kv_is_not_written_back_to_it() -> None:
    async def body(world: World) -> None:
        world.peer.dead = True
        world.kv.values[world.one.rows.kv_key(7)] = row(7)
        for _ in range(4):
            await world.fetch(7)
        assert world.counts() == {"kv": 4}

    case(body)


def test_keys_in_kv_carry_the_knots_fingerprint() -> None:
    async def body(world: World) -> None:
        assert world.one.rows.kv_key(7) == f"{PATH.name}@{header_of(PATH).fingerprint}/7"

    case(body)


def test_writes_to_kv_go_on_in_the_background_and_not_in_the_callers_way() -> None:
    class Later(Background):
        """Starts nothing before it is told."""

        def __init__(self) -> None:
            super().__init__()
            self.waiting: list[Coroutine[Any, Any, None]] = []

        def __call__(self, coroutine: Coroutine[Any, Any, None]) -> None:
            self.waiting.append(coroutine)

        async def drain(self) -> None:
            while self.waiting:
                await self.waiting.pop()

    later = Later()

    async def body(world: World) -> None:
        await world.one.rows.fetch([7])
        await world.one.rows.fetch([7])
        assert world.kv.values == {}
        assert len(later.waiting) == 1
        await later.drain()
        assert world.kv.values == {world.one.rows.kv_key(7): row(7)}

    case(body, background=later)


@pytest.mark.parametrize("value", [b"", row(7)[:-4], row(7) + bytes(4), bytes(TABLE.row_bytes)])
def test_a_value_in_kv_of_another_length_is_deleted_and_not_used(value: bytes) -> None:
    async def body(world: World) -> None:
        world.peer.dead = True
        key = world.one.rows.kv_key(7)
        world.kv.values[key] = value
        await world.fetch(7)
        assert world.counts() == {"filled": 1, "kv_poisoned": 1}
        assert key not in world.kv.values
        await world.fetch(7)
        assert world.kv.values[key] == row(7), "and what is right takes its place"

    case(body)


def test_a_key_value_store_that_is_down_costs_reads_and_nothing_else() -> None:
    async def body(world: World) -> None:
        world.kv.fail = True
        world.peer.dead = True
        for _ in range(3):
            await world.fetch(7, 8)
        assert world.counts() == {"filled": 6, "kv_failed": 8}
        world.kv.fail = False
        world.kv.values[world.one.rows.kv_key(7)] = b"poison"
        world.kv.delete = None  # type: ignore[assignment]
        await world.fetch(7)

    case(body)


def test_without_kv_nothing_is_read_from_it_or_written_to_it() -> None:
    async def body(world: World) -> None:
        world.kv.fail = True
        for _ in range(3):
            await world.fetch(7)
        assert world.counts() == {"filled": 1, "warden": 2}

    case(body, USE_KV="off")


@pytest.mark.parametrize(
    "trouble", ["dead", "404", "409", "500", "no frame", "no parts", "cut", "rows of other sizes"]
)
def test_a_warden_in_whatever_trouble_costs_reads_and_nothing_else(trouble: str) -> None:
    async def body(world: World) -> None:
        async def status(call: Call) -> Reply:
            return Reply(int(trouble), b"no")

        match trouble:
            case "dead":
                world.peer.dead = True
            case "404" | "409" | "500":
                world.peer.answer = status
            case "no frame":
                world.peer.spoil = lambda data: b"AWFR"
            case "no parts":
                world.peer.spoil = lambda data: encode(Kind.ROWS, [], answer=True)
            case "cut":
                world.peer.spoil = lambda data: data[:-1]
            case _:
                odd = {
                    "ids": Tensor("ids", "i32", (1,), struct.pack("<i", 7)),
                    "rows": Tensor("rows", "u8", (1, 5), bytes(5)),
                }
                world.peer.spoil = lambda data: encode(Kind.ROWS, [Part({}, odd)], answer=True)
        await world.fetch(7, 8)
        assert world.counts() == {"filled": 2}
        assert len(world.one.blobs.reads) == 2, "the digests, and one group"

    case(body)


def test_rows_that_nobody_asked_for_are_not_taken_from_a_warden() -> None:
    async def body(world: World) -> None:
        def more(data: bytes) -> bytes:
            part = decode(data).parts[0]
            size = TABLE.row_bytes
            ids = bytes(part.tensors["ids"].data) + struct.pack("<i", 200)
            rows_ = bytes(part.tensors["rows"].data) + bytes(size)
            count = len(ids) // 4
            tensors = {
                "ids": Tensor("ids", "i32", (count,), ids),
                "rows": Tensor("rows", "u8", (count, size), rows_),
            }
            return encode(Kind.ROWS, [Part({}, tensors)], answer=True)

        world.peer.spoil = more
        await world.fetch(7)
        assert set(await world.one.rows.fetch([7])) == {7}

    case(body)


def test_a_warden_that_hangs_is_waited_for_once_and_then_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "PATIENCE", 0.01)

    async def body(world: World) -> None:
        async def hang(call: Call) -> Reply:
            await asyncio.Event().wait()
            raise AssertionError

        original, world.peer.answer = world.peer.answer, hang
        for _ in range(3):
            await world.fetch(7)
        assert len(world.peer.calls) == 1
        world.peer.answer = original
        for _ in range(LEFT_ALONE):
            await world.fetch(7)
        assert len(world.peer.calls) > 1, "it gets another chance"

    case(body)


def test_a_warden_is_asked_for_no_more_rows_than_it_gives_at_once() -> None:
    path = knot_of(vocab=MOST_AT_ONCE + 300)

    async def main() -> None:
        warden, peer, _ = row_warden(path.parent, budget=2 << 20)
        one = await shard_on(path, (0, MOST_AT_ONCE + 300), warden=peer)
        tokens = range(MOST_AT_ONCE + 200)
        found = await one.rows.fetch(tokens)
        assert len(found) == len(tokens)
        await one.rows.fetch(tokens)
        assert one.rows.counts.warden == len(tokens)
        sizes = [decode(call.body).parts[0].tensors["ids"].shape[0] for call in peer.calls]
        assert max(sizes) == MOST_AT_ONCE
        assert warden.cache.size

    run(main())


def test_the_digests_and_then_whole_groups_are_read_adjacent_ones_together() -> None:
    async def body(world: World) -> None:
        world.peer.dead = True
        await world.fetch(0, 5, 17, 40, 41, 200)
        at = header_of(PATH).file_offset(TABLE.offset)
        [digests, *groups] = world.one.blobs.reads
        assert (
            digests[1] == header_of(PATH).file_offset(header_of(PATH).digests.offset) + 8 * TABLE.first_digest
        )
        assert groups == [(PATH.name, at, 3 * GROUP), (PATH.name, at + 12 * GROUP, GROUP)]

    case(body, USE_KV="off")


def test_a_read_is_no_longer_than_the_desk_it_is_checked_on() -> None:
    assert runs([0, 1, 2, 3, 5, 6, 9], 2) == [(0, 2), (2, 4), (5, 7), (9, 10)]
    assert runs([0, 1, 2], 100) == [(0, 3)]
    assert runs([], 3) == []


def test_rows_that_do_not_match_their_digest_are_an_error_that_names_them() -> None:
    async def body(world: World) -> None:
        world.peer.dead = True
        at = header_of(PATH).file_offset(TABLE.offset) + 2 * GROUP

        def spoil(offset: int, data: bytes) -> bytes:
            if not offset <= at < offset + len(data):
                return data
            return data[: at - offset] + bytes([data[at - offset] ^ 1]) + data[at - offset + 1 :]

        world.one.blobs.spoil = spoil
        await world.fetch(7)
        sentence = rf"knot {PATH.name}, tensor token_embd_weight, rows \[32, 48\): the digest is wrong"
        with pytest.raises(RowsUnavailable, match=sentence):
            await world.one.rows.fetch([7, 40])

    case(body)


def test_the_last_group_of_a_table_may_be_shorter() -> None:
    assert TABLE.rows % 16, "or this tests nothing"

    async def body(world: World) -> None:
        world.peer.dead = True
        await world.fetch(TABLE.rows - 1)

    case(body)


def test_many_requests_at_once_do_not_get_in_each_others_way() -> None:
    async def body(world: World) -> None:
        rng = np.random.default_rng(1)
        wanted = [[int(t) for t in rng.integers(0, 300, 12)] for _ in range(12)]
        found = await asyncio.gather(*(world.one.rows.fetch(tokens) for tokens in wanted))
        for tokens, answer in zip(wanted, found, strict=True):
            assert answer == {token: row(token) for token in tokens}

    case(body)


def test_a_store_that_fails_for_good_is_an_error_of_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("knot.bucket.PAUSE_SECONDS", 0)

    async def body(world: World) -> None:
        async def fails(*arguments: Any) -> bytes:
            raise BlobFailed("no")

        world.peer.dead = True
        world.one.blobs.read = fails  # type: ignore[method-assign]
        with pytest.raises(BlobFailed):
            await world.one.rows.fetch([7])

    case(body)
