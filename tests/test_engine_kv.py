"""Sessions' pages: shared, copied, given back, and never torn."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from engine_blocks import HOSTS, tiny
from engine_support import Station, by, make_host
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.client import Phase
from engine.errors import BadArgument, BadState, OverBudget

PAGE = 16
HOSTS_ = HOSTS[:2]


def station(kind: str = "native", **changes: Any) -> Station:
    return Station(tiny("qwen2"), make_host(kind), by(400), **changes)


def embedded(tokens: list[int]) -> np.ndarray:
    return tiny("qwen2").rows("token_embd.weight", tokens)


def append(station: Station, slot: int, tokens: list[int]) -> bytes:
    """Runs `tokens` in a session; returns the normalised rows' bytes."""
    start = station.engine.kv_length(slot)
    rows = [(slot, start + i) for i in range(len(tokens))]
    return asyncio.run(station.run(rows, embedded(tokens))).tobytes()


def from_scratch(tokens: list[int], last: int) -> bytes:
    """What the last `last` tokens give in a session that has seen nothing else."""
    fresh = station(max_rows=256)
    out = append(fresh, fresh.engine.kv_open(), tokens)
    return out[-len(out) // len(tokens) * last :]


def tokens(count: int, seed: int = 0) -> list[int]:
    return [int(i) for i in np.random.default_rng(seed).integers(0, 300, count)]


@pytest.mark.parametrize("kind", HOSTS_)
@pytest.mark.parametrize("at", [0, 1, 15, 16, 17, 32, 40])
def test_a_fork_and_its_source_go_on_apart(kind: str, at: int) -> None:
    given = station(kind)
    common = tokens(40)
    source = given.engine.kv_open()
    append(given, source, common)
    before = given.engine.kv_free_pages()
    fork = given.engine.kv_fork(source, at)
    assert given.engine.kv_length(fork) == at
    assert before - given.engine.kv_free_pages() == (1 if at % PAGE else 0), "whole pages are shared"
    mine, theirs = tokens(20, 1), tokens(20, 2)
    for start in range(0, 20, 5):  # in turns, so that either would see what the other writes
        assert append(given, source, mine[start : start + 5]) == from_scratch(common + mine[: start + 5], 5)
        seen = common[:at] + theirs[: start + 5]
        assert append(given, fork, theirs[start : start + 5]) == from_scratch(seen, 5)
    given.engine.kv_close(source)
    assert append(given, fork, [1]) == from_scratch(common[:at] + theirs + [1], 1)
    given.engine.kv_close(fork)
    assert given.engine.kv_free_pages() == given.config.kv_pages


@pytest.mark.parametrize("kind", HOSTS_)
@pytest.mark.parametrize("at", [0, 3, 16, 31, 33])
def test_a_truncated_session_goes_on_as_if_the_rest_had_never_been(kind: str, at: int) -> None:
    given = station(kind)
    common = tokens(33)
    slot = given.engine.kv_open()
    append(given, slot, common)
    given.engine.kv_truncate(slot, at)
    assert given.config.kv_pages - given.engine.kv_free_pages() == -(-at // PAGE)
    assert append(given, slot, tokens(9, 5)) == from_scratch(common[:at] + tokens(9, 5), 9)


@pytest.mark.parametrize("kind", HOSTS_)
def test_truncating_into_a_shared_page_copies_it_before_the_next_write(kind: str) -> None:
    given = station(kind)
    common = tokens(32)
    source = given.engine.kv_open()
    append(given, source, common)
    fork = given.engine.kv_fork(source, 32)
    assert given.config.kv_pages - given.engine.kv_free_pages() == 2
    given.engine.kv_truncate(fork, 20)
    assert append(given, fork, tokens(4, 3)) == from_scratch(common[:20] + tokens(4, 3), 4)
    assert append(given, source, [9]) == from_scratch([*common, 9], 1), "the source has kept its page"


@pytest.mark.parametrize("kind", HOSTS_)
def test_a_session_saved_page_by_page_is_restored_bit_for_bit(kind: str) -> None:
    given = station(kind)
    engine, host = given.engine, given.engine.host
    common = tokens(37)
    slot = engine.kv_open()
    append(given, slot, common)
    size = engine.kv_page_bytes()
    saved = [host.read(engine.kv_page_at(slot, index), size) for index in range(3)]
    engine.kv_close(slot)
    other = engine.kv_open()
    append(given, other, tokens(48, 8))  # overwrites the pages that were freed

    restored = engine.kv_open()
    engine.kv_restore(restored, 37)
    assert engine.kv_length(restored) == 37
    for index, page in enumerate(saved):
        host.write(engine.kv_page_at(restored, index), page)
    assert append(given, restored, [4, 5]) == from_scratch([*common, 4, 5], 2)


def test_a_page_holds_keys_and_values_of_sixteen_tokens_in_all_layers() -> None:
    given = station()
    assert given.engine.kv_page_tokens() == PAGE
    assert given.engine.kv_page_bytes() == PAGE * 3 * 2 * 32 * 4


@pytest.mark.parametrize("kind", HOSTS_)
def test_a_batch_that_needs_more_pages_than_there_are_changes_nothing(kind: str) -> None:
    given = station(kind, kv_pages=3, max_rows=64)
    first, second = given.engine.kv_open(), given.engine.kv_open()
    append(given, first, tokens(20))
    with pytest.raises(OverBudget, match="needs 2 more KV pages of 16 tokens, 1 of 3 are free"):
        given.engine.batch_begin([(first, 20), *((second, i) for i in range(17))])
    assert given.engine.kv_free_pages() == 1
    assert append(given, first, [1]) == from_scratch([*tokens(20), 1], 1)


@pytest.mark.parametrize("kind", HOSTS_)
def test_an_aborted_batch_leaves_lengths_and_pages_as_they_were(kind: str) -> None:
    given = station(kind)
    engine = given.engine
    common = tokens(32)
    source = engine.kv_open()
    append(given, source, common)
    fork = engine.kv_fork(source, 32)
    engine.kv_truncate(fork, 20)
    free = engine.kv_free_pages()

    async def half() -> None:
        with engine.batch([(fork, 20 + i) for i in range(30)]) as batch:
            engine.host.write(batch.hidden_at, embedded(tokens(30, 4)).tobytes())
            assert engine.kv_free_pages() == free - 3, "one copy of the shared page, two new ones"
            for layer in range(2):
                for phase in Phase:
                    await given.phase(layer, phase)
            raise RuntimeError("the caller is gone")

    with pytest.raises(RuntimeError, match="gone"):
        asyncio.run(half())
    assert (engine.kv_length(source), engine.kv_length(fork)) == (32, 20)
    assert engine.kv_free_pages() == free
    assert append(given, source, [9]) == from_scratch([*common, 9], 1)
    assert append(given, fork, [8]) == from_scratch([*common[:20], 8], 1)


def test_sessions_in_an_open_batch_can_only_be_forked() -> None:
    given = station()
    engine = given.engine
    slot, other = engine.kv_open(), engine.kv_open()
    append(given, slot, tokens(18))
    engine.batch_begin([(slot, 18)])
    for refused in (
        lambda: engine.kv_close(slot),
        lambda: engine.kv_truncate(slot, 3),
        lambda: engine.kv_restore(slot, 3),
    ):
        with pytest.raises(BadState, match="in the batch that is open"):
            refused()
    fork = engine.kv_fork(slot, 17)
    engine.kv_close(other)
    engine.batch_abort()
    assert append(given, fork, [3]) == from_scratch([*tokens(18)[:17], 3], 1)
    assert append(given, slot, [3]) == from_scratch([*tokens(18), 3], 1)


def test_what_cannot_be_done_to_a_session_is_said_with_its_numbers() -> None:
    engine = station(max_sessions=2, kv_pages=2).engine
    slot = engine.kv_open()
    with pytest.raises(BadState, match="session 7 is not open"):
        engine.kv_length(7)
    with pytest.raises(BadArgument, match="has 0 tokens and cannot be truncated to 1"):
        engine.kv_truncate(slot, 1)
    with pytest.raises(BadArgument, match="has 0 tokens and cannot be forked at 1"):
        engine.kv_fork(slot, 1)
    with pytest.raises(OverBudget, match="takes 3 pages, 2 of 2 are free"):
        engine.kv_restore(slot, 33)
    engine.kv_restore(slot, 32)
    with pytest.raises(BadState, match="has 32 tokens; only an empty one"):
        engine.kv_restore(slot, 5)
    with pytest.raises(BadArgument, match="has 2 pages, no page 2"):
        engine.kv_page_at(slot, 2)
    with pytest.raises(OverBudget, match="none of 2 is free"):
        engine.kv_fork(slot, 5)
    assert engine.kv_open() != slot
    with pytest.raises(OverBudget, match="all 2 sessions are open"):
        engine.kv_open()
    engine.kv_close(slot)
    with pytest.raises(BadState, match="not open"):
        engine.kv_close(slot)


class Sessions(RuleBasedStateMachine):
    """Random opens, appends, forks, truncations, aborts and closes, against plain lists of tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.station = station(kv_pages=12, max_sessions=4)
        self.model: dict[int, list[int]] = {}

    def pick(self, index: int) -> int:
        return sorted(self.model)[index % len(self.model)]

    @rule()
    def open(self) -> None:
        try:
            self.model[self.station.engine.kv_open()] = []
        except OverBudget:
            assert len(self.model) == 4

    @precondition(lambda self: self.model)
    @rule(index=st.integers(0, 3), count=st.integers(1, 20), seed=st.integers(0, 9))
    def append(self, index: int, count: int, seed: int) -> None:
        slot = self.pick(index)
        new = tokens(count, seed)
        try:
            out = append(self.station, slot, new)
        except OverBudget:
            return
        self.model[slot] = self.model[slot] + new
        assert out == from_scratch(self.model[slot], count)

    @precondition(lambda self: self.model)
    @rule(index=st.integers(0, 3), count=st.integers(1, 40))
    def abort(self, index: int, count: int) -> None:
        slot = self.pick(index)
        start = len(self.model[slot])
        try:
            self.station.engine.batch_begin([(slot, start + i) for i in range(count)])
        except OverBudget:
            return
        self.station.engine.batch_abort()

    @precondition(lambda self: self.model)
    @rule(index=st.integers(0, 3), at=st.floats(0, 1))
    def fork(self, index: int, at: float) -> None:
        slot = self.pick(index)
        length = round(at * len(self.model[slot]))
        try:
            self.model[self.station.engine.kv_fork(slot, length)] = self.model[slot][:length]
        except OverBudget:
            assert len(self.model) == 4 or self.station.engine.kv_free_pages() == 0

    @precondition(lambda self: self.model)
    @rule(index=st.integers(0, 3), at=st.floats(0, 1))
    def truncate(self, index: int, at: float) -> None:
        slot = self.pick(index)
        length = round(at * len(self.model[slot]))
        self.station.engine.kv_truncate(slot, length)
        self.model[slot] = self.model[slot][:length]

    @precondition(lambda self: self.model)
    @rule(index=st.integers(0, 3))
    def close(self, index: int) -> None:
        slot = self.pick(index)
        self.station.engine.kv_close(slot)
        del self.model[slot]

    @invariant()
    def lengths_are_right_and_no_page_is_lost(self) -> None:
        engine = self.station.engine
        held = set[int]()
        for slot, seen in self.model.items():
            assert engine.kv_length(slot) == len(seen)
            held |= {engine.kv_page_at(slot, index) for index in range(-(-len(seen) // PAGE))}
        assert engine.kv_free_pages() == 12 - len(held)


TestSessions = Sessions.TestCase
TestSessions.settings = settings(max_examples=15, stateful_step_count=20, deadline=None)
