"""A shard that dies in mid-prompt: exact, flagged or refused, as asked; never silently wrong."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np
import pytest
from core_support import grouped, run
from fake_cluster import FakeCluster, fake_cluster
from generation_support import COUNT, EXPECTED, PROMPT
from shard_support import shard_on
from station_support import embedded, inline, line_on, through

import answering
from generation import Limits
from protocol.calls import Call
from protocol.frames import decode
from protocol.ports import PeerLost
from protocol.steps import Choice, Rows

PATH = grouped()
# Eight shards of 37 or 38 ids: none of the prompt's tokens is shard 2's, two are shard 1's.
NOBODYS, TWICE = 2, 1
RETRIES = 2


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answering, "Limits", functools.partial(Limits, pause=0, step_retries=RETRIES))


def case(body: Callable[[FakeCluster], Coroutine[Any, Any, None]], **more: Any) -> None:
    async def main() -> None:
        async with fake_cluster(PATH, shards=8, host=inline, wardens=False, **more) as cluster:
            await body(cluster)
            await cluster.background.drain()
            for api in cluster.stations:
                assert len(api.station.sessions) == 0

    run(main())


def owned(cluster: FakeCluster, shard: int) -> int:
    start, end = cluster.route.shards[shard].ids
    return sum(start <= token < end for token in PROMPT)


def asked(cluster: FakeCluster, **more: Any) -> Coroutine[Any, Any, dict[str, Any]]:
    return cluster.complete(prompt=list(PROMPT), max_tokens=COUNT, **more)


def dead_for_embeddings(cluster: FakeCluster, shard: int, dead: Callable[[int], bool]) -> None:
    """Loses a shard's calls to /embed as long as `dead` says so, of how often it was asked for logits."""
    peer, logits = cluster.shard_peers[shard], 0

    async def before(call: Call) -> None:
        nonlocal logits
        logits += call.path == "/logits"
        if call.path == "/embed" and dead(logits):
            raise PeerLost("the shard is dead")

    peer.before = before


def in_mid_prompt(logits: int) -> bool:
    """Dead until the prompt is through, and back for the logits."""
    return logits == 0


async def with_zeros(lost: set[int], count: int) -> list[int]:
    """Greedy ids when the prompt's tokens at these places embed to zero, step by step."""
    line, shard = await line_on(PATH, 1), await shard_on(PATH)
    hidden = embedded(PATH, PROMPT).copy()
    hidden[sorted(lost)] = 0
    found: list[int] = []
    position = 0
    while len(found) < count:
        rows = await through(line, "s", position, hidden, rows=Rows.LAST)
        best = await shard.logits(np.ascontiguousarray(rows[-1]), Choice(), f"l{position}")
        found.append(best.candidates[0].id)
        position += len(hidden)
        hidden = embedded(PATH, found[-1:])
    return found


def test_a_dead_shard_that_owns_no_token_of_the_prompt_disturbs_nobody() -> None:
    async def body(cluster: FakeCluster) -> None:
        assert owned(cluster, NOBODYS) == 0
        for more in ({}, {"on_shard_failure": "degrade"}):
            dead_for_embeddings(cluster, NOBODYS, in_mid_prompt)
            answer = await cluster.complete(prompt=list(PROMPT), max_tokens=COUNT, **more)
            assert answer["knot"]["ids"] == EXPECTED
            assert answer["knot"]["degraded"] is False

    case(body)


@pytest.mark.parametrize("stream", [False, True])
def test_a_dead_shard_that_owns_some_is_a_refusal_that_names_it(stream: bool) -> None:
    async def body(cluster: FakeCluster) -> None:
        dead_for_embeddings(cluster, TWICE, in_mid_prompt)
        answer = await asked(cluster, stream=stream)
        text = answer["events"] if stream else answer["error"]["message"]
        assert "shard 37-75" in text
        assert "finish_reason" not in text
        if not stream:
            assert (answer["status"], answer["error"]["code"]) == (502, "lost")
        calls = [call for call in cluster.shard_peers[TWICE].calls if call.path == "/embed"]
        assert len(calls) == 0, "each was lost on its way"
        cluster.shard_peers[TWICE].before = None
        assert (await asked(cluster))["knot"]["ids"] == EXPECTED, "and it is back"

    case(body)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("details", [False, True])
