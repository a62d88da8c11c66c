"""Generations over a whole cluster: the exact greedy ids, over any topology, alone and beside others."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import Any

import pytest
from core_support import greedy, grouped, run
from fake_cluster import FakeCluster, FakePeer, fake_cluster, make_native
from generation_support import COUNT, EXPECTED, LIMITS, PROMPT, case, generate, generation, ids_of
from station_support import inline

from generation import Generation
from protocol.calls import Call
from protocol.frames import decode
from protocol.steps import Refusal, RefusalKind
from sampling import Sampler


@pytest.mark.parametrize("arch", ["qwen2", "llama"])
@pytest.mark.parametrize("stations", [1, 2, 3])
@pytest.mark.parametrize("shards", [1, 3, 8])
def test_greedy_ids_are_those_of_exact_arithmetic_over_any_topology(
    arch: str, stations: int, shards: int
) -> None:
    path = grouped(arch)

    async def main() -> None:
        async with fake_cluster(path, stations=stations, shards=shards, host=inline) as cluster:
            found, report = await generate(cluster)
            assert found == greedy(path, PROMPT, COUNT)
            assert (report.attempts, report.retries, report.reasons, report.decoded) == (1, 0, [], COUNT - 1)
            assert not report.degraded
            cluster.at_rest()

    run(main())


@pytest.mark.parametrize("residency", ["fluid", "resident"])
@pytest.mark.parametrize("rows", ["1", "2", "4"])
def test_prompts_go_through_in_pieces_and_the_ids_stay_the_same(residency: str, rows: str) -> None:
    async def body(cluster: FakeCluster) -> None:
        assert (await generate(cluster))[0] == EXPECTED
        steps = [decode(call.body).parts[0].envelope for call in cluster.station_peers[0].calls if call.body]
        counts = [step["count"] for step in steps if step["phase"] == "prefill"]
        assert max(counts) <= int(rows)
        assert sum(counts) == len(PROMPT)
        positions = [step["position"] for step in steps if step["phase"] == "prefill"]
        assert positions == sorted(positions), "no piece overtakes another"

    case(body, stations=3, RESIDENCY=residency, MAX_BATCH_ROWS=rows)


def test_pieces_of_a_prompt_are_at_several_stations_at_once_and_one_at_each() -> None:
    async def body(cluster: FakeCluster) -> None:
        inside = [0] * 3
        most = [0] * 3
        together = 0

        def watch(number: int, peer: FakePeer) -> None:
            original = peer.answer

            async def answer(call: Call) -> Any:
                nonlocal together
                inside[number] += 1
                most[number] = max(most[number], inside[number])
                together = max(together, sum(inside))
                for _ in range(20):
                    await asyncio.sleep(0)
                try:
                    return await original(call)
                finally:
                    inside[number] -= 1

            peer.answer = answer

        for number, peer in enumerate(cluster.station_peers):
            watch(number, peer)
        assert (await generate(cluster, count=1))[0] == EXPECTED[:1]
        assert together == 3, "each station is busy with a piece of its own"
        # The ends of the session come afterwards, to all at once.
        assert most == [1, 1, 1]

    case(body, stations=3, RESIDENCY="resident")


def test_sessions_that_write_at_the_same_time_get_the_ids_they_would_get_alone() -> None:
    async def body(cluster: FakeCluster) -> None:
        prompts = [PROMPT, PROMPT[3:], (5,), PROMPT * 3]
        alone = [(await generate(cluster, prompt=prompt))[0] for prompt in prompts]
        mades = [
            Generation(
                cluster.shared, f"s{i}", prompt, Sampler(), limits=LIMITS,
            )
            for i, prompt in enumerate(prompts)
        ]  # fmt: skip
        found = await asyncio.gather(*map(ids_of, mades))
        assert found == alone
        assert found[0] == EXPECTED
        await cluster.background.drain()
        assert cluster.stations[0].loop.load.sessions_peak > 2, "they went together"
        assert cluster.shards[0].loop.load.rows_peak > 2

    case(body, host=make_native, RESIDENCY="fluid")


def test_one_session_without_pages_does_not_disturb_the_one_that_has_them() -> None:
    async def body(cluster: FakeCluster) -> None:
        first, second = generation(cluster), generation(cluster, prompt=PROMPT * 2)
        second.session = "other"
        async with aclosing(first.tokens(COUNT)) as tokens:
            found = [(await anext(tokens)).id]
            with pytest.raises(Refusal) as caught:
                await ids_of(second)
            assert caught.value.kind is RefusalKind.OVER_BUDGET
            found += [sampled.id async for sampled in tokens]
        assert found == EXPECTED
        await cluster.background.drain()

    case(body, stations=1, KV_BYTES="25000")


def test_a_generation_needs_a_token_to_begin_with_and_may_make_none() -> None:
    async def body(cluster: FakeCluster) -> None:
        with pytest.raises(ValueError, match="at least one token"):
            generation(cluster, prompt=())
        assert await ids_of(generation(cluster), 0) == []

    case(body)


def test_choosing_from_a_flat_nucleus_asks_the_shards_again_and_sends_the_row_once() -> None:
    async def body(cluster: FakeCluster) -> None:
        sampler = Sampler(2.0, top_p=0.9999, seed=5)
        expected, _ = await generate(cluster, sampler)
        again = [
            part.envelope["again"]
            for call in cluster.shard_peers[0].calls
            if call.path == "/logits"
            for part in decode(call.body).parts
        ]
        assert True in again
        for shard in cluster.shards:
            shard.shard._kept.clear()
            shard.shard._free = list(range(shard.shard.engine.config.kept))  # type: ignore[union-attr]
        assert (await generate(cluster, sampler))[0] == expected

    case(body, shards=2)


def test_a_row_that_a_shard_forgot_between_two_choices_is_sent_once_more() -> None:
    async def body(cluster: FakeCluster) -> None:
        sampler = Sampler(2.0, top_p=0.9999, seed=5)
        expected, _ = await generate(cluster, sampler)

        async def forget(call: Call) -> None:
            if call.path == "/logits" and decode(call.body).parts[0].envelope["again"]:
                cluster.shards[0].shard.take_over(cluster.shards[0].shard.knot)

        cluster.shard_peers[0].before = forget
        found, report = await generate(cluster, sampler)
        assert found == expected
        assert report.attempts == 1

    case(body, shards=2)
