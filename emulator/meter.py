"""How much of its 128 MB an isolate uses, and a stop to one that uses more.

Nothing on the platform tells a Worker how much memory it uses, and no local runtime enforces the limit. This
counts what there is to count: the engine's memory as it is, bodies on their way through as they are held, and
what the Worker itself says that it keeps (`boundary.held`). Python and JavaScript are a constant.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from protocol.recorder import Recorder

# Python's heap in WebAssembly is 30 MiB and never shrinks; the JavaScript heap settles near 32 MB in a long
# streaming run (37 MB with its buffers, which are counted as bodies). Measured on workerd 1.20261117.1 with
# Pyodide 314 while a gigabyte passed through an isolate.
BASELINE_BYTES: Final = (30 << 20) + 32_000_000


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """An isolate's memory in bytes, by what it is used for."""

    baseline: int
    engine: int
    bodies: int
    held: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.baseline + self.engine + self.bodies + self.held

    def __str__(self) -> str:
        return (
            f"{_mb(self.total)} (Python and JavaScript {_mb(self.baseline)}, engine {_mb(self.engine)}, "
            f"bodies {_mb(self.bodies)}, kept {_mb(self.held)})"
        )


class Meter:
    """One isolate's memory. `exceeded` is called once, when the limit is passed; `recorder` hears of all."""

    def __init__(
        self,
        name: str,
        limit: int | None,
        exceeded: Callable[[str], None],
        recorder: Recorder | None = None,
    ) -> None:
        self._name = name
        self._limit = limit
        self._exceeded = exceeded
        self._engine = 0
        self._bodies = 0
        self._held = 0
        self._over = False
        self._recorder = recorder
        self.peak = self.use()

    def use(self) -> MemoryUse:
        """What is used now."""
        return MemoryUse(BASELINE_BYTES, self._engine, self._bodies, self._held)

    def of_engine(self, size: int) -> None:
        """The engine's memory is now `size` bytes."""
        if size != self._engine:
            self._engine = size
            self._changed(size)

    def in_bodies(self, delta: int) -> None:
        """Bodies on their way take `delta` bytes more, or less."""
        self._bodies += delta
        self._changed(delta)

    def held(self, delta: int) -> None:
        """What the Worker keeps takes `delta` bytes more, or less."""
        self._held += delta
        self._changed(delta)

    def _changed(self, delta: int) -> None:
        if self._recorder is not None:
            self._recorder.used(self._name, self._engine, self._bodies, self._held)
        if delta <= 0:
            return
        use = self.use()
        if use.total <= self.peak.total:
            return
        self.peak = use
        if self._limit is not None and use.total > self._limit and not self._over:
            self._over = True
            self._exceeded(
                f"Worker {self._name} exceeded its memory limit of {_mb(self._limit)}: it uses {use}"
            )


def _mb(size: int) -> str:
    return f"{size / 1e6:.1f} MB"
