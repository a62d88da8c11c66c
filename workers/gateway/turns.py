"""Work that outlives one event of an object: how much one event may do, and how the next one comes.

The platform bounds what an object does for one event: calls of other parts, and time of computing. A new
event, a request or an alarm, begins the reckoning anew for everything that goes on in the object. So while
there is work, an alarm is set; and when an event has made as many calls as it may, the others wait for it.

Where all parts share one thread, as in a local cluster, calls that follow each other leave it no moment to
look at its sockets: whoever comes later would wait until the first session ends. So all calls pause at times.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final

from protocol.ports import Background, Clock, PeerLost

# Of the 10,000 calls that the platform allows; the rest is for calls that are no steps.
CALLS: Final = 8000
# How long the next event is waited for, in seconds; an alarm that is due comes within moments.
PATIENCE: Final = 60.0
# After so many seconds of calls there is a pause of so many. A timer comes only when the thread has looked
# around; one of fewer than four milliseconds is none to Pyodide.
BREATH, PAUSE = 0.25, 0.004


@dataclass(slots=True)
class TurnCounts:
    """Events so far, calls of other parts, and most calls in one event."""

    turns: int = 0
    calls: int = 0
    calls_peak: int = 0


class Turns:
    """The events of one object. `ring` sets the alarm to so many seconds from now; without one nothing waits.

    Every event calls `begin`; every call of another part is announced by `call`.
    """

    def __init__(
        self,
        background: Background | None = None,
        ring: Callable[[float], Awaitable[None]] | None = None,
        *,
        seconds: float = 10.0,
        calls: int = CALLS,
        clock: Clock = time.monotonic,
    ) -> None:
        self._background = background
        self._ring = ring
        self._seconds = seconds
        self._most = calls
        self._calls = 0
        self._rung: float | None = None
        self._next = asyncio.Event()
        self._clock = clock
        self._paused = clock()
        self._pause: asyncio.Task[None] | None = None
        self.counts = TurnCounts()

    def begin(self) -> None:
        """A new event has come."""
        self._calls = 0
        self._rung = None
        self.counts.turns += 1
        self._next.set()

    async def call(self) -> None:
        """Counts a call of another part; waits for the next event when this one may make no more.

        Raises `PeerLost` when none comes.
        """
        # Before the calls are counted: whoever waits here together must not make more than there are left.
        await self._look_around()
        while self._ring is not None and self._calls >= self._most:
            self._set(0.0)
            self._next.clear()
            try:
                async with asyncio.timeout(PATIENCE):
                    await self._next.wait()
            except TimeoutError:
                raise PeerLost(
                    f"{self._calls} calls were made in one event, and no other came in {PATIENCE:g} s"
                ) from None
        self._calls += 1
        self.counts.calls += 1
        self.counts.calls_peak = max(self.counts.calls_peak, self._calls)
        self._set(self._seconds)

    async def _look_around(self) -> None:
        """Lets what waits outside come in, if the last pause was a while ago."""
        if self._ring is None:
            return
        if self._pause is None and self._clock() - self._paused >= BREATH:
            self._pause = asyncio.ensure_future(asyncio.sleep(PAUSE))
            self._pause.add_done_callback(self._looked)
        if self._pause is not None:
            await asyncio.shield(self._pause)  # all of them: one that went on would keep the thread busy

    def _looked(self, _pause: asyncio.Task[None]) -> None:
        self._pause, self._paused = None, self._clock()

    def _set(self, seconds: float) -> None:
        """Sees to it that an alarm comes in so many seconds or sooner."""
        if self._ring is None or self._background is None:
            return
        if self._rung is None or seconds < self._rung:
            self._rung = seconds
            self._background(self._ring_in(seconds))

    async def _ring_in(self, seconds: float) -> None:
        assert self._ring is not None
        try:
            await self._ring(seconds)
        except Exception:
            self._rung = None  # the next call tries again
            raise
