"""What one event of an object may do, and that another one comes when it is used up."""

from __future__ import annotations

import asyncio

import pytest
from core_support import run
from fake_cluster import Background

import turns as turns_module
from protocol.ports import PeerLost
from turns import Turns


class Clockwork:
    """An alarm that rings when a test says so."""

    def __init__(self, **settings: float) -> None:
        self.set: list[float] = []
        self.background = Background()
        self.turns = Turns(self.background, self._ring, **settings)  # type: ignore[arg-type]

    async def _ring(self, seconds: float) -> None:
        self.set.append(seconds)


def test_no_event_makes_more_calls_than_it_may_and_the_rest_wait_for_the_next() -> None:
    async def main() -> None:
        clockwork = Clockwork(seconds=7, calls=5)
        turns = clockwork.turns
        made = 0

        async def work() -> None:
            nonlocal made
            for _ in range(6):
                await turns.call()
                made += 1

        tasks = [asyncio.ensure_future(work()) for _ in range(4)]
        for event in range(1, 5):
            for _ in range(20):
                await asyncio.sleep(0)
            assert made == min(24, 5 * event)
            turns.begin()
        for _ in range(20):
            await asyncio.sleep(0)
        assert all(task.done() for task in tasks)
        assert (turns.counts.calls, turns.counts.calls_peak, turns.counts.turns) == (24, 5, 4)
        # One alarm in seven seconds for every event that has work, and one at once for each that was full.
        assert clockwork.set == [7, 0, 7, 0, 7, 0, 7, 0, 7]
        await clockwork.background.drain()

    run(main())


def test_without_work_no_alarm_is_set() -> None:
    async def main() -> None:
        clockwork = Clockwork(seconds=7)
        for _ in range(3):
            clockwork.turns.begin()
        assert clockwork.set == []

    run(main())


def test_when_no_event_comes_the_call_is_lost_and_nothing_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns_module, "PATIENCE", 0.01)

    async def main() -> None:
        clockwork = Clockwork(calls=1)
        await clockwork.turns.call()
        with pytest.raises(PeerLost, match="1 calls were made in one event"):
            await clockwork.turns.call()
        await clockwork.background.drain()

    run(main())


def test_an_alarm_that_could_not_be_set_is_set_by_the_next_call() -> None:
    async def main() -> None:
        tries: list[float] = []

        async def ring(seconds: float) -> None:
            tries.append(seconds)
            if len(tries) == 1:
                raise OSError("storage is away")

        background = Background()
        turns = Turns(background, ring, seconds=3)
        await turns.call()
        [task] = background.tasks
        await asyncio.wait([task])
        assert isinstance(task.exception(), OSError)
        await turns.call()
        await background.drain()
        assert tries == [3, 3]

    run(main())


def test_calls_pause_now_and_then_and_all_of_them_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns_module, "PAUSE", 0.0)
    now = 0.0

    async def main() -> None:
        nonlocal now
        clockwork = Clockwork(clock=lambda: now)  # type: ignore[arg-type]
        order: list[str] = []

        async def call(name: str) -> None:
            await clockwork.turns.call()
            order.append(name)

        async def both() -> None:
            asyncio.get_running_loop().call_soon(order.append, "somebody else")
            await asyncio.gather(call("a"), call("b"))

        await both()
        assert "a" in order[:2], "nothing waits as long as no pause is due"
        order.clear()
        now += turns_module.BREATH
        later = asyncio.ensure_future(both())
        for _ in range(2):
            await asyncio.sleep(0)
        assert order == ["somebody else"], "nobody calls during the pause"
        await later
        assert order == ["somebody else", "a", "b"]
        await clockwork.background.drain()

    run(main())


def test_those_who_pause_together_make_no_more_calls_than_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns_module, "PAUSE", 0.0)
    now = 0.0

    async def main() -> None:
        nonlocal now
        turns = Clockwork(calls=5, clock=lambda: now).turns  # type: ignore[arg-type]
        now += turns_module.BREATH
        tasks = [asyncio.ensure_future(turns.call()) for _ in range(9)]
        for _ in range(20):
            await asyncio.sleep(0)
        assert sum(task.done() for task in tasks) == 5
        turns.begin()
        await asyncio.gather(*tasks)
        assert turns.counts.calls_peak == 5

    run(main())
