"""Long calls on threads, for hosts in CPython."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

T = TypeVar("T")


async def run_to_end(function: Callable[..., T], *args: Any) -> T:
    """Runs `function` on a thread. A cancelled caller still waits for it before the cancellation goes on.

    The function works in an engine's memory, which its owner may reuse once the call seems over. So nothing
    here is a task: whoever cancels all tasks would otherwise end the wait before the thread.
    """
    running = asyncio.get_running_loop().run_in_executor(None, partial(function, *args))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        while not running.done():
            try:
                await asyncio.wait([running])
            except asyncio.CancelledError:
                continue
        if not running.cancelled():
            running.exception()  # taken notice of: the cancellation is what the caller hears about
        raise
