"""What sessions begin with, so that one begins with the pages of another instead of computing them again.

A station sees rows and never tokens, so whoever sends them says what they are: a digest for every full page,
of all tokens up to its end and of the model. Two sessions whose digests of a page agree have the same keys
and values up to there, to the bit. Live sessions that claim digests can be shared, and so can the pages that
a session left behind when it was released; those are given up for others whenever room is wanted.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from engine.values import KV_PAGE_TOKENS


class Slots(Protocol):
    """The engine's sessions of keys and values."""

    def kv_open(self) -> int:
        """A new, empty slot."""
        ...

    def kv_close(self, slot: int) -> None:
        """Frees a slot and its pages."""
        ...

    def kv_truncate(self, slot: int, length: int) -> None:
        """Forgets the tokens from `length` on."""
        ...

    def kv_fork(self, slot: int, length: int) -> int:
        """A new slot that begins with the first `length` tokens of `slot`."""
        ...


class Holder(Protocol):
    """Whoever has pages: `length` tokens of them, of which `digests` say what they are."""

    slot: int
    length: int
    digests: tuple[bytes, ...]


@dataclass(eq=False, slots=True)
class Kept:
    """Pages that a session left behind."""

    slot: int
    length: int
    digests: tuple[bytes, ...]


@dataclass(slots=True)
class PrefixCounts:
    """How often was asked for a prefix and found one, tokens that were not computed again for it; prefixes
    that were left behind and given up."""

    asked: int = 0
    hits: int = 0
    tokens: int = 0
    kept: int = 0
    evicted: int = 0


class Prefixes:
    """The prefixes that one station knows. At most `most` of them are kept beyond their sessions."""

    def __init__(self, slots: Slots, most: int) -> None:
        self._slots = slots
        self._most = most
        self._kept: OrderedDict[int, Kept] = OrderedDict()
        self._holders: dict[bytes, dict[int, Holder]] = {}
        self.counts = PrefixCounts()

    def __len__(self) -> int:
        return len(self._kept)

    def kept(self) -> list[Kept]:
        """What is kept, what was used least recently first."""
        return list(self._kept.values())

    def claim(self, holder: Holder) -> None:
        """Lets others begin with what a session has, or will have."""
        for digest in holder.digests:
            self._holders.setdefault(digest, {})[id(holder)] = holder

    def forget(self, holder: Holder) -> None:
        """The holder's pages are about to be gone."""
        for digest in holder.digests:
            found = self._holders.get(digest, {})
            found.pop(id(holder), None)
            if not found:
                self._holders.pop(digest, None)

    def longest(self, digests: Sequence[bytes], limit: int) -> tuple[Holder, int] | None:
        """Who has the most of these pages, up to `limit` tokens, and how many tokens that is."""
        best: tuple[Holder, int] | None = None
        for pages in range(min(len(digests), limit // KV_PAGE_TOKENS), 0, -1):
            for holder in self._holders.get(digests[pages - 1], {}).values():
                # A live session may have claimed more than it has computed.
                there = min(pages, holder.length // KV_PAGE_TOKENS) * KV_PAGE_TOKENS
                if there and (best is None or there > best[1]):
                    best = holder, there
            if best is not None and best[1] >= (pages - 1) * KV_PAGE_TOKENS:
                break
        return best

    def used(self, holder: Holder) -> None:
        """Somebody has begun with what the holder has."""
        if id(holder) in self._kept:
            self._kept.move_to_end(id(holder))

    def keep(self, slot: int, length: int, digests: Sequence[bytes]) -> None:
        """Keeps the whole pages of a slot that nobody else will use, as far as digests say what they are."""
        pages = min(len(digests), length // KV_PAGE_TOKENS)
        if not self._most or not pages or self._covered(digests[pages - 1]):
            self._slots.kv_close(slot)
            return
        self._slots.kv_truncate(slot, pages * KV_PAGE_TOKENS)
        kept = Kept(slot, pages * KV_PAGE_TOKENS, tuple(digests[:pages]))
        own = set(kept.digests)
        # What the new one begins with needs no keeping of its own.
        for shorter in [other for other in self._kept.values() if other.digests[-1] in own]:
            self._drop(shorter)
        self._kept[id(kept)] = kept
        self.claim(kept)
        self.counts.kept += 1
        while len(self._kept) > self._most:
            self.evict()

    def evict(self, spare: Holder | None = None) -> bool:
        """Gives up the kept prefix that was used least recently, but not `spare`; whether there was one."""
        for kept in self._kept.values():
            if kept is not spare:
                self._drop(kept)
                self.counts.evicted += 1
                return True
        return False

    def clear(self) -> None:
        """Gives up everything that is kept."""
        for kept in self.kept():
            self._drop(kept)

    def _covered(self, digest: bytes) -> bool:
        for key in self._holders.get(digest, {}):
            if key in self._kept:
                self._kept.move_to_end(key)
                return True
        return False

    def _drop(self, kept: Kept) -> None:
        del self._kept[id(kept)]
        self.forget(kept)
        self._slots.kv_close(kept.slot)
