"""Faults on a seed: what goes wrong on a network, by chance, and the same way every time.

Whether the n-th event at a site is struck depends on the seed, the kind of fault, the site and n alone. So a
run with the same seed and the same calls at each site sees the same faults, however calls of different sites
interleave.
"""

from __future__ import annotations

import hashlib
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

KINDS: Final[Mapping[str, str]] = {
    "lost_call": "a call between Workers never arrives",
    "lost_answer": "a call arrives and is carried out, but its answer is lost",
    "double_call": "a call is carried out twice, one after the other; the second answer counts",
    "slow_call": "a call waits before it arrives",
    "restart": "the called Durable Object is reset before the call arrives",
    "evict": "the called Worker's isolate is evicted before the call arrives",
    "r2_error": "R2 answers by an internal error",
    "r2_torn": "the body of an R2 read ends early",
    "r2_slow": "an R2 read waits before its first byte",
    "kv_stale": "a KV read gives the value before the last one",
}


@dataclass(frozen=True, slots=True)
class Injected:
    """One fault that was injected: its kind, where, and the how manieth event there it hit."""

    kind: str
    site: str
    number: int


class Faults:
    """A plan of faults: `rates` says how often each kind strikes, from 0 to 1.

    `slow_seconds` is the longest wait; `injected` has the last faults, newest last.
    """

    def __init__(self, seed: int, rates: Mapping[str, float], slow_seconds: float = 0.05) -> None:
        for kind, rate in rates.items():
            if kind not in KINDS or not 0 <= rate <= 1:
                raise ValueError(
                    f"fault {kind!r} at rate {rate} is unknown or impossible; known are {', '.join(KINDS)}, "
                    "each at a rate from 0 to 1"
                )
        self.seed = seed
        self.rates = dict(rates)
        self.counts: Counter[str] = Counter()
        self.injected: deque[Injected] = deque(maxlen=1000)
        self._slow_seconds = slow_seconds
        self._numbers: Counter[tuple[str, str]] = Counter()

    def strikes(self, kind: str, site: str) -> bool:
        """Whether this event at `site` suffers a fault of `kind`."""
        rate = self.rates.get(kind, 0.0)
        if not rate:
            return False
        number = self._numbers[kind, site]
        self._numbers[kind, site] += 1
        if self._draw(kind, site, number) >= rate:
            return False
        self.counts[kind] += 1
        self.injected.append(Injected(kind, site, number))
        return True

    def delay(self, site: str) -> float:
        """Seconds that a slow event waits."""
        return self._slow_seconds * self._next("delay", site)

    def cut(self, site: str, length: int) -> int:
        """How many bytes of `length` a torn body still has."""
        return int(length * self._next("cut", site))

    def _next(self, what: str, site: str) -> float:
        number = self._numbers[what, site]
        self._numbers[what, site] += 1
        return self._draw(what, site, number)

    def _draw(self, kind: str, site: str, number: int) -> float:
        """A number from 0 to 1 that depends on its arguments and the seed alone."""
        digest = hashlib.blake2b(f"{self.seed}\0{kind}\0{site}\0{number}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big") / 2**64
