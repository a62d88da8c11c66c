"""What a recorder takes down, and what the fluid-memory invariant makes of it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.fluid import NotFluid, check_events, check_fluid
from protocol.recorder import BlobRead, BlockMoved, Event, IsolateEnded, MemoryUsed, Recorder


def block(
    size: int,
    name: str = "a",
    layer: int | None = 0,
    phase: str = "attn",
    stays: bool = False,
    isolate: str = "entry",
) -> BlockMoved:
    return BlockMoved(0.0, isolate, layer, phase, name, size, stays)


def test_events_are_taken_down_in_order_with_the_time_since_the_beginning() -> None:
    now = [100.0]
    recorder = Recorder(clock=lambda: now[0])
    now[0] = 100.5
    recorder.moved("entry")(3, "ffn_up", "blk_3_ffn_up_weight[0:16)", 64, False)
    recorder.used("entry", 1, 2, 3)
    now[0] = 101.0
    recorder.read("entry", "get", "a.knot", 10, 20)
    recorder.ended("entry")
    assert recorder.events == [
        BlockMoved(0.5, "entry", 3, "ffn_up", "blk_3_ffn_up_weight[0:16)", 64, False),
        MemoryUsed(0.5, "entry", 1, 2, 3),
        BlobRead(1.0, "entry", "get", "a.knot", 10, 20),
        IsolateEnded(1.0, "entry"),
    ]
    recorder.clear()
    assert (recorder.events, recorder.dropped) == ([], 0)


def test_a_recorder_keeps_the_last_events_counts_the_others_and_proves_nothing_then() -> None:
    recorder = Recorder(most=3)
    for size in (1, -1, 2, -2, 3, -3):
        recorder.moved("entry")(0, "attn", "a", size, False)
    assert [event.size for event in recorder.events if isinstance(event, BlockMoved)] == [-2, 3, -3]
    assert recorder.dropped == 3
    with pytest.raises(ValueError, match="lost its first 3 events"):
        check_fluid(recorder)


def test_two_blocks_of_a_phase_one_after_the_other_are_fluid() -> None:
    flow = check_events(
        [
            block(5, "a"), block(7, "b"), block(-5, "a"), block(3, "c"), block(-7, "b"), block(-3, "c"),
            block(4, "d", phase="ffn_gate"), block(-4, "d", phase="ffn_gate"),
            block(2, "p", phase="ffn_up", stays=True),
        ]
    )["entry"]  # fmt: skip
    assert (flow.most_blocks, flow.most_bytes, flow.pinned_bytes) == (2, 12, 2)
    assert flow.order == [(0, "attn"), (0, "ffn_gate")]
    assert flow.passed == {(0, "attn"): 15, (0, "ffn_gate"): 4, (0, "ffn_up"): 2}


BROKEN: dict[str, tuple[list[Event], str]] = {
    "a third block": ([block(1, "a"), block(1, "b"), block(1, "c")], "number 3"),
    "two phases": ([block(1, "a"), block(1, "b", phase="ffn_up")], "have not left"),
    "two layers": ([block(1, "a"), block(1, "b", layer=1)], "have not left"),
    "a pinned block of another phase": ([block(1, "a"), block(1, "b", layer=1, stays=True)], "have not left"),
    "a block that never leaves": ([block(1, "a")], "never left"),
    "a block that was never there": ([block(-1, "a")], "leaves with 1"),
    "a block that leaves with other bytes": ([block(2, "a"), block(-1, "a")], "leaves with 1 bytes, 2 are"),
    "a block that arrives twice": ([block(1, "a"), block(1, "a")], "there already"),
    "a pinned block that arrives twice": (
        [block(1, "a", stays=True), block(1, "a", stays=True)],
        "there already",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("events", "words"), BROKEN.values(), ids=BROKEN)
def test_what_is_not_fluid_is_named_with_isolate_layer_and_phase(events: list[Event], words: str) -> None:
    with pytest.raises(NotFluid, match=words) as raised:
        check_events(events)
    assert "entry" in str(raised.value)


def test_isolates_are_apart_and_one_that_ended_holds_nothing() -> None:
    gone = IsolateEnded(0.0, "entry")
    flows = check_events(
        [block(1, "a"), block(2, "b", layer=7, isolate="exit"), block(9, "p", stays=True), gone,
         block(1, "a"), block(-1, "a"), block(-2, "b", layer=7, isolate="exit")]
    )  # fmt: skip
    assert {name: flow.pinned_bytes for name, flow in flows.items()} == {"entry": 9, "exit": 0}


@given(st.lists(st.integers(1, 5), max_size=6), st.integers(1, 2), st.data())
def test_any_pass_over_phases_is_fluid_until_one_block_is_forgotten(
    sizes: list[int], ahead: int, data: st.DataObject
) -> None:
    """Blocks leave in order, `ahead` being held at once; taking any one leaving away breaks it."""
    events: list[Event] = []
    for layer, count in enumerate(sizes):
        names = [f"{layer}.{i}" for i in range(count)]
        for i in range(count + ahead - 1):
            if i < count:
                events.append(block(i + 1, names[i], layer))
            if i >= ahead - 1:
                events.append(block(-(i - ahead + 2), names[i - ahead + 1], layer))
    flows = check_events(events)
    assert sum(sum(flow.passed.values()) for flow in flows.values()) == sum(n * (n + 1) // 2 for n in sizes)
    leaving = [i for i, event in enumerate(events) if isinstance(event, BlockMoved) and event.size < 0]
    if leaving:
        forgotten = data.draw(st.sampled_from(leaving))
        with pytest.raises(NotFluid):
            check_events(events[:forgotten] + events[forgotten + 1 :])
