"""Many timers, of which the platform sees one.

A timer of Python's that is cancelled stays a timer of the platform until its time has come, and an object may
have ten thousand of those. Deadlines are long and nearly always cancelled, so they are kept here, and looked
at by one timer that never waits for longer than a second.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import weakref
from collections.abc import Callable
from typing import Final

TICK: Final = 1.0


class Timer:
    """A callback that is to come, unless it is cancelled."""

    def __init__(self, callback: Callable[[], object]) -> None:
        self._callback: Callable[[], object] | None = callback

    @property
    def cancelled(self) -> bool:
        """Whether it will not come, or has."""
        return self._callback is None

    def cancel(self) -> None:
        """It is not to come."""
        self._callback = None

    def ring(self) -> None:
        """Calls back, once."""
        callback, self._callback = self._callback, None
        if callback is not None:
            callback()


class Timers:
    """The timers of one event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = weakref.ref(loop)
        self._heap: list[tuple[float, int, Timer]] = []
        self._numbers = itertools.count()
        self._armed: float | None = None

    def add(self, seconds: float, callback: Callable[[], object]) -> Timer:
        """Calls back in so many seconds."""
        loop = self._loop()
        assert loop is not None
        timer, when = Timer(callback), loop.time() + seconds
        heapq.heappush(self._heap, (when, next(self._numbers), timer))
        self._arm(loop)
        return timer

    def _arm(self, loop: asyncio.AbstractEventLoop) -> None:
        while self._heap and self._heap[0][2].cancelled:
            heapq.heappop(self._heap)
        if not self._heap:
            return
        when = min(self._heap[0][0], loop.time() + TICK)
        if self._armed is None or when < self._armed:
            self._armed = when
            loop.call_at(when, self._ring, when)

    def _ring(self, when: float) -> None:
        loop = self._loop()
        if loop is None or when != self._armed:
            return  # an earlier one was armed since
        self._armed = None
        due: list[Timer] = []
        while self._heap and (self._heap[0][0] <= loop.time() or self._heap[0][2].cancelled):
            due.append(heapq.heappop(self._heap)[2])
        self._arm(loop)
        for timer in due:
            timer.ring()


_timers: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Timers] = weakref.WeakKeyDictionary()


def call_later(seconds: float, callback: Callable[[], object]) -> Timer:
    """Calls back in so many seconds, on the running loop."""
    loop = asyncio.get_running_loop()
    found = _timers.get(loop)
    if found is None:
        found = _timers[loop] = Timers(loop)
    return found.add(seconds, callback)
