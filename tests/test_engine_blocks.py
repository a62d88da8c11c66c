"""Row blocks: whole row groups, every row once, and a place in the arena for each."""

from __future__ import annotations

from itertools import pairwise

import pytest
from core_support import grouped, header_of, knot_of
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.blocks import (
    MAX_GROUPS,
    Arena,
    Block,
    Rows,
    aligned,
    arena_bytes,
    cut,
    largest_block,
    phase_units,
    total_bytes,
    unit,
)
from engine.budget import OverBudgetError
from knot.header import PHASES, TensorInfo


def tensor(rows: int, group_rows: int, cols: int = 32, offset: int = 1000) -> TensorInfo:
    """A Q8_0 tensor: a row of 32 is 34 bytes."""
    length = rows * cols // 32 * 34
    return TensorInfo("w", "Q8_0", (rows, cols), offset, length, group_rows, 7)


@st.composite
def some_rows(draw: st.DrawFn) -> Rows:
    rows = draw(st.integers(1, 60))
    start = draw(st.integers(0, rows - 1))
    return Rows(tensor(rows, draw(st.integers(1, rows))), start, draw(st.integers(start + 1, rows)))


@settings(max_examples=150, deadline=None)
@given(some_rows(), st.integers(1, 3000))
def test_blocks_are_whole_groups_within_the_size_and_every_row_is_in_one(rows: Rows, size: int) -> None:
    blocks, info = cut(rows, size), rows.tensor
    assert (blocks[0].start, blocks[-1].end) == (rows.start, rows.end)
    assert all(a.end == b.start for a, b in pairwise(blocks))
    assert all(a.offset + a.length == b.offset for a, b in pairwise(blocks)), "one read brings them all"
    group = info.group_rows * info.row_bytes
    for block in blocks:
        assert block.start < block.end
        first = (block.offset - info.offset) // info.row_bytes
        assert (block.offset - info.offset) % group == 0, "digests cover whole groups"
        assert first + block.skip // info.row_bytes == block.start
        assert block.row_bytes <= block.length - block.skip
        assert block.groups == -(-block.length // block.group_bytes)
        assert block.first_digest == info.first_digest + first // info.group_rows
        assert block.length <= max(size, group)
        assert block.offset + block.length <= info.end
    assert all(block.skip == 0 for block in blocks[1:])


def test_blocks_are_as_large_as_the_size_allows() -> None:
    lengths = [block.length for block in cut(Rows.all(tensor(100, 5)), 3 * 5 * 34)]
    assert lengths == [510] * 6 + [340]
    assert [block.length for block in cut(Rows.all(tensor(100, 5)), 1)] == [170] * 20
    assert [block.length for block in cut(Rows.all(tensor(100, 100)), 1)] == [3400], "a group is never cut"


def test_a_slice_that_begins_inside_a_group_skips_what_comes_before() -> None:
    [block] = cut(Rows(tensor(100, 16), 20, 30), 1 << 20)
    assert (block.start, block.end) == (20, 30)
    assert (block.offset, block.length) == (1000 + 16 * 34, 16 * 34)
    assert block.skip == 4 * 34
    assert (block.first_digest, block.groups) == (8, 1)


def test_a_blocks_digests_fit_the_engines_mailbox_however_small_the_groups() -> None:
    blocks = cut(Rows.all(tensor(3 * MAX_GROUPS + 5, 1)), 1 << 30)
    assert [block.groups for block in blocks] == [MAX_GROUPS] * 3 + [5]


def test_a_stations_units_are_its_phases_in_the_order_of_the_forward_pass() -> None:
    header = header_of(grouped())
    units = phase_units(header, range(1, 3), PHASES, 5000)
    assert len(units) == 2 * len(PHASES)
    names = [list(dict.fromkeys(block.tensor.name for block in unit)) for unit in units]
    assert names[:4] == [
        ["blk_1_attn_q_weight", "blk_1_attn_k_weight", "blk_1_attn_v_weight", "blk_1_attn_output_weight"],
        ["blk_1_ffn_gate_weight"],
        ["blk_1_ffn_up_weight"],
        ["blk_1_ffn_down_weight"],
    ]
    assert names[4:] == [[name.replace("blk_1", "blk_2") for name in phase] for phase in names[:4]]
    for blocks in units:
        assert len(blocks) > 1, "cut, or this tests nothing"
        assert all(a.offset + a.length == b.offset for a, b in pairwise(blocks)), "a phase is one read"
    assert total_bytes(units) == sum(header.tensor(name).length for per_unit in names for name in per_unit)


def test_a_phase_that_lacks_a_tensor_is_an_error_and_not_a_shorter_phase() -> None:
    import dataclasses

    header = header_of(knot_of())
    left = {key: value for key, value in header.tensors.items() if key != "blk_1_ffn_up_weight"}
    with pytest.raises(ValueError, match="phase ffn_up of layer 1 needs the tensor blk_1_ffn_up_weight"):
        phase_units(dataclasses.replace(header, tensors=left), range(3), PHASES, 4096)


def units_of(sizes: list[list[int]]) -> list[tuple[Block, ...]]:
    """Units whose blocks have these numbers of rows."""
    return [unit([Rows.all(tensor(n, n, offset=0)) for n in rows], 1) for rows in sizes]


def occupied(units: list[tuple[Block, ...]], arena: Arena) -> list[tuple[int, int]]:
    """[start, end) of every pinned block and of both buffers."""
    found = [
        (place, place + block.length)
        for blocks, places in zip(units, arena.places, strict=True)
        for block, place in zip(blocks, places, strict=True)
        if place is not None
    ]
    largest = max((block.length for blocks in units for block in blocks), default=0)
    return found + ([] if arena.whole else [(at, at + largest) for at in arena.buffers])


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=4), min_size=1, max_size=5),
    st.sampled_from(["fluid", "pinned-prefix", "resident"]),
    st.integers(0, 5000),
    st.integers(0, 40).map(lambda n: n * 64),
)
def test_no_two_places_overlap_or_leave_the_arena_and_what_is_pinned_is_a_prefix(
    sizes: list[list[int]], residency: str, size: int, at: int
) -> None:
    units = units_of(sizes)
    try:
        arena = Arena.plan(units, residency, at, size)
    except OverBudgetError:
        assert size < (arena_bytes(units) if residency == "resident" else 2 * largest_block(units))
        return
    places = sorted(occupied(units, arena))
    assert all(a_end <= b_start for (_, a_end), (b_start, _) in pairwise(places))
    assert places[0][0] >= at
    assert places[-1][1] <= at + size
    assert all(start % 64 == 0 for start, _ in places)
    flat = [place is not None for per_unit in arena.places for place in per_unit]
    assert flat == sorted(flat, reverse=True), "pinned is what comes first in the cycle"
    assert arena.whole == all(flat)
    if residency == "fluid":
        assert not any(flat)
    if residency == "resident":
        assert all(flat)
    if residency == "pinned-prefix" and not all(flat):
        lengths = [aligned(block.length) for blocks in units for block in blocks]
        pinned = sum(flat)
        assert arena.pinned_bytes == sum(lengths[:pinned])
        assert sum(lengths[: pinned + 1]) + 2 * largest_block(units) > size, "one more would have fitted"
    assert arena.used <= size


