"""One station, or several in a row, without a platform: boots them, sends them steps, looks inside."""

from __future__ import annotations

import asyncio
import functools
import struct
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from core_support import reference_of
from engine_support import make_host
from fake_cluster import HEADERS, SECRET, Background, FileBlobs

from engine.client import StationEngine
from engine.host import EngineHost
from knot.bucket import BucketKnot
from knot.topology import role_of, split
from near import NearSource
from protocol.calls import FRAME, Call, Reply
from protocol.frames import Kind, Part, Tensor, decode, encode
from protocol.ports import Peer
from protocol.recorder import Moved
from protocol.steps import Envelope, ForwardStep, Phase, Rows
from specialization import StationSettings
from station import Station
from station_api import StationApi

Host = Callable[[int], EngineHost]


def inline(limit: int) -> EngineHost:
    """A native engine that computes where it is called."""
    return make_host("native", limit)


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@dataclass
class OneStation:
    """A booted station and what is around it."""

    api: StationApi
    knot: BucketKnot
    blobs: FileBlobs
    source: NearSource
    background: Background
    clock: Clock

    @property
    def station(self) -> Station:
        return self.api.station

    @property
    def free_pages(self) -> int:
        return self.station.engine.kv_free_pages()

    def step(
        self,
        session: str,
        position: int,
        hidden: np.ndarray | None = None,
        *,
        phase: Phase | None = None,
        rows: Rows = Rows.ALL,
        epoch: int = 0,
        step: str | None = None,
        model: str | None = None,
        layers: tuple[int, int] | None = None,
    ) -> Part:
        """A step for this station; without `hidden` it ends the session."""
        count = 0 if hidden is None else len(hidden)
        envelope = Envelope(
            "r",
            session,
            epoch,
            model or self.knot.header.fingerprint,
            layers or self.station.layers,
            step or f"{position}+{count}",
        )
        if hidden is None:
            return Part(ForwardStep(envelope, phase or Phase.RELEASE, 0, 0, 0).to_json())
        phase = phase or (Phase.DECODE if position else Phase.PREFILL)
        made = ForwardStep(envelope, phase, position, count, position, rows)
        data = np.ascontiguousarray(hidden, "<f4")
        return Part(made.to_json(), {"hidden": Tensor("hidden", "f32", data.shape, data.tobytes())})

    async def send(self, *parts: Part) -> list[Part]:
        """The answers to steps that travel in one frame."""
        return list(decode((await self.post(encode(Kind.FORWARD, parts))).bytes()).parts)

    async def post(self, body: bytes, content_type: str = FRAME) -> Reply:
        return await self.api.answer(Call("POST", "/forward", body, {"content-type": content_type}))

    async def forward(self, session: str, position: int, hidden: np.ndarray, **more: Any) -> np.ndarray:
        """The rows that come out; fails when the step is refused."""
        [answer] = await self.send(self.step(session, position, hidden, **more))
        return values(answer)

    async def status(self, *arguments: Any, **more: Any) -> str:
        """What becomes of a step."""
        [answer] = await self.send(self.step(*arguments, **more))
        return str(answer.envelope["status"])


class Gate(FileBlobs):
    """A bucket whose reads wait until the gate opens."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.gate = asyncio.Event()
        self.gate.set()
        self.waiting = asyncio.Event()

    async def read(self, *arguments: Any) -> bytes:
        self.waiting.set()
        await self.gate.wait()
        return await super().read(*arguments)

    async def closed(self, work: Coroutine[Any, Any, list[Part]]) -> asyncio.Task[list[Part]]:
        """Starts work that stops in the middle of its batch."""
        self.gate.clear()
        self.waiting.clear()
        task = asyncio.ensure_future(work)
        await self.waiting.wait()
        return task


def values(answer: Part) -> np.ndarray:
    """The rows of an answer that is no refusal."""
    assert answer.envelope["status"] == "ok", answer.envelope
    [tensor] = answer.tensors.values()
    return np.frombuffer(bytes(tensor.data), "<f4").reshape(tensor.shape)


async def station_on(
    path: Path,
    layers: tuple[int, int] = (0, 3),
    *,
    host: Host = inline,
    warden: Peer | None = None,
    moved: Moved | None = None,
    held: Callable[[int], None] = lambda delta: None,
    blobs: FileBlobs | None = None,
    **variables: str,
) -> OneStation:
    """Boots a station that owns `layers`."""
    blobs, background, clock = blobs or FileBlobs(path.parent), Background(), Clock()
    knot = await BucketKnot.open(blobs, path.name)
    given = {
        "KNOT_KEY": path.name,
        "CLUSTER_SECRET": SECRET,
        "SPECIALIZATION_ROLE": role_of(*layers, knot.header.config.num_layers),
        "SPECIALIZATION_START_LAYER": str(layers[0]),
        "SPECIALIZATION_END_LAYER": str(layers[1]),
        "BLOCK_BYTES": "8192",
        "KV_BYTES": "600000",
        **variables,
    }
    settings = StationSettings.read(given.get)
    source = NearSource(knot, warden, layers, HEADERS, background)
    engine = StationEngine(host(settings.engine_bytes))
    station = await Station.boot(settings, knot, engine, source, clock, held=held, moved=moved)
    return OneStation(StationApi(station, source, clock, background), knot, blobs, source, background, clock)


async def line_on(path: Path, stations: int, **more: Any) -> list[OneStation]:
    """Stations that share the model's three layers."""
    return [await station_on(path, layers, **more) for layers in split(3, stations)]


async def through(
    line: Sequence[OneStation], session: str, position: int, hidden: np.ndarray, **more: Any
) -> np.ndarray:
    """Rows through all stations of a line."""
    for one in line:
        hidden = await one.forward(session, position, hidden, **more)
    return hidden


def embedded(path: Path, ids: Sequence[int]) -> np.ndarray:
    """f32 [len(ids), hidden], from the GGUF."""
    return reference_of(path).model.rows("token_embd.weight", list(ids)).astype("<f4")


def exact_states(path: Path, ids: Sequence[int]) -> list[np.ndarray]:
    """The exact residual stream after each layer, and last the normalised one."""
    return _exact_states(path, tuple(ids))


@functools.cache
def _exact_states(path: Path, ids: tuple[int, ...]) -> list[np.ndarray]:
    reference, streams = reference_of(path), list[np.ndarray]()
    reference.logits([ids], lambda _, found: streams.append(found[0]))
    return [*streams, reference._norm(streams[-1], reference.model.vector("output_norm.weight"))]


def floats(*numbers: float) -> bytes:
    return struct.pack(f"<{len(numbers)}f", *numbers)
