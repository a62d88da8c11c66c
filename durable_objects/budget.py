"""The memory that all objects of one isolate share for what they keep."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Protocol

from protocol.ports import Clock
from protocol.settings import MIB

# An isolate has 128 MB. Pyodide, the JavaScript heap and their buffers take about 66 MB of a busy one, and
# what is left must also hold the bodies that pass through.
MOST_KEPT: Final = 40 * MIB
OUT_OF_USE_SECONDS: Final = 120


class Keeper(Protocol):
    """Whatever keeps bytes under a budget."""

    @property
    def size(self) -> int:
        """Bytes that it keeps."""
        ...

    def clear(self) -> None:
        """Forgets everything, and gives its bytes back."""
        ...


class IsolateBudget:
    """Bytes kept by an isolate's objects together; `held` tells the isolate's meter of every change.

    Globals of an isolate outlive its objects: what an object kept that was restarted, or whose knot was
    replaced, is taken back when someone else needs the room.
    """

    def __init__(self, limit: int, clock: Clock, held: Callable[[int], None] = lambda delta: None) -> None:
        self.limit = min(limit, MOST_KEPT)
        self.used = 0
        self._clock = clock
        self._held = held
        self._keepers: dict[str, tuple[float, Keeper]] = {}

    @property
    def free(self) -> int:
        """Bytes that may still be kept."""
        return self.limit - self.used

    def register(self, name: str, keeper: Keeper) -> None:
        """Makes `keeper` that of the object `name`; what the object kept before it was restarted goes."""
        if name in self._keepers:
            self._keepers[name][1].clear()
        self._keepers[name] = (self._clock(), keeper)

    def touch(self, name: str) -> None:
        """Takes note that the object `name` is in use."""
        self._keepers[name] = (self._clock(), self._keepers[name][1])

    def take(self, size: int) -> bool:
        """Reserves `size` bytes, at the cost of objects that are out of use; False when they do not fit."""
        if size > self.free:
            self._reclaim(size)
        if size > self.free:
            return False
        self.used += size
        self._held(size)
        return True

    def give(self, size: int) -> None:
        """Returns `size` bytes."""
        self.used -= size
        self._held(-size)

    def _reclaim(self, size: int) -> None:
        unused = [entry for entry in self._keepers.values() if self._clock() - entry[0] >= OUT_OF_USE_SECONDS]
        for _, keeper in sorted(unused, key=lambda entry: entry[0]):
            if self.free < size:
                keeper.clear()
