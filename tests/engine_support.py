"""Drives the engine over a GGUF file the way a station and a shard do, for tests and by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from reference import Model

from engine.client import (
    Phase,
    RopeType,
    Selection,
    ShardConfig,
    ShardEngine,
    StationConfig,
    StationEngine,
    Tensor,
    Vector,
)
from engine.host import EngineHost
from engine.native import NativeEngine
from engine.wasm import PIPELINE, WasmEngine

PHASES = {
    Phase.ATTN: {Tensor.Q: "attn_q", Tensor.K: "attn_k", Tensor.V: "attn_v", Tensor.O: "attn_output"},
    Phase.FFN_GATE: {Tensor.GATE: "ffn_gate"},
    Phase.FFN_UP: {Tensor.UP: "ffn_up"},
    Phase.FFN_DOWN: {Tensor.DOWN: "ffn_down"},
}
LAYER_VECTORS = {
    Vector.ATTN_NORM: "attn_norm.weight",
    Vector.FFN_NORM: "ffn_norm.weight",
    Vector.Q_BIAS: "attn_q.bias",
    Vector.K_BIAS: "attn_k.bias",
    Vector.V_BIAS: "attn_v.bias",
    Vector.Q_NORM: "attn_q_norm.weight",
    Vector.K_NORM: "attn_k_norm.weight",
}
# How many rows of a matrix come at a time, given how many are left.
Cut = Callable[[int], int]


class _Native(NativeEngine):
    async def compute(self, name: str, *args: int) -> int:
        return self.call(name, *args)


class _Wasm(WasmEngine):
    async def compute(self, name: str, *args: int) -> int:
        return self.call(name, *args)


def make_host(kind: str, limit: int = 1 << 30) -> EngineHost:
    """An engine: "native", "wasm" or "relaxed" (the module built with relaxed SIMD).

    It computes where it is called: tests make thousands of tiny calls, and threads would be most of the time.
    """
    if kind == "native":
        return _Native(limit)
    return _Wasm(limit, PIPELINE if kind == "wasm" else PIPELINE.with_name("pipeline-relaxed.wasm"))


def station_config(model: Model, **changes: Any) -> StationConfig:
    """A station that owns all layers of `model`, unless `changes` say otherwise."""
    shape = model.shape
    given: dict[str, Any] = {
        "layer_start": 0,
        "layer_end": shape.layers,
        "hidden": shape.hidden,
        "ffn": shape.ffn,
        "n_heads": shape.heads,
        "n_kv_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "rope_type": RopeType.NEOX if shape.neox else RopeType.NORM,
        "rope_dim": shape.rope_dim,
        "rope_theta": shape.rope_theta,
        "norm_eps": shape.eps,
        "qkv_bias": shape.bias,
        "qk_norm": shape.arch == "qwen3",
        "output_norm": True,
        "max_rows": 64,
        "max_sessions": 8,
        "kv_pages": 32,
        "arena_bytes": 4 << 20,
    }
    return StationConfig(**{**given, **changes})


def by(rows: int) -> Cut:
    """Blocks of `rows` rows."""
    return lambda left: min(rows, left)


class Station:
    """A station with its weights at hand. Blocks are written at an odd offset, as a knot's are."""

    def __init__(self, model: Model, host: EngineHost, cut: Cut | None = None, **changes: Any):
        self.model = model
        self.engine = StationEngine(host)
        self.engine.station_configure(station_config(model, **changes))
        assert self.engine.config is not None
        self.config = self.engine.config
        self.at = self.engine.arena_at + 1
        self.room = self.config.arena_bytes - 1
        self.cut = cut
        for layer in range(self.config.layer_start, self.config.layer_end):
            for kind, name in LAYER_VECTORS.items():
                if f"blk.{layer}.{name}" in model.tensors:
                    self.set_vector(layer, kind, model.vector(f"blk.{layer}.{name}"))
        if self.config.output_norm:
            self.set_vector(0, Vector.OUTPUT_NORM, model.vector("output_norm.weight"))
        if "rope_freqs.weight" in model.tensors:
            self.set_vector(0, Vector.ROPE_FREQS, model.vector("rope_freqs.weight"))

    def set_vector(self, layer: int, kind: Vector, values: np.ndarray) -> None:
        self.engine.host.write(self.at, values.astype("<f4").tobytes())
        self.engine.set_vector(layer, kind, self.at, values.size)

    async def run(self, rows: Sequence[tuple[int, int]], hidden: np.ndarray) -> np.ndarray:
        """One batch through all layers; returns the residual stream, or the normalised rows of an exit."""
        host = self.engine.host
        with self.engine.batch(rows) as batch:
            host.write(batch.hidden_at, np.ascontiguousarray(hidden, "<f4").tobytes())
            for layer in range(self.config.layer_start, self.config.layer_end):
                for phase in Phase:
                    await self.phase(layer, phase)
            at = self.engine.output_norm(0, len(rows)) if self.config.output_norm else batch.hidden_at
            out = host.read(at, batch.hidden_bytes)
        return np.frombuffer(out, "<f4").reshape(len(rows), -1)

    async def phase(self, layer: int, phase: Phase) -> None:
        self.engine.phase_begin(layer, phase)
        for tensor, name in PHASES[phase].items():
            kind, data = self.model.stored(f"blk.{layer}.{name}.weight")
            for row, block in blocks(data, self.room, self.cut):
                self.engine.host.write(self.at, block.data)
                await self.engine.phase_block(tensor, kind, row, len(block), self.at, block.size)
        self.engine.phase_end()


