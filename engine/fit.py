"""What fits into the memory of a station or a shard: rows of a batch, keys and values, weights.

The parts ask this when they boot, and the planner asks it for parts that do not exist yet; both get the same
answer. How many bytes a configuration takes is the engine's own word (`sizes`). Standard library only: this
file also runs inside a Worker.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from engine.blocks import RESIDENCIES, Unit, arena_bytes, largest_block
from engine.budget import CEILING_BYTES, MIB, Budget, DoesNotFit, engine_memory, mb
from engine.errors import Unsupported
from engine.rows import desk_bytes
from engine.values import KV_PAGE_TOKENS, KvType, RopeType, ShardConfig, StationConfig
from knot.architectures import has_qk_norm
from knot.config import ModelConfig
from knot.header import KnotHeader
from protocol.pieces import TILE_ROWS
from protocol.settings import Settings

F32: Final = 4
# Of a step's rows, there are in Python's heap at once: those being computed, those of the step that waits,
# the answer, and the frame that it is put into. Outside of it: the frame as it is sent, and one that was.
ROWS_IN: Final = 2
ROWS_OUT: Final = 2
ROWS_SENT: Final = 2

CANDIDATE_BYTES: Final = 16
MOST_KEPT: Final = 65_536  # slices of logits, as many as the engine takes
DESK_BYTES: Final = 256 * 1024
# Embedded rows that a shard can always answer with at once: as many, or as many as are so many bytes.
EMBED_ROWS: Final = 128
EMBED_BYTES: Final = 2 * MIB
# Rows that are embedded are there by id, together, in a frame, and as KV or the engine gave them.
ROWS_EMBEDDED: Final = 4

# Of a piece of a prompt a gateway has at once: rows, the frame that they go in, the answer, and its rows.
PIECE_COPIES: Final = 4
# Embedded rows of a prompt that a gateway has besides the pieces that are under way, together and cut.
PROMPT_BYTES: Final = 2 * MIB
PROMPT_COPIES: Final = 2

KV_TYPES: Final = {"f32": KvType.F32, "f16": KvType.F16, "q8_0": KvType.Q8_0}
# (elements, bytes) of a block of keys or values.
_KV_BLOCKS: Final = {KvType.F32: (1, 4), KvType.F16: (1, 2), KvType.Q8_0: (32, 34)}

FRAMES_IN: Final = "frames in"
FRAMES_OUT: Final = "frames out"
FRAMES_SENT: Final = "frames sent"
ANSWERS: Final = "answers"
SAVING: Final = "pages being saved"
ENGINE: Final = "engine"
PROMPTS: Final = "prompts"
PIECES: Final = "pieces under way"


@dataclass(frozen=True, slots=True)
class StationMemory:
    """How a station may use its memory. Sizes in bytes.

    `isolate_bytes` bounds everything, `engine_bytes` the engine's region, `kv_bytes` the keys and values of
    all sessions in it (of type `kv_type`), `max_rows` a batch. Row blocks are of `block_bytes`; two are held.
    Outside of the engine, `answer_bytes` are for answers that are remembered, `save_bytes` for pages on their
    way to storage.
    """

    residency: str
    isolate_bytes: int
    engine_bytes: int
    kv_bytes: int
    kv_type: str
    block_bytes: int
    answer_bytes: int
    save_bytes: int
    max_rows: int
    max_sessions: int

    @staticmethod
    def of(env: Settings) -> StationMemory:
        """A station's memory from its variables. Raises `SettingsError` that names the one at fault."""
        return StationMemory(
            residency=env.choice("RESIDENCY", RESIDENCIES, "pinned-prefix"),
            isolate_bytes=env.integer("ISOLATE_BYTES", MIB, 1 << 40, CEILING_BYTES),
            engine_bytes=env.integer("ENGINE_BYTES", MIB, 1024 * MIB, 44 * MIB),
            kv_bytes=env.integer("KV_BYTES", 0, 1024 * MIB, 12 * MIB),
            kv_type=env.choice("KV_TYPE", tuple(KV_TYPES), "f32"),
            block_bytes=env.integer("BLOCK_BYTES", 1, 64 * MIB, 4 * MIB),
            answer_bytes=env.integer("ANSWER_BYTES", 0, 64 * MIB, 2 * MIB),
            save_bytes=env.integer("SAVE_BYTES", 0, 64 * MIB, 4 * MIB),
            max_rows=env.integer("MAX_BATCH_ROWS", 1, 4096, 128),
            max_sessions=env.integer("MAX_SESSIONS", 1, 4096, 64),
        )