def test_where_degrading_is_allowed_the_answer_says_which_shard_and_how_many_tokens(
    stream: bool, details: bool
) -> None:
    async def body(cluster: FakeCluster) -> None:
        assert owned(cluster, TWICE) == 2
        expected = await with_zeros({5, 8}, COUNT)
        assert expected != EXPECTED
        dead_for_embeddings(cluster, TWICE, in_mid_prompt)
        answer = await asked(cluster, on_shard_failure="degrade", stream=stream, details=details)
        if stream:
            last = json.loads(answer["events"].split("\n\n")[-3][6:])
            assert last["choices"][0]["finish_reason"] == "length"
        else:
            last = answer
        assert last["knot"]["degraded"] == {"shards": {"37-75": 2}, "tokens": 2}
        if details:
            assert last["knot"]["ids"] == expected, "zeros for the lost ones, and nothing else is wrong"

    case(body)


def test_a_shard_that_is_back_within_the_retries_is_no_degradation() -> None:
    async def body(cluster: FakeCluster) -> None:
        cluster.shard_peers[TWICE].lose += ["/embed"] * RETRIES
        answer = await asked(cluster, on_shard_failure="degrade")
        assert answer["knot"]["ids"] == EXPECTED
        assert answer["knot"]["degraded"] is False

    case(body)


def test_a_shard_that_is_dead_for_the_logits_as_well_is_an_error_even_where_degrading_is_allowed() -> None:
    async def body(cluster: FakeCluster) -> None:
        cluster.shard_peers[NOBODYS].dead = True
        answer = await asked(cluster, on_shard_failure="degrade")
        assert answer["status"] == 502
        assert "shard 75-112" in answer["error"]["message"]

    case(body)


def test_a_generated_token_whose_shard_is_lost_is_counted_as_well() -> None:
    async def body(cluster: FakeCluster) -> None:
        # The first two generated ids are shard 2's; it is dead for the first of them.
        assert all(75 <= token < 112 for token in EXPECTED[:2])
        dead_for_embeddings(cluster, NOBODYS, lambda logits: logits == 1)
        answer = await asked(cluster, on_shard_failure="degrade")
        assert answer["knot"]["degraded"] == {"shards": {"75-112": 1}, "tokens": 1}
        dead_for_embeddings(cluster, NOBODYS, lambda logits: logits >= 1)
        answer = await asked(cluster)
        assert (answer["status"], answer["error"]["code"]) == (502, "lost")

    case(body)


def test_tokens_made_from_a_degraded_prompt_stay_flagged_when_a_later_attempt_is_whole() -> None:
    async def body(cluster: FakeCluster) -> None:
        dead_for_embeddings(cluster, TWICE, in_mid_prompt)
        cleared = False

        async def lose_the_cache(call: Call) -> None:
            nonlocal cleared
            if not cleared and decode(call.body).parts[0].envelope["phase"] == "decode":
                cleared = True
                cluster.stations[1].station.sessions.clear()

        cluster.station_peers[1].before = lose_the_cache
        answer = await asked(cluster, on_shard_failure="degrade")
        assert answer["knot"]["attempts"] == 2
        assert answer["knot"]["ids"] != EXPECTED, "the first token came of the degraded prompt"
        assert answer["knot"]["degraded"] == {"shards": {"37-75": 2}, "tokens": 2}

    case(body)


def test_an_attempt_that_made_no_token_leaves_no_flag() -> None:
    async def body(cluster: FakeCluster) -> None:
        # The degraded attempt fails before its first token; the next one is whole.
        left = cluster.station_peers[1].lose
        left += ["/forward"] * (RETRIES + 1)
        dead_for_embeddings(cluster, TWICE, lambda logits: bool(left))
        answer = await asked(cluster, on_shard_failure="degrade")
        assert answer["knot"]["attempts"] == 2
        assert answer["knot"]["ids"] == EXPECTED
        assert answer["knot"]["degraded"] is False

    case(body)


def test_a_disagreement_about_the_model_is_never_degraded_away() -> None:
    async def body(cluster: FakeCluster) -> None:
        api = cluster.shards[TWICE]
        settings = api.shard.settings
        api.shard.settings = dataclasses.replace(settings, vocab_end=settings.vocab_end - 1)
        answer = await asked(cluster, on_shard_failure="degrade")
        assert answer["error"]["code"] == "wrong_range"
        api.shard.settings = settings

    case(body)
