"""What a LayerWarden keeps: whole tensors of some layers, under the isolate's budget.

A forward pass asks for the same tensors in the same order again and again. A cache smaller than that cycle
which evicts the least recently used tensor throws away just what is asked for next, and never hits; so the
default is to keep the first tensors that fit and let the rest pass through. LRU remains as a named policy.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from itertools import count
from typing import Final

from durable_objects.budget import IsolateBudget
from protocol.ports import Held
from protocol.settings import MIB

POLICIES: Final = ("pinned-prefix", "lru")


@dataclass(slots=True)
class CacheCounts:
    """Lookups that found a tensor and that did not; tensors taken in, evicted and invalidated."""

    hits: int = 0
    misses: int = 0
    admitted: int = 0
    evicted: int = 0
    invalidated: int = 0


class LayerCache:
    """Tensors by name, with a policy that says which stay."""

    def __init__(self, policy: str, budget: IsolateBudget) -> None:
        if policy not in POLICIES:
            raise ValueError(f"policy {policy!r} is not known; the known ones are {', '.join(POLICIES)}")
        self._policy = policy
        self._budget = budget
        self._tensors: OrderedDict[str, Held] = OrderedDict()
        self._reserved: dict[int, int] = {}
        self._tickets = count(1)
        self.counts = CacheCounts()

    def __len__(self) -> int:
        return len(self._tensors)

    @property
    def size(self) -> int:
        """Bytes of all tensors kept."""
        return sum(map(len, self._tensors.values()))

    def get(self, name: str) -> Held | None:
        """A tensor that is kept, or None."""
        found = self._tensors.get(name)
        if found is None:
            self.counts.misses += 1
            return None
        self.counts.hits += 1
        self._tensors.move_to_end(name)
        return found

    def reserve(self, name: str, size: int) -> int | None:
        """Sets `size` bytes aside for a tensor that is to be kept; None when it is not.

        What comes back names the reservation until `put` or `release`. `clear` may have ended it meanwhile:
        an object that is aborted while a tensor is on its way to it can give nothing back itself.
        """
        if self._policy == "lru":
            self._evict_for(size, keep=name)
        if not self._budget.take(size):
            return None
        ticket = next(self._tickets)
        self._reserved[ticket] = size
        return ticket

    def put(self, ticket: int, name: str, data: Held) -> bool:
        """Keeps a tensor whose size was reserved; False when the reservation has ended."""
        if self._reserved.pop(ticket, None) is None:
            return False
        if name in self._tensors:
            self._drop(name)
        self._tensors[name] = data
        self.counts.admitted += 1
        return True

    def release(self, ticket: int) -> None:
        """Gives up a reservation."""
        self._budget.give(self._reserved.pop(ticket, 0))

    def lose(self, name: str, data: Held) -> None:
        """Forgets a tensor that did not arrive, unless another has taken its place."""
        if self._tensors.get(name) is data:
            self._drop(name)

    def invalidate(self, name: str) -> bool:
        """Forgets a tensor; whether it was there."""
        if name not in self._tensors:
            return False
        self._drop(name)
        self.counts.invalidated += 1
        return True

    def clear(self) -> None:
        """Forgets everything, and ends all reservations."""
        for name in list(self._tensors):
            self._drop(name)
        for ticket in list(self._reserved):
            self.release(ticket)

    def _evict_for(self, size: int, keep: str) -> None:
        if size > self._budget.limit:
            return
        evictable = [name for name, data in self._tensors.items() if not stays(name, len(data))]
        for name in evictable:
            if self._budget.free >= size:
                return
            if name != keep:
                self._drop(name)
                self.counts.evicted += 1

    def _drop(self, name: str) -> None:
        data = self._tensors.pop(name)
        self._budget.give(len(data))
        data.drop()


def stays(name: str, size: int) -> bool:
    """Whether LRU leaves a tensor alone: the small ones, and those that every pass needs."""
    return "norm" in name or name in ("token_embd_weight", "output_weight") or size < MIB
