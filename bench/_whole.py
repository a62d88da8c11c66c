"""A whole model in one process: one station and one shard, called by function calls.

Import it when the folders of the Workers are on the path.
"""

from __future__ import annotations

import asyncio
import time
import zlib
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Protocol, cast

from bench._oracles import tests_module
from engine.client import ShardEngine, StationEngine
from engine.host import EngineHost
from engine.rows import RowReader
from hops import read_slice
from knot.bucket import BucketKnot
from knot.header import KnotHeader
from knot.topology import role_of
from near import NearSource
from protocol.frames import Part
from protocol.steps import Choice, Envelope, ForwardStep, LogitsStep, Phase, Rows
from rows import EmbeddingRows
from shard import LogitsWork, Shard
from slice_settings import ShardSettings
from specialization import StationSettings
from station import ForwardWork, Station


class Step(Protocol):
    """Takes ids that follow those before, or begins again with them; returns the best next id."""

    def __call__(self, ids: Sequence[int], again: bool = False) -> Coroutine[Any, Any, int]: ...


@asynccontextmanager
async def model(
    path: Path, header: KnotHeader, variables: dict[str, str], engine: str
) -> AsyncGenerator[Step]:
    """The model, greedily."""
    config = header.config
    tasks: set[asyncio.Task[None]] = set()

    def background(work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    common = {**variables, "KNOT_KEY": path.name, "CLUSTER_SECRET": "of one process alone"}
    own = {
        "SPECIALIZATION_ROLE": role_of(0, config.num_layers, config.num_layers),
        "SPECIALIZATION_START_LAYER": "0",
        "SPECIALIZATION_END_LAYER": str(config.num_layers),
    }
    slice_of = {"VOCAB_START": "0", "VOCAB_END": str(config.vocab_size)}
    settings = StationSettings.read({**common, **own}.get)
    shard_settings = ShardSettings.read({**common, **slice_of}.get)
    blobs = tests_module("fake_cluster").FileBlobs(path.parent)
    knot = await BucketKnot.open(blobs, path.name)
    source = NearSource(knot, None, (0, config.num_layers), {}, background)
    station = await Station.boot(
        settings, knot, StationEngine(_host(engine, settings.engine_bytes)), source, time.monotonic
    )
    shard = await Shard.boot(shard_settings, knot, ShardEngine(_host(engine, shard_settings.engine_bytes)))
    reader = RowReader(knot, shard.engine, shard.desk)
    rows = EmbeddingRows(shard_settings, knot, reader, None, None, {}, background)
    position = epoch = 0

    def envelope(range_of: tuple[int, int], name: str) -> Envelope:
        return Envelope("bench", "bench", epoch, header.fingerprint, range_of, name)

    async def step(ids: Sequence[int], again: bool = False) -> int:
        nonlocal position, epoch
        if again or not epoch:
            position, epoch = 0, epoch + 1
        found = await rows.fetch(ids)
        normed = b""
        for at in range(0, len(ids), station.max_rows):
            some = ids[at : at + station.max_rows]
            data = b"".join(found[token] for token in some)
            forward = ForwardStep(
                envelope(station.layers, f"f{position}"),
                Phase.DECODE if position else Phase.PREFILL, position, len(some), position, Rows.LAST,
            )  # fmt: skip
            [part] = await station.run([ForwardWork(forward, data, zlib.crc32(data))])
            normed = bytes(_part(part).tensor("normed", "f32", 2).data)
            position += len(some)
        wanted = LogitsStep(envelope(shard_settings.slice, f"l{position}"), Choice())
        [part] = await shard.run([LogitsWork(wanted, normed)])
        return read_slice(_part(part)).candidates[0].id

    try:
        yield step
    finally:
        if tasks:
            await asyncio.wait(tasks)


def _part(answer: Part | Exception) -> Part:
    if isinstance(answer, Exception):
        raise answer
    return answer


def _host(engine: str, limit: int) -> EngineHost:
    if engine == "native":
        from engine.native import NativeEngine

        return NativeEngine(limit)
    from engine.wasm import WasmEngine

    make = cast(Callable[[int], EngineHost], WasmEngine)
    return make(limit)
