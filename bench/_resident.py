"""A whole model in one engine for its layers and one for its head: nothing but computing is timed.

What Python tells the engines is written down as it goes, so that JavaScript can replay it in V8
(`replay.mjs`).
"""

from __future__ import annotations

import asyncio
import json
import subprocess
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import numpy as np

from bench._oracles import stored_model, tests_module
from bench._seconds import Seconds
from engine.client import (
    KV_PAGE_TOKENS,
    RopeType,
    ShardConfig,
    ShardEngine,
    StationConfig,
    StationEngine,
    Tensor,
    Vector,
    Weights,
)
from engine.native import NativeEngine

LIMIT: Final = 2**31 - 1
ROOT: Final = Path(__file__).resolve().parent.parent
# The tests' tables of a layer's tensors.
_TABLES: Final = tests_module("engine_support")
VECTORS: Final[dict[Vector, str]] = _TABLES.LAYER_VECTORS
TENSORS: Final[dict[Tensor, str]] = {
    tensor: name for phase in _TABLES.PHASES.values() for tensor, name in phase.items()
}


class Written:
    """A native engine that writes down what it is told."""

    def __init__(self, index: int, log: list[list[Any]]):
        self._engine = NativeEngine(LIMIT)
        self._index, self._log = index, log

    def call(self, name: str, *args: int) -> int:
        """Calls a function of the ABI."""
        self._log.append(["call", self._index, name, *map(int, args)])
        return self._engine.call(name, *args)

    async def compute(self, name: str, *args: int) -> int:
        """The same, here and now."""
        return self.call(name, *args)

    def write(self, offset: int, data: bytes | bytearray | memoryview) -> None:
        """Copies `data` into the region."""
        self._log.append(["write", self._index, offset, bytes(data).hex()])
        self._engine.write(offset, data)

    def load(self, offset: int, data: np.ndarray, file_offset: int) -> None:
        """Copies a stretch of the model's file into the region."""
        self._log.append(["load", self._index, offset, file_offset, data.size])
        self._engine.write(offset, data.data)

    def read(self, offset: int, length: int) -> bytes:
        """Copies `length` bytes out of the region."""
        return self._engine.read(offset, length)

    def memory_bytes(self) -> int:
        """Bytes of the region."""
        return self._engine.memory_bytes()


