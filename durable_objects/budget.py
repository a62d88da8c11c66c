"""The memory that all objects of one isolate share for what they keep."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from protocol.settings import MIB

# An isolate has 128 MB. Pyodide, the JavaScript heap and their buffers take about 66 MB of a busy one, and
# what is left must also hold the bodies that pass through.
MOST_KEPT: Final = 40 * MIB


class IsolateBudget:
    """Bytes kept by an isolate's objects together; `held` tells the isolate's meter of every change."""

    def __init__(self, limit: int, held: Callable[[int], None] = lambda delta: None) -> None:
        self.limit = min(limit, MOST_KEPT)
        self.used = 0
        self._held = held

    @property
    def free(self) -> int:
        """Bytes that may still be kept."""
        return self.limit - self.used

    def take(self, size: int) -> bool:
        """Reserves `size` bytes; False when they do not fit."""
        if size > self.free:
            return False
        self.used += size
        self._held(size)
        return True

    def give(self, size: int) -> None:
        """Returns `size` bytes."""
        self.used -= size
        self._held(-size)
