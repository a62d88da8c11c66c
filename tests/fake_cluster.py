"""A cluster without a platform: the cores, a file for a bucket, and peers that are function calls.

What the emulator and workerd add is tested with them; here the parts are watched closely, and broken at will.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from durable_objects.budget import IsolateBudget
from durable_objects.cobordism_warden_api import CobordismWardenApi
from durable_objects.layer_cache import LayerCache
from durable_objects.layer_warden_api import LayerWardenApi
from engine.client import Engine, ShardEngine, StationEngine
from engine.host import EngineHost
from engine.native import NativeEngine
from engine.rows import Desk, RowReader
from gateway_api import GatewayApi
from knot.bucket import BucketKnot
from knot.tokenizer import Tokenizer
from knot.topology import ranges, role_of, split
from lanes import Wire
from near import NearSource
from observer import Observer, Parts
from protocol.bodies import BytesInflow
from protocol.calls import Call, Inflow, Reply, ShortBody
from protocol.ports import BlobChanged, BlobInfo, BlobMissing, PeerLost
from route import GatewaySettings, find_route
from rows import EmbeddingRows
from shard import Shard
from shard_api import ShardApi
from shared import Route, Shared
from slice_settings import ShardSettings
from specialization import StationSettings
from station import Station
from station_api import StationApi
from telemetry import Telemetry

SECRET = "a secret of the tests"
HEADERS = {"x-knot-secret": SECRET}
KEY = "tiny.knot"
MIB = 1 << 20


class Background:
    """Tasks that go on after an answer; `drain` waits for them."""

    def __init__(self) -> None:
        self.tasks: set[asyncio.Task[None]] = set()

    def __call__(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(coroutine)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def drain(self) -> None:
        while self.tasks:
            await asyncio.wait(self.tasks)


class FileBlobs:
    """A folder as a bucket. `spoil` may change what a read returns; `reads` lists (key, offset, length)."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.reads: list[tuple[str, int, int]] = []
        self.spoil: Callable[[int, bytes], bytes] = lambda offset, data: data

    async def head(self, key: str) -> BlobInfo:
        path = self.folder / key
        if not path.exists():
            raise BlobMissing(f"{key} is not in the bucket")
        return BlobInfo(path.stat().st_size, self._etag(path))

    async def read(self, key: str, offset: int, length: int, etag: str | None = None) -> bytes:
        info = await self.head(key)
        if etag is not None and etag != info.etag:
            raise BlobChanged(f"{key} was uploaded again")
        self.reads.append((key, offset, length))
        with (self.folder / key).open("rb") as file:
            file.seek(offset)
            data = self.spoil(offset, file.read(length))
        if len(data) < length:
            raise ShortBody(f"{key}: {length} bytes at {offset} were asked for, {len(data)} came")
        return data

    async def open(self, key: str, offset: int, length: int, etag: str | None = None) -> Inflow:
        try:
            return BytesInflow(await self.read(key, offset, length, etag))
        except ShortBody:
            return _Torn(length)

    def _etag(self, path: Path) -> str:
        stat = path.stat()
        known = f"{path}-{stat.st_size}-{stat.st_mtime_ns}"
        if stat.st_size > MIB * 64:  # large files are only read by tests, never changed by them
            return known
        return _md5(path, known)


@functools.cache
def _md5(path: Path, known: str) -> str:
    return hashlib.md5(path.read_bytes()).hexdigest()


class _Torn(BytesInflow):
    """A body that breaks off at once."""

    def __init__(self, length: int) -> None:
        super().__init__(b"")
        self.length = length


