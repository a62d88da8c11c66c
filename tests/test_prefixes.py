"""Prefixes that sessions share: never another one's, as long as can be, and given up when room is wanted."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np
import pytest
from core_support import grouped, run
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule
from station_support import OneStation, embedded, station_on

from prefixes import Kept, Prefixes
from protocol.frames import Part, Tensor
from protocol.steps import DIGEST_BYTES, Envelope, ForwardStep, Phase

PATH = grouped()
IDS = [7, 260, 31, 299, 0, 128, 77, 260, 5, 91, 14, 200, 63, 17, 9, 250, 111, 42, 3, 18] * 3
HIDDEN = embedded(PATH, IDS)
PAGE = 16


def digest(*tokens: object) -> bytes:
    return repr(tokens).encode()[-DIGEST_BYTES:].rjust(DIGEST_BYTES, b".")


def digests(name: str, pages: int) -> list[bytes]:
    return [digest(name, page) for page in range(pages)]


class Slots:
    """Slots as the engine has them, with the tokens that are in them."""

    def __init__(self) -> None:
        self.open: dict[int, int] = {}
        self._next = 0

    def kv_open(self) -> int:
        return self._new(0)

    def kv_close(self, slot: int) -> None:
        del self.open[slot]

    def kv_truncate(self, slot: int, length: int) -> None:
        assert length <= self.open[slot]
        self.open[slot] = length

    def kv_fork(self, slot: int, length: int) -> int:
        assert length <= self.open[slot]
        return self._new(length)

    def _new(self, length: int) -> int:
        self._next += 1
        self.open[self._next] = length
        return self._next

    def with_tokens(self, length: int) -> int:
        return self._new(length)


def keep(slots: Slots, prefixes: Prefixes, name: str, length: int, pages: int | None = None) -> None:
    prefixes.keep(
        slots.with_tokens(length), length, digests(name, length // PAGE if pages is None else pages)
    )


def test_whole_pages_are_kept_as_far_as_digests_say_what_they_are() -> None:
    slots = Slots()
    prefixes = Prefixes(slots, 4)
    keep(slots, prefixes, "a", 50)
    assert [kept.length for kept in prefixes.kept()] == [48]
    assert list(slots.open.values()) == [48]
    keep(slots, prefixes, "b", 50, 2)
    assert [kept.length for kept in prefixes.kept()] == [48, 32]
    keep(slots, prefixes, "c", 15)
    keep(slots, prefixes, "d", 64, 0)
    assert len(prefixes) == 2
    assert len(slots.open) == 2, "what is not kept is closed"


def test_the_longest_prefix_is_found_and_nothing_beyond_what_agrees() -> None:
    slots = Slots()
    prefixes = Prefixes(slots, 4)
    keep(slots, prefixes, "a", 48)
    found = prefixes.longest([*digests("a", 2), *digests("other", 3)], 1000)
    assert found is not None
    assert found[1] == 32
    assert prefixes.longest(digests("a", 9), 47) == (found[0], 32), "no more than is wanted"
    assert prefixes.longest(digests("a", 9), 15) is None
    assert prefixes.longest(digests("other", 9), 1000) is None
    assert prefixes.longest([], 1000) is None
    keep(slots, prefixes, "b", 80)
    assert prefixes.longest([*digests("b", 5)], 1000) is not None


def test_a_live_session_is_shared_as_far_as_it_has_computed() -> None:
    slots = Slots()
    prefixes = Prefixes(slots, 4)
    live = Kept(slots.with_tokens(0), 0, tuple(digests("a", 4)))
    prefixes.claim(live)
    assert prefixes.longest(digests("a", 4), 1000) is None
    live.length = 37
    assert prefixes.longest(digests("a", 4), 1000) == (live, 32)
    prefixes.forget(live)
    assert prefixes.longest(digests("a", 4), 1000) is None
    assert prefixes._holders == {}


def test_a_longer_prefix_takes_the_place_of_what_it_begins_with_and_the_same_one_is_kept_once() -> None:
    slots = Slots()
    prefixes = Prefixes(slots, 4)
    keep(slots, prefixes, "a", 32)
    keep(slots, prefixes, "b", 32)
    keep(slots, prefixes, "a", 48)
    assert [kept.length for kept in prefixes.kept()] == [32, 48]
    keep(slots, prefixes, "a", 48)
    keep(slots, prefixes, "a", 16)
    assert [kept.length for kept in prefixes.kept()] == [32, 48]
    assert sorted(slots.open.values()) == [32, 48]


def test_no_more_are_kept_than_is_allowed_and_the_ones_used_least_recently_go_first() -> None:
    slots = Slots()
    prefixes = Prefixes(slots, 2)
    keep(slots, prefixes, "a", 16)
    keep(slots, prefixes, "b", 16)
    holder, _ = prefixes.longest(digests("a", 1), 16) or pytest.fail("it is there")
    prefixes.used(holder)
    keep(slots, prefixes, "c", 16)
    assert prefixes.longest(digests("b", 1), 16) is None
    assert prefixes.longest(digests("a", 1), 16) is not None
    [a, c] = prefixes.kept()
    assert prefixes.evict(spare=a)
    assert prefixes.kept() == [a]
    assert not prefixes.evict(spare=a)
    prefixes.clear()
    assert slots.open == {}
    keep(slots, Prefixes(slots, 0), "a", 16)
    assert slots.open == {}, "none where none are allowed"
    del c


class Books(RuleBasedStateMachine):
    """Whatever is kept, claimed and given up: what is found has exactly the tokens that were asked for."""

    holders = Bundle("holders")
    texts = st.lists(st.sampled_from("ab"), max_size=5).map("".join)

    def __init__(self) -> None:
        super().__init__()
        self.slots = Slots()
        self.prefixes = Prefixes(self.slots, 3)
        self.live: list[Kept] = []
        self.content: dict[int, str] = {}

    @staticmethod
    def of(text: str) -> tuple[bytes, ...]:
        return tuple(digest(text[: n + 1]) for n in range(len(text)))

    @rule(text=texts, more=st.integers(0, 15))
    def leaves_pages_behind(self, text: str, more: int) -> None:
        slot = self.slots.with_tokens(len(text) * PAGE + more)
        self.content[slot] = text
        self.prefixes.keep(slot, len(text) * PAGE + more, self.of(text))

    @rule(text=texts, computed=st.integers(0, 5))
    def lives(self, text: str, computed: int) -> None:
        length = min(computed, len(text)) * PAGE
        slot = self.slots.with_tokens(length)
        self.content[slot] = text
        self.live.append(Kept(slot, length, self.of(text)))
        self.prefixes.claim(self.live[-1])

    @rule(which=st.integers(0, 9))
    def ends(self, which: int) -> None:
        if self.live:
            gone = self.live.pop(which % len(self.live))
            self.prefixes.forget(gone)
            self.slots.kv_close(gone.slot)

    @rule()
    def makes_room(self) -> None:
        assert self.prefixes.evict() == (len(self.prefixes.kept()) < self.before)

    @rule(text=texts, limit=st.integers(0, 90))
    def is_asked(self, text: str, limit: int) -> None:
        found = self.prefixes.longest(self.of(text), limit)
        holders = [*self.live, *self.prefixes.kept()]
        best = 0
        for holder in holders:
            content = self.content[holder.slot]
            common = next((n for n, (x, y) in enumerate(zip(content, text, strict=False)) if x != y), None)
            pages = min(len(content), len(text)) if common is None else common
            best = max(best, min(pages, holder.length // PAGE, limit // PAGE) * PAGE)
        assert (found[1] if found else 0) == best
        if found:
            assert self.content[found[0].slot][: best // PAGE] == text[: best // PAGE]
            assert found[0].slot in self.slots.open

    @invariant()
    def books_are_in_order(self) -> None:
        self.before = len(self.prefixes.kept())
        assert self.before <= 3
        slots = {holder.slot for holder in (*self.live, *self.prefixes.kept())}
        assert slots == set(self.slots.open)


TestBooks = Books.TestCase
TestBooks.settings = settings(max_examples=60, stateful_step_count=20, deadline=None)


# On a station.


def opens(
    one: OneStation,
    session: str,
    known: list[bytes] | None = None,
    *,
    source: str | None = None,
    limit: int = 1000,
    claims: bool = True,
    epoch: int = 0,
) -> Part:
    envelope = Envelope("r", session, epoch, one.knot.header.fingerprint, one.station.layers, "open")
    step = ForwardStep(envelope, Phase.OPEN, limit, 0, limit, source=source, claims=claims)
    return Part(step.to_json(), tensor_of(known))


def tensor_of(known: list[bytes] | None) -> dict[str, Tensor]:
    if known is None:
        return {}
    return {"digests": Tensor("digests", "u8", (len(known), DIGEST_BYTES), b"".join(known))}


def releases(one: OneStation, session: str, known: list[bytes], epoch: int = 0) -> Part:
    envelope = Envelope("r", session, epoch, one.knot.header.fingerprint, one.station.layers, "release")
    return Part(ForwardStep(envelope, Phase.RELEASE, 0, 0, 0).to_json(), tensor_of(known))


async def begun(one: OneStation, *arguments: Any, **more: Any) -> int:
    [answer] = await one.send(opens(one, *arguments, **more))
    assert answer.envelope["status"] == "ok", answer.envelope
    return answer.envelope["cache_length"]


def case(body: Callable[[OneStation], Coroutine[Any, Any, None]], **variables: Any) -> None:
    async def main() -> None:
        one = await station_on(PATH, **variables)
        pages = one.free_pages
        await body(one)
        await one.background.drain()
        one.station.sessions.prefixes.clear()
        assert one.station.sessions.lengths() == {}
        assert one.free_pages == pages, "all pages are accounted for"

    run(main())


async def alone(count: int) -> np.ndarray:
    return await (await station_on(PATH)).forward("s", 0, HIDDEN[:count])


def test_a_released_session_leaves_its_pages_to_the_next_one_to_the_bit() -> None:
    async def body(one: OneStation) -> None:
        expected = await alone(60)
        assert await begun(one, "a", digests("x", 3)) == 0
        await one.forward("a", 0, HIDDEN[:50])
        await one.send(releases(one, "a", digests("x", 3)))
        assert one.station.kept_pages() == 3
        assert await begun(one, "b", digests("x", 3)) == 48
        found = await one.forward("b", 48, HIDDEN[48:60])
        assert found.tobytes() == expected[48:60].tobytes()
        await one.send(one.step("b", 0))
        counts = one.station.sessions.prefixes.counts
        assert (counts.asked, counts.hits, counts.tokens, counts.kept) == (2, 1, 48, 1)

    case(body)


def test_a_session_begins_with_what_a_live_one_has_and_both_go_their_own_way() -> None:
    async def body(one: OneStation) -> None:
        expected = await alone(60)
        await begun(one, "a", digests("x", 3))
        await one.forward("a", 0, HIDDEN[:40])
        assert await begun(one, "b", digests("x", 3)) == 32
        other = await one.forward("b", 32, HIDDEN[:20])
        assert (await one.forward("a", 40, HIDDEN[40:60])).tobytes() == expected[40:].tobytes()
        assert other.tobytes() != expected[32:52].tobytes()
        await one.send(one.step("a", 0))
        assert (await one.forward("b", 52, HIDDEN[:2])).shape == (2, 96), (
            "whose pages the other one took along"
        )
        await one.send(one.step("b", 0))

    case(body)


def test_a_named_session_is_shared_to_the_token_and_another_length_is_a_miss() -> None:
    async def body(one: OneStation) -> None:
        expected = await alone(60)
        await one.forward("a", 0, HIDDEN[:37])
        assert await begun(one, "b", source="a", limit=37) == 37
        assert (await one.forward("b", 37, HIDDEN[37:60])).tobytes() == expected[37:].tobytes()
        assert (await one.forward("a", 37, HIDDEN[37:60])).tobytes() == expected[37:].tobytes()
        for source, limit in (("a", 61), ("nobody", 5)):
            [answer] = await one.send(opens(one, "c", source=source, limit=limit))
            assert answer.envelope["status"] == "cache_miss"
        await one.send(one.step("a", 0), one.step("b", 0))

    case(body)


def test_an_opening_that_comes_twice_opens_once_and_one_that_comes_too_late_is_refused() -> None:
    async def body(one: OneStation) -> None:
        await begun(one, "a", digests("x", 3))
        await one.forward("a", 0, HIDDEN[:50])
        await one.send(releases(one, "a", digests("x", 3)))
        assert [await begun(one, "b", digests("x", 3)) for _ in range(2)] == [48, 48]
        await one.forward("b", 48, HIDDEN[48:50])
        assert await begun(one, "b", digests("x", 3)) == 48
        assert one.station.sessions.lengths() == {"b": 50}
        await one.send(one.step("b", 0))
        [late] = await one.send(opens(one, "b", digests("x", 3)))
        assert late.envelope["status"] == "cancelled"
        assert await begun(one, "b", digests("x", 3), epoch=1) == 48
        await one.send(one.step("b", 0, epoch=1))

    case(body)


def test_what_is_not_claimed_is_nobody_elses_and_a_cancelled_session_leaves_nothing() -> None:
    async def body(one: OneStation) -> None:
        await begun(one, "a", digests("x", 3), claims=False)
        await one.forward("a", 0, HIDDEN[:50])
        assert await begun(one, "b", digests("x", 3)) == 0
        await one.send(one.step("a", 0, phase=Phase.CANCEL), one.step("b", 0, phase=Phase.CANCEL))
        assert len(one.station.sessions.prefixes) == 0

    case(body)


def test_kept_pages_make_room_for_whoever_needs_it_and_only_then() -> None:
    async def body(one: OneStation) -> None:
        total = one.free_pages
        for name in "abc":
            await begun(one, name, digests(name, 2))
            await one.forward(name, 0, HIDDEN[:32])
            await one.send(releases(one, name, digests(name, 2)))
        assert one.station.kept_pages() == 6
        assert total - one.free_pages == 6
        needed = one.free_pages + 1
        await one.forward("big", 0, np.concatenate([HIDDEN] * 9)[: needed * PAGE])
        assert one.station.sessions.prefixes.counts.evicted == 1
        assert await begun(one, "d", digests("b", 2)) == 32, "the oldest one went, the others stayed"
        await one.send(one.step("big", 0), one.step("d", 0))

    case(body, MAX_BATCH_ROWS="1024", KV_BYTES="400000")


def test_prefixes_take_no_place_from_sessions() -> None:
    async def body(one: OneStation) -> None:
        for name in "abc":
            await begun(one, name, digests(name, 1))
            await one.forward(name, 0, HIDDEN[:16])
            await one.send(releases(one, name, digests(name, 1)))
        assert len(one.station.sessions.prefixes) == 3
        for name in "defg":
            await one.forward(name, 0, HIDDEN[:3])
        assert len(one.station.sessions.prefixes) == 0
        assert await one.status("h", 0, HIDDEN[:3]) == "over_budget"
        await one.send(*(one.step(name, 0) for name in "defg"))

    case(body, MAX_SESSIONS="4")


def test_digests_of_another_size_are_a_bad_frame() -> None:
    async def body(one: OneStation) -> None:
        part = opens(one, "a", [])
        wrong = Part(part.envelope, {"digests": Tensor("digests", "u8", (1, 5), b"12345")})
        [answer] = await one.send(wrong)
        assert answer.envelope["status"] == "bad_frame"

    case(body)
