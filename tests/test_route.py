"""A route is made of parts that agree; one that does not is named, with the field."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from core_support import knot_of, run
from fake_cluster import HEADERS, SECRET, Background, FakeCluster, FakePeer, fake_cluster

import route
from lanes import Wire
from protocol.calls import Call, Reply, json_reply
from protocol.frames import BadFrame, Part, Tensor, decode, encode
from route import GatewaySettings, RouteUnavailable, find_route
from shared import Route

PATH = knot_of()


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(route, "PAUSE_SECONDS", 0)


def settings(cluster: FakeCluster) -> GatewaySettings:
    variables = {
        "KNOT_KEY": PATH.name,
        "CLUSTER_SECRET": SECRET,
        "STATION_RANGES": "0-1,1-3",
        "SHARD_RANGES": "0-150,150-300",
        "STEP_DEADLINE_SECONDS": "7",
    }
    return GatewaySettings.read(variables.get)


async def find(cluster: FakeCluster) -> Route:
    return await find_route(settings(cluster), *_parts(cluster), cluster.wire)


def _parts(cluster: FakeCluster) -> Any:
    return cluster.knot.header, cluster.station_peers, cluster.shard_peers


def case(body: Callable[[FakeCluster], Coroutine[Any, Any, None]]) -> None:
    async def main() -> None:
        async with fake_cluster(PATH, stations=2, shards=2, wardens=False) as cluster:
            await body(cluster)

    run(main())


def changed(peer: FakePeer, **changes: Any) -> None:
    """Has a part say something else of itself; None for a field that it does not mention."""
    original = peer.answer

    async def answer(call: Call) -> Reply:
        health = {**(await original(call)).json(), **changes}
        return json_reply({key: value for key, value in health.items() if value is not None})

    peer.answer = answer


def test_a_route_knows_its_hops_the_rows_all_of_them_take_and_whether_weights_stay() -> None:
    async def body(cluster: FakeCluster) -> None:
        found = await find(cluster)
        assert [hop.layers for hop in found.stations] == [(0, 1), (1, 3)]
        assert [hop.ids for hop in found.shards] == [(0, 150), (150, 300)]
        assert found.model == cluster.knot.header.fingerprint
        assert (found.hidden_size, found.max_rows, found.resident) == (96, 128, True)
        changed(cluster.station_peers[1], max_rows=17, resident=False)
        found = await find(cluster)
        assert (found.max_rows, found.resident) == (17, False)

    case(body)


STATION: dict[str, Any] = {
    "model": "0" * 64, "hidden_size": 97, "vocab_size": 301, "kind": "shard", "layers": [1, 2], "max_rows": 0,
    "resident": "yes",
}  # fmt: skip
SHARD: dict[str, Any] = {
    "model": "0" * 64, "hidden_size": 97, "vocab_size": 301, "kind": "station", "vocab": [150, 299],
}  # fmt: skip


@pytest.mark.parametrize("missing", [False, True])
@pytest.mark.parametrize("name", STATION)
def test_a_station_that_disagrees_is_named_with_the_field_and_both_values(name: str, missing: bool) -> None:
    async def body(cluster: FakeCluster) -> None:
        changed(cluster.station_peers[1], **{name: None if missing else STATION[name]})
        with pytest.raises(RouteUnavailable, match=f"^station 1 has {name} ") as caught:
            await find(cluster)
        assert repr(None if missing else STATION[name]) in str(caught.value)
        assert "expected" in str(caught.value)

    case(body)


@pytest.mark.parametrize("name", SHARD)
def test_a_shard_that_disagrees_is_named_with_the_field_and_both_values(name: str) -> None:
    async def body(cluster: FakeCluster) -> None:
        changed(cluster.shard_peers[1], **{name: SHARD[name]})
        with pytest.raises(RouteUnavailable, match=f"^shard 1 has {name} ") as caught:
            await find(cluster)
        assert repr(SHARD[name]) in str(caught.value)

    case(body)


def test_parts_in_another_order_than_the_settings_say_are_noticed() -> None:
    async def body(cluster: FakeCluster) -> None:
        cluster.station_peers.reverse()
        with pytest.raises(RouteUnavailable, match=r"station 0 has layers \[1, 3\], expected \[0, 1\]"):
            await find(cluster)

    case(body)


@pytest.mark.parametrize(
    ("reply", "sentence"),
    [
        (Reply(503, b"SettingsError: KNOT_KEY is not set"), "shard 0 answered 503: SettingsError: KNOT_KEY"),
        (Reply(500, "ä".encode() * 300), "shard 0 answered 500: ä"),
        (Reply(200, b"<html>"), "shard 0 cannot be reached"),
        (Reply(200, b"3"), "shard 0 cannot be reached"),
    ],
)
def test_a_part_that_is_not_well_is_named_with_what_it_said(reply: Reply, sentence: str) -> None:
    async def body(cluster: FakeCluster) -> None:
        async def answer(call: Call) -> Reply:
            return reply

        cluster.shard_peers[0].answer = answer
        with pytest.raises(RouteUnavailable, match=sentence):
            await find(cluster)

    case(body)


def test_a_dead_part_is_named_and_the_others_are_not_left_waiting_for() -> None:
    async def body(cluster: FakeCluster) -> None:
        stopped: list[str] = []

        async def slow(call: Call) -> Reply:
            try:
                await asyncio.Event().wait()
            finally:
                stopped.append("stopped")
            raise AssertionError

        cluster.shard_peers[1].answer = slow
        cluster.station_peers[0].dead = True
        with pytest.raises(RouteUnavailable, match="station 0 cannot be reached: the peer is dead"):
            await find(cluster)
        await cluster.background.drain()
        assert stopped == ["stopped"]

    case(body)


def test_a_part_that_is_only_slow_to_start_is_asked_again() -> None:
    async def body(cluster: FakeCluster) -> None:
        cluster.shard_peers[0].lose.append("/health")
        await find(cluster)
        assert len([call for call in cluster.shard_peers[0].calls if call.path == "/health"]) == 3

    case(body)


def test_parts_are_asked_with_the_clusters_secret() -> None:
    async def body(cluster: FakeCluster) -> None:
        for peer in (*cluster.station_peers, *cluster.shard_peers):
            assert all(call.headers["x-knot-secret"] == SECRET for call in peer.calls)

    case(body)


@pytest.mark.parametrize(
    ("rows", "chunk", "fluid"),
    [(1, 1, 8), (2, 1, 8), (3, 1, 8), (4, 2, 8), (100, 50, 104), (127, 63, 128), (300, 128, 104)],
)
def test_where_weights_stay_a_prompt_is_cut_so_that_all_stations_have_work(
    rows: int, chunk: int, fluid: int
) -> None:
    async def body(cluster: FakeCluster) -> None:
        found = await find(cluster)
        assert found.chunk(rows) == chunk
        changed(cluster.station_peers[0], resident=False)
        assert (await find(cluster)).chunk(rows) == fluid, (
            "where they are read for every piece, as few as can be, of about the same size"
        )

    case(body)


def test_nothing_is_left_in_the_background() -> None:
    async def body(cluster: FakeCluster) -> None:
        background = Background()
        await find_route(settings(cluster), *_parts(cluster), Wire(HEADERS, 5, background))
        assert not background.tasks

    case(body)


class Known:
    """Answers that are remembered."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}

    async def get(self, key: str) -> bytes | None:
        return self.values.get(key)

    async def put(self, key: str, value: bytes) -> None:
        self.values[key] = value

    async def delete(self, key: str) -> None:
        self.values.pop(key, None)

    async def keys(self, prefix: str) -> list[str]:
        return sorted(key for key in self.values if key.startswith(prefix))


