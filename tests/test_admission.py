"""Who may use a cluster: bounded, in order, and nobody's place is lost or kept."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest
from core_support import run
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from admission import STRIDE, Admission, MadeRoom, Place, Pool
from engine.values import KV_PAGE_TOKENS
from protocol.steps import Refusal, RefusalKind


def at_rest(admission: Admission) -> bool:
    return (admission.active, admission.waiting, admission.used) == (0, 0, 0)


def test_beyond_those_who_may_wait_a_request_is_refused_at_once_and_takes_no_place() -> None:
    async def main() -> None:
        admission = Admission(sessions=2, waiting=3, tokens=100_000)
        places = [place for _ in range(5) for place in admission.enter(1, 10, 10)]
        assert (admission.active, admission.waiting) == (2, 3)
        for _ in range(200):
            with pytest.raises(Refusal, match="2 sessions are being served and 3 are waiting") as caught:
                admission.enter(1, 10, 10)
            assert (caught.value.kind, caught.value.retry_after_ms) == (RefusalKind.BUSY, 1000)
        assert (admission.active, admission.waiting, admission.refused) == (2, 3, 200)
        for place in places:
            place.leave()
            place.leave()
        assert at_rest(admission)

    run(main())


def test_a_request_for_several_sessions_gets_all_its_places_or_none() -> None:
    async def main() -> None:
        admission = Admission(sessions=2, waiting=2, tokens=100_000)
        first = admission.enter(3, 10, 10)
        with pytest.raises(Refusal):
            admission.enter(2, 10, 10)
        assert (admission.active, admission.waiting) == (2, 1)
        first += admission.enter(1, 10, 10)
        assert [place.served for place in first] == [True, True, False, False]

    run(main())


def test_a_prompt_that_no_cache_can_hold_is_refused_with_both_numbers() -> None:
    async def main() -> None:
        admission = Admission(sessions=2, waiting=2, tokens=160)
        with pytest.raises(Refusal, match=r"200 tokens.*160") as caught:
            admission.enter(1, 200, 10)
        assert (caught.value.kind, caught.value.retry_after_ms) == (RefusalKind.OVER_BUDGET, None)
        assert at_rest(admission)

    run(main())


def test_those_who_wait_are_served_in_the_order_they_came() -> None:
    async def main() -> None:
        admission = Admission(sessions=1, waiting=9, tokens=100_000)
        places = [place for _ in range(4) for place in admission.enter(1, 10, 10)]
        served: list[int] = []

        async def one(number: int) -> None:
            await places[number].admitted()
            served.append(number)
            await asyncio.sleep(0)
            places[number].leave()

        await asyncio.gather(*(one(number) for number in (2, 0, 3, 1)))
        assert served == [0, 1, 2, 3]
        assert at_rest(admission)

    run(main())


def test_when_room_runs_out_the_last_one_makes_it_and_comes_back_before_new_ones() -> None:
    async def main() -> None:
        admission = Admission(sessions=3, waiting=3, tokens=2 * STRIDE + 2 * KV_PAGE_TOKENS)
        old, young = (admission.enter(1, KV_PAGE_TOKENS, 1000)[0] for _ in range(2))
        [new] = admission.enter(1, KV_PAGE_TOKENS, 1000)
        assert [place.served for place in (old, young, new)] == [True, True, False]
        growing = asyncio.ensure_future(old.hold(STRIDE + 2 * KV_PAGE_TOKENS))
        await asyncio.sleep(0)
        assert young.to_make_room
        assert not growing.done()
        with pytest.raises(MadeRoom):
            await young.hold(KV_PAGE_TOKENS + 1)
        young.pause()
        await growing
        assert old.reserved >= STRIDE + 2 * KV_PAGE_TOKENS
        assert not young.served
        old.leave()
        await young.admitted()
        assert not new.served, "there is no room for both"
        assert admission.preempted == 1
        young.leave()
        await new.admitted()
        new.leave()
        assert at_rest(admission)

    run(main())


def test_the_first_one_is_never_asked_to_make_room_so_somebody_always_gets_on() -> None:
    """Sessions that all want more than there is together: each gets to its end, one after the other."""

    async def main() -> None:
        admission = Admission(sessions=6, waiting=6, tokens=3 * STRIDE)
        ends: list[int] = []

        async def one(number: int, place: Place) -> None:
            written = 0
            while written < 2 * STRIDE:
                await place.admitted()
                try:
                    while written < 2 * STRIDE:
                        await place.hold(KV_PAGE_TOKENS + written + 1)
                        written += 1
                        await asyncio.sleep(0)
                except MadeRoom:
                    place.pause()
            place.leave()
            ends.append(number)

        places = [admission.enter(1, KV_PAGE_TOKENS, 2 * STRIDE)[0] for _ in range(6)]
        await asyncio.gather(*(one(number, place) for number, place in enumerate(places)))
        assert sorted(ends) == list(range(6))
        assert ends[0] == 0
        assert at_rest(admission)

    run(main())


@settings(max_examples=60, deadline=None, phases=(Phase.explicit, Phase.generate))
@given(st.data())
def test_whoever_comes_goes_or_leaves_midway_nothing_is_held_in_the_end(data: st.DataObject) -> None:
    async def main() -> None:
        sessions, waiting = data.draw(st.integers(1, 3)), data.draw(st.integers(0, 3))
        admission = Admission(sessions, waiting, tokens=data.draw(st.integers(3, 30)) * KV_PAGE_TOKENS)

        async def one(place: Place, tokens: int) -> None:
            try:
                while True:
                    await place.admitted()
                    try:
                        for written in range(tokens):
                            await place.hold(place.whole - tokens + written)
                            await asyncio.sleep(0)
                        return
                    except MadeRoom:
                        place.pause()
            finally:
                place.leave()

        def start(place: Place, tokens: int) -> asyncio.Task[None]:
            task = asyncio.ensure_future(one(place, tokens))
            task.add_done_callback(lambda _: place.leave())  # it may be cancelled before it begins
            return task

        tasks: list[asyncio.Task[None]] = []
        for _ in range(data.draw(st.integers(1, 8))):
            tokens = data.draw(st.integers(1, 60))
            try:
                [place] = admission.enter(1, data.draw(st.integers(1, 40)), tokens)
            except Refusal:
                assert admission.waiting <= waiting
                continue
            tasks.append(start(place, tokens))
            assert admission.active <= sessions
            for _ in range(data.draw(st.integers(0, 5))):
                await asyncio.sleep(0)
            if data.draw(st.booleans()):
                data.draw(st.sampled_from(tasks)).cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.sleep(0)
        assert at_rest(admission)

    run(main(), 3)


def test_a_pool_serves_in_order_and_gives_back_what_was_taken_when_a_waiter_leaves() -> None:
    async def main() -> None:
        pool = Pool(10)
        order: list[str] = []

        async def one(name: str, amount: int) -> None:
            async with pool.take(amount):
                order.append(name)
                for _ in range(3):
                    await asyncio.sleep(0)

        def start(work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
            return asyncio.ensure_future(work)

        tasks = [start(one("a", 6)), start(one("b", 6)), start(one("c", 99)), start(one("d", 1))]
        await asyncio.sleep(0)
        tasks[1].cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert order == ["a", "c", "d"]
        async with pool.take(10):
            pass

    run(main())
