"""Time on the wall and on the processor."""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import contextmanager


class Seconds:
    """Time on the wall and on the processor of what was marked, by name."""

    def __init__(self) -> None:
        self.wall: dict[str, list[float]] = {}
        self.processor: dict[str, list[float]] = {}

    @contextmanager
    def of(self, name: str) -> Generator[None]:
        """Times a block."""
        wall, processor = time.perf_counter(), time.process_time()
        yield
        self.wall.setdefault(name, []).append(time.perf_counter() - wall)
        self.processor.setdefault(name, []).append(time.process_time() - processor)
