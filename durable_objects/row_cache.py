"""What a CobordismWarden keeps: raw embedding rows, the least recently used going first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from durable_objects.budget import IsolateBudget
from durable_objects.layer_cache import CacheCounts


class RowCache:
    """Rows by id. Every row has the same size and is as likely to be wanted again: plain LRU."""

    def __init__(self, budget: IsolateBudget) -> None:
        self._budget = budget
        self._rows: OrderedDict[int, bytes] = OrderedDict()
        self.size = 0
        self.counts = CacheCounts()

    def __len__(self) -> int:
        return len(self._rows)

    def held(self, ids: Iterable[int]) -> dict[int, bytes]:
        """Those of the rows that are kept."""
        found: dict[int, bytes] = {}
        for row in ids:
            data = self._rows.get(row)
            if data is None:
                self.counts.misses += 1
            else:
                self.counts.hits += 1
                self._rows.move_to_end(row)
                found[row] = data
        return found

    def keep(self, row: int, data: bytes) -> None:
        """Keeps a row, at the cost of older ones."""
        if row in self._rows:
            return
        while not self._budget.take(len(data)):
            if not self._rows:
                return
            self._forget(next(iter(self._rows)))
            self.counts.evicted += 1
        self._rows[row] = data
        self.size += len(data)
        self.counts.admitted += 1

    def invalidate(self, row: int) -> bool:
        """Forgets a row; whether it was there."""
        if row not in self._rows:
            return False
        self._forget(row)
        self.counts.invalidated += 1
        return True

    def clear(self) -> None:
        """Forgets everything."""
        self._budget.give(self.size)
        self.size = 0
        self._rows.clear()

    def _forget(self, row: int) -> None:
        size = len(self._rows.pop(row))
        self.size -= size
        self._budget.give(size)