@dataclass(frozen=True, slots=True)
class ShardMemory:
    """How a shard may use its memory. Sizes in bytes.

    `isolate_bytes` bounds everything, `engine_bytes` the engine's region, `kept_bytes` the slices of logits
    that can be chosen from again, `max_rows` a pass over the head, `max_tokens` the ids of one step that are
    embedded.
    """

    residency: str
    isolate_bytes: int
    engine_bytes: int
    kept_bytes: int
    block_bytes: int
    max_rows: int
    max_tokens: int

    @staticmethod
    def of(env: Settings) -> ShardMemory:
        """A shard's memory from its variables. Raises `SettingsError` that names the one at fault."""
        return ShardMemory(
            residency=env.choice("RESIDENCY", RESIDENCIES, "pinned-prefix"),
            isolate_bytes=env.integer("ISOLATE_BYTES", MIB, 1 << 40, CEILING_BYTES),
            engine_bytes=env.integer("ENGINE_BYTES", MIB, 1024 * MIB, 44 * MIB),
            kept_bytes=env.integer("KEPT_LOGITS_BYTES", 0, 256 * MIB, 6 * MIB),
            block_bytes=env.integer("BLOCK_BYTES", 1, 64 * MIB, 4 * MIB),
            max_rows=env.integer("MAX_BATCH_ROWS", 1, 4096, 32),
            max_tokens=env.integer("MAX_TOKENS", 1, 1_000_000, 65_536),
        )


def kv_page_bytes(model: ModelConfig, layers: int, kv_type: str) -> int:
    """Bytes of a page: keys and values of 16 tokens in so many layers. Raises `Unsupported`."""
    elements, size = _KV_BLOCKS[KV_TYPES[kv_type]]
    if model.head_dim % elements:
        raise Unsupported(
            f"KV_TYPE {kv_type} wants heads of a multiple of {elements} elements, the model's have "
            f"{model.head_dim}; take f16 or f32"
        )
    return KV_PAGE_TOKENS * layers * 2 * model.kv_dim // elements * size