class Shard:
    """A shard of the vocabulary with its rows at hand."""

    def __init__(
        self,
        model: Model,
        host: EngineHost,
        start: int = 0,
        end: int | None = None,
        cut: Cut | None = None,
        **changes: Any,
    ):
        self.model = model
        self.engine = ShardEngine(host)
        given: dict[str, Any] = {
            "hidden": model.shape.hidden,
            "vocab_start": start,
            "vocab_end": model.shape.vocab if end is None else end,
            "max_rows": 64,
            "kept": 64,
            "arena_bytes": 4 << 20,
        }
        self.engine.shard_configure(ShardConfig(**{**given, **changes}))
        assert self.engine.config is not None
        self.config = self.engine.config
        self.at = self.engine.arena_at
        self.cut = cut

    async def embed(self, ids: Sequence[int]) -> np.ndarray:
        """f32 [len(ids), hidden]."""
        kind, data = self.model.stored("token_embd.weight")
        out_at = self.at + self.config.arena_bytes // 4
        parts: list[bytes] = []
        for start in range(0, len(ids), 32):
            rows = np.ascontiguousarray(data[list(ids[start : start + 32])])
            self.engine.host.write(self.at + 1, rows.data)
            length = await self.engine.embed_range_sliced(
                kind, self.config.hidden, len(rows), self.at + 1, rows.size, out_at
            )
            parts.append(self.engine.host.read(out_at, length))
        return np.frombuffer(b"".join(parts), "<f4").reshape(len(ids), -1)

    async def logits(self, hidden: np.ndarray, kept: Iterable[int] | None = None) -> np.ndarray:
        """This slice's logits, f32 [rows, ids]; kept under `kept`."""
        host, targets = self.engine.host, list(range(len(hidden)) if kept is None else kept)
        hidden = np.ascontiguousarray(hidden, "<f4")
        host.write(self.at, hidden.data)
        self.engine.logits_begin(targets, self.at)
        kind, data = self.model.stored(self.model.head)
        data = data[self.config.vocab_start : self.config.vocab_end]
        for row, block in blocks(data, self.config.arena_bytes - 1, self.cut):
            host.write(self.at + 1, block.data)
            await self.engine.logits_block(kind, row, len(block), self.at + 1, block.size)
        self.engine.logits_end()
        width = self.config.vocab_end - self.config.vocab_start
        slices = [host.read(self.engine.logits_at(target), 4 * width) for target in targets]
        return np.frombuffer(b"".join(slices), "<f4").reshape(len(targets), width)


def blocks(data: np.ndarray, room: int, cut: Cut | None) -> Iterable[tuple[int, np.ndarray]]:
    """(first row, rows) of a matrix, each within `room` bytes."""
    row = 0
    while row < len(data):
        left = len(data) - row
        count = min(max(1, (cut or by(left))(left)), room // data.shape[1])
        assert count, "a row is larger than the arena"
        yield row, np.ascontiguousarray(data[row : row + count])
        row += count


class Cluster:
    """One station and one shard: a whole model."""

    def __init__(self, path: Path | Model, kind: str = "native", limit: int = 1 << 30, **changes: Any):
        self.model = path if isinstance(path, Model) else Model(path)
        self.station = Station(self.model, make_host(kind, limit), **changes)
        self.shard = Shard(self.model, make_host(kind, limit), max_rows=self.station.config.max_rows)

    async def forward(self, slot: int, ids: Sequence[int], piece: int | None = None) -> np.ndarray:
        """Logits at every position of `ids`, appended to session `slot` in pieces of `piece` tokens."""
        hidden = await self.shard.embed(ids)
        length = self.station.engine.kv_length(slot)
        piece = piece or self.station.config.max_rows
        outputs = [
            await self.shard.logits(
                await self.station.run(
                    [(slot, length + start + i) for i in range(len(part))], np.asarray(part)
                )
            )
            for start in range(0, len(ids), piece)
            for part in [hidden[start : start + piece]]
        ]
        return np.concatenate(outputs)

    async def greedy(self, ids: Sequence[int], count: int) -> tuple[list[int], np.ndarray]:
        """`count` greedy ids after a prompt, and the logits at every position but the last."""
        slot = self.station.engine.kv_open()
        logits, found, seen = await self.forward(slot, ids), list[int](), list[np.ndarray]()
        for _ in range(count):
            seen.append(logits)
            best: Selection = await self.shard.engine.select(len(logits) - 1, top_k=1)
            found.append(best.candidates[0].id)
            assert found[-1] == int(np.argmax(logits[-1]))
            if len(found) < count:
                logits = await self.forward(slot, found[-1:])
        self.station.engine.kv_close(slot)
        return found, np.concatenate(seen)
