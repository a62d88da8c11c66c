"""The memory that all objects of one isolate share for what they keep."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Protocol

from engine.budget import MIB, Budget, engine_memory
from protocol.ports import Clock
from protocol.settings import Settings

# What a warden's isolate holds besides what is kept: an engine that checks rows, and bodies that pass.
ENGINE_BYTES: Final = 4 * MIB
PASSING_BYTES: Final = 3_500_000
# What both heaps were larger after a long run of a 500 MB model on workerd than those of a station, which
# hands nothing on: Python's 45 MB and JavaScript's 44 MB.
HANDING_ON_BYTES: Final = 25_000_000
KEPT: Final = "kept"
OUT_OF_USE_SECONDS: Final = 120


def warden_budget() -> Budget:
    """The memory of an isolate of wardens that keep nothing yet."""
    budget = Budget()
    budget.reserve("engine", engine_memory(ENGINE_BYTES), python=False)
    budget.reserve("bodies passing", PASSING_BYTES, python=False)
    budget.reserve("heaps of a long run", HANDING_ON_BYTES, python=False)
    budget.reserve(KEPT, 0, python=False)
    return budget


MOST_KEPT: Final = warden_budget().room() // MIB * MIB


def most_kept(settings: Settings) -> int:
    """Bytes that an isolate of wardens may keep, as MEMORY_BUDGET_BYTES says, within what it has.

    Raises `SettingsError`.
    """
    return min(settings.integer("MEMORY_BUDGET_BYTES", 0, 1 << 40, MOST_KEPT), MOST_KEPT)


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
        self._budget = warden_budget()
        self._clock = clock
        self._held = held
        self._keepers: dict[str, tuple[float, Keeper]] = {}

    @property
    def used(self) -> int:
        """Bytes that are kept."""
        return self._budget.used(KEPT)

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
        if size > self.free or not self._budget.take(KEPT, size):
            return False
        self._held(size)
        return True

    def give(self, size: int) -> None:
        """Returns `size` bytes."""
        self._budget.give(KEPT, size)
        self._held(-size)

    def _reclaim(self, size: int) -> None:
        unused = [entry for entry in self._keepers.values() if self._clock() - entry[0] >= OUT_OF_USE_SECONDS]
        for _, keeper in sorted(unused, key=lambda entry: entry[0]):
            if self.free < size:
                keeper.clear()