class DictKv:
    """Key-value pairs in memory; `fail` makes every call raise."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.fail = False

    async def get(self, key: str) -> bytes | None:
        self._check()
        return self.values.get(key)

    async def put(self, key: str, value: bytes, ttl_seconds: int) -> None:
        self._check()
        self.values[key] = value

    async def delete(self, key: str) -> None:
        self._check()
        self.values.pop(key, None)

    def _check(self) -> None:
        if self.fail:
            raise RuntimeError("the key-value store is down")


@dataclass
class FakePeer:
    """A peer that is a function, and can be broken.

    `dead` loses every call. `lose`, `lose_answer` and `hang` name paths: the next call to such a path is lost
    on its way there, on its way back, or never comes back. `before` is awaited before every call.
    """

    answer: Callable[[Call], Coroutine[Any, Any, Reply]]
    dead: bool = False
    lose: list[str] = field(default_factory=list)
    lose_answer: list[str] = field(default_factory=list)
    hang: list[str] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    spoil: Callable[[bytes], bytes] = lambda data: data
    before: Callable[[Call], Coroutine[Any, Any, None]] | None = None

    async def call(self, call: Call) -> Reply:
        if self.before is not None:
            await self.before(call)
        self._check(call)
        if call.path in self.hang:
            self.hang.remove(call.path)
            await asyncio.Event().wait()
        reply = await self.answer(call)
        if call.path in self.lose_answer:
            self.lose_answer.remove(call.path)
            raise PeerLost(f"the answer to {call.path} was lost")
        if isinstance(reply.body, bytes):
            return Reply(reply.status, self.spoil(reply.body), reply.headers)
        data = await _gather(reply.body)
        return Reply(reply.status, self.spoil(data), reply.headers)

    async def open(self, call: Call) -> tuple[Reply, Inflow]:
        self._check(call)
        reply = await self.answer(call)
        data = reply.body if isinstance(reply.body, bytes) else await _gather(reply.body)
        return Reply(reply.status, b"", reply.headers), BytesInflow(self.spoil(data))

    def _check(self, call: Call) -> None:
        self.calls.append(call)
        if self.dead:
            raise PeerLost("the peer is dead")
        if call.path in self.lose:
            self.lose.remove(call.path)
            raise PeerLost(f"the call to {call.path} was lost")


async def _gather(body: Any) -> bytes:
    if hasattr(body, "read"):
        return await body.read(body.length)
    return b"".join([piece async for piece in body])


@dataclass
class FakeCluster:
    """Stations, shards, wardens and gateway over one folder."""

    blobs: FileBlobs
    kv: DictKv
    background: Background
    stations: list[StationApi]
    station_peers: list[FakePeer]
    layer_wardens: list[LayerWardenApi]
    layer_warden_peers: list[FakePeer]
    shards: list[ShardApi]
    shard_peers: list[FakePeer]
    row_wardens: list[CobordismWardenApi]
    row_warden_peers: list[FakePeer]
    gateway: GatewayApi
    wire: Wire
    route: Route
    shared: Shared
    knot: BucketKnot
    log: list[dict[str, Any]] = field(default_factory=list)

    def at_rest(self) -> None:
        """Fails unless everything that generations held anywhere has been given back."""
        self.at_rest_of_steps()
        assert self.shared.at_rest, (self.shared.admission.active, self.shared.admission.waiting)
        assert self.shared.admission.used == 0
        assert self.shared.rounds.writers == 0
        for api in self.stations:
            kept = api.station.kept_pages()
            memory = api.station.engine.engine_memory()
            assert len(api.station.sessions) == 0, api.station.sessions.lengths()
            # What is kept for sessions to come is given up whenever room is wanted.
            assert memory.kv_free_pages + kept == memory.kv_pages
            assert api.station.sessions.remembered_bytes == 0

    def at_rest_of_steps(self) -> None:
        """Fails when a step is waiting or running, or a task is."""
        assert not self.background.tasks
        for api in (*self.stations, *self.shards):
            assert len(api.loop) == 0

    async def complete(self, **body: Any) -> dict[str, Any]:
        """POST /v1/completions; the answer's JSON, whatever its status, with the status under "status"."""
        import json

        call = Call(
            "POST",
            "/v1/completions",
            json.dumps({"details": True, "temperature": 0, **body}).encode(),
            {"authorization": f"Bearer {SECRET}"},
        )
        reply = await self.gateway.answer(call)
        data = reply.body if isinstance(reply.body, bytes) else await _gather(reply.body)
        answer = {"events": data.decode()} if body.get("stream") else json.loads(data)
        await self.background.drain()
        return {"status": reply.status, **answer}


def make_native(limit: int) -> EngineHost:
    return NativeEngine(limit)


