"""A station's endpoints: POST /forward, GET /health, /metrics and /memory."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from engine.client import KV_PAGE_TOKENS
from engine.fit import FRAMES_IN
from near import NearSource
from protocol.agreement import agreement
from protocol.batching import BatchLoop
from protocol.calls import Call, Reply, json_reply
from protocol.fields import BadField, json_fields
from protocol.frames import BadFrame, Kind, Part, Tensor
from protocol.ports import Background, Clock
from protocol.serving import (
    answer_frame,
    answer_step,
    bad_frame,
    curl_answer,
    f32_row,
    is_frame,
    no_room,
    not_found,
    refused,
)
from protocol.steps import DIGEST_BYTES, Envelope, ForwardStep, Phase, Rows, forward_step
from station import ForwardWork, Station

CURL_SESSION = "curl"


class StationApi:
    """Answers calls for one booted station. Everything that waits for others happens in its batch loop."""

    def __init__(
        self,
        station: Station,
        source: NearSource,
        clock: Clock,
        background: Background,
        isolate: Callable[[], dict[str, int]] = dict,
    ) -> None:
        self.station = station
        self._source = source
        self._clock = clock
        self._isolate = isolate
        self._started = clock()
        self._requests = 0
        self.loop: BatchLoop[ForwardWork, Part] = BatchLoop(
            station.run, station.max_rows, station.settings.max_queue, background
        )

    async def answer(self, call: Call) -> Reply:
        """Answers one call, whatever it is."""
        self._requests += 1
        match call.method, call.path:
            case "POST", "/forward":
                return await self._forward(call)
            case "GET", "/health":
                return json_reply(self.health())
            case "GET", "/memory":
                return json_reply(self.memory())
            case "GET", "/metrics":
                return json_reply(self.metrics())
            case _:
                return not_found(call, "a station", "POST /forward, GET /health, /metrics and /memory")

    async def _forward(self, call: Call) -> Reply:
        budget, size = self.station.budget, len(call.body)
        if not budget.take(FRAMES_IN, size):
            return refused(no_room(budget, FRAMES_IN, size))
        try:
            return await self._answer(call)
        finally:
            budget.give(FRAMES_IN, size)

    async def _answer(self, call: Call) -> Reply:
        if is_frame(call):
            return await answer_frame(call, Kind.FORWARD, self._run)
        try:
            part = self._curl_step(call.body)
        except (BadField, BadFrame) as error:
            return bad_frame(error)
        return curl_answer(await answer_step(part, self._run))

    async def _run(self, part: Part) -> Part:
        step = forward_step(part.envelope)
        station = self.station
        step.envelope.check(station.knot.header.fingerprint, station.layers)
        if step.phase is Phase.OPEN:
            return Part({"status": "ok", "cache_length": station.sessions.begin(step, _digests(part))})
        if not step.phase.has_rows:
            kept = _digests(part) if step.phase is Phase.RELEASE else ()
            ended = station.sessions.end(step.envelope.session, step.envelope.epoch, kept)
            return Part({"status": "ok", "cache_length": 0, "ended": ended})
        hidden = part.tensor("hidden", "f32", 2)
        expected = (step.count, station.knot.header.config.hidden_size)
        if hidden.shape != expected:
            raise BadFrame(f"hidden is {list(hidden.shape)}, expected {list(expected)}")
        checksum = zlib.crc32(hidden.data)
        known = station.sessions.answer_to(step, checksum)
        if known is not None:
            return known
        return await self.loop.submit(ForwardWork(step, hidden.data, checksum))

    def _curl_step(self, body: bytes) -> Part:
        """A step from JSON such as {"hidden": [[...]], "session": "a", "position": 0}."""
        fields = json_fields(body, "the request")
        size = self.station.knot.header.config.hidden_size
        rows = fields.array("hidden", self.station.max_rows)
        session = fields.text("session", CURL_SESSION)
        position = fields.integer("position", 0, 1 << 31, 0)
        wanted = fields.choice("rows", {str(rows): rows for rows in Rows}, "last")
        epoch = fields.integer("epoch", 0, 1 << 31, 0)
        fields.end()
        data = b"".join(f32_row(row, size, "the request.hidden") for row in rows)
        envelope = Envelope(
            request=CURL_SESSION,
            session=session,
            epoch=epoch,
            model=self.station.knot.header.fingerprint,
            range=self.station.layers,
            step=f"{position}+{len(rows)}-{wanted}-{zlib.crc32(data):08x}",
        )
        phase = Phase.DECODE if position else Phase.PREFILL
        step = ForwardStep(envelope, phase, position, len(rows), position, wanted)
        return Part(step.to_json(), {"hidden": Tensor("hidden", "f32", (len(rows), size), data)})

    def health(self) -> dict[str, Any]:
        """What the station is, for whoever wants to use it."""
        station = self.station
        return {
            "status": "ok",
            "kind": "station",
            "role": station.settings.role,
            "layers": list(station.layers),
            **agreement(station.knot.header),
            "knot": station.knot.key,
            "max_rows": station.max_rows,
            "residency": station.settings.residency,
            "resident": station.weights.arena.whole,
            "kv_tokens": station.engine.engine_memory().kv_pages * KV_PAGE_TOKENS,
            "kv_type": station.settings.kv_type,
        }

    def memory(self) -> dict[str, Any]:
        """What the engine's region is used for, in bytes and pages."""
        engine = self.station.engine
        return {
            "engine": engine.engine_memory()._asdict(),
            "host_bytes": engine.host.memory_bytes(),
            "isolate": self._isolate(),
            "budget": {"ceiling": self.station.budget.ceiling, **self.station.budget.table()},
            "kv_page_bytes": engine.kv_page_bytes(),
            "pinned_bytes": self.station.weights.arena.pinned_bytes,
            "sessions": self.station.sessions.lengths(),
            "kept_pages": self.station.kept_pages(),
            "answers_bytes": self.station.sessions.remembered_bytes,
        }

    def metrics(self) -> dict[str, Any]:
        """Counters since the start."""
        return {
            "uptime_seconds": round(self._clock() - self._started, 3),
            "requests": self._requests,
            "queue": len(self.loop),
            "sessions": len(self.station.sessions),
            "batches": asdict(self.loop.load),
            "reads": asdict(self.station.weights.reads),
            "sources": asdict(self._source.counts),
            "prefixes": asdict(self.station.sessions.prefixes.counts),
            "saved": None if self.station.saved is None else asdict(self.station.saved.counts),
        }


def _digests(part: Part) -> tuple[bytes, ...]:
    """The digests that a step carries; none when it carries none. Raises `BadFrame`."""
    if "digests" not in part.tensors:
        return ()
    tensor = part.tensor("digests", "u8", 2)
    count, size = tensor.shape
    if size != DIGEST_BYTES:
        raise BadFrame(f"digests are {list(tensor.shape)}, expected {[count, DIGEST_BYTES]}")
    return tuple(bytes(tensor.data[at : at + size]) for at in range(0, count * size, size))
