"""The life of a generation as a value: what has happened, what may happen next, and what it still holds.

An *attempt* is one pass of reading and writing under one epoch. When it is lost, what it held anywhere is to
be freed, and another one replays prompt and written tokens from token zero under a fresh epoch, as often as
is allowed. Tokens that were written are never taken back. An attempt that had to make room for others is not
counted: nothing was wrong.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TypeAlias

from protocol.steps import Refusal, RefusalKind

# A fresh epoch may help against these; the others would only fail again.
REPLAY = frozenset(
    (RefusalKind.CACHE_MISS, RefusalKind.STALE_EPOCH, RefusalKind.LOST, RefusalKind.UNAVAILABLE)
)


class Stage(StrEnum):
    """Where a generation is. From the last three on nothing happens any more."""

    WAITING = "waiting"
    READING = "reading"
    WRITING = "writing"
    ENDED = "ended"
    FAILED = "failed"
    LEFT = "left"

    @property
    def final(self) -> bool:
        """Whether nothing can follow."""
        return self in (Stage.ENDED, Stage.FAILED, Stage.LEFT)


@dataclass(frozen=True, slots=True)
class Life:
    """A generation of at most `most` tokens after `prompt` tokens, in at most `limit` attempts.

    `cached` tokens of the present attempt did not have to be read. `held` are the epochs of which a part may
    still hold something.
    """

    prompt: int
    most: int
    limit: int
    stage: Stage = Stage.WAITING
    epoch: int = 0
    attempts: int = 0
    written: int = 0
    cached: int = 0
    preempted: int = 0
    reasons: tuple[str, ...] = ()
    held: frozenset[int] = frozenset()

    @property
    def at_rest(self) -> bool:
        """Whether it is over, and nobody holds anything of it."""
        return self.stage.final and not self.held


@dataclass(frozen=True, slots=True)
class Begun:
    """An attempt has begun; from now on parts may hold something of it."""


@dataclass(frozen=True, slots=True)
class Found:
    """The attempt goes on from so many tokens that all stations had."""

    tokens: int


@dataclass(frozen=True, slots=True)
class Wrote:
    """A token was chosen."""


@dataclass(frozen=True, slots=True)
class Stopped:
    """The text is complete before all tokens were made."""


@dataclass(frozen=True, slots=True)
class Lost:
    """The attempt failed."""

    refusal: Refusal


@dataclass(frozen=True, slots=True)
class Preempted:
    """The attempt made room for another session."""


@dataclass(frozen=True, slots=True)
class Left:
    """Nobody wants the rest."""


@dataclass(frozen=True, slots=True)
class Freed:
    """Nobody holds anything of an epoch any more."""

    epoch: int


Event: TypeAlias = Begun | Found | Wrote | Stopped | Lost | Preempted | Left | Freed


class Impossible(Exception):
    """An event that cannot happen to a generation where it is."""

    def __init__(self, life: Life, event: Event) -> None:
        super().__init__(f"{event} cannot happen to a generation that is {life.stage} at epoch {life.epoch}")


def apply(life: Life, event: Event) -> Life:
    """The generation after an event. Raises `Impossible`."""
    going = life.stage in (Stage.READING, Stage.WRITING)
    match event:
        case Freed(epoch):
            return replace(life, held=life.held - {epoch})
        case Left() if not life.stage.final:
            return replace(life, stage=Stage.LEFT)
        case Stopped() if not life.stage.final:
            return replace(life, stage=Stage.ENDED)
        case Begun() if life.stage is Stage.WAITING and life.attempts < life.limit:
            epoch = life.epoch + 1
            return replace(
                life, stage=Stage.READING, epoch=epoch, attempts=life.attempts + 1, cached=0,
                held=life.held | {epoch},
            )  # fmt: skip
        case Found(tokens) if life.stage is Stage.READING and 0 <= tokens < life.prompt + life.written:
            return replace(life, cached=tokens)
        case Wrote() if going and life.written < life.most:
            written = life.written + 1
            return replace(
                life, written=written, stage=Stage.ENDED if written == life.most else Stage.WRITING
            )
        case Lost(refusal) if not life.stage.final:
            again = going and refusal.kind in REPLAY and life.attempts < life.limit
            stage = Stage.WAITING if again else Stage.FAILED
            return replace(life, stage=stage, reasons=(*life.reasons, str(refusal)))
        case Preempted() if going:
            return replace(
                life, stage=Stage.WAITING, attempts=life.attempts - 1, preempted=life.preempted + 1
            )
        case _:
            raise Impossible(life, event)
