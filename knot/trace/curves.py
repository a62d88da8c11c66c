"""What a recorder took down as curves: each isolate's memory at every moment, by what it is used for."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from emulator.meter import BASELINE_BYTES
from engine.blocks import UnitName
from protocol.recorder import BlobRead, BlockMoved, Event, IsolateEnded, MemoryUsed


@dataclass(frozen=True, slots=True)
class Moment:
    """An isolate from `at` (seconds) on: bytes of its engine, of bodies, and kept by Python objects.

    Of the engine's memory, `pinned` bytes are weights that stay and `transit` bytes weights on their way, all
    of one `unit`. An isolate that is not running holds nothing.
    """

    at: float
    running: bool = False
    engine: int = 0
    bodies: int = 0
    kept: int = 0
    pinned: int = 0
    transit: int = 0
    unit: UnitName | None = None

    @property
    def baseline(self) -> int:
        """Bytes of Python and JavaScript."""
        return BASELINE_BYTES if self.running else 0

    @property
    def total(self) -> int:
        """All bytes of the isolate."""
        return self.baseline + self.engine + self.bodies + self.kept


@dataclass(slots=True)
class Reading:
    """What an isolate asked a bucket for."""

    operations: int = 0
    bytes: int = 0


@dataclass(slots=True)
class Curve:
    """One isolate: moments in order, each lasting until the next one; and what it read from buckets."""

    moments: list[Moment] = field(default_factory=list[Moment])
    read: Reading = field(default_factory=Reading)

    @property
    def peak(self) -> Moment:
        """The moment of most memory, of several the one with most weights on their way."""
        return max(self.moments, key=_fullness, default=Moment(0.0))

    def columns(self, start: float, end: float, count: int) -> list[Moment]:
        """`count` equal stretches of [start, end), each by its fullest moment: what a picture can show."""
        width = (end - start) / count
        edges = [start + width * i for i in range(count + 1)]
        found: list[Moment] = []
        now, index = Moment(start), 0
        while index < len(self.moments) and self.moments[index].at < start:
            now = self.moments[index]
            index += 1
        for left, right in pairwise(edges):
            fullest = now
            while index < len(self.moments) and self.moments[index].at < right:
                now = self.moments[index]
                fullest = max(fullest, now, key=_fullness)
                index += 1
            found.append(replace(fullest, at=left))
        return found


def curves(events: Iterable[Event]) -> dict[str, Curve]:
    """The curve of every isolate in a recording."""
    found: dict[str, Curve] = {}
    for event in events:
        curve = found.setdefault(event.isolate, Curve())
        last = curve.moments[-1] if curve.moments else Moment(event.at)
        match event:
            case BlobRead():
                curve.read.operations += 1
                curve.read.bytes += event.length
            case IsolateEnded():
                curve.moments.append(Moment(event.at))
            case MemoryUsed():
                curve.moments.append(
                    replace(
                        last, at=event.at, running=True,
                        engine=event.engine, bodies=event.bodies, kept=event.kept,
                    )
                )  # fmt: skip
            case BlockMoved():
                curve.moments.append(_moved(last, event))
    return found


def _moved(last: Moment, event: BlockMoved) -> Moment:
    if event.stays:
        return replace(last, at=event.at, running=True, pinned=last.pinned + event.size)
    transit = last.transit + event.size
    unit = (event.layer, event.phase) if transit else None
    return replace(last, at=event.at, running=True, transit=transit, unit=unit)


def passes(curve: Curve) -> list[tuple[float, float]]:
    """When each pass over the weights on their way began and ended, [start, end)."""
    found: list[tuple[float, float]] = []
    before: UnitName | None = None
    start = end = 0.0
    moving = False
    for moment in curve.moments:
        if moment.unit is not None:
            if before is None or _order(moment.unit) < _order(before):
                if before is not None:
                    found.append((start, end))
                start = moment.at
            before = moment.unit
        elif moving:
            end = moment.at
        moving = moment.unit is not None
    if before is not None:
        found.append((start, end))
    return found


def _order(unit: UnitName) -> tuple[int, int]:
    from knot.header import PHASES

    layer, phase = unit
    return (-1 if layer is None else layer, PHASES.index(phase) if phase in PHASES else 0)


def _fullness(moment: Moment) -> tuple[int, int]:
    return moment.total, moment.transit


def fullest(found: Sequence[tuple[str, Curve]]) -> str:
    """The name of the isolate that used most."""
    return max(found, key=lambda item: _fullness(item[1].peak))[0]
