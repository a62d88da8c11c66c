"""A shard's endpoints: POST /embed, POST /logits, GET /health, /metrics and /memory."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any, Final

from engine.fit import FRAMES_OUT, embed_bytes
from engine.rows import RowsUnavailable
from protocol.agreement import agreement
from protocol.batching import BatchLoop
from protocol.calls import Call, Reply, ShortBody, json_reply
from protocol.fields import BadField, Fields, json_fields
from protocol.frames import BadFrame, Kind, Part, Tensor
from protocol.ports import Background, BlobChanged, BlobError, BlobFailed, Clock, PeerLost
from protocol.serving import (
    answer_frame,
    answer_step,
    bad_frame,
    curl_answer,
    f32_row,
    is_frame,
    no_room,
    not_found,
)
from protocol.steps import (
    Choice,
    EmbedStep,
    Envelope,
    LogitsStep,
    Refusal,
    RefusalKind,
    embed_step,
    logits_step,
)
from rows import EmbeddingRows
from shard import LogitsWork, Shard

CURL: Final = "curl"
ENDPOINTS: Final = "POST /embed and /logits, GET /health, /metrics and /memory"


class ShardApi:
    """Answers calls for one booted shard."""

    def __init__(
        self,
        shard: Shard,
        rows: EmbeddingRows,
        clock: Clock,
        background: Background,
        isolate: Callable[[], dict[str, int]] = dict,
    ) -> None:
        self.shard = shard
        self._rows = rows
        self._clock = clock
        self._isolate = isolate
        self._started = clock()
        self._requests = 0
        self.loop: BatchLoop[LogitsWork, Part] = BatchLoop(
            shard.run, shard.max_rows, shard.settings.max_queue, background
        )

    async def answer(self, call: Call) -> Reply:
        """Answers one call, whatever it is."""
        self._requests += 1
        match call.method, call.path:
            case "POST", "/embed":
                return await self._embedding(call)
            case "POST", "/logits":
                return await self._answer(call, Kind.LOGITS, self._logits, self._curl_logits)
            case _, "/forward":
                detail = "a shard owns vocabulary, not layers; POST /forward to a station"
                return json_reply({"error": {"kind": "not_implemented", "detail": detail}}, 501)
            case "GET", "/health":
                return json_reply(self.health())
            case "GET", "/memory":
                return json_reply(self.memory())
            case "GET", "/metrics":
                return json_reply(self.metrics())
            case _:
                return not_found(call, "a shard", ENDPOINTS)

    async def _answer(self, call: Call, kind: Kind, run: Any, from_curl: Any) -> Reply:
        if is_frame(call):
            return await answer_frame(call, kind, run)
        try:
            part: Part = from_curl(json_fields(call.body, "the request"))
        except (BadField, BadFrame) as error:
            return bad_frame(error)
        return curl_answer(await answer_step(part, run))

    async def _embedding(self, call: Call) -> Reply:
        """Embeds; the rows are counted until they are in the frame."""
        budget, held = self.shard.budget, 0

        async def run(part: Part) -> Part:
            nonlocal held
            tokens = self._tokens(part)
            size = embed_bytes(self.shard.knot.header.config, len(self._owned(tokens)))
            if not budget.take(FRAMES_OUT, size):
                raise no_room(budget, FRAMES_OUT, size)
            held += size
            return await self._embed(tokens)

        try:
            return await self._answer(call, Kind.EMBED, run, self._curl_embed)
        finally:
            budget.give(FRAMES_OUT, held)

    def _tokens(self, part: Part) -> Sequence[int]:
        step = embed_step(part.envelope)
        shard = self.shard
        step.envelope.check(shard.knot.header.fingerprint, shard.settings.slice)
        tensor = part.tensor("tokens", "i32", 1)
        if tensor.shape[0] > shard.settings.max_tokens:
            raise Refusal(
                RefusalKind.OVER_BUDGET,
                f"{tensor.shape[0]} tokens in one step, {shard.settings.max_tokens} are taken; cut them",
            )
        tokens = struct.unpack(f"<{tensor.shape[0]}i", tensor.data)
        vocab_size = shard.knot.header.config.vocab_size
        for token in tokens:
            if not 0 <= token < vocab_size:
                raise BadFrame(f"token id {token} does not exist; the vocabulary has {vocab_size} ids")
        return tokens

    def _owned(self, tokens: Sequence[int]) -> list[tuple[int, int]]:
        """(position, id) of the tokens that are the shard's."""
        start, end = self.shard.settings.slice
        return [(position, token) for position, token in enumerate(tokens) if start <= token < end]

    async def _embed(self, tokens: Sequence[int]) -> Part:
        shard, owned = self.shard, self._owned(tokens)
        try:
            rows = await self._rows.fetch([token for _, token in owned])
        except (ShortBody, BlobFailed, PeerLost) as error:
            raise Refusal(RefusalKind.UNAVAILABLE, str(error), 100) from error
        except (RowsUnavailable, BlobError) as error:
            shard.stale = shard.stale or isinstance(error, BlobChanged)
            raise Refusal(RefusalKind.BAD_WEIGHTS, str(error)) from error
        positions = struct.pack(f"<{len(owned)}i", *(position for position, _ in owned))
        data = b"".join(rows[token] for _, token in owned)
        shape = (len(owned), shard.knot.header.config.hidden_size)
        return Part(
            {"status": "ok", "count": len(tokens)},
            {
                "positions": Tensor("positions", "i32", (len(owned),), positions),
                "rows": Tensor("rows", "f32", shape, data),
            },
        )

    async def _logits(self, part: Part) -> Part:
        step = logits_step(part.envelope)
        shard = self.shard
        step.envelope.check(shard.knot.header.fingerprint, shard.settings.slice)
        if step.again:
            return await shard.choose_again(step)
        normed = part.tensor("normed", "f32", 2)
        expected = (1, shard.knot.header.config.hidden_size)
        if normed.shape != expected:
            raise BadFrame(f"normed is {list(normed.shape)}, expected {list(expected)}")
        return await self.loop.submit(LogitsWork(step, normed.data))

    def _curl_embed(self, fields: Fields) -> Part:
        """A step from JSON such as {"tokens": [1, 2, 3]}."""
        tokens = fields.integers("tokens", self.shard.settings.max_tokens, -(1 << 31), (1 << 31) - 1)
        fields.end()
        data = struct.pack(f"<{len(tokens)}i", *tokens)
        step = EmbedStep(self._curl_envelope("embed"))
        return Part(step.to_json(), {"tokens": Tensor("tokens", "i32", (len(tokens),), data)})

    def _curl_logits(self, fields: Fields) -> Part:
        """A step from JSON such as {"normed": [...], "choice": {"top_k": 5}}."""
        size = self.shard.knot.header.config.hidden_size
        data = f32_row(fields.raw("normed"), size, "the request.normed")
        choice = Choice.from_fields(fields.object("choice")) if fields.has("choice") else Choice(top_k=5)
        fields.end()
        step = LogitsStep(self._curl_envelope(f"{zlib.crc32(data):08x}"), choice)
        return Part(step.to_json(), {"normed": Tensor("normed", "f32", (1, size), data)})

    def _curl_envelope(self, step: str) -> Envelope:
        return Envelope(CURL, CURL, 0, self.shard.knot.header.fingerprint, self.shard.settings.slice, step)

    def health(self) -> dict[str, Any]:
        """What the shard is, for whoever wants to use it."""
        shard = self.shard
        return {
            "status": "ok",
            "kind": "shard",
            "vocab": list(shard.settings.slice),
            **agreement(shard.knot.header),
            "knot": shard.knot.key,
            "max_tokens": shard.max_tokens,
            "residency": shard.settings.residency,
        }

    def memory(self) -> dict[str, Any]:
        """What the engine's region is used for, in bytes."""
        engine = self.shard.engine
        return {
            "engine": engine.engine_memory()._asdict(),
            "host_bytes": engine.host.memory_bytes(),
            "isolate": self._isolate(),
            "budget": {"ceiling": self.shard.budget.ceiling, **self.shard.budget.table()},
            "pinned_bytes": self.shard.weights.arena.pinned_bytes,
            "kept_logits": self.shard.kept,
        }

    def metrics(self) -> dict[str, Any]:
        """Counters since the start."""
        return {
            "uptime_seconds": round(self._clock() - self._started, 3),
            "requests": self._requests,
            "queue": len(self.loop),
            "batches": asdict(self.loop.load),
            "reads": asdict(self.shard.weights.reads),
            "rows": asdict(self._rows.counts),
        }
