"""Who is cancelled in the very moment that its turn comes: nobody behind it waits for ever."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
from core_support import run

from admission import Pool
from rounds import Rounds


def test_a_seat_that_is_cancelled_as_its_group_sets_out_holds_up_nobody() -> None:
    async def main() -> None:
        rounds = Rounds(1, 128, time.monotonic)
        first = rounds.seat("first")
        await first.__aenter__()

        async def second() -> None:
            async with rounds.seat("second"):
                raise AssertionError("it was cancelled before")

        waiting = asyncio.ensure_future(second())
        await asyncio.sleep(0)
        waiting.cancel()
        # No turn of the event loop lies between: the one that waited has not come to say so.
        await first.__aexit__(None, None, None)
        with pytest.raises(asyncio.CancelledError):
            await waiting
        async with asyncio.timeout(5), rounds.seat("third"):
            pass
        assert rounds.counts.steps == 2, "nobody set out with a seat that was given up"

    run(main())


def test_a_share_of_a_pool_that_is_cancelled_as_it_is_given_goes_to_the_next() -> None:
    async def main() -> None:
        pool = Pool(1)
        first = pool.take(1)
        await first.__aenter__()
        got: list[str] = []

        async def take(name: str) -> None:
            async with pool.take(1):
                got.append(name)

        second, third = (asyncio.ensure_future(take(name)) for name in ("second", "third"))
        await asyncio.sleep(0)
        second.cancel()
        await first.__aexit__(None, None, None)
        found: list[Any] = await asyncio.wait_for(asyncio.gather(second, third, return_exceptions=True), 5)
        assert isinstance(found[0], asyncio.CancelledError)
        assert found[1] is None
        assert got == ["third"]

    run(main())
