"""What the engine's calls take and give: configurations, tables and answers, as values.

Standard library only: this file also runs inside a Worker.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

from engine.errors import BadArgument

CONFIG_VERSION = 1
KV_PAGE_TOKENS = 16


class Phase(IntEnum):
    """The four phases of a layer, in the order they run."""

    ATTN = 0
    FFN_GATE = 1
    FFN_UP = 2
    FFN_DOWN = 3


class Tensor(IntEnum):
    """The matrices of a layer, in the order their rows are expected."""

    Q = 0
    K = 1
    V = 2
    O = 3  # noqa: E741 - the field's name for it
    GATE = 4
    UP = 5
    DOWN = 6


class Vector(IntEnum):
    """What `set_vector` takes."""

    ATTN_NORM = 0
    FFN_NORM = 1
    Q_BIAS = 2
    K_BIAS = 3
    V_BIAS = 4
    OUTPUT_NORM = 5
    ROPE_FREQS = 6
    Q_NORM = 7
    K_NORM = 8


class RopeType(IntEnum):
    """Which elements of a head RoPE turns together."""

    NORM = 0  # (2i, 2i + 1), as GGUF permutes llama
    NEOX = 1  # (i, i + rope_dim / 2), as qwen2


class KvType(IntEnum):
    """How keys and values are kept; the numbers are ggml's. Q8_0 wants heads of a multiple of 32 elements."""

    F32 = 0
    F16 = 1
    Q8_0 = 8


@dataclass(frozen=True, slots=True)
class StationConfig:
    """The shapes and the budget of a layer station that owns layers [layer_start, layer_end).

    `max_rows` bounds the rows of one batch, `kv_pages` the pages of 16 tokens that all sessions share,
    `arena_bytes` the space for weights.
    """

    layer_start: int
    layer_end: int
    hidden: int
    ffn: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    rope_type: int
    rope_dim: int
    rope_theta: float
    norm_eps: float
    qkv_bias: bool
    output_norm: bool
    max_rows: int
    max_sessions: int
    kv_pages: int
    arena_bytes: int
    kv_type: int = KvType.F32
    qk_norm: bool = False

    def pack(self) -> bytes:
        """The configuration as the engine reads it. Raises `BadArgument` for a number beyond 32 bits."""
        flags = int(self.qkv_bias) | int(self.output_norm) << 1 | int(self.qk_norm) << 2
        return packed(
            "<10I2f6I",
            CONFIG_VERSION, self.layer_start, self.layer_end, self.hidden, self.ffn,
            self.n_heads, self.n_kv_heads, self.head_dim, self.rope_type, self.rope_dim,
            self.rope_theta, self.norm_eps,
            flags, self.max_rows, self.max_sessions, self.kv_pages, self.kv_type, self.arena_bytes,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class ShardConfig:
    """The slice [vocab_start, vocab_end) of the vocabulary that a shard owns, and its budget.

    `max_rows` bounds the rows of one pass over the head, `kept` the slices of logits kept for `select`.
    """

    hidden: int
    vocab_start: int
    vocab_end: int
    max_rows: int
    kept: int
    arena_bytes: int

    def pack(self) -> bytes:
        """The configuration as the engine reads it. Raises `BadArgument` for a number beyond 32 bits."""
        return packed(
            "<7I",
            CONFIG_VERSION, self.hidden, self.vocab_start, self.vocab_end,
            self.max_rows, self.kept, self.arena_bytes,
        )  # fmt: skip


class Memory(NamedTuple):
    """What an engine reserved, in bytes and pages; the peaks are since it was configured."""

    region: int
    persistent: int
    scratch: int
    arena: int
    kv_pages: int
    kv_free_pages: int
    kv_used_peak: int
    rows_peak: int
    arena_peak: int


class Weights(NamedTuple):
    """A whole tensor in the region: its ggml type, offset and bytes."""

    type: int
    at: int
    length: int


class Row(NamedTuple):
    """One row of a batch: a session's slot and the position of the token."""

    slot: int
    position: int


class Adjust(NamedTuple):
    """What happens to one id's logit before the temperature.

    It becomes (raw > 0 ? raw / multiply : raw * multiply) + add. `add` may be minus infinity, which
    bans the id; of two entries for an id the later one counts.
    """

    id: int
    multiply: float = 1.0
    add: float = 0.0


class Candidate(NamedTuple):
    """One id of a slice: its logit, the adjusted one, and what it was ranked by. Banned: -inf, -inf."""

    id: int
    raw: float
    adjusted: float
    key: float


@dataclass(frozen=True, slots=True)
class Selection:
    """A shard's answer for one row.

    `lse_raw` is the log-sum-exp over all logits of the slice, `lse_adjusted` over the adjusted ones of the
    ids that are not banned (-inf when all are). `candidates` come best first; `wanted` in the order asked.
    """

    lse_raw: float
    lse_adjusted: float
    candidates: list[Candidate]
    wanted: list[Candidate]


@dataclass(frozen=True, slots=True)
class Batch:
    """A batch that is open: `hidden_at` is where its residual stream, f32 [n_rows, hidden], lies."""

    rows: tuple[Row, ...]
    hidden_at: int
    hidden_bytes: int


def packed(layout: str, *values: int | float) -> bytes:
    """Little-endian fields. Raises `BadArgument` for a number that does not fit its field."""
    try:
        return struct.pack(layout, *values)
    except (struct.error, OverflowError) as error:
        raise BadArgument(f"{values} does not fit the engine's 32-bit fields: {error}") from error
