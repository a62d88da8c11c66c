"""The fluid-memory invariant, checked on what a recorder took down.

At every moment, an isolate holds of the weights on their way at most two blocks, all of one phase of one
layer; every one of them leaves before a block of another phase arrives. Pinned blocks arrive once and stay.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from protocol.recorder import BlockMoved, Event, IsolateEnded, Recorder

MOST_BLOCKS: Final = 2

# A phase of a layer; the head has no layer.
Unit = tuple[int | None, str]


class NotFluid(AssertionError):
    """A moment at which an isolate held what it should not; names isolate, time, layer, phase and blocks."""


@dataclass(slots=True)
class Flow:
    """What passed through an isolate.

    `most_blocks` and `most_bytes` were on their way at once at most, `pinned_bytes` were pinned at most.
    `passed` has the bytes of every phase that arrived, `order` the phases in the order in which blocks that
    do not stay held memory.
    """

    most_blocks: int = 0
    most_bytes: int = 0
    pinned_bytes: int = 0
    passed: dict[Unit, int] = field(default_factory=dict[Unit, int])
    order: list[Unit] = field(default_factory=list[Unit])


@dataclass(slots=True)
class _Held:
    transit: dict[str, int] = field(default_factory=dict[str, int])
    pinned: dict[str, int] = field(default_factory=dict[str, int])
    unit: Unit | None = None


def check_fluid(recorder: Recorder) -> dict[str, Flow]:
    """The flow of every isolate, of a whole recording. Raises `NotFluid` at the first moment that is wrong.

    A recording that has lost its beginning proves nothing, and is refused with `ValueError`.
    """
    if recorder.dropped:
        raise ValueError(f"the recording has lost its first {recorder.dropped} events; give it more room")
    return check_events(recorder.events)


def check_events(events: Iterable[Event]) -> dict[str, Flow]:
    """`check_fluid` for events that begin where nothing is held, and end where nothing is on its way."""
    flows: dict[str, Flow] = {}
    held: dict[str, _Held] = {}
    for event in events:
        if isinstance(event, IsolateEnded):
            held.pop(event.isolate, None)
        elif isinstance(event, BlockMoved):
            flow = flows.setdefault(event.isolate, Flow())
            _move(event, held.setdefault(event.isolate, _Held()), flow)
    for isolate, found in held.items():
        if found.transit:
            raise NotFluid(f"{isolate}: {sorted(found.transit)} arrived and never left")
    return flows


def _move(event: BlockMoved, held: _Held, flow: Flow) -> None:
    blocks = held.pinned if event.stays else held.transit
    unit = (event.layer, event.phase)
    if event.size < 0:
        if blocks.get(event.block) != -event.size:
            raise NotFluid(
                f"{_when(event)} leaves with {-event.size} bytes, {blocks.get(event.block)} are there"
            )
        del blocks[event.block]
        return
    if event.block in blocks:
        raise NotFluid(f"{_when(event)} arrives, but is there already")
    if held.transit and held.unit != unit:
        raise NotFluid(f"{_when(event)} arrives, but {sorted(held.transit)} of {held.unit} have not left")
    blocks[event.block] = event.size
    flow.passed[unit] = flow.passed.get(unit, 0) + event.size
    if event.stays:
        flow.pinned_bytes = max(flow.pinned_bytes, sum(blocks.values()))
        return
    held.unit = unit
    if not flow.order or flow.order[-1] != unit:
        flow.order.append(unit)
    flow.most_blocks = max(flow.most_blocks, len(held.transit))
    flow.most_bytes = max(flow.most_bytes, sum(held.transit.values()))
    if len(held.transit) > MOST_BLOCKS:
        raise NotFluid(f"{_when(event)} arrives as number {len(held.transit)}: {sorted(held.transit)}")


def _when(event: BlockMoved) -> str:
    where = event.phase if event.layer is None else f"layer {event.layer} {event.phase}"
    return f"{event.isolate} at {event.at:.3f} s: {where}, {event.block}"
