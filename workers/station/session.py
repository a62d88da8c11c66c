"""What a station keeps in its books of one session, and of the steps it has taken."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from protocol.frames import Part
from protocol.steps import Rows


@dataclass(frozen=True, slots=True)
class Taken:
    """A step that was taken: where, how many rows, a checksum of them, and which it returns.

    `void` says that the session was cut to less than the step began with, so that it cannot be repeated.
    """

    position: int
    count: int
    checksum: int
    rows: Rows
    void: bool = field(default=False, compare=False)


@dataclass(slots=True)
class Session:
    """One session. `length` is what its cache holds; `answers` are those of steps that may be repeated.

    `saved` is how much of it is in storage, and `checks` the checksums of the pages there.
    `busy` while a step runs, which keeps its slot open even when it is `ended` meanwhile. `begun` is how much
    it began with, `digests` say what its pages are, and `kept` which of them stay when it ends.
    """

    id: str
    epoch: int
    slot: int
    used: float
    length: int = 0
    busy: bool = False
    ended: bool = False
    begun: int = 0
    digests: tuple[bytes, ...] = ()
    kept: tuple[bytes, ...] = ()
    saved: int = 0
    checks: list[int] = field(default_factory=list[int])
    taken: OrderedDict[str, Taken] = field(default_factory=OrderedDict[str, Taken])
    answers: OrderedDict[str, Part] = field(default_factory=OrderedDict[str, Part])


@dataclass(slots=True)
class Admitted:
    """A step that may run: its session, and the slot to run in. `forked` slots are closed afterwards.

    The session is busy until `Sessions.done` or `Sessions.failed`.
    """

    session: Session
    slot: int
    forked: bool
