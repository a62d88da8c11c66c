"""An exact forward pass in numpy, straight from a GGUF file: what the engine's results are held against.

Weights are dequantised by the `gguf` library one tensor at a time, so a model of any size needs the memory of
its largest matrix and of the activations. Nothing is shared with the engine but the formulas.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf.constants import GGMLQuantizationType as Kind

HEAD_ROWS = 8192  # rows of the head that are dequantised at a time


@dataclass(frozen=True)
class Shape:
    """What a GGUF's metadata says of a llama, qwen2 or qwen3 model."""

    arch: str
    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    rope_dim: int
    rope_theta: float
    eps: float
    neox: bool
    bias: bool
    vocab: int


class Model:
    """A GGUF file: its shape, and its tensors as stored."""

    def __init__(self, path: Path):
        self.reader = gguf.GGUFReader(path)
        self.tensors = {tensor.name: tensor for tensor in self.reader.tensors}
        arch = self.field("general.architecture")
        heads = int(self.field(f"{arch}.attention.head_count"))
        hidden = int(self.field(f"{arch}.embedding_length"))
        head_dim = int(self.field(f"{arch}.attention.key_length", hidden // heads))
        self.shape = Shape(
            arch=arch,
            layers=int(self.field(f"{arch}.block_count")),
            hidden=hidden,
            ffn=int(self.field(f"{arch}.feed_forward_length")),
            heads=heads,
            kv_heads=int(self.field(f"{arch}.attention.head_count_kv", heads)),
            head_dim=head_dim,
            rope_dim=int(self.field(f"{arch}.rope.dimension_count", head_dim)),
            rope_theta=float(self.field(f"{arch}.rope.freq_base", 1e4)),
            eps=float(self.field(f"{arch}.attention.layer_norm_rms_epsilon")),
            neox=arch in ("qwen2", "qwen3"),
            bias="blk.0.attn_q.bias" in self.tensors,
            vocab=int(self.tensors["token_embd.weight"].shape[1]),
        )

    def field(self, name: str, default: Any = None) -> Any:
        field = self.reader.get_field(name)
        if field is None:
            if default is None:
                raise KeyError(name)
            return default
        return field.contents()

    @property
    def head(self) -> str:
        """The tensor that makes logits: the embedding table, when the model is tied."""
        return "output.weight" if "output.weight" in self.tensors else "token_embd.weight"

    def stored(self, name: str) -> tuple[Kind, np.ndarray]:
        """(type, bytes [rows, row bytes]) of a matrix; a view of the file."""
        tensor = self.tensors[name]
        rows = int(tensor.shape[1])
        return Kind(tensor.tensor_type), tensor.data.view(np.uint8).reshape(rows, -1)

    def vector(self, name: str) -> np.ndarray:
        return np.array(self.tensors[name].data, np.float32)

    def rows(self, name: str, rows: Any = slice(None)) -> np.ndarray:
        """Rows of a matrix as f32."""
        kind, data = self.stored(name)
        return values_of(data[rows], kind)


def values_of(rows: np.ndarray, kind: Kind) -> np.ndarray:
    """f32 values of stored rows, as the `gguf` library reads them."""
    rows = np.ascontiguousarray(rows)
    if kind == Kind.F32:
        return rows.view(np.float32)
    if kind == Kind.F16:
        return rows.view(np.float16).astype(np.float32)
    return gguf.quants.dequantize(rows, kind)


class Reference:
    """The forward pass. `dtype` is what activations and sums are held in (weights are exact either way)."""

    def __init__(self, model: Model | Path, dtype: Any = np.float64):
        self.model = model if isinstance(model, Model) else Model(model)
        self.dtype = dtype

    def logits(
        self, prompts: Sequence[Sequence[int]], watch: Callable[[int, list[np.ndarray]], None] | None = None
    ) -> list[np.ndarray]:
        """Logits [len(prompt), vocab] at every position of every prompt, in one pass over the weights.

        `watch` is called after each layer with its number and the residual streams.
        """
        streams = [
            self.model.rows("token_embd.weight", list(prompt)).astype(self.dtype) for prompt in prompts
        ]
        for layer in range(self.model.shape.layers):
            streams = self._layer(layer, streams)
            if watch:
                watch(layer, streams)
        norm = self.model.vector("output_norm.weight")
        finals = [self._norm(stream, norm) for stream in streams]
        outputs = [np.empty((len(final), self.model.shape.vocab), self.dtype) for final in finals]
        for start in range(0, self.model.shape.vocab, HEAD_ROWS):
            rows = slice(start, min(start + HEAD_ROWS, self.model.shape.vocab))
            weights = self.model.rows(self.model.head, rows).astype(self.dtype).T
            for final, output in zip(finals, outputs, strict=True):
                output[:, rows] = final @ weights
        return outputs

    def _layer(self, layer: int, streams: list[np.ndarray]) -> list[np.ndarray]:
        model, shape = self.model, self.model.shape
        at = f"blk.{layer}."
        norm = model.vector(f"{at}attn_norm.weight")
        normed = [self._norm(stream, norm) for stream in streams]
        q, k, v = (self._product(f"{at}attn_{name}", normed) for name in "qkv")
        if f"{at}attn_q_norm.weight" in model.tensors:
            q, k = (
                [self._heads_normed(x, model.vector(f"{at}attn_{name}_norm.weight")) for x in heads]
                for name, heads in (("q", q), ("k", k))
            )
        mixed = [self._attention(*heads) for heads in zip(q, k, v, strict=True)]
        streams = [s + o for s, o in zip(streams, self._product(f"{at}attn_output", mixed), strict=True)]
        norm = model.vector(f"{at}ffn_norm.weight")
        normed = [self._norm(stream, norm) for stream in streams]
        gates = self._product(f"{at}ffn_gate", normed)
        ups = self._product(f"{at}ffn_up", normed)
        with np.errstate(over="ignore"):
            gated = [gate / (1 + np.exp(-gate)) * up for gate, up in zip(gates, ups, strict=True)]
        assert gated[0].shape[1] == shape.ffn
        return [s + d for s, d in zip(streams, self._product(f"{at}ffn_down", gated), strict=True)]

    def _product(self, name: str, inputs: list[np.ndarray]) -> list[np.ndarray]:
        weights = self.model.rows(f"{name}.weight").astype(self.dtype).T
        bias = self.model.vector(f"{name}.bias") if f"{name}.bias" in self.model.tensors else None
        products = [x @ weights for x in inputs]
        return products if bias is None else [product + bias for product in products]

    def _norm(self, x: np.ndarray, weight: np.ndarray) -> np.ndarray:
        mean = np.mean(x.astype(np.float64) ** 2, axis=-1, keepdims=True)
        return (x / np.sqrt(mean + np.float32(self.model.shape.eps))).astype(self.dtype) * weight

    def _heads_normed(self, x: np.ndarray, weight: np.ndarray) -> np.ndarray:
        return self._norm(x.reshape(len(x), -1, self.model.shape.head_dim), weight).reshape(x.shape)

    def _attention(self, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
        shape, tokens = self.model.shape, len(q)
        q = self._turned(q.reshape(tokens, shape.heads, shape.head_dim))
        k = self._turned(k.reshape(tokens, shape.kv_heads, shape.head_dim))
        v = v.reshape(tokens, shape.kv_heads, shape.head_dim)
        group = shape.heads // shape.kv_heads
        future = np.triu(np.full((tokens, tokens), -np.inf), 1)
        mixed = np.empty_like(q)
        for head in range(shape.heads):
            scores = q[:, head] @ k[:, head // group].T / np.sqrt(shape.head_dim) + future
            weights = np.exp(scores - scores.max(axis=1, keepdims=True))
            mixed[:, head] = weights / weights.sum(axis=1, keepdims=True) @ v[:, head // group]
        return mixed.reshape(tokens, -1).astype(self.dtype)

    def _turned(self, heads: np.ndarray) -> np.ndarray:
        """RoPE on [tokens, heads, head_dim]."""
        shape = self.model.shape
        pairs = shape.rope_dim // 2
        frequencies = shape.rope_theta ** (-2.0 * np.arange(pairs) / shape.rope_dim)
        if "rope_freqs.weight" in self.model.tensors:
            frequencies = frequencies / self.model.vector("rope_freqs.weight")
        angles = np.arange(len(heads))[:, None, None] * frequencies
        cosine, sine = np.cos(angles), np.sin(angles)
        if shape.neox:
            first, second = slice(0, pairs), slice(pairs, 2 * pairs)
        else:
            first, second = slice(0, 2 * pairs, 2), slice(1, 2 * pairs, 2)
        turned = heads.copy()
        turned[..., first] = heads[..., first] * cosine - heads[..., second] * sine
        turned[..., second] = heads[..., first] * sine + heads[..., second] * cosine
        return turned
