"""A station's sessions: how they end, what they may take, and that one session's trouble is its own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np
import pytest
from core_support import grouped, run
from fake_cluster import make_native
from station_support import Gate, OneStation, embedded, station_on, values

from protocol.steps import Phase

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


@pytest.mark.parametrize("phase", [Phase.RELEASE, Phase.CANCEL])
def test_an_ended_session_gives_its_pages_back_and_takes_no_more_steps(phase: Phase) -> None:
    async def body(one: OneStation) -> None:
        pages = one.free_pages
        await one.forward("s", 0, HIDDEN)
        await one.forward("t", 0, HIDDEN)
        assert one.free_pages == pages - 4
        [answer] = await one.send(one.step("s", 0, phase=phase))
        assert (answer.envelope["status"], answer.envelope["ended"]) == ("ok", True)
        assert one.free_pages == pages - 2
        [answer] = await one.send(one.step("s", 0, phase=phase))
        assert answer.envelope["ended"] is False, "twice does no harm"
        # A piece of the prompt that was on its way would open the session for nobody.
        assert await one.status("s", 0, HIDDEN) == "cancelled"
        assert lengths(one) == {"t": len(IDS)}
        assert bits(await one.forward("s", 0, HIDDEN, epoch=1)) == bits(await truth())
        await one.send(one.step("s", 0, phase=phase, epoch=1), one.step("t", 0, phase=phase))
        assert one.free_pages == pages
        assert one.station.sessions.remembered_bytes == 0

    case(body)


def test_a_cancel_that_overtakes_its_session_still_ends_it() -> None:
    async def body(one: OneStation) -> None:
        await one.send(one.step("s", 0, phase=Phase.CANCEL, epoch=4))
        assert await one.status("s", 0, HIDDEN, epoch=4) == "cancelled"
        assert await one.status("s", 0, HIDDEN, epoch=3) == "cancelled"
        assert lengths(one) == {}
        assert await one.status("s", 0, HIDDEN, epoch=5) == "ok"

    case(body)


@pytest.mark.parametrize("known", [False, True])
def test_a_session_that_ends_in_the_middle_of_its_batch_is_freed_when_the_batch_ends(known: bool) -> None:
    blobs = Gate(PATH.parent)

    async def body(one: OneStation) -> None:
        pages = one.free_pages
        if known:
            await one.forward("s", 0, HIDDEN[:3])
        at = 3 if known else 0
        running = await blobs.closed(one.send(one.step("s", at, HIDDEN[at:]), one.step("t", 0, HIDDEN)))
        [answer] = await one.send(one.step("s", 0, phase=Phase.CANCEL))
        assert (answer.envelope["status"], answer.envelope["ended"]) == ("ok", True)
        assert "s" not in lengths(one)
        blobs.gate.set()
        ended, other = await running
        assert ended.envelope["status"] == "ok", "it was too late to stop it, and its rows are right"
        assert bits(values(other)) == bits(await truth()), "nobody else noticed"
        assert lengths(one) == {"t": len(IDS)}
        assert one.free_pages == pages - 2
        await one.send(one.step("t", 0))
        assert one.free_pages == pages
        assert one.station.sessions.remembered_bytes == 0

    case(body, blobs=blobs, RESIDENCY="fluid")


def test_a_session_that_ends_and_begins_anew_in_the_middle_of_its_batch_is_the_new_one() -> None:
    blobs = Gate(PATH.parent)

    async def body(one: OneStation) -> None:
        pages = one.free_pages
        running = await blobs.closed(one.send(one.step("s", 0, OTHER)))
        await one.send(one.step("s", 0, phase=Phase.CANCEL))
        again = asyncio.ensure_future(one.forward("s", 0, HIDDEN, epoch=1))
        await asyncio.sleep(0)
        blobs.gate.set()
        await running
        assert bits(await again) == bits(await truth())
        assert one.free_pages == pages - 2
        await one.send(one.step("s", 0, epoch=1))
        assert one.free_pages == pages

    case(body, blobs=blobs, RESIDENCY="fluid")


def test_a_caller_that_leaves_in_mid_batch_hurts_nobody_and_its_step_can_be_repeated() -> None:
    blobs = Gate(PATH.parent)

    async def body(one: OneStation) -> None:
        leaves = asyncio.ensure_future(one.send(one.step("s", 0, HIDDEN)))
        stays = await blobs.closed(one.send(one.step("t", 0, OTHER)))
        leaves.cancel()
        await asyncio.sleep(0)
        blobs.gate.set()
        [answer] = await stays
        assert bits(values(answer)) == bits(await truth(hidden=OTHER))
        assert bits(await one.forward("s", 0, HIDDEN)) == bits(await truth())

    case(body, blobs=blobs, RESIDENCY="fluid")


def test_a_session_that_nobody_used_for_its_time_to_live_is_gone() -> None:
    async def body(one: OneStation) -> None:
        pages = one.free_pages
        await one.forward("old", 0, HIDDEN[:3])
        one.clock.now += 60
        await one.forward("used", 0, HIDDEN[:3])
        one.clock.now += 60
        await one.forward("used", 3, HIDDEN[3:4])
        assert lengths(one) == {"used": 4}, "120 seconds are more than 100, 60 are not"
        assert one.free_pages == pages - 1
        assert await one.status("old", 3, HIDDEN[3:4]) == "cache_miss"

    case(body, SESSION_TTL_SECONDS="100")


def test_when_all_places_are_taken_the_session_idle_for_longest_goes_and_never_a_busy_one() -> None:
    async def body(one: OneStation) -> None:
        for name in ("a", "b", "c"):
            await one.forward(name, 0, HIDDEN[:3])
            one.clock.now += 10
        await one.forward("a", 3, HIDDEN[3:4])
        [answer] = await one.send(one.step("d", 0, HIDDEN[:3]))
        assert answer.envelope["status"] == "over_budget", "nobody is idle for 30 seconds yet"
        assert "3 sessions are open and none is idle" in answer.envelope["detail"]
        assert answer.envelope["retry_after_ms"] > 0
        one.clock.now += 15
        await one.forward("d", 0, HIDDEN[:3])
        assert set(lengths(one)) == {"a", "c", "d"}, "b was idle for longest"

    case(body, MAX_SESSIONS="3")


# 40 tokens in pages of 16 tokens.
PAGES = {"KV_BYTES": str(3 * 12288 + 100)}


def test_without_pages_a_step_is_over_budget_and_what_there_was_goes_on() -> None:
    async def body(one: OneStation) -> None:
        assert one.free_pages == 3
        await one.forward("a", 0, HIDDEN[:17])
        [answer] = await one.send(one.step("b", 0, HIDDEN))
        assert answer.envelope["status"] == "over_budget"
        assert "2 more KV pages" in answer.envelope["detail"]
        assert answer.envelope["retry_after_ms"] > 0
        assert one.free_pages == 1
        assert bits(await one.forward("a", 17, HIDDEN[17:])) == bits((await truth())[17:])
        await one.send(one.step("a", 0), one.step("b", 0))
        assert one.free_pages == 3
        assert bits(await one.forward("b", 0, HIDDEN, epoch=1)) == bits(await truth())

    case(body, **PAGES)


def test_idle_sessions_make_room_as_many_as_are_needed_and_no_more() -> None:
    async def body(one: OneStation) -> None:
        for name in ("a", "b", "c"):
            await one.forward(name, 0, HIDDEN[:16])
            one.clock.now += 1
        one.clock.now += 40
        await one.forward("d", 0, HIDDEN[:3])
        assert set(lengths(one)) == {"b", "c", "d"}
        await one.forward("c", 16, HIDDEN[16:17])
        assert set(lengths(one)) == {"c", "d"}

    case(body, **PAGES)


def test_a_session_is_never_ended_to_make_room_for_its_own_next_step() -> None:
    async def body(one: OneStation) -> None:
        whole = await truth()
        await one.forward("slow", 0, HIDDEN[:16])
        one.clock.now += 1
        await one.forward("other", 0, HIDDEN[:20])
        one.clock.now += 40
        # Both are idle and "slow" for longer; no page is free.
        assert bits(await one.forward("slow", 16, HIDDEN[16:17])) == bits(whole[16:17])
        assert lengths(one) == {"slow": 17}

    case(body, **PAGES)


def test_a_step_that_fits_its_own_last_page_ends_nobody() -> None:
    async def body(one: OneStation) -> None:
        await one.forward("a", 0, HIDDEN[:17])
        await one.forward("b", 0, HIDDEN[:3])
        one.clock.now += 40
        assert one.free_pages == 0
        await one.forward("a", 17, HIDDEN[17:18])
        await one.forward("b", 3, HIDDEN[3:5])
        assert lengths(one) == {"a": 18, "b": 5}

    case(body, **PAGES)


def test_sessions_of_one_batch_that_do_not_fit_together_each_get_their_own_answer() -> None:
    async def body(one: OneStation) -> None:
        answers = await one.send(*(one.step(f"s{i}", 0, HIDDEN[:17]) for i in range(3)))
        assert [answer.envelope["status"] for answer in answers] == ["ok", "over_budget", "over_budget"]
        assert bits(values(answers[0])) == bits(await truth(17))

    case(body, **PAGES, SESSION_IDLE_SECONDS="0")


def test_a_fork_that_finds_no_page_makes_room_or_says_so() -> None:
    async def body(one: OneStation) -> None:
        whole = await truth()
        await one.forward("a", 0, HIDDEN[:5])
        await one.forward("a", 5, HIDDEN[5:17])
        await one.forward("b", 0, HIDDEN[:3])
        assert one.free_pages == 0
        [answer] = await one.send(one.step("a", 0, HIDDEN[:5]))
        assert answer.envelope["status"] == "over_budget"
        assert answer.envelope["retry_after_ms"] > 0
        assert lengths(one) == {"a": 17, "b": 3}
        one.clock.now += 40
        assert bits(await one.forward("a", 0, HIDDEN[:5])) == bits(whole[:5])
        assert lengths(one) == {"a": 17}

    case(body, **PAGES, ANSWER_BYTES="0")


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_one_sessions_broken_numbers_are_its_own_and_name_layer_and_phase(poison: float) -> None:
    async def body(one: OneStation) -> None:
        pages = one.free_pages
        await one.forward("writer", 0, HIDDEN[:5])
        broken = OTHER.copy()
        broken[2, 17] = poison
        answers = await one.send(
            one.step("a", 0, HIDDEN), one.step("broken", 0, broken), one.step("writer", 5, HIDDEN[5:6])
        )
        statuses = [answer.envelope["status"] for answer in answers]
        assert statuses == ["ok", "non_finite", "ok"]
        assert "layer 0" in answers[1].envelope["detail"]
        assert "attn" in answers[1].envelope["detail"]
        assert bits(values(answers[0])) == bits(await truth())
        assert bits(values(answers[2])) == bits((await truth())[5:6])
        assert lengths(one)["broken"] == 0
        assert bits(await one.forward("writer", 6, HIDDEN[6:7])) == bits((await truth())[6:7])
        # The same session may try again with sound rows.
        assert bits(await one.forward("broken", 0, HIDDEN)) == bits(await truth())
        await one.send(*(one.step(name, 0) for name in ("a", "broken", "writer")))
        assert one.free_pages == pages

    case(body)


def test_remembered_answers_stay_within_their_budget_and_the_oldest_go_first() -> None:
    told: list[int] = []

    async def body(one: OneStation) -> None:
        size = HIDDEN[:4].nbytes
        for name in ("a", "b", "c", "d"):
            await one.forward(name, 0, HIDDEN[:4])
            assert one.station.sessions.remembered_bytes <= 3 * size
        assert one.station.sessions.remembered_bytes == 3 * size == sum(told)
        works = one.api.loop.load.works
        await one.forward("d", 0, HIDDEN[:4])
        assert one.api.loop.load.works == works
        await one.forward("a", 0, HIDDEN[:4])
        assert one.api.loop.load.works == works + 1
        # A session remembers its last answer only.
        await one.forward("d", 4, HIDDEN[4:5])
        for name in "abcd":
            await one.send(one.step(name, 0))
        assert one.station.sessions.remembered_bytes == sum(told) == 0

    case(body, ANSWER_BYTES=str(3 * HIDDEN[:4].nbytes), held=told.append)


def test_a_restarted_object_finds_weights_and_no_sessions_even_in_mid_batch() -> None:
    blobs = Gate(PATH.parent)

    async def body(one: OneStation) -> None:
        pages = one.free_pages
        await one.forward("s", 0, HIDDEN[:5])
        reads = one.station.weights.reads.opened
        one.station.take_over(one.knot, one.source)
        assert lengths(one) == {}
        assert one.free_pages == pages
        assert await one.status("s", 5, HIDDEN[5:6]) == "cache_miss"
        assert bits(await one.forward("s", 0, HIDDEN, epoch=1)) == bits(await truth())
        assert one.station.weights.reads.opened == reads, "resident weights were not read again"

    case(body, blobs=blobs)


def test_a_batch_that_nobody_will_ever_end_does_not_lock_the_station() -> None:
    async def body(one: OneStation) -> None:
        pages = one.free_pages
        admitted = one.station.sessions.admit(_forward_step(one), 0)
        one.station.engine.batch_begin([(admitted.slot, 0)])
        one.station.take_over(one.knot, one.source)
        assert one.free_pages == pages
        assert bits(await one.forward("s", 0, HIDDEN)) == bits(await truth())

    case(body)


def _forward_step(one: OneStation) -> Any:
    from protocol.steps import forward_step

    return forward_step(one.step("s", 0, HIDDEN[:1]).envelope)


def test_on_threads_ends_and_duplicates_in_mid_batch_are_as_harmless() -> None:
    async def body(one: OneStation) -> None:
        pages, whole = one.free_pages, await truth()
        works = [
            *(asyncio.ensure_future(one.send(one.step(f"s{i}", 0, HIDDEN))) for i in range(3)),
            asyncio.ensure_future(one.send(one.step("s0", 0, HIDDEN))),
        ]
        await asyncio.sleep(0.002)
        ends = asyncio.ensure_future(one.send(one.step("s1", 0, phase=Phase.CANCEL)))
        found = [answers[0] for answers in await asyncio.gather(*works)]
        await ends
        for answer in found:
            if answer.envelope["status"] != "cancelled":
                assert bits(values(answer)) == bits(whole)
        await one.send(one.step("s0", 0), one.step("s1", 0), one.step("s2", 0))
        assert one.free_pages == pages

    case(body, host=make_native, RESIDENCY="fluid")
