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

from engine.errors import BadArgument
from engine.host import EngineHost
from engine.values import (
    CONFIG_VERSION,
    KV_PAGE_TOKENS,
    Adjust,
    Batch,
    Candidate,
    KvType,
    Memory,
    Phase,
    RopeType,
    Row,
    Selection,
    ShardConfig,
    StationConfig,
    Tensor,
    Vector,
    Weights,
    packed,
)

__all__ = [
    "CONFIG_VERSION",
    "KV_PAGE_TOKENS",
    "Adjust",
    "Batch",
    "Candidate",
    "Engine",
    "KvType",
    "Memory",
    "Phase",
    "RopeType",
    "Row",
    "Selection",
    "ShardConfig",
    "ShardEngine",
    "StationConfig",
    "StationEngine",
    "Tensor",
    "Vector",
    "Weights",
]

_ANSWER = struct.Struct("<2d2I")
_CANDIDATE = struct.Struct("<I3f")


class Engine:
    """What stations and shards share: memory, types, single kernels.

    Arguments, answers and the sentences of errors go through one mailbox, so an engine has one user at a
    time: while a call of `forward_range_*` is awaited, no other call may be made.
    """

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
        bad = self.host.call("first_bad_group", at, length, group_length, expected_at)
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
        table = packed(f"<{2 * len(rows)}I", *(number for row in rows for number in row))
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
        table = packed("<12I", *q, *k, *v, *o)
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
        at = self._mail(packed("<6I", *gate, *up), "table of tensors")
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
        at = self._mail(packed(f"<{len(kept)}I", *kept), "table of kept slices")
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
        params = packed(
            "<3If4I",
            CONFIG_VERSION, top_k, int(seed is not None), temperature,
            seed_bits & 0xFFFFFFFF, seed_bits >> 32, len(own), len(wanted),
        )  # fmt: skip
        params += b"".join(packed("<I2f", *entry) for entry in own) + packed(f"<{len(wanted)}I", *wanted)
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
        # At once, not on a thread: nobody else may write the mailbox between these three lines.
        length = self.host.call("logits_select", kept, at, len(params), out_at, room - (out_at - at))
        answer = self.host.read(out_at, length)
        lse_raw, lse_adjusted, n, m = _ANSWER.unpack_from(answer)
        found = [Candidate(*entry) for entry in _CANDIDATE.iter_unpack(answer[_ANSWER.size :])]
        assert len(found) == n + m
        return Selection(lse_raw, lse_adjusted, found[:n], found[n:])
