"""Errors of the engine, one class for each kind of `rust/distributed-inference/src/error.rs`."""

from __future__ import annotations


class EngineError(Exception):
    """The engine refused a call; the sentence is the engine's own."""

    status = 0


class BadArgument(EngineError):
    """An argument has a value that no caller should pass."""

    status = 1


class OutOfBounds(EngineError):
    """An offset or a length leaves the part of the region it belongs to."""

    status = 2


class Unsupported(EngineError):
    """A weight type, architecture or option that the engine does not compute."""

    status = 3


class OverBudget(EngineError):
    """More memory than the host's limit allows."""

    status = 4


class BadState(EngineError):
    """A call out of order: a block skipped, a phase not begun, a session not open."""

    status = 5


class NonFinite(EngineError):
    """A NaN or an infinity in an activation; the sentence names layer and phase."""

    status = 6


class BadData(EngineError):
    """Data that contradicts itself: a tokenizer section, a digest."""

    status = 7


class BadHandle(EngineError):
    """A handle that names no engine."""

    status = 8


class EnginePanicked(EngineError):
    """A defect of the engine; it must be thrown away."""

    status = 9


BY_STATUS: dict[int, type[EngineError]] = {kind.status: kind for kind in EngineError.__subclasses__()}


def raise_for(status: int, message: str) -> None:
    """Raises the error that a negative `status` stands for; `message` is the engine's sentence."""
    kind = BY_STATUS.get(-status, EngineError)
    raise kind(message or f"the engine answered {status} and no sentence")


class EngineLost(Exception):
    """The engine is gone with all that it held: its isolate was ended, or cannot be reached."""
