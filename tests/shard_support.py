"""One shard of the vocabulary without a platform: boots it, asks it, looks inside."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from fake_cluster import HEADERS, MIB, SECRET, Background, DictKv, FakePeer, FileBlobs
from station_support import Clock, Host, inline

from durable_objects.budget import IsolateBudget
from durable_objects.cobordism_warden_api import CobordismWardenApi
from engine.client import Engine, ShardEngine
from engine.rows import Desk, RowReader
from hops import read_slice
from knot.bucket import BucketKnot
from protocol.calls import FRAME, Call, Reply
from protocol.frames import Kind, Part, Tensor, decode, encode
from protocol.ports import KeyValue, Peer
from protocol.recorder import Moved
from protocol.steps import Choice, EmbedStep, Envelope, LogitsStep, Slice
from rows import EmbeddingRows
from shard import Shard
from shard_api import ShardApi
from slice_settings import ShardSettings


@dataclass
class OneShard:
    """A booted shard and what is around it."""

    api: ShardApi
    rows: EmbeddingRows
    knot: BucketKnot
    blobs: FileBlobs
    background: Background

    @property
    def shard(self) -> Shard:
        return self.api.shard

    def envelope(self, step: str, **changes: Any) -> Envelope:
        given = {
            "request": "r",
            "session": "s",
            "epoch": 0,
            "model": self.knot.header.fingerprint,
            "range": self.shard.settings.slice,
            "step": step,
        }
        return Envelope(**{**given, **changes})

    async def send(self, path: str, kind: Kind, *parts: Part) -> list[Part]:
        reply = await self.post(path, encode(kind, parts))
        assert reply.status == 200, reply.bytes()
        return list(decode(reply.bytes()).parts)

    async def post(self, path: str, body: bytes, content_type: str = FRAME) -> Reply:
        return await self.api.answer(Call("POST", path, body, {"content-type": content_type}))

    def embed_step(self, tokens: Sequence[int], step: str = "embed", **changes: Any) -> Part:
        data = struct.pack(f"<{len(tokens)}i", *tokens)
        envelope = EmbedStep(self.envelope(step, **changes)).to_json()
        return Part(envelope, {"tokens": Tensor("tokens", "i32", (len(tokens),), data)})

    async def embed(self, tokens: Sequence[int]) -> dict[int, bytes]:
        """Rows by position; fails when the step is refused."""
        [answer] = await self.send("/embed", Kind.EMBED, self.embed_step(tokens))
        assert answer.envelope["status"] == "ok", answer.envelope
        positions = np.frombuffer(bytes(answer.tensors["positions"].data), "<i4")
        rows = np.frombuffer(bytes(answer.tensors["rows"].data), "<f4").reshape(answer.tensors["rows"].shape)
        return {int(position): row.tobytes() for position, row in zip(positions, rows, strict=True)}

    def logits_step(
        self, normed: np.ndarray | None, choice: Choice, step: str = "logits-1", **changes: Any
    ) -> Part:
        envelope = LogitsStep(self.envelope(step, **changes), choice, normed is None).to_json()
        if normed is None:
            return Part(envelope)
        data = np.ascontiguousarray(normed, "<f4").tobytes()
        return Part(envelope, {"normed": Tensor("normed", "f32", (1, normed.size), data)})

    async def logits(self, normed: np.ndarray | None, choice: Choice, step: str = "logits-1") -> Slice:
        """The slice of the logits of one row; fails when the step is refused."""
        [answer] = await self.send("/logits", Kind.LOGITS, self.logits_step(normed, choice, step))
        assert answer.envelope["status"] == "ok", answer.envelope
        return read_slice(answer)


async def shard_on(
    path: Path,
    ids: tuple[int, int] = (0, 300),
    *,
    host: Host = inline,
    warden: Peer | None = None,
    kv: KeyValue | None = None,
    moved: Moved | None = None,
    blobs: FileBlobs | None = None,
    background: Background | None = None,
    **variables: str,
) -> OneShard:
    """Boots a shard that owns `ids`."""
    blobs, background = blobs or FileBlobs(path.parent), background or Background()
    knot = await BucketKnot.open(blobs, path.name)
    given = {
        "KNOT_KEY": path.name,
        "CLUSTER_SECRET": SECRET,
        "VOCAB_START": str(ids[0]),
        "VOCAB_END": str(ids[1]),
        "BLOCK_BYTES": "8192",
        **variables,
    }
    settings = ShardSettings.read(given.get)
    shard = await Shard.boot(settings, knot, ShardEngine(host(settings.engine_bytes)), moved=moved)
    rows = EmbeddingRows(
        settings, knot, RowReader(knot, shard.engine, shard.desk), warden, kv, HEADERS, background
    )
    return OneShard(ShardApi(shard, rows, Clock(), background), rows, knot, blobs, background)


def row_warden(
    folder: Path, budget: int = 8 * MIB, held: Callable[[int], None] = lambda delta: None
) -> tuple[CobordismWardenApi, FakePeer, FileBlobs]:
    """A CobordismWarden, the way to it, and the bucket that it reads."""
    blobs = FileBlobs(folder)

    async def open_rows(key: str) -> tuple[str, RowReader]:
        engine = Engine(inline(4 * MIB))
        engine.host.call("engine_reserve_arena", 65_536)
        knot = await BucketKnot.open(blobs, key)
        return knot.id, RowReader(knot, engine, Desk(engine.arena_at, 65_536))

    api = CobordismWardenApi(IsolateBudget(budget, Clock(), held), open_rows)
    return api, FakePeer(api.answer), blobs


def kv_and_background() -> tuple[DictKv, Background]:
    return DictKv(), Background()
