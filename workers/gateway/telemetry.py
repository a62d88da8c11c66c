"""What a gateway has done: counts since it started, and the distribution of the newest measurements.

Everything is bounded. A count is one number for every part or outcome, of which there are few; a distribution
is of the last `WINDOW` measurements. `metrics` says them as text; a generation's own figures are in its
`Report`.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from protocol.steps import Refusal

if TYPE_CHECKING:
    from generation import Report

WINDOW: Final = 512
QUANTILES: Final = (0.5, 0.95)


class Window:
    """The newest measurements of one thing, and count and sum of all."""

    def __init__(self) -> None:
        self._newest: deque[float] = deque(maxlen=WINDOW)
        self.count = 0
        self.sum = 0.0

    def add(self, value: float) -> None:
        """Takes note of a measurement."""
        self._newest.append(value)
        self.count += 1
        self.sum += value

    def quantiles(self, of: Sequence[float] = QUANTILES) -> list[float]:
        """Values that so large a share of the newest does not exceed (nearest rank); none of nothing."""
        ranked = sorted(self._newest)
        return [ranked[max(0, math.ceil(len(ranked) * q) - 1)] for q in of] if ranked else []


@dataclass(slots=True)
class HopCounts:
    """Calls of one endpoint of one part, the steps in them, bytes of frames there and back, seconds."""

    calls: int = 0
    failed: int = 0
    steps: int = 0
    steps_peak: int = 0
    sent: int = 0
    received: int = 0
    seconds: Window = field(default_factory=Window)


class Telemetry:
    """One gateway's counts."""

    def __init__(self) -> None:
        self.hops: dict[tuple[str, str], HopCounts] = {}
        self.ended: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.written_tokens = 0
        self.retries = 0
        self.replays = 0
        self.preempted = 0
        self.waiting = Window()
        self.first_token = Window()
        self.prefill_rate = Window()
        self.decode_rate = Window()

    def observe(
        self, part: str, path: str, seconds: float, sent: int, received: int, steps: int, well: bool
    ) -> None:
        """Takes note of a call."""
        hop = self.hops.setdefault((part, path), HopCounts())
        hop.calls += 1
        hop.failed += not well
        hop.steps += steps
        hop.steps_peak = max(hop.steps_peak, steps)
        hop.sent += sent
        hop.received += received
        hop.seconds.add(seconds)

    def generation_ended(self, report: Report, stage: str) -> None:
        """Takes note of a generation that is over."""
        self.ended[stage] += 1
        self.prompt_tokens += report.prompt_tokens
        self.cached_tokens += report.cached_tokens
        self.written_tokens += report.written_tokens
        self.retries += report.retries
        self.replays += max(0, report.attempts - 1)
        self.preempted += report.preempted
        if not report.written_tokens:
            return
        self.waiting.add(report.waiting_seconds)
        self.first_token.add(report.first_token_seconds)
        if report.prefill_tok_s:
            self.prefill_rate.add(report.prefill_tok_s)
        if report.decode_tok_s:
            self.decode_rate.add(report.decode_tok_s)

    def request_refused(self, refusal: Refusal) -> None:
        """Takes note of a request that was not begun."""
        self.refused[str(refusal.kind)] += 1
