"""Waiting with an end: nothing is left running, whatever ends first."""

from __future__ import annotations

import asyncio

import pytest
from core_support import run
from fake_cluster import Background

from protocol.deadlines import DeadlineExceeded, together, within


class Worker:
    """A coroutine that waits for ever, and says how it ended."""

    def __init__(self, slow_to_stop: int = 0) -> None:
        self.ended = ""
        self.slow_to_stop = slow_to_stop

    async def __call__(self) -> str:
        try:
            await asyncio.Event().wait()
        finally:
            for _ in range(self.slow_to_stop):
                await asyncio.sleep(0)
            self.ended = "stopped"
        return "never"


def test_what_is_ready_in_time_is_returned_and_nothing_goes_to_the_background() -> None:
    async def body() -> None:
        background = Background()

        async def quick() -> str:
            await asyncio.sleep(0)
            return "answer"

        assert await within(5, quick(), "it", background) == "answer"
        assert not background.tasks

    run(body())


def test_an_error_comes_through_as_it_is() -> None:
    async def body() -> None:
        async def broken() -> str:
            raise KeyError("what went wrong")

        with pytest.raises(KeyError, match="what went wrong"):
            await within(5, broken(), "it", Background())

    run(body())


def test_a_deadline_names_who_and_how_long_and_stops_what_was_waited_for() -> None:
    async def body() -> None:
        worker, background = Worker(slow_to_stop=3), Background()
        with pytest.raises(DeadlineExceeded, match=r"shard 3 did not answer within 0\.01 s"):
            await within(0.01, worker(), "shard 3", background)
        assert len(background.tasks) == 1, "whoever is abandoned is waited for in the background"
        await background.drain()
        assert worker.ended == "stopped"

    run(body())


def test_the_caller_does_not_wait_for_one_who_does_not_want_to_stop() -> None:
    async def body() -> None:
        let_go, background = asyncio.Event(), Background()

        async def stubborn() -> None:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                await let_go.wait()

        with pytest.raises(DeadlineExceeded):
            await within(0.01, stubborn(), "it", background)
        assert background.tasks
        let_go.set()
        await background.drain()

    run(body())


def test_a_caller_that_is_cancelled_stops_what_it_waited_for() -> None:
    async def body() -> None:
        worker, background = Worker(), Background()
        caller = asyncio.ensure_future(within(60, worker(), "it", background))
        await asyncio.sleep(0.001)
        caller.cancel()
        with pytest.raises(asyncio.CancelledError):
            await caller
        await background.drain()
        assert worker.ended == "stopped"

    run(body())


def test_an_error_after_the_deadline_is_nobodys_surprise() -> None:
    async def body() -> None:
        background, told = Background(), list[str]()
        asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context["message"]))

        async def breaks_when_stopped() -> None:
            try:
                await asyncio.Event().wait()
            finally:
                raise RuntimeError("broke while stopping")

        with pytest.raises(DeadlineExceeded):
            await within(0.01, breaks_when_stopped(), "it", background)
        await background.drain()
        import gc

        gc.collect()
        assert told == [], "no 'exception was never retrieved'"

    run(body())


def test_together_gives_results_in_order() -> None:
    async def body() -> None:
        async def after(turns: int) -> int:
            for _ in range(turns):
                await asyncio.sleep(0)
            return turns

        assert await together(after(n) for n in (3, 1, 2)) == [3, 1, 2]
        assert await together([]) == []

    run(body())


def test_when_one_of_several_fails_the_others_have_stopped_before_the_error_is_heard() -> None:
    async def body() -> None:
        workers = [Worker(slow_to_stop=2), Worker(slow_to_stop=2)]

        async def fails() -> str:
            await asyncio.sleep(0)
            raise LookupError("no such shard")

        with pytest.raises(LookupError, match="no such shard"):
            await together([workers[0](), fails(), workers[1]()])
        assert [worker.ended for worker in workers] == ["stopped", "stopped"]

    run(body())


def test_when_the_caller_of_several_is_cancelled_all_of_them_stop() -> None:
    async def body() -> None:
        workers = [Worker(), Worker()]
        caller = asyncio.ensure_future(together(worker() for worker in workers))
        await asyncio.sleep(0.001)
        caller.cancel()
        with pytest.raises(asyncio.CancelledError):
            await caller
        assert [worker.ended for worker in workers] == ["stopped", "stopped"]

    run(body())