def station_config(
    memory: StationMemory, model: ModelConfig, layers: tuple[int, int], rows: int, arena: int
) -> StationConfig:
    """The engine's configuration, with `rows` rows a batch and `arena` bytes of weights."""
    if model.rope_scaling is not None:
        raise Unsupported(f"rope scaling {model.rope_scaling.type!r} is not computed by this engine")
    start, end = layers
    return StationConfig(
        layer_start=start,
        layer_end=end,
        hidden=model.hidden_size,
        ffn=model.ffn_size,
        n_heads=model.num_heads,
        n_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        rope_type=RopeType.NEOX if model.rope_type == "neox" else RopeType.NORM,
        rope_dim=model.rope_dim,
        rope_theta=model.rope_theta,
        norm_eps=model.norm_eps,
        qkv_bias=model.qkv_bias,
        output_norm=end == model.num_layers,
        max_rows=rows,
        max_sessions=memory.max_sessions + 1,  # one more for a fork that answers a late duplicate
        kv_pages=max(1, memory.kv_bytes // kv_page_bytes(model, end - start, memory.kv_type)),
        arena_bytes=arena,
        kv_type=KV_TYPES[memory.kv_type],
        qk_norm=has_qk_norm(model),
    )


def fit_station(
    memory: StationMemory,
    model: ModelConfig,
    layers: tuple[int, int],
    units: Sequence[Unit],
    sizes: Callable[[StationConfig], int],
) -> tuple[StationConfig, Budget]:
    """The engine's configuration for `layers` within an isolate, and what the isolate's memory is for.

    A batch gets as many rows as fit beside keys, values and two blocks of weights, up to `max_rows`: in fluid
    memory the weights are read once for every piece of a prompt, so that pieces should be few. What is left
    is for weights that stay. Residency resident puts the weights first. Raises `OverBudgetError`.
    """
    buffers, whole = 2 * largest_block(units), arena_bytes(units)
    least = whole if memory.residency == "resident" else buffers

    def fixed(rows: int) -> int:
        return sizes(station_config(memory, model, layers, rows, 0))

    def room(rows: int) -> int:
        """Bytes for weights beside batches of so many rows."""
        free = _station_budget(memory, model, rows).room() - engine_memory(0)
        return min(memory.engine_bytes, free) - fixed(rows)

    rows = _most(memory.max_rows, lambda rows: room(rows) >= least)
    if not rows:
        what = "all weights" if memory.residency == "resident" else "two blocks of weights"
        free = _station_budget(memory, model, 1).room() - engine_memory(0)
        raise DoesNotFit(
            f"a station of layers [{layers[0]}, {layers[1]}) needs {mb(fixed(1))} for keys, values and "
            f"activations of one row, and {mb(least)} for {what}, but ENGINE_BYTES is "
            f"{mb(memory.engine_bytes)}, and the isolate has {mb(free)} for it",
            _cures(memory),
        )
    if TILE_ROWS < rows < memory.max_rows:
        rows -= rows % TILE_ROWS
    wanted = buffers if memory.residency == "fluid" else max(whole, buffers)
    config = station_config(memory, model, layers, rows, min(room(rows), wanted) // 64 * 64)
    budget = _station_budget(memory, model, rows)
    budget.reserve(ENGINE, engine_memory(sizes(config)), python=False)
    return config, budget


def _cures(memory: StationMemory) -> str:
    if memory.residency == "resident":
        return "take pinned-prefix, lower KV_BYTES, or take more stations"
    return "lower KV_BYTES or BLOCK_BYTES, or take more stations"


def _station_budget(memory: StationMemory, model: ModelConfig, rows: int) -> Budget:
    """What a station's isolate holds beside its engine, with batches of `rows` rows."""
    size = F32 * model.hidden_size * rows
    budget = Budget(memory.isolate_bytes)
    budget.set_aside(FRAMES_IN, ROWS_IN * size)
    budget.set_aside(FRAMES_OUT, ROWS_OUT * size)
    budget.set_aside(FRAMES_SENT, ROWS_SENT * size, python=False)
    budget.set_aside(ANSWERS, memory.answer_bytes)
    budget.set_aside(SAVING, memory.save_bytes)
    return budget


def shard_desk(header: KnotHeader, ids: tuple[int, int], max_rows: int) -> int:
    """Bytes in which a shard works: for a selection from its whole slice, and for the rows of a pass."""
    selection = CANDIDATE_BYTES * (ids[1] - ids[0] + 1024)
    rows = F32 * header.config.hidden_size * max_rows
    return desk_bytes(header.embedding_tensor(), max(DESK_BYTES, selection, rows))


def fit_shard(
    memory: ShardMemory,
    model: ModelConfig,
    ids: tuple[int, int],
    desk: int,
    blocks: Unit,
    sizes: Callable[[ShardConfig], int],
) -> tuple[ShardConfig, Budget]:
    """The engine's configuration for a slice of the head within an isolate, and what its memory is for.

    Weights get what kept logits, rows and the desk of `desk` bytes leave. Raises `OverBudgetError`.
    """
    start, end = ids
    kept = max(memory.max_rows, min(memory.kept_bytes // (F32 * (end - start)), MOST_KEPT))
    buffers, whole = 2 * largest_block([blocks]), arena_bytes([blocks])
    least = whole if memory.residency == "resident" else buffers

    def config(arena: int) -> ShardConfig:
        return ShardConfig(model.hidden_size, start, end, memory.max_rows, kept, arena)

    budget = _shard_budget(memory, model)
    fixed = sizes(config(0))
    free = budget.room() - engine_memory(0)
    room = min(memory.engine_bytes, free) - fixed - desk
    if room < least:
        what = "all weights" if memory.residency == "resident" else "two blocks of weights"
        raise DoesNotFit(
            f"a shard of ids [{start}, {end}) needs {mb(fixed)} for {kept} slices of logits and "
            f"{memory.max_rows} rows, {mb(desk)} to work in, and {mb(least)} for {what}, but ENGINE_BYTES is "
            f"{mb(memory.engine_bytes)}, and the isolate has {mb(free)} for it",
            "lower MAX_BATCH_ROWS or BLOCK_BYTES, or take more shards",
        )
    wanted = buffers if memory.residency == "fluid" else max(buffers, whole)
    found = config(desk + min(room, wanted) // 64 * 64)
    budget.reserve(ENGINE, engine_memory(sizes(found)), python=False)
    return found, budget


def _shard_budget(memory: ShardMemory, model: ModelConfig) -> Budget:
    """What a shard's isolate holds beside its engine."""
    row = F32 * model.hidden_size
    size = row * max(1, min(EMBED_ROWS, EMBED_BYTES // row))
    budget = Budget(memory.isolate_bytes)
    budget.set_aside(FRAMES_OUT, ROWS_EMBEDDED * size)
    budget.set_aside(FRAMES_SENT, ROWS_SENT * size, python=False)
    return budget


def embed_bytes(model: ModelConfig, rows: int) -> int:
    """Bytes in Python's heap of so many embedded rows, from where they were read to the frame."""
    return ROWS_EMBEDDED * F32 * model.hidden_size * rows


def most_embedded(budget: Budget, model: ModelConfig, most: int) -> int:
    """Rows that a shard can embed in one step when nothing else is going on."""
    return _most(most, lambda rows: budget.fits(FRAMES_OUT, embed_bytes(model, rows)))


def take_prompt(budget: Budget, row: int, rows: int, wanted: int) -> int:
    """Takes what a prompt needs that goes through in pieces of `rows` rows of `row` bytes.

    Returns how many pieces may be under way at once, at most `wanted`; 0, and nothing is taken, when there is
    no room for one. `give_prompt` returns it.
    """
    if not budget.take(PROMPTS, prompt_bytes(row, rows)):
        return 0
    size, found = PIECE_COPIES * row * rows, 0
    while found < wanted and budget.take(PIECES, size):
        found += 1
    if not found:
        budget.give(PROMPTS, prompt_bytes(row, rows))
    return found


def give_prompt(budget: Budget, row: int, rows: int, pieces: int) -> None:
    """Returns what `take_prompt` took."""
    budget.give(PROMPTS, prompt_bytes(row, rows))
    budget.give(PIECES, PIECE_COPIES * row * rows * pieces)


def prompt_bytes(row: int, rows: int) -> int:
    """Bytes of embedded rows that are waiting to be under way."""
    return PROMPT_COPIES * max(PROMPT_BYTES, row * rows)


def _most(most: int, fits: Callable[[int], bool]) -> int:
    """The largest number up to `most` that fits, 0 when not even 1 does; whatever fits, less does too."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        if fits(middle):
            low = middle
        else:
            high = middle - 1
    return low
