"""Steps of a session: repeated, late, cut back, of another way or another epoch, and always to the bit."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np
import pytest
from core_support import grouped, run
from station_support import OneStation, embedded, station_on, values

from protocol.steps import Rows

PATH = grouped()
IDS = [7, 260, 31, 299, 0, 128, 77, 260, 5, 91, 14, 200, 63, 17, 9, 250, 111, 42, 3, 18]
HIDDEN = embedded(PATH, IDS)
OTHER = embedded(PATH, [299, 1, 54, 9, 9, 9, 200, 33, 120, 77, 4, 8, 16, 32, 64, 128, 256, 12, 24, 48])


def case(body: Callable[[OneStation], Coroutine[Any, Any, None]], **variables: Any) -> None:
    async def main() -> None:
        one = await station_on(PATH, **variables)
        await body(one)
        await one.background.drain()
        assert not any(session.busy for session in one.station.sessions._sessions.values())

    run(main())


def bits(rows: np.ndarray) -> bytes:
    return np.ascontiguousarray(rows).tobytes()


def lengths(one: OneStation) -> dict[str, int]:
    return one.station.sessions.lengths()


async def truth(count: int = len(IDS), hidden: np.ndarray = HIDDEN) -> np.ndarray:
    """The rows of a session that nothing ever happened to."""
    return await (await station_on(PATH)).forward("s", 0, hidden[:count])


def test_the_same_step_twice_is_answered_the_same_and_appends_nothing_twice() -> None:
    async def body(one: OneStation) -> None:
        first = await one.forward("s", 0, HIDDEN[:6])
        second = await one.forward("s", 0, HIDDEN[:6])
        assert bits(first) == bits(second)
        assert lengths(one) == {"s": 6}
        assert one.api.loop.load.works == 1, "from memory"
        assert bits(await one.forward("s", 6, HIDDEN[6:])) == bits((await truth())[6:])

    case(body)


def test_a_step_whose_answer_was_dropped_is_computed_again_to_the_bit() -> None:
    async def body(one: OneStation) -> None:
        first = await one.forward("s", 0, HIDDEN[:6])
        second = await one.forward("s", 0, HIDDEN[:6])
        assert bits(first) == bits(second)
        assert one.api.loop.load.works == 2, "there was no room to remember it"
        assert lengths(one) == {"s": 6}
        assert bits(await one.forward("s", 6, HIDDEN[6:])) == bits((await truth())[6:])

    case(body, ANSWER_BYTES="0")


@pytest.mark.parametrize("answers", ["0", "2000000"])
@pytest.mark.parametrize("late", [0, 1, 2])
def test_a_late_duplicate_is_answered_from_a_fork_while_the_session_goes_on(answers: str, late: int) -> None:
    edges = [0, 5, 12, 13]

    async def body(one: OneStation) -> None:
        whole = await truth(15)
        for start, end in ((0, 5), (5, 12), (12, 13), (13, 14)):
            await one.forward("s", start, HIDDEN[start:end])
        start, end = edges[late], edges[late + 1]
        pages = one.free_pages
        again = await one.forward("s", start, HIDDEN[start:end])
        assert bits(again) == bits(whole[start:end])
        assert lengths(one) == {"s": 14}, "the session is where it was"
        assert one.free_pages == pages, "and the fork is gone"
        assert bits(await one.forward("s", 14, HIDDEN[14:15])) == bits(whole[14:])

    case(body, ANSWER_BYTES=answers)


def test_a_late_duplicate_and_the_next_step_in_one_frame_both_get_their_rows() -> None:
    async def body(one: OneStation) -> None:
        whole = await truth(14)
        for start, end in ((0, 5), (5, 12)):
            await one.forward("s", start, HIDDEN[start:end])
        late, following = await one.send(one.step("s", 0, HIDDEN[:5]), one.step("s", 12, HIDDEN[12:14]))
        assert bits(values(late)) == bits(whole[:5])
        assert bits(values(following)) == bits(whole[12:])

    case(body)


def test_a_late_duplicate_after_the_session_took_another_way_is_computed_for_the_old_one_or_refused() -> None:
    async def body(one: OneStation) -> None:
        whole = await truth(8)
        await one.forward("s", 0, HIDDEN[:4])
        await one.forward("s", 4, HIDDEN[4:8])
        # The session is cut to 4 and goes on otherwise.
        other = await one.forward("s", 4, OTHER[4:8], step="another way")
        assert bits(await one.forward("s", 4, HIDDEN[4:8])) == bits(whole[4:8]), "its first 4 are still there"
        assert lengths(one) == {"s": 8}
        third = await one.forward("s", 8, OTHER[8:9])
        # Cut to 2, which the late one began after: nobody can compute it any more.
        await one.forward("s", 2, OTHER[2:9], step="a third way")
        assert await one.status("s", 4, HIDDEN[4:8]) == "cache_miss"
        assert lengths(one) == {"s": 9}
        fresh = await station_on(PATH)
        await fresh.forward("s", 0, np.concatenate([HIDDEN[:4], OTHER[4:8]]))
        assert bits(await fresh.forward("s", 8, OTHER[8:9])) == bits(third)
        assert bits(other) != bits(whole[4:8])

    case(body, ANSWER_BYTES="0")


def test_a_step_id_used_for_something_else_is_refused_and_nothing_happens() -> None:
    async def body(one: OneStation) -> None:
        await one.forward("s", 0, HIDDEN[:6], step="x")
        for position, hidden in ((0, OTHER[:6]), (0, HIDDEN[:5]), (6, HIDDEN[6:12])):
            [answer] = await one.send(one.step("s", position, hidden, step="x"))
            assert answer.envelope["status"] == "bad_frame"
            assert "step id x was used for 6 rows at 0 before" in answer.envelope["detail"]
        [answer] = await one.send(one.step("s", 0, HIDDEN[:6], step="x", rows=Rows.LAST))
        assert answer.envelope["status"] == "bad_frame", "the remembered answer has other rows"
        assert lengths(one) == {"s": 6}

    case(body)


@pytest.mark.parametrize("answers", ["0", "2000000"])
def test_duplicates_in_flight_together_get_the_same_rows_and_append_once(answers: str) -> None:
    async def body(one: OneStation) -> None:
        rows = await asyncio.gather(*(one.forward("s", 0, HIDDEN[:6]) for _ in range(4)))
        assert {bits(found) for found in rows} == {bits(await truth(6))}
        assert lengths(one) == {"s": 6}

    case(body, ANSWER_BYTES=answers)


def test_many_duplicates_out_of_order_change_nothing() -> None:
    async def body(one: OneStation) -> None:
        whole, pages = await truth(), one.free_pages
        rng = np.random.default_rng(3)
        steps = [(0, 5), (5, 6), (6, 7), (7, 15), (15, 16)]
        for done in range(1, len(steps) + 1):
            await one.forward("s", steps[done - 1][0], HIDDEN[slice(*steps[done - 1])])
            for index in rng.integers(0, done, 4):
                start, end = steps[index]
                assert bits(await one.forward("s", start, HIDDEN[start:end])) == bits(whole[start:end])
            assert lengths(one) == {"s": steps[done - 1][1]}
        assert one.free_pages == pages - 1
        await one.send(one.step("s", 0))
        assert one.free_pages == pages

    case(body, ANSWER_BYTES="3000")


def test_a_step_beyond_what_the_cache_holds_is_a_cache_miss_with_both_numbers() -> None:
    async def body(one: OneStation) -> None:
        [answer] = await one.send(one.step("s", 5, HIDDEN[5:6]))
        assert answer.envelope["status"] == "cache_miss"
        assert "session s of epoch 0 is not here, the step expects 5 tokens" in answer.envelope["detail"]
        await one.forward("s", 0, HIDDEN[:4])
        [answer] = await one.send(one.step("s", 5, HIDDEN[5:6]))
        assert answer.envelope["status"] == "cache_miss"
        assert "has 4 tokens here, the step expects 5; replay" in answer.envelope["detail"]
        assert lengths(one) == {"s": 4}
        assert answer.envelope["session"] == "s"
        assert answer.envelope["step"] == "5+1"

    case(body)


def test_a_cache_that_holds_more_is_cut_to_what_the_step_expects() -> None:
    async def body(one: OneStation) -> None:
        await one.forward("s", 0, HIDDEN[:4])
        await one.forward("s", 4, OTHER[4:20], step="speculation")
        rows = await one.forward("s", 4, HIDDEN[4:], step="what was chosen")
        assert bits(rows) == bits((await truth())[4:])
        assert lengths(one) == {"s": len(IDS)}

    case(body)


def test_a_fresh_epoch_begins_anew_and_the_old_one_is_stale() -> None:
    async def body(one: OneStation) -> None:
        pages = one.free_pages
        await one.forward("s", 0, OTHER, epoch=1)
        rows = await one.forward("s", 0, HIDDEN, epoch=2)
        assert bits(rows) == bits(await truth())
        [answer] = await one.send(one.step("s", len(IDS), OTHER[:1], epoch=1))
        assert answer.envelope["status"] == "stale_epoch"
        assert "is at epoch 2, the step is of 1" in answer.envelope["detail"]
        assert await one.status("s", 0, epoch=1) == "stale_epoch", "nor does a late release end the new one"
        assert lengths(one) == {"s": len(IDS)}
        # A newer epoch must begin at zero.
        assert await one.status("s", 4, HIDDEN[4:5], epoch=3) == "cache_miss"
        assert one.free_pages == pages - 2
        [answer] = await one.send(one.step("s", 0, epoch=2))
        assert answer.envelope["ended"] is True
        assert one.free_pages == pages

    case(body)


def test_another_model_or_another_range_is_refused_and_nothing_is_opened() -> None:
    async def body(one: OneStation) -> None:
        assert await one.status("s", 0, HIDDEN, model="f" * 64) == "wrong_model"
        assert await one.status("s", 0, HIDDEN, layers=(0, 2)) == "wrong_range"
        assert await one.status("s", 0, model="f" * 64) == "wrong_model"
        assert lengths(one) == {}

    case(body)


def test_too_many_rows_are_over_budget_and_too_many_steps_are_busy() -> None:
    async def body(one: OneStation) -> None:
        [answer] = await one.send(one.step("s", 0, HIDDEN[:9]))
        assert answer.envelope["status"] == "over_budget"
        assert "has 9 rows, a batch here holds 8" in answer.envelope["detail"]
        answers = await one.send(*(one.step(f"s{i}", 0, HIDDEN[:1]) for i in range(5)))
        found = [answer.envelope["status"] for answer in answers]
        assert found == ["ok"] * 3 + ["busy"] * 2
        assert answers[-1].envelope["retry_after_ms"] > 0

    case(body, MAX_BATCH_ROWS="8", MAX_QUEUE="3")
