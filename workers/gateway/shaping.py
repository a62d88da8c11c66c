"""What changes logits before a token is chosen: bias, and penalties for what was said already.

An id's logit becomes (raw > 0 ? raw / r : raw * r) + bias - presence * [count > 0] - frequency * count, where
r is the repetition penalty (Keskar et al. 2019) if the id is in the prompt or in what was written, else 1,
and count says how often it was written. Presence and frequency are OpenAI's, which count written tokens only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from protocol.steps import Adjustment


@dataclass(frozen=True, slots=True)
class Shaping:
    """The parameters; the defaults change nothing."""

    presence: float = 0.0
    frequency: float = 0.0
    repetition: float = 1.0
    bias: Mapping[int, float] = field(default_factory=dict[int, float])

    @property
    def changes(self) -> bool:
        """Whether anything is changed."""
        return bool(self.bias or self.presence or self.frequency or self.repetition != 1)


class Shaper:
    """What one session's next logits are changed by."""

    def __init__(self, shaping: Shaping, prompt: Sequence[int]) -> None:
        self._shaping = shaping
        self._written: Counter[int] = Counter()
        self._seen = set(prompt) if shaping.repetition != 1 else set[int]()

    def wrote(self, token: int) -> None:
        """Takes note of a token."""
        if self._shaping.presence or self._shaping.frequency:
            self._written[token] += 1
        if self._shaping.repetition != 1:
            self._seen.add(token)

    def adjustments(self) -> tuple[Adjustment, ...]:
        """The changes, by id."""
        shaping = self._shaping
        return tuple(
            Adjustment(token, shaping.repetition if token in self._seen else 1.0, self._add(token))
            for token in sorted({*shaping.bias, *self._written, *self._seen})
        )

    def _add(self, token: int) -> float:
        count, shaping = self._written[token], self._shaping
        return shaping.bias.get(token, 0.0) - (shaping.presence * (count > 0) + shaping.frequency * count)