def test_what_does_not_fit_where_it_was_asked_to_stay_is_refused_with_both_figures() -> None:
    units = phase_units(header_of(grouped()), range(3), PHASES, 4096)
    needed = arena_bytes(units)
    assert Arena.plan(units, "resident", 0, needed).whole
    with pytest.raises(
        OverBudgetError, match=f"resident needs {needed} bytes .* which has {needed - 64}: take"
    ):
        Arena.plan(units, "resident", 0, needed - 64)


@pytest.mark.parametrize("residency", ["fluid", "pinned-prefix"])
def test_an_arena_without_room_for_two_blocks_is_refused_with_both_figures(residency: str) -> None:
    units = phase_units(header_of(grouped()), range(3), PHASES, 4096)
    largest = largest_block(units)
    assert Arena.plan(units, residency, 0, 2 * largest).used == 2 * largest
    with pytest.raises(
        OverBudgetError,
        match=f"two blocks of {largest} bytes do not fit an arena of {2 * largest - 1}: make BLOCK",
    ):
        Arena.plan(units, residency, 0, 2 * largest - 1)


def test_a_prefix_that_is_everything_needs_no_buffers() -> None:
    units = units_of([[3, 4], [5]])
    arena = Arena.plan(units, "pinned-prefix", 128, arena_bytes(units))
    assert arena.whole
    assert arena.used == arena.pinned_bytes == arena_bytes(units)