class Resident:
    """A model with all its weights in place."""

    def __init__(self, path: Path, *, rows: int, tokens: int):
        self.path = path
        self.log: list[list[Any]] = []
        self.seconds = Seconds()
        self._model = stored_model(path)
        shape = self._model.shape
        self._layers, self._vocab, self._hidden = shape.layers, shape.vocab, shape.hidden
        layers = range(shape.layers)
        names = [f"blk.{layer}.{name}.weight" for layer in layers for name in TENSORS.values()]
        self.layer_bytes = sum(self._model.stored(name)[1].size for name in names)
        station, shard = Written(0, self.log), Written(1, self.log)
        self.station, self.shard = StationEngine(station), ShardEngine(shard)
        self.station.station_configure(
            StationConfig(
                layer_start=0,
                layer_end=shape.layers,
                hidden=shape.hidden,
                ffn=shape.ffn,
                n_heads=shape.heads,
                n_kv_heads=shape.kv_heads,
                head_dim=shape.head_dim,
                rope_type=RopeType.NEOX if shape.neox else RopeType.NORM,
                rope_dim=shape.rope_dim,
                rope_theta=shape.rope_theta,
                norm_eps=shape.eps,
                qkv_bias=shape.bias,
                qk_norm=shape.arch == "qwen3",
                output_norm=True,
                max_rows=rows,
                max_sessions=2,
                kv_pages=2 * (-(-tokens // KV_PAGE_TOKENS) + 1),
                arena_bytes=self.layer_bytes + 64 * len(names) + 64,
            )
        )
        at = self.station.arena_at
        for layer in layers:
            for kind, name in VECTORS.items():
                if f"blk.{layer}.{name}" in self._model.tensors:
                    self._vector(at, layer, kind, f"blk.{layer}.{name}")
        self._vector(at, 0, Vector.OUTPUT_NORM, "output_norm.weight")
        self._weights: dict[tuple[int, Tensor], Weights] = {}
        for layer in layers:
            for tensor, name in TENSORS.items():
                kind, data = self._model.stored(f"blk.{layer}.{name}.weight")
                station.load(at, data, self._file_offset(f"blk.{layer}.{name}.weight"))
                self._weights[layer, tensor] = Weights(int(kind), at, data.size)
                at += -(-data.size // 64) * 64
        kind, data = self._model.stored(self._model.head)
        self.head_bytes = data.size
        head = ShardConfig(
            hidden=shape.hidden,
            vocab_start=0,
            vocab_end=shape.vocab,
            max_rows=1,
            kept=1,
            arena_bytes=data.size + 64 + 4 * shape.hidden,
        )
        self.shard.shard_configure(head)
        self._head = Weights(int(kind), self.shard.arena_at, data.size)
        self._head_hidden = self.shard.arena_at + -(-data.size // 64) * 64
        shard.load(self._head.at, data, self._file_offset(self._model.head))

    def threads(self, number: int) -> None:
        """Lets products use several threads; a replay in V8 has one."""
        if number > 1:
            for engine in (self.station, self.shard):
                engine.host.call("engine_threads", number)

    def session(self, name: str, ids: Sequence[int], decode: int, *, warm: bool = False) -> int:
        """A prompt in one batch, then `decode` tokens one by one; returns the last one's best id."""
        station = self.station
        slot = station.kv_open()
        best = 0
        with self._timed(f"{name}prefill", warm):
            best = asyncio.run(self._pass(slot, 0, list(ids)))
        for i in range(decode):
            with self._timed(f"{name}decode", warm):
                best = asyncio.run(self._pass(slot, len(ids) + i, [ids[i % len(ids)]]))
        station.kv_close(slot)
        return best

    async def _pass(self, slot: int, first: int, ids: list[int]) -> int:
        station, weights = self.station, self._weights
        hidden = self._model.rows("token_embd.weight", ids).astype("<f4")
        with station.batch([(slot, first + i) for i in range(len(ids))]) as batch:
            station.host.write(batch.hidden_at, hidden.tobytes())
            for layer in range(self._layers):
                attention = [weights[layer, t] for t in (Tensor.Q, Tensor.K, Tensor.V, Tensor.O)]
                await station.forward_range_attn_chunk(layer, *attention)
                await station.forward_range_ffn_gate_chunk(layer, weights[layer, Tensor.GATE])
                await station.forward_range_ffn_up_chunk(layer, weights[layer, Tensor.UP])
                await station.forward_range_ffn_down_chunk(layer, weights[layer, Tensor.DOWN])
            at = station.output_norm(len(ids) - 1, 1)
            last = station.host.read(at, 4 * self._hidden)
        # In a replay the hidden row is what it was here: hosts agree to the bit.
        self.shard.host.write(self._head_hidden, last)
        self.shard.logits_begin([0], self._head_hidden)
        await self.shard.logits_block(self._head.type, 0, self._vocab, self._head.at, self._head.length)
        self.shard.logits_end()
        selection = await self.shard.select(0, top_k=1)
        return selection.candidates[0].id

    @contextmanager
    def _timed(self, name: str, warm: bool) -> Generator[None]:
        if warm:
            yield
            return
        self.log.append(["begin", name])
        with self.seconds.of(name):
            yield
        self.log.append(["end", name])

    def _vector(self, at: int, layer: int, kind: Vector, name: str) -> None:
        values = self._model.vector(name).astype("<f4")
        self.station.host.write(at, values.tobytes())
        self.station.set_vector(layer, kind, at, values.size)

    def _file_offset(self, name: str) -> int:
        return int(self._model.tensors[name].data_offset)


def replayed(
    node: Path, module: Path, model: Path, log: list[list[Any]]
) -> dict[str, dict[str, list[float]]]:
    """Seconds of every mark, on the wall and on the processor, when V8 replays a log with a wasm module."""
    script = Path(__file__).with_name("replay.mjs")
    told = "\n".join(json.dumps(entry) for entry in log)
    done = subprocess.run(
        [node, script, module, model], input=told, text=True, capture_output=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{module.name} in V8 failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])
