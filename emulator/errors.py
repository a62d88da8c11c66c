"""What can go wrong in an emulated cluster, and how it looks to the code of a Worker."""

from __future__ import annotations

import traceback
from typing import Final

LOST: Final = "Network connection lost."


class JsException(Exception):
    """An error as it reaches Python from JavaScript: a name and a message, and nothing else crosses."""

    def __init__(self, name: str, message: str) -> None:
        super().__init__(f"{name}: {message}")
        self.name = name
        self.message = message


class EmulatorError(Exception):
    """A cluster that was set up wrongly, or asked for what it does not have."""


class WorkerLost(Exception):
    """The isolate or the object that should have answered is gone; the sentence says why."""


class WorkerFailed(Exception):
    """A Worker's code raised. `trace` is its traceback, which is all that crosses to a caller."""

    def __init__(self, where: str, error: BaseException) -> None:
        # An error that crossed Workers carries tracebacks; what happened is in their last line.
        lines = str(error).strip().splitlines() or [""]
        super().__init__(f"{where} raised {type(error).__name__}: {lines[-1][:500]}")
        self.trace = "".join(traceback.format_exception(error))
        self.js = (error.name, error.message) if isinstance(error, JsException) else None


class LimitExceeded(JsException):
    """A Worker wanted more than the platform gives; the sentence says what and how much."""

    def __init__(self, message: str) -> None:
        super().__init__("Error", message)


class StreamBroken(JsException):
    """A body ended by an error: its source is gone, or gave less than it had promised."""

    def __init__(self, message: str) -> None:
        super().__init__("Error", message)


class DurableObjectAbort(BaseException):
    """Unwinds the code that called `ctx.abort()`; `except Exception` does not stop it."""


def as_seen_by_fetch(error: Exception) -> OSError:
    """What a caller's `fetch` raises when the other side failed: the SDK makes an OSError of everything."""
    if isinstance(error, WorkerFailed):
        return OSError(error.js[1] if error.js else f"PythonError: {error.trace}")
    return OSError(error.message if isinstance(error, JsException) else str(error) or LOST)


def as_seen_by_rpc(error: Exception) -> Exception:
    """What a caller of an RPC method sees when the other side failed."""
    if isinstance(error, WorkerFailed):
        return JsException(*(error.js or ("PythonError", error.trace)))
    if isinstance(error, JsException):
        return error
    return JsException("Error", str(error) or LOST)
