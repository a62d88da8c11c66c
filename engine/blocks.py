"""Weights in row blocks: where each block lies in the knot, and which of them stay in the engine's arena.

A *unit* is what is multiplied in one go and read as one range: a phase of a layer, or a shard's slice of the
head. Its rows are cut into blocks of whole row groups, so that each block can be checked against its digests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from engine.budget import OverBudgetError
from knot.header import KnotHeader, TensorInfo

RESIDENCIES: Final = ("fluid", "pinned-prefix", "resident")

# A block's digests pass through the engine's mailbox.
MAX_GROUPS: Final = 4096


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows [start, end) of a tensor that a unit multiplies with."""

    tensor: TensorInfo
    start: int
    end: int

    @classmethod
    def all(cls, tensor: TensorInfo) -> Rows:
        """Every row of `tensor`."""
        return cls(tensor, 0, tensor.rows)


@dataclass(frozen=True, slots=True)
class Block:
    """Rows [start, end) of a tensor, read as whole row groups: `length` bytes from payload offset `offset`.

    `skip` bytes of them come before row `start`, when a shard's first row lies inside a group.
    `first_digest` and `groups` name the digests; `group_bytes` is the length of every group but the last.
    """

    tensor: TensorInfo
    start: int
    end: int
    offset: int
    length: int
    skip: int
    first_digest: int
    groups: int
    group_bytes: int

    @property
    def row_bytes(self) -> int:
        """Bytes of the rows themselves."""
        return (self.end - self.start) * self.tensor.row_bytes

    @property
    def name(self) -> str:
        """The tensor and its rows."""
        return f"{self.tensor.name}[{self.start}:{self.end}]"


Unit = tuple[Block, ...]

# The layer and phase of a unit; the head has no layer.
UnitName = tuple[int | None, str]
HEAD: Final[UnitName] = (None, "head")


def cut(rows: Rows, block_bytes: int) -> list[Block]:
    """Cuts rows into blocks of at most `block_bytes`, or of one row group where a group is larger."""
    tensor = rows.tensor
    whole = tensor.groups(rows.start, rows.end)
    group_bytes = tensor.group_rows * tensor.row_bytes
    step = max(1, min(block_bytes // group_bytes, MAX_GROUPS)) * tensor.group_rows
    blocks: list[Block] = []
    for first in range(whole.row_start, whole.row_end, step):
        start, end = max(first, rows.start), min(first + step, rows.end)
        found = tensor.groups(start, end)
        skip = (start - found.row_start) * tensor.row_bytes
        blocks.append(
            Block(
                tensor, start, end, found.offset, found.length, skip,
                found.first_digest, found.digest_count, group_bytes,
            )
        )  # fmt: skip
    return blocks


def unit(parts: Sequence[Rows], block_bytes: int) -> Unit:
    """The blocks of rows that lie one after the other in the payload."""
    return tuple(block for part in parts for block in cut(part, block_bytes))


def phase_units(header: KnotHeader, layers: range, phases: Sequence[str], block_bytes: int) -> list[Unit]:
    """The units of a station, in the order that a forward pass needs them: layer by layer, phase by phase."""
    return [
        unit([Rows.all(tensor) for tensor in header.phase_range(layer, phase).tensors], block_bytes)
        for layer in layers
        for phase in phases
    ]


def unit_names(layers: range, phases: Sequence[str]) -> list[UnitName]:
    """What the units of `phase_units` are called."""
    return [(layer, phase) for layer in layers for phase in phases]


def total_bytes(units: Sequence[Unit]) -> int:
    """Bytes that one pass over the units reads when nothing stays."""
    return sum(block.length for unit in units for block in unit)


def largest_block(units: Sequence[Unit]) -> int:
    """Bytes of arena that the largest block takes."""
    return max(aligned(block.length) for unit in units for block in unit)


def arena_bytes(units: Sequence[Unit]) -> int:
    """Bytes of arena that all blocks take together."""
    return sum(aligned(block.length) for unit in units for block in unit)


@dataclass(frozen=True, slots=True)
class Arena:
    """Where blocks lie in an arena of `size` bytes from `at`: pinned ones first, then two buffers in turn.

    Pinned are the first blocks of the cycle that fit. A cache that evicts the least recently used block of a
    cycle longer than itself never hits; a fixed prefix always does, as often as its share of the cycle.
    """

    places: tuple[tuple[int | None, ...], ...]
    buffers: tuple[int, int]
    pinned_bytes: int
    used: int

    @property
    def whole(self) -> bool:
        """Whether every block stays."""
        return all(place is not None for unit in self.places for place in unit)

    @classmethod
    def plan(cls, units: Sequence[Unit], residency: str, at: int, size: int) -> Arena:
        """Places the blocks. Raises `OverBudgetError` when the arena is too small for `residency`."""
        largest, whole = largest_block(units), arena_bytes(units)
        if residency == "resident" and whole > size:
            raise OverBudgetError(
                f"residency resident needs {whole} bytes of weights in the arena, which has {size}: take "
                f"pinned-prefix, or more stations or shards"
            )
        buffer_bytes = 0 if whole <= size and residency != "fluid" else 2 * largest
        if buffer_bytes > size:
            raise OverBudgetError(
                f"two blocks of {largest} bytes do not fit an arena of {size}: make BLOCK_BYTES smaller"
            )
        room = 0 if residency == "fluid" else size - buffer_bytes
        free, full, places = at, False, list[tuple[int | None, ...]]()
        for blocks in units:
            found: list[int | None] = []
            for block in blocks:
                full = full or free - at + aligned(block.length) > room
                found.append(None if full else free)
                free += 0 if full else aligned(block.length)
            places.append(tuple(found))
        second = free + (largest if buffer_bytes else 0)
        return cls(tuple(places), (free, second), free - at, free - at + buffer_bytes)


def aligned(length: int) -> int:
    """`length` rounded up so that the next block starts where vector loads are cheap."""
    return length + -length % 64
