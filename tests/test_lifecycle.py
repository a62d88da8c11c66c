"""The life of a generation as a value: whatever happens in whatever order, it stays one that can be."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lifecycle import (
    REPLAY,
    Begun,
    Event,
    Found,
    Freed,
    Impossible,
    Left,
    Life,
    Lost,
    Preempted,
    Stage,
    Stopped,
    Wrote,
    apply,
)
from protocol.steps import Refusal, RefusalKind

EVENTS: st.SearchStrategy[Event] = st.one_of(
    st.just(Begun()),
    st.integers(-1, 12).map(Found),
    st.just(Wrote()),
    st.just(Wrote()),
    st.just(Stopped()),
    st.sampled_from(RefusalKind).map(lambda kind: Lost(Refusal(kind, "no"))),
    st.sampled_from(sorted(REPLAY)).map(lambda kind: Lost(Refusal(kind, "no"))),
    st.just(Preempted()),
    st.just(Left()),
    st.integers(0, 5).map(Freed),
)
LIVES = st.builds(Life, st.integers(1, 8), st.integers(0, 4), st.integers(1, 3), epoch=st.integers(0, 2))


def after(life: Life, *events: Event) -> Life:
    for event in events:
        life = apply(life, event)
    return life


@settings(max_examples=400, deadline=None)
@given(LIVES, st.lists(EVENTS, max_size=40))
def test_whatever_happens_the_life_stays_one_that_can_be(life: Life, events: list[Event]) -> None:
    first = life.epoch
    for event in events:
        before = replace(life)
        try:
            life = apply(life, event)
        except Impossible:
            continue
        assert 0 <= life.attempts <= life.limit
        assert before.written <= life.written <= life.most, "written tokens are never taken back"
        assert life.written - before.written == isinstance(event, Wrote)
        assert (life.prompt, life.most, life.limit) == (before.prompt, before.most, before.limit)
        assert life.epoch - before.epoch == isinstance(event, Begun), "every attempt has a fresh epoch"
        assert life.held <= set(range(first + 1, life.epoch + 1))
        if isinstance(event, Begun):
            assert life.held == before.held | {life.epoch}
            assert life.cached == 0
        elif not isinstance(event, Freed):
            assert life.held == before.held, "only what is said to be free is free"
        if before.stage.final:
            assert isinstance(event, Freed), "nothing happens any more but that things are freed"
            assert life.stage is before.stage
        assert life.at_rest == (life.stage.final and not life.held)


@settings(max_examples=200, deadline=None)
@given(LIVES, st.lists(st.sampled_from(sorted(REPLAY)), min_size=8, max_size=8))
def test_losses_are_replayed_as_often_as_is_allowed_and_not_once_more(
    life: Life, kinds: list[RefusalKind]
) -> None:
    attempts = 0
    for kind in kinds:
        life = apply(life, Begun())
        attempts += 1
        life = apply(life, Lost(Refusal(kind, "no")))
        if life.stage.final:
            break
    assert life.stage is Stage.FAILED
    assert attempts == life.limit == len(life.reasons)
    with pytest.raises(Impossible, match="failed"):
        apply(life, Begun())


@pytest.mark.parametrize("kind", sorted(set(RefusalKind) - REPLAY))
def test_what_would_only_fail_again_is_not_tried_again(kind: RefusalKind) -> None:
    life = after(Life(3, 5, 9), Begun(), Wrote(), Lost(Refusal(kind, "no")))
    assert life.stage is Stage.FAILED
    assert life.attempts == 1


def test_making_room_for_others_is_no_failed_attempt() -> None:
    life = Life(3, 5, 1)
    for count in range(1, 4):
        life = after(life, Begun(), Wrote(), Preempted())
        assert (life.stage, life.attempts, life.preempted, life.written) == (
            Stage.WAITING, 0, count, count,
        )  # fmt: skip
    assert after(life, Begun(), Wrote(), Wrote()).stage is Stage.ENDED


def test_an_ended_generation_rests_when_every_epoch_it_had_is_freed() -> None:
    life = after(Life(2, 1, 3), Begun(), Lost(Refusal(RefusalKind.LOST, "no")), Begun(), Wrote())
    assert life.stage is Stage.ENDED
    assert life.held == {1, 2}
    assert not life.at_rest
    life = apply(life, Freed(2))
    assert not life.at_rest
    assert apply(life, Freed(1)).at_rest


@pytest.mark.parametrize("tokens", [-1, 4, 100])
def test_more_tokens_than_there_are_before_the_last_one_cannot_be_found(tokens: int) -> None:
    life = after(Life(3, 5, 1), Begun(), Wrote())
    assert life.stage is Stage.WRITING
    with pytest.raises(Impossible):
        apply(life, Found(1))
    reading = after(Life(3, 5, 1), Begun())
    with pytest.raises(Impossible):
        apply(reading, Found(tokens))
    assert apply(reading, Found(2)).cached == 2
