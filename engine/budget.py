"""An isolate's memory: one object that is asked before anything is set aside, and refuses with the figures.

Nothing on the platform tells a Worker how much it uses, and nothing but the limit itself enforces it. So what
Pyodide and JavaScript take is measured once, everything else is counted here, and the sum stays under a
ceiling below the limit. Standard library only: this file also runs inside a Worker.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

MIB: Final = 1 << 20

# What an isolate may have, and what we let it use.
ISOLATE_BYTES: Final = 128_000_000
CEILING_BYTES: Final = 120_000_000

# Measured on workerd 1.20261117.1 with Pyodide 314, all modules imported: Python's heap, how much of it is
# free, and the factor by which it grows when that is used up. It never shrinks.
PYTHON_BYTES: Final = 30 * MIB
PYTHON_FREE_BYTES: Final = 2 * MIB + 3 * MIB // 4
PYTHON_GROWTH: Final = 1.2
PAGE_BYTES: Final = 65_536
# The JavaScript heap of a long streaming run, and the buffers of the reads under way beside it.
JAVASCRIPT_BYTES: Final = 32_000_000
STREAM_BYTES: Final = 5_000_000
# WebAssembly memory beside an engine's region: the crate has data, a stack, its books, and half a MiB for the
# activations of a product.
ENGINE_OVERHEAD: Final = 3 * MIB // 2


class OverBudgetError(ValueError):
    """Something that does not fit; the sentence has the figures."""


class DoesNotFit(OverBudgetError):
    """A part that does not fit an isolate: `figures` say what is too large for what, the sentence also what
    would help."""

    def __init__(self, figures: str, cures: str) -> None:
        super().__init__(f"{figures}: {cures}")
        self.figures = figures


def python_heap(extra: int) -> int:
    """Bytes of Python's heap when `extra` bytes are kept in it beyond what it holds at rest."""
    size = PYTHON_BYTES
    while size < PYTHON_BYTES - PYTHON_FREE_BYTES + extra:
        size = -(-int(size * PYTHON_GROWTH) // PAGE_BYTES) * PAGE_BYTES
    return size


@dataclass(slots=True)
class _Share:
    """Bytes set aside for a purpose, and in use for it, which may be more. `python` says in whose heap."""

    reserved: int = 0
    used: int = 0
    python: bool = True

    @property
    def size(self) -> int:
        return max(self.reserved, self.used)


class Budget:
    """The memory of one isolate. Purposes have names; sizes are in bytes.

    What is `reserved` for a purpose is there for it whatever else happens. What is `taken` for it beyond that
    comes out of what nobody has reserved.
    """

    def __init__(self, ceiling: int = CEILING_BYTES) -> None:
        self.ceiling = ceiling
        self._shares: dict[str, _Share] = {}

    @property
    def total(self) -> int:
        """What the isolate uses at most, by this reckoning."""
        return self._with()

    def room(self, *, python: int = 0, outside: int = 0) -> int:
        """Bytes outside of Python's heap that are left; as if so many more were reserved. May be negative."""
        return self.ceiling - self._with(python, outside)

    def set_aside(self, purpose: str, size: int, *, python: bool = True) -> None:
        """`reserve` without asking whether it fits, for reckonings of what would be."""
        before = self._shares.get(purpose)
        self._shares[purpose] = _Share(size, before.used if before else 0, python)

    def reserve(self, purpose: str, size: int, *, python: bool = True) -> None:
        """Sets bytes aside for a purpose, in place of what was. Raises `OverBudgetError`."""
        before = self._shares.get(purpose)
        self.set_aside(purpose, size, python=python)
        if self.total > self.ceiling:
            figures = str(self)
            if before is None:
                del self._shares[purpose]
            else:
                self._shares[purpose] = before
            raise OverBudgetError(
                f"{size} bytes for {purpose} do not fit an isolate of {self.ceiling}: {figures}"
            )

    def fits(self, purpose: str, size: int) -> bool:
        """Whether bytes could be taken for a purpose now."""
        if not self.take(purpose, size):
            return False
        self.give(purpose, size)
        return True

    def take(self, purpose: str, size: int) -> bool:
        """Takes bytes into use for a purpose; False when they do not fit now."""
        share = self._shares.setdefault(purpose, _Share())
        share.used += size
        if share.used > share.reserved and self.total > self.ceiling:
            share.used -= size
            return False
        return True

    def give(self, purpose: str, size: int) -> None:
        """Returns bytes that were taken."""
        self._shares[purpose].used -= size

    def used(self, purpose: str) -> int:
        """Bytes that are taken for a purpose."""
        share = self._shares.get(purpose)
        return share.used if share else 0

    def table(self) -> dict[str, int]:
        """Bytes by purpose: what is reserved or, if that is more, in use."""
        python = sum(share.size for share in self._shares.values() if share.python)
        return {
            # Its heap has some room to begin with, and then grows by a fifth.
            "python": python_heap(python) - python,
            "javascript": JAVASCRIPT_BYTES,
            "streams": STREAM_BYTES,
            **{purpose: share.size for purpose, share in self._shares.items()},
        }

    def __str__(self) -> str:
        return ", ".join(f"{purpose} {size}" for purpose, size in self.table().items())

    def _with(self, python: int = 0, outside: int = 0) -> int:
        for share in self._shares.values():
            if share.python:
                python += share.size
            else:
                outside += share.size
        return python_heap(python) + JAVASCRIPT_BYTES + STREAM_BYTES + outside


def mb(size: int) -> str:
    """Bytes as people read them."""
    return f"{size / 1e6:,.1f} MB"


def engine_memory(region: int) -> int:
    """Bytes of WebAssembly memory of an engine with a region of so many."""
    return region + ENGINE_OVERHEAD