@asynccontextmanager
async def fake_cluster(
    knot_path: Path,
    *,
    stations: int = 2,
    shards: int = 3,
    host: Callable[[int], EngineHost] = make_native,
    wardens: bool = True,
    deadline: float | None = None,
    **variables: str,
) -> AsyncIterator[FakeCluster]:
    """A cluster on the knot, whose settings are the defaults but for `variables`.

    `deadline`, in seconds, may be shorter than the shortest that a variable can say.
    """
    blobs, kv, background = FileBlobs(knot_path.parent), DictKv(), Background()
    key = knot_path.name
    knot = await BucketKnot.open(blobs, key)
    config = knot.header.config
    # Engines of the size of their model: clearing the memory of large ones would be most of a test's time.
    small = {"BLOCK_BYTES": "4096", "KV_BYTES": "600000", "KEPT_LOGITS_BYTES": "100000"}
    common = {"KNOT_KEY": key, "CLUSTER_SECRET": SECRET, **small, **variables}
    cluster = FakeCluster(
        blobs, kv, background, [], [], [], [], [], [], [], [], None, None, None, None, knot  # type: ignore[arg-type]
    )  # fmt: skip
    for start, end in split(config.num_layers, stations):
        own = {
            "SPECIALIZATION_ROLE": role_of(start, end, config.num_layers),
            "SPECIALIZATION_START_LAYER": str(start),
            "SPECIALIZATION_END_LAYER": str(end),
        }
        settings = StationSettings.read({**common, **own}.get)
        cache = LayerCache("pinned-prefix", IsolateBudget(8 * MIB, time.monotonic))
        warden = LayerWardenApi(cache, lambda k: BucketKnot.open(blobs, k), background)
        warden_peer = FakePeer(warden.answer)
        source = NearSource(knot, warden_peer if wardens else None, (start, end), HEADERS, background)
        engine = StationEngine(host(settings.engine_bytes))
        station = await Station.boot(settings, knot, engine, source, time.monotonic)
        api = StationApi(station, source, time.monotonic, background)
        cluster.stations.append(api)
        cluster.station_peers.append(FakePeer(api.answer))
        cluster.layer_wardens.append(warden)
        cluster.layer_warden_peers.append(warden_peer)
    for start, end in split(config.vocab_size, shards):
        own = {"VOCAB_START": str(start), "VOCAB_END": str(end)}
        settings_of_shard = ShardSettings.read({**common, **own}.get)

        async def open_rows(k: str) -> tuple[str, RowReader]:
            engine = Engine(host(4 * MIB))
            engine.host.call("engine_reserve_arena", MIB)
            found = await BucketKnot.open(blobs, k)
            return found.id, RowReader(found, engine, Desk(engine.arena_at, MIB))

        row_warden = CobordismWardenApi(IsolateBudget(8 * MIB, time.monotonic), open_rows)
        row_peer = FakePeer(row_warden.answer)
        shard = await Shard.boot(settings_of_shard, knot, ShardEngine(host(settings_of_shard.engine_bytes)))
        rows = EmbeddingRows(
            settings_of_shard,
            knot,
            RowReader(knot, shard.engine, shard.desk),
            row_peer if wardens else None,
            kv,
            HEADERS,
            background,
        )
        shard_api = ShardApi(shard, rows, time.monotonic, background)
        cluster.shards.append(shard_api)
        cluster.shard_peers.append(FakePeer(shard_api.answer))
        cluster.row_wardens.append(row_warden)
        cluster.row_warden_peers.append(row_peer)
    settings_of_gateway = GatewaySettings.read(
        {
            **common,
            "STATION_RANGES": ranges(split(config.num_layers, stations)),
            "SHARD_RANGES": ranges(split(config.vocab_size, shards)),
        }.get
    )
    settings_of_gateway.check(knot.header)
    if deadline is not None:
        settings_of_gateway = replace(settings_of_gateway, deadline=deadline)
    wire = cluster.wire = Wire(HEADERS, settings_of_gateway.deadline, background)
    route = cluster.route = await find_route(
        settings_of_gateway, knot.header, cluster.station_peers, cluster.shard_peers, wire
    )
    telemetry = Telemetry()
    wire.observe = telemetry.observe
    cluster.shared = Shared(
        route, time.monotonic, background, sharing=settings_of_gateway.sharing, telemetry=telemetry,
        log=lambda message, **fields: cluster.log.append({"message": message, **fields}),
    )  # fmt: skip
    observer = Observer(cluster.shared, wire, Parts(cluster.station_peers, cluster.shard_peers))
    section = knot.header.tokenizer
    assert section is not None
    tokenizer = Tokenizer(host(40 * MIB), await knot.read(section.offset, section.length))
    cluster.gateway = GatewayApi(settings_of_gateway, knot.header, tokenizer, cluster.shared, observer)
    try:
        yield cluster
    finally:
        await background.drain()
