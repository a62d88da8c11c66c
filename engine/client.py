"""Typed calls of the engine, over any host: what a layer station needs, and what a vocabulary shard needs.

Names are the ABI's (docs/engine.md). Weights never pass through here: whoever holds the bytes writes
them into the region, and these methods take offsets. `type` is always a ggml type id. Calls that
multiply are `async` and go through `host.compute`; the rest return at once.

Standard library only: this file also runs inside a Worker.
"""

from __future__ import annotations

import struct
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

from engine.errors import BadArgument
from engine.host import EngineHost

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


class RopeType(IntEnum):
    """Which elements of a head RoPE turns together."""

    NORM = 0  # (2i, 2i + 1), as GGUF permutes llama
    NEOX = 1  # (i, i + rope_dim / 2), as qwen2


class KvType(IntEnum):
    """How keys and values are kept."""

    F32 = 0


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

    def pack(self) -> bytes:
        """The configuration as the engine reads it. Raises `BadArgument` for a number beyond 32 bits."""
        flags = int(self.qkv_bias) | int(self.output_norm) << 1
        return _packed(
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
        return _packed(
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


class Engine:
    """What stations and shards share: memory, types, single kernels."""

    def __init__(self, host: EngineHost):
        self.host = host
        self.mailbox_bytes = host.call("engine_mailbox_bytes")

    @property
    def arena_at(self) -> int:
        """Offset of the arena; it changes when the engine is configured."""
        return self.host.call("engine_arena_at")

    @property
    def arena_bytes(self) -> int:
        """Bytes of the arena."""
        return self.engine_memory().arena

    def engine_memory(self) -> Memory:
        """What is reserved, free, and was used at most."""
        size = 4 * len(Memory._fields)
        self.host.call("engine_memory", 0)
        return Memory(*struct.unpack(f"<{len(Memory._fields)}I", self.host.read(0, size)))

    def type_block(self, type: int) -> tuple[int, int]:
        """(elements, bytes) of one block. Raises `Unsupported` for a type that has no kernel."""
        packed = self.host.call("type_block", type)
        return packed >> 16, packed & 0xFFFF

    async def first_bad_group(self, at: int, length: int, group_length: int, digests: bytes) -> int | None:
        """The first group of `length` bytes at `at` whose XXH3-64 is not the one in `digests`, or None.

        Groups have `group_length` bytes, the last one what is left; `digests` are little-endian u64s.
        """
        groups = -(-length // group_length)
        if len(digests) != 8 * groups:
            raise BadArgument(f"{groups} groups have {8 * groups} bytes of digests, got {len(digests)}")
        expected_at = self._mail(digests, "digests")
        bad = await self.host.compute("first_bad_group", at, length, group_length, expected_at)
        return bad - 1 if bad else None

    async def embed_range_sliced(
        self, type: int, cols: int, n_rows: int, rows_at: int, rows_length: int, out_at: int
    ) -> int:
        """Dequantises raw rows into f32 [n_rows, cols] at `out_at`; returns the bytes written."""
        return await self.host.compute("embed_range_sliced", type, cols, n_rows, rows_at, rows_length, out_at)

    async def matmul_block(
        self, type: int, cols: int, n_rows: int, w_at: int, w_length: int, batch: int, x_at: int, y_at: int
    ) -> None:
        """y = x·wᵀ: f32 x [batch, cols], rows w [n_rows, cols] of `type`, f32 y [batch, n_rows]."""
        await self.host.compute("matmul_block", type, cols, n_rows, w_at, w_length, batch, x_at, y_at)

    def _mail(self, data: bytes, what: str, at: int = 0) -> int:
        if at + len(data) > self.mailbox_bytes:
            raise BadArgument(f"{what}: {len(data)} bytes, the mailbox holds {self.mailbox_bytes - at}")
        self.host.write(at, data)
        return at


class StationEngine(Engine):
    """The engine of a layer station. Layers are counted as the model counts them."""

    config: StationConfig | None = None

    def station_bytes(self, config: StationConfig) -> int:
        """Region bytes that `config` would take."""
        data = config.pack()
        return self.host.call("station_bytes", self._mail(data, "station configuration"), len(data))

    def station_configure(self, config: StationConfig) -> None:
        """Reserves the region for `config`; whatever the engine held is gone. Raises `OverBudget`."""
        data = config.pack()
        self.host.call("station_configure", self._mail(data, "station configuration"), len(data))
        self.config = config

    def set_vector(self, layer: int, kind: Vector | int, at: int, count: int) -> None:
        """Keeps `count` f32 values that lie at `at` (mailbox or arena; any alignment) as a vector of `layer`.

        `layer` is ignored for OUTPUT_NORM and ROPE_FREQS.
        """
        self.host.call("set_vector", layer, kind, at, count)

    # Sessions' keys and values, in pages of 16 tokens.

    def kv_page_tokens(self) -> int:
        """Tokens in a page."""
        return self.host.call("kv_page_tokens")

    def kv_page_bytes(self) -> int:
        """Bytes of a page: keys and values of 16 tokens in all owned layers."""
        return self.host.call("kv_page_bytes")

    def kv_free_pages(self) -> int:
        """Pages that belong to no session."""
        return self.host.call("kv_free_pages")

    def kv_open(self) -> int:
        """A new, empty session's slot. Raises `OverBudget` when all `max_sessions` are open."""
        return self.host.call("kv_open")

    def kv_close(self, slot: int) -> None:
        """Ends a session and frees what only it used."""
        self.host.call("kv_close", slot)

    def kv_length(self, slot: int) -> int:
        """Tokens that a session has committed."""
        return self.host.call("kv_length", slot)

    def kv_truncate(self, slot: int, length: int) -> None:
        """Forgets the tokens from `length` on."""
        self.host.call("kv_truncate", slot, length)

    def kv_fork(self, slot: int, length: int) -> int:
        """A new session that begins with the first `length` tokens of `slot`; whole pages are shared."""
        return self.host.call("kv_fork", slot, length)

    def kv_page_at(self, slot: int, index: int) -> int:
        """Region offset of a session's page `index`, to save it or to write it back."""
        return self.host.call("kv_page_at", slot, index)

    def kv_restore(self, slot: int, length: int) -> None:
        """Gives an empty session pages for `length` tokens, which the host then writes."""
        self.host.call("kv_restore", slot, length)

    # One batch: rows of several sessions, through all owned layers together.

    def batch_begin(self, rows: Sequence[Row | tuple[int, int]]) -> None:
        """Opens a batch of (slot, position) rows; a session's rows are contiguous and continue its length."""
        table = _packed(f"<{2 * len(rows)}I", *(number for row in rows for number in row))
        self.host.call("batch_begin", self._mail(table, "table of rows"), len(rows))

    def batch_hidden_at(self) -> int:
        """Offset of the residual stream, f32 [n_rows, hidden], which the host fills and later reads."""
        return self.host.call("batch_hidden_at")

    def batch_end(self) -> None:
        """Commits the sessions' new lengths. Raises `BadState` unless every phase is complete."""
        self.host.call("batch_end")

    def batch_abort(self) -> None:
        """Forgets the batch: lengths and pages are as before. Without a batch it does nothing."""
        self.host.call("batch_abort")

    @contextmanager
    def batch(self, rows: Sequence[Row | tuple[int, int]]) -> Generator[Batch]:
        """A batch that ends with the block, or is aborted when the block raises or is cancelled."""
        self.batch_begin(rows)
        try:
            hidden = self.config.hidden if self.config else 0
            yield Batch(tuple(Row(*row) for row in rows), self.batch_hidden_at(), 4 * hidden * len(rows))
            self.batch_end()
        except BaseException:
            self.batch_abort()
            raise

    def phase_begin(self, layer: int, phase: Phase | int) -> None:
        """Begins a phase; layers and phases come strictly in order."""
        self.host.call("phase_begin", layer, phase)

    async def phase_block(
        self, tensor: Tensor | int, type: int, row: int, n_rows: int, at: int, length: int
    ) -> None:
        """Multiplies with rows [row, row + n_rows) of a tensor, which lie at `at`."""
        await self.host.compute("phase_block", tensor, type, row, n_rows, at, length)

    def phase_end(self) -> None:
        """Ends the phase. Raises `BadState` when rows are missing, `NonFinite` for a NaN or an infinity."""
        self.host.call("phase_end")

    async def forward_range_attn_chunk(
        self, layer: int, q: Weights, k: Weights, v: Weights, o: Weights
    ) -> None:
        """The whole attention phase of `layer`, its four tensors being in the region."""
        table = _packed("<12I", *q, *k, *v, *o)
        at = self._mail(table, "table of tensors")
        await self.host.compute("forward_range_attn_chunk", layer, at)

    async def forward_range_ffn_gate_chunk(self, layer: int, gate: Weights) -> None:
        """The whole gate phase of `layer`."""
        await self.host.compute("forward_range_ffn_gate_chunk", layer, *gate)

    async def forward_range_ffn_up_chunk(self, layer: int, up: Weights) -> None:
        """The whole up phase of `layer`."""
        await self.host.compute("forward_range_ffn_up_chunk", layer, *up)

    async def forward_range_ffn_down_chunk(self, layer: int, down: Weights) -> None:
        """The whole down phase of `layer`."""
        await self.host.compute("forward_range_ffn_down_chunk", layer, *down)

    async def forward_range_ffn_gate_up_chunk(self, layer: int, gate: Weights, up: Weights) -> None:
        """The gate and the up phase of `layer` in one call."""
        at = self._mail(_packed("<6I", *gate, *up), "table of tensors")
        await self.host.compute("forward_range_ffn_gate_up_chunk", layer, at)

    def output_norm(self, row: int, n_rows: int) -> int:
        """Normalises rows of the finished batch; returns the offset of f32 [n_rows, hidden]."""
        return self.host.call("output_norm", row, n_rows)


class ShardEngine(Engine):
    """The engine of a vocabulary shard. Ids are the model's; rows of the head count from `vocab_start`."""

    config: ShardConfig | None = None

    def shard_bytes(self, config: ShardConfig) -> int:
        """Region bytes that `config` would take."""
        data = config.pack()
        return self.host.call("shard_bytes", self._mail(data, "shard configuration"), len(data))

    def shard_configure(self, config: ShardConfig) -> None:
        """Reserves the region for `config`; whatever the engine held is gone. Raises `OverBudget`."""
        data = config.pack()
        self.host.call("shard_configure", self._mail(data, "shard configuration"), len(data))
        self.config = config

    def shard_ban(self, start: int, end: int) -> None:
        """Ids in [start, end) are never selected; what lies outside of the slice is no matter."""
        self.host.call("shard_ban", start, end)

    def logits_begin(self, kept: Sequence[int], hidden_at: int) -> None:
        """Begins a pass over the head for f32 [len(kept), hidden] rows at `hidden_at` (they are copied).

        Row i's logits go to the kept slice `kept[i]`. A pass that was not ended is forgotten.
        """
        at = self._mail(_packed(f"<{len(kept)}I", *kept), "table of kept slices")
        self.host.call("logits_begin", at, len(kept), hidden_at)

    async def logits_block(self, type: int, row: int, n_rows: int, at: int, length: int) -> None:
        """Multiplies with rows [row, row + n_rows) of the slice, in order."""
        await self.host.compute("logits_block", type, row, n_rows, at, length)

    def logits_end(self) -> None:
        """Ends the pass. Raises `BadState` when rows are missing, `NonFinite` naming the token id."""
        self.host.call("logits_end")

    def logits_at(self, kept: int) -> int:
        """Offset of a kept slice: f32 [vocab_end - vocab_start], as multiplied."""
        return self.host.call("logits_at", kept)

    async def select(
        self,
        kept: int,
        *,
        top_k: int,
        temperature: float = 1.0,
        seed: int | None = None,
        adjust: Sequence[Adjust] = (),
        wanted: Sequence[int] = (),
        workspace: tuple[int, int] | None = None,
    ) -> Selection:
        """The best `top_k` ids of a kept slice and what is needed to merge slices exactly.

        With a `seed` (64 bits) the ranking adds Gumbel noise, a function of seed and id alone, to the
        adjusted logits: the best of all shards is then one exact sample. Temperature 0 counts as 1 (the
        best one is the same). Ids in `adjust` that are not the shard's are ignored; `wanted` ones raise
        `BadArgument`. Arguments and answer go through the mailbox, or through `workspace` = (offset,
        bytes) in the arena when they are larger.
        """
        config = self.config
        if config is None:
            raise BadArgument("select: the shard is not configured")
        own = [entry for entry in adjust if config.vocab_start <= entry.id < config.vocab_end]
        seed_bits = 0 if seed is None else seed & (1 << 64) - 1
        params = _packed(
            "<3If4I",
            CONFIG_VERSION, top_k, int(seed is not None), temperature,
            seed_bits & 0xFFFFFFFF, seed_bits >> 32, len(own), len(wanted),
        )  # fmt: skip
        params += b"".join(_packed("<I2f", *entry) for entry in own) + _packed(f"<{len(wanted)}I", *wanted)
        at, room = workspace or (0, self.mailbox_bytes)
        out_at = at + len(params) + -len(params) % 8
        rows = min(top_k, config.vocab_end - config.vocab_start) + len(wanted)
        needed = out_at - at + _ANSWER.size + rows * _CANDIDATE.size
        if needed > room:
            raise BadArgument(
                f"select: {len(own)} adjustments and {rows} answers take {needed} bytes, "
                f"the workspace has {room}: pass a larger one in the arena"
            )
        self.host.write(at, params)
        length = await self.host.compute("logits_select", kept, at, len(params), out_at, room - (out_at - at))
        answer = self.host.read(out_at, length)
        lse_raw, lse_adjusted, n, m = _ANSWER.unpack_from(answer)
        found = [Candidate(*entry) for entry in _CANDIDATE.iter_unpack(answer[_ANSWER.size :])]
        assert len(found) == n + m
        return Selection(lse_raw, lse_adjusted, found[:n], found[n:])


_ANSWER = struct.Struct("<2d2I")
_CANDIDATE = struct.Struct("<I3f")


def _packed(layout: str, *values: int | float) -> bytes:
    try:
        return struct.pack(layout, *values)
    except (struct.error, OverflowError) as error:
        raise BadArgument(f"{values} does not fit the engine's 32-bit fields: {error}") from error
