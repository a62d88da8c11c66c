"""Topologies for a model: the smallest that fits, and the one that holds everything resident."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Final

from engine.budget import ISOLATE_BYTES, MIB, DoesNotFit, OverBudgetError, mb
from engine.client import KV_PAGE_TOKENS
from engine.fit import ShardMemory, StationMemory, kv_page_bytes
from knot.header import KnotHeader
from knot.plan.cluster import ClusterPlan, plan_cluster
from knot.plan.parts import plan_shard, plan_station
from knot.topology import Topology, split
from protocol.settings import Settings

# More shards than this do not make anything smaller.
MOST_SHARDS: Final = 256
# Fewer rows than a tile of the kernels make a prompt needlessly slow.
LEAST_ROWS: Final = 8
BLOCK_SIZES: Final = (4 * MIB, 2 * MIB, MIB)

Ranges = tuple[tuple[int, int], ...]


class NoTopology(OverBudgetError):
    """There is no topology that fits; the sentence says what is too large, and what would help."""


def kv_variables(
    header: KnotHeader, stations: Sequence[tuple[int, int]], context: int, kv_type: str
) -> dict[str, str]:
    """The variables that give every station room for keys and values of `context` tokens, in whole pages.

    One more page is for a session that does not end with a page. Raises `OverBudgetError`.
    """
    layers = max(end - start for start, end in stations)
    pages = -(-context // KV_PAGE_TOKENS) + 1
    size = pages * kv_page_bytes(header.config, layers, kv_type)
    if size > ISOLATE_BYTES:
        raise OverBudgetError(
            f"keys and values of {context} tokens in {layers} layers are {mb(size)} as {kv_type}, and an "
            f"isolate has {mb(ISOLATE_BYTES)}: take more stations, fewer tokens (--context) or smaller keys "
            "and values (--kv f16 or q8_0)"
        )
    return {"KV_BYTES": str(size), "KV_TYPE": kv_type}


def best_plan(
    header: KnotHeader,
    topology: Topology,
    variables: Mapping[str, str],
    *,
    context: int,
    prompt: int,
    kv_type: str = "f32",
) -> ClusterPlan:
    """The plan for a topology, with the row blocks that cut a prompt into the fewest pieces.

    Smaller blocks leave more room for rows; of block sizes that do equally well the largest is taken. What
    `variables` say stays as it is. Raises `OverBudgetError`.
    """
    made = {**kv_variables(header, topology.stations, context, kv_type), **variables}
    plans: list[ClusterPlan] = []
    refusal: OverBudgetError | None = None
    for size in BLOCK_SIZES if "BLOCK_BYTES" not in made else (int(made["BLOCK_BYTES"]),):
        try:
            plans.append(plan_cluster(header, topology, {**made, "BLOCK_BYTES": str(size)}, prompt=prompt))
        except OverBudgetError as error:
            refusal = error
    if not plans:
        assert refusal is not None
        raise refusal
    return min(plans, key=lambda plan: len(plan.pieces(prompt)))


def smallest_stations(
    header: KnotHeader, variables: Mapping[str, str], *, context: int, kv_type: str
) -> Ranges:
    """As few stations as can hold their keys and values, even ranges. Raises `NoTopology`."""
    layers = header.config.num_layers
    refusal = ""
    for count in range(1, layers + 1):
        ranges = split(layers, count)
        try:
            made = {
                "BLOCK_BYTES": str(BLOCK_SIZES[-1]),
                **kv_variables(header, ranges, context, kv_type),
                **variables,
            }
            memory = StationMemory.of(Settings(made.get))
            rows = min(
                plan_station(header, "", part, memory).plan.rows for part in dict.fromkeys(_sizes(ranges))
            )
        except OverBudgetError as error:
            refusal = _figures(error)
            continue
        if rows >= min(LEAST_ROWS, memory.max_rows):
            return ranges
    raise NoTopology(
        f"no number of stations has room for {context} tokens of {header.name}: even with one layer each, "
        f"{refusal}; plan for fewer tokens (--context) or smaller keys and values (--kv f16 or q8_0)"
    )


def resident_stations(
    header: KnotHeader, variables: Mapping[str, str], *, context: int, kv_type: str
) -> Ranges:
    """As few stations as hold all their weights: each takes as many layers as fit. Raises `NoTopology`."""
    layers = header.config.num_layers

    def fits(start: int, end: int) -> None:
        made = {
            **kv_variables(header, [(start, end)], context, kv_type),
            **variables,
            "RESIDENCY": "resident",
        }
        plan_station(header, "", (start, end), StationMemory.of(Settings(made.get)))

    return _greedy(layers, fits, "layer", header.name)


def smallest_shards(header: KnotHeader, variables: Mapping[str, str], residency: str) -> Ranges:
    """As few shards as fit, or as hold their slices of the head. Raises `NoTopology`."""
    ids = header.config.vocab_size
    memory = replace(ShardMemory.of(Settings(variables.get)), residency=residency)
    refusal = ""
    for count in range(1, min(ids, MOST_SHARDS) + 1):
        try:
            for part in _sizes(split(ids, count)):
                plan_shard(header, "", part, memory)
        except OverBudgetError as error:
            refusal = _figures(error)
            continue
        return split(ids, count)
    raise NoTopology(f"no number of shards up to {MOST_SHARDS} fits {header.name}: {refusal}")


def _figures(error: OverBudgetError) -> str:
    """A refusal without what would help a single part: a search has tried that."""
    return error.figures if isinstance(error, DoesNotFit) else str(error)


def _sizes(ranges: Ranges) -> Ranges:
    """The first range of every length: the others need about the same, and the largest decides."""
    found: dict[int, tuple[int, int]] = {}
    for start, end in ranges:
        found.setdefault(end - start, (start, end))
    return tuple(found.values())


def _greedy(total: int, fits: Callable[[int, int], None], what: str, name: str) -> Ranges:
    ranges: list[tuple[int, int]] = []
    start = 0
    while start < total:
        end = start
        try:
            while end < total:
                fits(start, end + 1)
                end += 1
        except OverBudgetError as error:
            if end == start:
                raise NoTopology(
                    f"no topology holds all of {name} resident: {what} {start} alone: {_figures(error)}"
                ) from error
        ranges.append((start, end))
        start = end
    return tuple(ranges)
