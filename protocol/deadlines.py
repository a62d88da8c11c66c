"""Waiting with an end, without leaving anything half-done behind."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any, TypeVar

from protocol.ports import Background
from protocol.timers import call_later

T = TypeVar("T")


class DeadlineExceeded(Exception):
    """Something took longer than its deadline; the sentence says what and how long."""


async def within(seconds: float, coroutine: Coroutine[Any, Any, T], what: str, background: Background) -> T:
    """The coroutine's result, or `DeadlineExceeded` after `seconds`.

    What is abandoned is cancelled and waited for in the background: a call that nobody awaits any more can
    hold up a whole isolate on Workers.
    """
    task = asyncio.ensure_future(coroutine)
    over = asyncio.get_running_loop().create_future()
    timer = call_later(seconds, lambda: over.done() or over.set_result(None))
    try:
        await asyncio.wait([task, over], return_when=asyncio.FIRST_COMPLETED)
    except asyncio.CancelledError:
        task.cancel()
        background(_drain(task))
        raise
    finally:
        timer.cancel()
        over.cancel()
    if task.done():
        return task.result()
    task.cancel()
    background(_drain(task))
    raise DeadlineExceeded(f"{what} did not answer within {seconds:g} s")


async def together(coroutines: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """The coroutines' results, in order. When one fails the others are cancelled and waited for first."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)


async def _drain(task: asyncio.Future[Any]) -> None:
    await asyncio.wait([task])
    if not task.cancelled():
        task.exception()
