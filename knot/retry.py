"""Trying again what may go better the next time, such as a download."""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from knot.errors import FetchError

T = TypeVar("T")

ATTEMPTS = 3
# Seconds before the second try; twice that before the third.
PAUSE = 1.0


class FinalError(FetchError):
    """A refusal that no further try would change."""


def retried(what: str, action: Callable[[], T]) -> T:
    """The result of `action`, tried three times. Raises `FetchError`: `what`, and the last reason."""
    for attempt in range(1, ATTEMPTS + 1):
        try:
            return action()
        except FinalError as error:
            raise FetchError(f"{what}: {error}") from error
        except Exception as error:
            if attempt == ATTEMPTS:
                reason = " ".join(str(error).split())[:300] or type(error).__name__
                raise FetchError(f"{what} in {ATTEMPTS} tries: {reason}") from error
            time.sleep(PAUSE * attempt)
    raise AssertionError("the last attempt returns or raises")


def clear(staging: Path) -> None:
    """Removes a folder of downloads that is done with, and the one it lies in unless others use it."""
    shutil.rmtree(staging)
    with contextlib.suppress(OSError):
        staging.parent.rmdir()
