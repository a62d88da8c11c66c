"""What isolates hold, moment by moment: blocks of weights that arrive and leave, memory, reads from buckets.

One recorder takes down a whole cluster, for tests and for pictures. It is bounded: of a run with more events
than it keeps it has the last ones, and says how many are missing. Standard library only.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol

from protocol.ports import Clock

MOST_EVENTS: Final = 500_000


@dataclass(frozen=True, slots=True)
class BlockMoved:
    """A block of weights begins to arrive in an engine's arena (`size` > 0), or has left it (`size` < 0).

    `layer` is None for the head. A block that `stays` is pinned: it leaves only when it proves to be bad or
    when the part boots anew. `at` is in seconds since the recording began, as everywhere here.
    """

    at: float
    isolate: str
    layer: int | None
    phase: str
    block: str
    size: int
    stays: bool


@dataclass(frozen=True, slots=True)
class MemoryUsed:
    """An isolate's memory in bytes: the engine's, bodies on their way, and what Python objects keep."""

    at: float
    isolate: str
    engine: int
    bodies: int
    kept: int


@dataclass(frozen=True, slots=True)
class BlobRead:
    """An isolate began to ask a bucket: `get` of `length` bytes of `key` from `offset`, or `head`."""

    at: float
    isolate: str
    operation: str
    key: str
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class IsolateEnded:
    """An isolate is gone, with everything that it held."""

    at: float
    isolate: str


Event = BlockMoved | MemoryUsed | BlobRead | IsolateEnded


class Moved(Protocol):
    """Is told of every block of weights that arrives (+bytes) or leaves (-bytes)."""

    def __call__(self, layer: int | None, phase: str, block: str, size: int, stays: bool) -> None:
        """A block moves; `layer` is None for the head."""
        ...


class Recorder:
    """Takes down at most `most` events; older ones are dropped and counted."""

    def __init__(self, most: int = MOST_EVENTS, clock: Clock = time.monotonic) -> None:
        self._events: deque[Event] = deque(maxlen=most)
        self._clock = clock
        self._began = clock()
        self._seen = 0

    @property
    def events(self) -> list[Event]:
        """What was taken down, in order."""
        return list(self._events)

    @property
    def dropped(self) -> int:
        """Events that had no room any more: the oldest ones."""
        return self._seen - len(self._events)

    @property
    def elapsed(self) -> float:
        """Seconds since the recording began."""
        return self._clock() - self._began

    def clear(self) -> None:
        """Forgets what was taken down; time goes on."""
        self._events.clear()
        self._seen = 0

    def moved(self, isolate: str) -> Moved:
        """Takes down blocks that move in an isolate."""

        def take(layer: int | None, phase: str, block: str, size: int, stays: bool) -> None:
            self._take(lambda at: BlockMoved(at, isolate, layer, phase, block, size, stays))

        return take

    def used(self, isolate: str, engine: int, bodies: int, kept: int) -> None:
        """Takes down what an isolate's memory is now."""
        self._take(lambda at: MemoryUsed(at, isolate, engine, bodies, kept))

    def read(self, isolate: str, operation: str, key: str, offset: int = 0, length: int = 0) -> None:
        """Takes down an operation on a bucket."""
        self._take(lambda at: BlobRead(at, isolate, operation, key, offset, length))

    def ended(self, isolate: str) -> None:
        """Takes down that an isolate is gone."""
        self._take(lambda at: IsolateEnded(at, isolate))

    def _take(self, event: Callable[[float], Event]) -> None:
        self._seen += 1
        self._events.append(event(self.elapsed))
