"""What a part would take: memory, weights, reads. Stations and shards ask the same when they boot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from engine.blocks import Arena, Rows, Unit, largest_block, phase_units, total_bytes, unit, unit_names
from engine.budget import Budget, OverBudgetError, engine_memory
from engine.client import KV_PAGE_TOKENS, ShardEngine, StationEngine
from engine.fit import (
    ENGINE,
    ShardMemory,
    StationMemory,
    fit_shard,
    fit_station,
    kv_page_bytes,
    most_embedded,
    shard_desk,
    take_prompt,
)
from knot.header import PHASES, KnotHeader, TensorInfo
from knot.plan.reads import PassReads, Reads, pass_reads, shard_boot, station_boot


@dataclass(frozen=True, slots=True)
class PhaseSize:
    """A phase of a layer, or the head (layer None), and its bytes."""

    layer: int | None
    phase: str
    bytes: int


@dataclass(frozen=True, slots=True)
class PartPlan:
    """One isolate.

    - `range`: layers or ids, [start, end). `rows`: of a batch at most.
    - `memory`: bytes by purpose; `peak` is their sum. `region`: what the engine's memory is for.
    - `weights`: bytes of all its weights, `pinned`: of those that stay, `in_flight`: of those on their way.
    - `boot`, `passes`: what it reads before its first pass, and for passes. `elements`: weights that a row
      is multiplied with. `kv_tokens`: tokens of keys and values that it has room for.
    """

    name: str
    range: tuple[int, int]
    rows: int
    memory: Mapping[str, int]
    region: Mapping[str, int]
    phases: tuple[PhaseSize, ...]
    weights: int
    pinned: int
    in_flight: int
    boot: Reads
    passes: PassReads
    elements: int
    blocks: int
    kv_tokens: int = 0
    kv_token_bytes: int = 0
    max_tokens: int = 0

    @property
    def peak(self) -> int:
        """The most that the isolate uses, by its own reckoning."""
        return sum(self.memory.values())

    @property
    def whole(self) -> bool:
        """Whether all weights stay."""
        return self.passes.warm == Reads()


@dataclass(frozen=True, slots=True)
class Station:
    """A station's plan with what others need to reckon on: its units and where they lie."""

    plan: PartPlan
    units: tuple[Unit, ...]
    arena: Arena


def plan_station(header: KnotHeader, name: str, layers: tuple[int, int], memory: StationMemory) -> Station:
    """A station that owns `layers`. Raises `OverBudgetError` with the figures."""
    owned = range(*layers)
    units = tuple(phase_units(header, owned, PHASES, memory.block_bytes))
    config, budget = fit_station(memory, header.config, layers, units, _engines()[0].station_bytes)
    arena = Arena.plan(units, memory.residency, 0, config.arena_bytes)
    names = unit_names(owned, PHASES)
    phases = tuple(
        PhaseSize(*unit_name, total_bytes([blocks])) for unit_name, blocks in zip(names, units, strict=True)
    )
    page = kv_page_bytes(header.config, len(owned), memory.kv_type)
    kv = config.kv_pages * page
    region = budget.table()[ENGINE] - engine_memory(0)
    plan = PartPlan(
        name=name,
        range=layers,
        rows=config.max_rows,
        memory=budget.table(),
        region=_region(region, kv, config.arena_bytes, arena, units),
        phases=phases,
        weights=total_bytes(units),
        pinned=arena.pinned_bytes,
        in_flight=0 if arena.whole else 2 * largest_block(units),
        boot=station_boot(header, owned, units),
        passes=pass_reads(units, arena),
        elements=_elements([block.tensor for blocks in units for block in blocks]),
        blocks=sum(map(len, units)),
        kv_tokens=config.kv_pages * KV_PAGE_TOKENS,
        kv_token_bytes=page // KV_PAGE_TOKENS,
    )
    return Station(plan, units, arena)


def plan_shard(header: KnotHeader, name: str, ids: tuple[int, int], memory: ShardMemory) -> PartPlan:
    """A shard that owns `ids`. Raises `OverBudgetError` with the figures."""
    model = header.config
    desk = shard_desk(header, ids, memory.max_rows)
    blocks = unit([Rows(header.head_tensor(), *ids)], memory.block_bytes)
    config, budget = fit_shard(memory, model, ids, desk, blocks, _engines()[1].shard_bytes)
    arena = Arena.plan([blocks], memory.residency, 0, config.arena_bytes - desk)
    region = budget.table()[ENGINE] - engine_memory(0)
    kept = 4 * config.kept * (ids[1] - ids[0])
    return PartPlan(
        name=name,
        range=ids,
        rows=config.max_rows,
        memory=budget.table(),
        region=_region(region, kept, config.arena_bytes, arena, [blocks]),
        phases=(PhaseSize(None, "head", total_bytes([blocks])),),
        weights=total_bytes([blocks]),
        pinned=arena.pinned_bytes,
        in_flight=0 if arena.whole else 2 * largest_block([blocks]),
        boot=shard_boot(header),
        passes=pass_reads([blocks], arena),
        elements=(ids[1] - ids[0]) * model.hidden_size,
        blocks=len(blocks),
        max_tokens=most_embedded(budget, model, memory.max_tokens),
    )


def plan_gateway(header: KnotHeader, stations: int, piece: int) -> dict[str, int]:
    """A gateway's memory in bytes by purpose, while one prompt goes through in pieces of `piece` rows."""
    row = 4 * header.config.hidden_size
    budget = Budget()
    tokenizer = header.tokenizer
    # The engine copies the vocabulary out of the arena into tables of about the same size.
    budget.set_aside(ENGINE, engine_memory(2 * tokenizer.length if tokenizer else 0), python=False)
    if not take_prompt(budget, row, piece, stations + 1):
        raise OverBudgetError(
            f"a piece of {piece} rows does not fit the gateway ({budget}): lower MAX_BATCH_ROWS"
        )
    return budget.table()


def _region(region: int, kept: int, arena_bytes: int, arena: Arena, units: Sequence[Unit]) -> dict[str, int]:
    """An engine's region by purpose; keys and values, or kept logits, are `kept`."""
    buffers = 0 if arena.whole else 2 * largest_block(units)
    return {
        "kept": kept,
        "activations": region - kept - arena_bytes,
        "pinned": arena.pinned_bytes,
        "in flight": buffers,
        "spare": arena_bytes - arena.pinned_bytes - buffers,
    }


def _elements(tensors: Sequence[TensorInfo]) -> int:
    return sum(tensor.rows * tensor.cols for tensor in dict.fromkeys(tensors))


@cache
def _engines() -> tuple[StationEngine, ShardEngine]:
    """Engines that are only asked how large they would be."""
    from engine.native import NativeEngine

    return StationEngine(NativeEngine(1 << 20)), ShardEngine(NativeEngine(1 << 20))
