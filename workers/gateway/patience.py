"""How patient a generation is with its parts: the same step again where that may help."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final, TypeVar

from protocol.steps import Refusal, RefusalKind

T = TypeVar("T")
# The same step may be sent again after these: it is idempotent.
RETRY: Final = frozenset((RefusalKind.LOST, RefusalKind.UNAVAILABLE, RefusalKind.BUSY, RefusalKind.INTERNAL))


@dataclass(frozen=True, slots=True)
class Limits:
    """How often, and how long in seconds. `busy_retries` are those of a part whose queue is full."""

    step_retries: int = 2
    busy_retries: int = 60
    attempts: int = 3
    pause: float = 0.05


class Patience:
    """Sends steps again, and counts how often."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.retries = 0

    async def __call__(self, ask: Callable[[], Awaitable[T]]) -> T:
        """The answer to a step. Raises the last `Refusal` when no more asking would help."""
        lost = busy = 0
        while True:
            try:
                return await ask()
            except Refusal as refusal:
                if refusal.kind is RefusalKind.BUSY:
                    busy += 1
                elif refusal.kind in RETRY:
                    lost += 1
                else:
                    raise
                if lost > self.limits.step_retries or busy > self.limits.busy_retries:
                    raise
                self.retries += 1
                pause = self.limits.pause * 2 ** min(lost + busy, 5)
                await asyncio.sleep(max(pause, (refusal.retry_after_ms or 0) / 1000))
