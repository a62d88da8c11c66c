"""Timers: they ring in time and in order, and however many are cancelled, the platform sees few."""

from __future__ import annotations

import asyncio
from typing import Any

from core_support import run

from protocol.deadlines import within
from protocol.timers import call_later


def test_timers_ring_in_the_order_of_their_times_and_cancelled_ones_do_not() -> None:
    async def main() -> None:
        rung: list[int] = []
        timers = [
            call_later(seconds, lambda n=n: rung.append(n)) for n, seconds in enumerate((0.06, 0.02, 0.04))
        ]
        timers[2].cancel()
        await asyncio.sleep(0.2)
        assert rung == [1, 0]
        assert all(timer.cancelled for timer in timers)

    run(main())


def test_ten_thousand_deadlines_that_are_kept_are_a_handful_of_timers_of_the_platform() -> None:
    async def main() -> None:
        loop: Any = asyncio.get_running_loop()
        made: list[float] = []
        call_at = loop.call_at

        def counted(when: float, *rest: Any, **more: Any) -> Any:
            made.append(when)
            return call_at(when, *rest, **more)

        loop.call_at = counted

        async def quick() -> int:
            return 7

        for _ in range(10_000):
            assert await within(120, quick(), "it", lambda work: work.close()) == 7
        assert len(made) < 200
        assert all(when <= loop.time() + 1.01 for when in made), "none of them is long"

    run(main())
