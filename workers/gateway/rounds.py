"""When the sessions of a gateway take their next step: together, so that weights pass once for all of them.

Where weights are read for every pass, all sessions go through the stations as one group, since a pass costs
the same for one as for many. Where they stay in memory there are as many groups as stations, so that all
stations have work. A group sets out when an earlier one is back and everybody is there who is about to come,
or when the wait for them has been long enough: one that is slow, or whose part hangs, holds nobody up for
long.

Pieces of prompts ride along with a group while others are writing. Their size is such that a writer's step
takes at most `GAP` times as long as without them, but at least a tile of rows.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Final

from protocol.pieces import TILE_ROWS
from protocol.ports import Clock
from protocol.timers import Timer, call_later

# How many times as long a writer's step may take while prompts of others are read.
GAP: Final = 4
# Rows of a piece that rides along as long as nothing was measured.
FIRST_ROWS: Final = 32
# Waits, in seconds: the shortest and the longest, and the share of a round that lies in between.
SHORTEST, LONGEST, SHARE = 0.02, 1.0, 0.2
# A group is given up waiting for when some are back and the others take so many times as long.
STRAGGLERS: Final = 0.5
# A group of which nobody is back is given up waiting for after so many rounds' time, and at least this.
OVERDUE, OVERDUE_SECONDS = 5.0, 2.0
# How often a piece may be passed over for want of room.
PASSED_OVER: Final = 4
# How much the newest measurement counts.
NEWEST: Final = 0.2


@dataclass(eq=False, slots=True)
class Group:
    """Steps that have set out together."""

    began: float
    size: int
    rows: int
    members: set[str]
    patience: float
    arrived: int = 0
    ready: asyncio.Event = field(default_factory=asyncio.Event)
    some_back: bool = False
    over: bool = False
    giving_up: Timer | None = None
    late: Timer | None = None

    async def together(self) -> None:
        """Waits until every member has come as far, or has left, or has taken too long."""
        self.arrived += 1
        self.check()
        if self.ready.is_set():
            return
        if self.late is None:
            self.late = call_later(self.patience, self.ready.set)
        # Nothing stands between the event and those who wait: they wake in one turn of the event loop, so
        # that their steps get into one frame.
        await self.ready.wait()

    def check(self) -> None:
        """Lets those go who wait for others, if there are none to wait for."""
        if self.arrived >= len(self.members):
            self.ready.set()
            if self.late is not None:
                self.late.cancel()


@dataclass(eq=False, slots=True)
class _Waiting:
    name: str
    rows: int
    set_out: asyncio.Future[Group]
    passed_over: int = 0


@dataclass(slots=True)
class RoundCounts:
    """Rounds so far, steps in them, and most steps in one."""

    rounds: int = 0
    steps: int = 0
    steps_peak: int = 0


class Rounds:
    """The rounds of one gateway. `groups` may be under way at once; a group has at most `max_rows` rows.

    A round takes at most `gap` times as long with pieces of prompts as without.
    """

    def __init__(self, groups: int, max_rows: int, clock: Clock, gap: float = GAP) -> None:
        self._gap = gap
        self._groups = groups
        self._max_rows = max_rows
        self._clock = clock
        self._writers: set[str] = set()
        self._late: set[str] = set()
        self._queue: list[_Waiting] = []
        self._under_way: list[Group] = []
        self._timer: Timer | None = None
        self._seconds = 0.0
        self._row_seconds = 0.0
        self.counts = RoundCounts()

    @property
    def writers(self) -> int:
        """Sessions that are writing."""
        return len(self._writers)

    @property
    def shared(self) -> bool:
        """Whether prompts ride along: one pass is for everybody, and somebody is writing."""
        return self._groups == 1 and bool(self._writers)

    def piece_rows(self, most: int) -> int:
        """Rows of a prompt's next piece, of at most `most`: fewer while somebody is writing."""
        if not self._writers:
            return most
        rows = FIRST_ROWS
        if self._row_seconds and self._seconds:
            rows = int((self._gap - 1) * self._seconds / self._row_seconds)
        # A tile costs little more than one row of it, so a piece is no smaller.
        rows = max(TILE_ROWS, rows - rows % TILE_ROWS)
        return max(1, min(rows, self._max_rows - self.writers, most))

    def join(self, name: str) -> None:
        """A session begins to write."""
        self._writers.add(name)

    def leave(self, name: str) -> None:
        """A session writes no more."""
        self._writers.discard(name)
        self._late.discard(name)
        self._set_out()

    def read(self, rows: int, seconds: float) -> None:
        """Takes note of how long rows of a prompt took, alone."""
        self._row_seconds = _newer(self._row_seconds, seconds / rows)

    @asynccontextmanager
    async def seat(self, name: str, rows: int = 1) -> AsyncGenerator[Group]:
        """A place in the next group; it is under way as long as the block runs."""
        waiting = _Waiting(name, rows, asyncio.get_running_loop().create_future())
        self._queue.append(waiting)
        self._late.discard(name)
        self._set_out()
        try:
            group = await waiting.set_out
        except asyncio.CancelledError:
            if waiting in self._queue:
                self._queue.remove(waiting)
            elif waiting.set_out.done() and not waiting.set_out.cancelled():
                self._back(waiting.set_out.result(), name)
            self._set_out()
            raise
        try:
            yield group
        finally:
            self._back(group, name)

    def patience(self) -> float:
        """How long others are waited for, in seconds."""
        return min(max(SHORTEST, SHARE * self._seconds), LONGEST)

    def _back(self, group: Group, name: str) -> None:
        group.members.discard(name)
        group.check()
        if not group.members:
            self._end(group)
        elif not group.some_back and (name in self._writers or not group.members & self._writers):
            # A piece of a prompt is back sooner than those who write: they go on to the head.
            group.some_back = True
            wait = max(group.patience, STRAGGLERS * (self._clock() - group.began))
            self._give_up_in(group, wait)

    def _give_up_in(self, group: Group, seconds: float) -> None:
        if group.giving_up is not None:
            group.giving_up.cancel()
        group.giving_up = call_later(seconds, lambda: self._give_up(group))

    def _give_up(self, group: Group) -> None:
        """Whoever of a group is not back by now is waited for no longer."""
        group.ready.set()
        self._late |= group.members & self._writers
        self._end(group)

    def _end(self, group: Group) -> None:
        if group.over:
            return
        group.over = True
        if group.giving_up is not None:
            group.giving_up.cancel()
        if not group.members:
            self._measure(group, self._clock() - group.began)
        self._under_way.remove(group)
        self._set_out()

    def _measure(self, group: Group, seconds: float) -> None:
        more = group.rows - group.size
        if not more:
            self._seconds = _newer(self._seconds, seconds)
        elif self._seconds:
            self._row_seconds = _newer(self._row_seconds, max(0.0, seconds - self._seconds) / more)

    def _set_out(self) -> None:
        """Lets groups go as long as there are any that may."""
        # Who was cancelled may not have come to say so yet.
        self._queue = [waiting for waiting in self._queue if not waiting.set_out.cancelled()]
        while self._queue and len(self._under_way) < self._groups:
            most = -(-max(self.writers, 1) // self._groups)
            writers = sum(waiting.name in self._writers for waiting in self._queue)
            if writers < most and self._coming():
                if self._timer is None:
                    self._timer = call_later(self.patience(), self._waited)
                return
            self._go(most)
        if not self._queue and self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _coming(self) -> set[str]:
        """Writers that are neither waiting nor under way, and were not late the last time."""
        away = {waiting.name for waiting in self._queue}
        for group in self._under_way:
            away |= group.members
        return self._writers - away - self._late

    def _waited(self) -> None:
        self._timer = None
        self._late |= self._coming()
        self._set_out()

    def _go(self, most: int) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        taken: list[_Waiting] = []
        writers, room = 0, self.piece_rows(self._max_rows)
        for waiting in sorted(self._queue, key=lambda waiting: waiting.name not in self._writers):
            if waiting.name in self._writers:
                fits = writers < most
                writers += fits
            else:
                # The first piece goes along, however long; others if there is room.
                fits = waiting.rows <= room or waiting.passed_over >= PASSED_OVER or len(taken) == writers
                room -= waiting.rows if fits else 0
            if fits:
                taken.append(waiting)
            else:
                waiting.passed_over += 1
        self._queue = [waiting for waiting in self._queue if waiting not in taken]
        rows = sum(waiting.rows for waiting in taken)
        names = {waiting.name for waiting in taken}
        group = Group(self._clock(), len(taken), rows, names, self.patience())
        self._under_way.append(group)
        self._give_up_in(group, max(OVERDUE * self._seconds, OVERDUE_SECONDS))
        self.counts.rounds += 1
        self.counts.steps += len(taken)
        self.counts.steps_peak = max(self.counts.steps_peak, len(taken))
        for waiting in taken:
            if not waiting.set_out.done():
                waiting.set_out.set_result(group)


def _newer(before: float, now: float) -> float:
    return now if not before else (1 - NEWEST) * before + NEWEST * now