async def admitted(cluster: FakeCluster, known: Known) -> Route:
    return await find_route(settings(cluster), *_parts(cluster), cluster.wire, known)


def test_stations_are_admitted_by_a_canary_whose_answer_stays_the_same_and_that_leaves_nothing() -> None:
    async def body(cluster: FakeCluster) -> None:
        known = Known()
        for _ in range(3):
            await admitted(cluster, known)
            await cluster.background.drain()
            cluster.at_rest()
        assert len(known.values) == len(cluster.stations)
        assert all(api.loop.load.batches == 3 for api in cluster.stations), "one pass each time"

    case(body)


def spoiled(cluster: FakeCluster, change: Callable[[bytearray], None]) -> None:
    """Has the second station answer otherwise, in frames that are right."""

    def spoil(data: bytes) -> bytes:
        try:
            frame = decode(data)
        except BadFrame:
            return data
        parts = []
        for part in frame.parts:
            tensors = {}
            for name, tensor in part.tensors.items():
                changed = bytearray(tensor.data)
                if changed:
                    change(changed)
                tensors[name] = Tensor(name, tensor.dtype, tensor.shape, bytes(changed))
            parts.append(Part(part.envelope, tensors))
        return encode(frame.kind, parts, answer=True)

    cluster.station_peers[1].spoil = spoil


def test_a_station_whose_arithmetic_has_changed_is_not_admitted_and_the_field_is_named() -> None:
    async def body(cluster: FakeCluster) -> None:
        known = Known()
        await admitted(cluster, known)

        def lowest_bit(data: bytearray) -> None:
            data[0] ^= 1

        spoiled(cluster, lowest_bit)
        with pytest.raises(RouteUnavailable, match=r"station 1-3 has canary \w+, expected \w+"):
            await admitted(cluster, known)

    case(body)


def test_a_station_that_answers_by_numbers_that_are_none_is_not_admitted() -> None:
    async def body(cluster: FakeCluster) -> None:
        def no_number(data: bytearray) -> None:
            data[4:8] = b"\0\0\xc0\x7f"

        spoiled(cluster, no_number)
        with pytest.raises(RouteUnavailable, match="station 1-3 answers the canary by numbers"):
            await admitted(cluster, Known())

    case(body)


def test_a_station_whose_rows_depend_on_their_company_is_not_admitted() -> None:
    async def body(cluster: FakeCluster) -> None:
        def when_in_company(data: bytearray) -> None:
            if len(data) > 4 * cluster.route.hidden_size:
                data[0] ^= 1

        spoiled(cluster, when_in_company)
        with pytest.raises(RouteUnavailable, match="station 1-3 answers a row that shares a step otherwise"):
            await admitted(cluster, Known())

    case(body)


def test_a_station_that_cannot_compute_is_not_admitted() -> None:
    async def body(cluster: FakeCluster) -> None:
        cluster.station_peers[0].lose += ["/forward"] * 9
        with pytest.raises(RouteUnavailable, match=r"station 0-1.*lost"):
            await admitted(cluster, Known())

    case(body)
