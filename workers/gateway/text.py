"""Ids to text as they come: no half characters, and nothing of a stop string."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Decoder(Protocol):
    """Turns ids into text, holding back what is not a whole character yet."""

    def push(self, token_id: int) -> str:
        """Text that is whole now."""
        ...

    def finish(self) -> str:
        """What was held back."""
        ...


class TextStream:
    """Text of a generation, cut before the first stop string.

    What may be the beginning of a stop string is held back until it is known not to be.
    """

    def __init__(self, decoder: Decoder, stops: Sequence[str]) -> None:
        self._decoder = decoder
        self._stops = [stop for stop in stops if stop]
        self._held = ""
        self.stopped = False

    def push(self, token: int) -> str:
        """The text that is certain after one more id; sets `stopped` when a stop string is complete."""
        return self._release(self._decoder.push(token))

    def finish(self) -> str:
        """The rest of the text; a stop string may be complete only now."""
        text = self._release(self._decoder.finish())
        if not self.stopped:
            text, self._held = text + self._held, ""
        return text

    def _release(self, text: str) -> str:
        if self.stopped:
            return ""
        self._held += text
        found = [at for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if found:
            self.stopped = True
            text, self._held = self._held[: min(found)], ""
            return text
        certain = len(self._held) - max((self._pending(stop) for stop in self._stops), default=0)
        text, self._held = self._held[:certain], self._held[certain:]
        return text

    def _pending(self, stop: str) -> int:
        """Length of the longest end of the held text that a stop string begins with."""
        most = min(len(stop) - 1, len(self._held))
        return next((n for n in range(most, 0, -1) if self._held.endswith(stop[:n])), 0)
