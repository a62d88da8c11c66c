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

    What may be the beginning of a stop string is held back until it is known not to be. `starts` has, for
    every id, how many characters of text there were before it; `settled` says of how many ids all text has
    been released. An id that reaches into the stop string never is.
    """

    def __init__(self, decoder: Decoder, stops: Sequence[str]) -> None:
        self._decoder = decoder
        self._stops = [stop for stop in stops if stop]
        self._held = ""
        self._ends: list[int] = []
        self._released = 0
        self.starts: list[int] = []
        self.settled = 0
        self.stopped = False

    def push(self, token: int) -> str:
        """The text that is certain after one more id; sets `stopped` when a stop string is complete."""
        before = self._ends[-1] if self._ends else 0
        text = self._decoder.push(token)
        self.starts.append(before)
        self._ends.append(before + len(text))
        return self._settle(self._release(text))

    def finish(self) -> str:
        """The rest of the text; a stop string may be complete only now."""
        text = self._release(self._decoder.finish())
        if not self.stopped:
            text, self._held = text + self._held, ""
            self._settle(text)
            self.settled = len(self._ends)
            return text
        return self._settle(text)

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

    def _settle(self, text: str) -> str:
        self._released += len(text)
        while self.settled < len(self._ends):
            start, end = self.starts[self.settled], self._ends[self.settled]
            # An id without text of its own may be part of a character that is still to come.
            if end > self._released or (start == end == self._released):
                break
            self.settled += 1
        return text

    def _pending(self, stop: str) -> int:
        """Length of the longest end of the held text that a stop string begins with."""
        most = min(len(stop) - 1, len(self._held))
        return next((n for n in range(most, 0, -1) if self._held.endswith(stop[:n])), 0)
