"""Whatever is lost, late, wrong or gone: the same ids, or a refusal; and nothing is left behind."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import Any

import pytest
from fake_cluster import FakeCluster, FakePeer, make_native
from generation_support import COUNT, EXPECTED, LIMITS, case, generate, generation, ids_of

from protocol.calls import Call, Reply
from protocol.frames import Kind, Part, Tensor, decode, encode
from protocol.ports import PeerLost
from protocol.steps import Refusal, RefusalKind
from sampling import Sampler

SAMPLERS = {
    "greedy": Sampler(),
    "temperature": Sampler(1.0, seed=11),
    "top_p": Sampler(0.9, top_p=0.8, seed=12),
    "all of it": Sampler(1.2, top_k=60, top_p=0.95, min_p=0.01, seed=13),
}


@pytest.mark.parametrize("sampler", SAMPLERS.values(), ids=SAMPLERS)
@pytest.mark.parametrize("after", [0, 2, COUNT - 1])
def test_a_lost_cache_is_replayed_from_zero_and_gives_the_same_tokens(sampler: Sampler, after: int) -> None:
    async def body(cluster: FakeCluster) -> None:
        expected, _ = await generate(cluster, sampler)
        made = generation(cluster, sampler)
        found: list[int] = []
        async with aclosing(made.tokens(COUNT)) as tokens:
            async for sampled in tokens:
                found.append(sampled.id)
                if len(found) == after + 1:
                    cluster.stations[1].station.sessions.clear()
        assert found == expected
        lost = after + 1 < COUNT
        assert made.report.attempts == 1 + lost
        assert [reason.split(":")[0] for reason in made.report.reasons] == ["cache_miss"] * lost

    case(body)


def nth_call(cluster: FakeCluster, n: int, how: str) -> list[str]:
    """Has the n-th call of a generation go wrong; returns a list that will say which it was."""
    seen: list[str] = []
    hit: list[str] = []

    def breaks(peer: FakePeer, name: str) -> None:
        async def before(call: Call) -> None:
            seen.append(f"{name} {call.path}")
            if len(seen) - 1 == n:
                hit.append(seen[-1])
                if how == "lost":
                    raise PeerLost("the call was lost")
                if how == "answer":
                    peer.lose_answer.append(call.path)
                if how == "hang":
                    peer.hang.append(call.path)

        peer.before = before

    for i, peer in enumerate(cluster.station_peers):
        breaks(peer, f"station {i}")
    for i, peer in enumerate(cluster.shard_peers):
        breaks(peer, f"shard {i}")
    return hit


@pytest.mark.parametrize("how", ["lost", "answer"])
def test_whichever_call_is_lost_on_its_way_there_or_back_the_ids_stay_the_same(how: str) -> None:
    async def body(cluster: FakeCluster) -> None:
        hits: list[str] = []
        for n in range(100):
            hit = nth_call(cluster, n, how)
            found, report = await generate(cluster, count=3)
            assert found == EXPECTED[:3]
            cluster.at_rest_of_steps()
            if not hit:
                break
            hits += hit
            ends = hit[0].startswith("station") and n > 20
            assert (report.attempts, report.retries) == (
                1,
                0 if ends and report.retries == 0 else report.retries,
            )
            for api in cluster.stations:
                api.station.sessions.clear()  # a lost release is made up for by the time to live
        assert {"station 0 /forward", "station 1 /forward", "shard 0 /embed", "shard 2 /logits"} <= set(hits)
        assert len(hits) > 20

    case(body)


def test_a_lost_answer_is_the_stations_work_done_once() -> None:
    async def body(cluster: FakeCluster) -> None:
        await generate(cluster)
        works = cluster.stations[1].loop.load.works
        cluster.station_peers[1].lose_answer += ["/forward"] * 2
        found, report = await generate(cluster)
        assert found == EXPECTED
        assert (report.attempts, report.retries) == (1, 2)
        assert cluster.stations[1].loop.load.works == 2 * works, "repeats were answered from memory"

    case(body)


def test_a_hang_is_given_up_at_its_deadline_and_the_step_sent_again() -> None:
    async def body(cluster: FakeCluster) -> None:
        cluster.station_peers[0].hang.append("/forward")
        cluster.shard_peers[2].hang += ["/embed", "/logits"]
        found, report = await generate(cluster)
        assert found == EXPECTED
        assert report.attempts == 1
        assert report.retries >= 2

    case(body, deadline=0.5)


@pytest.mark.parametrize("part", ["station", "shard"])
def test_a_part_that_is_gone_for_good_ends_the_generation_after_bounded_attempts(part: str) -> None:
    async def body(cluster: FakeCluster) -> None:
        made = generation(cluster)
        peer = cluster.station_peers[1] if part == "station" else cluster.shard_peers[1]
        calls = len(peer.calls)
        found: list[int] = []

        async def until_it_fails() -> None:
            async with aclosing(made.tokens(COUNT)) as tokens:
                async for sampled in tokens:
                    found.append(sampled.id)
                    if len(found) == 2:
                        peer.dead = True

        with pytest.raises(Refusal) as caught:
            await until_it_fails()
        assert found == EXPECTED[:2], "what was made is not taken back"
        assert caught.value.kind is RefusalKind.LOST
        assert made.report.attempts == len(made.report.reasons) == LIMITS.attempts
        await cluster.background.drain()
        assert len(peer.calls) - calls < 40
        peer.dead = False
        for api in cluster.stations:
            api.station.sessions.clear()

    case(body)


def test_a_part_that_comes_back_in_time_costs_retries_and_no_attempt() -> None:
    async def body(cluster: FakeCluster) -> None:
        cluster.shard_peers[0].lose += ["/logits"] * LIMITS.step_retries
        cluster.station_peers[0].lose += ["/forward"] * LIMITS.step_retries
        found, report = await generate(cluster)
        assert found == EXPECTED
        assert (report.attempts, report.retries) == (1, 2 * LIMITS.step_retries)

    case(body)


def refuse_once(peer: FakePeer, path: str, refusal: Refusal, times: int = 1) -> None:
    """Has a part refuse its next steps."""
    original, left = peer.answer, [refusal] * times

    async def answer(call: Call) -> Any:
        reply = await original(call) if call.path != path or not left else None
        if reply is not None:
            return reply
        kind = {"/forward": Kind.FORWARD, "/embed": Kind.EMBED, "/logits": Kind.LOGITS}[path]
        return Reply(200, encode(kind, [Part(left.pop().to_json())], answer=True))

    peer.answer = answer


@pytest.mark.parametrize(
    "kind", [RefusalKind.BUSY, RefusalKind.INTERNAL, RefusalKind.UNAVAILABLE, RefusalKind.LOST]
)
def test_refusals_that_pass_are_waited_out_with_the_same_step(kind: RefusalKind) -> None:
    async def body(cluster: FakeCluster) -> None:
        refuse_once(cluster.station_peers[0], "/forward", Refusal(kind, "later", 1), 2)
        refuse_once(cluster.shard_peers[1], "/logits", Refusal(kind, "later", 1), 2)
        found, report = await generate(cluster)
        assert found == EXPECTED
        assert (report.attempts, report.retries) == (1, 4)

    case(body)


@pytest.mark.parametrize(
    "kind",
    [
        RefusalKind.WRONG_MODEL,
        RefusalKind.WRONG_RANGE,
        RefusalKind.BAD_FRAME,
        RefusalKind.NON_FINITE,
        RefusalKind.BAD_WEIGHTS,
        RefusalKind.OVER_BUDGET,
        RefusalKind.CANCELLED,
    ],
)
@pytest.mark.parametrize("path", ["/forward", "/logits"])
def test_refusals_that_stay_end_the_generation_at_once(kind: RefusalKind, path: str) -> None:
    async def body(cluster: FakeCluster) -> None:
        peer = cluster.station_peers[1] if path == "/forward" else cluster.shard_peers[1]
        refuse_once(peer, path, Refusal(kind, "no"))
        made = generation(cluster)
        with pytest.raises(Refusal) as caught:
            await ids_of(made)
        assert caught.value.kind is kind
        assert (made.report.attempts, made.report.retries) == (1, 0)
        await cluster.background.drain()

    case(body)


def test_busy_for_ever_is_not_waited_for_ever() -> None:
    async def body(cluster: FakeCluster) -> None:
        refuse_once(cluster.station_peers[0], "/forward", Refusal(RefusalKind.BUSY, "full", 0), 1000)
        made = generation(cluster)
        with pytest.raises(Refusal) as caught:
            await ids_of(made)
        assert caught.value.kind is RefusalKind.BUSY
        assert made.report.retries == LIMITS.busy_retries
        cluster.station_peers[0].answer = cluster.stations[0].answer
        await cluster.background.drain()

    case(body)


@pytest.mark.parametrize("spoil", ["a row too few", "another name", "bytes"])
def test_a_station_that_answers_wrongly_is_a_lost_one_and_never_multiplied_with(spoil: str) -> None:
    async def body(cluster: FakeCluster) -> None:
        peer, left = cluster.station_peers[0], [1, 1]

        def wrong(data: bytes) -> bytes:
            if not left or not data.startswith(b"AWFR"):
                return data
            part = decode(data).parts[0]
            if "hidden" not in part.tensors or part.tensors["hidden"].shape[0] == 0:
                return data
            left.pop()
            if spoil == "bytes":
                return data[:-8]
            tensor = part.tensors["hidden"]
            if spoil == "another name":
                changed = {"normed": Tensor("normed", "f32", tensor.shape, tensor.data)}
            else:
                rows, size = tensor.shape
                changed = {"hidden": Tensor("hidden", "f32", (rows - 1, size), tensor.data[: -4 * size])}
            return encode(Kind.FORWARD, [Part(part.envelope, changed)], answer=True)

        peer.spoil = wrong
        found, report = await generate(cluster)
        assert found == EXPECTED
        assert not left
        assert report.attempts + report.retries == 3

    case(body)


def test_a_client_that_leaves_after_any_token_leaves_nothing_behind() -> None:
    async def body(cluster: FakeCluster) -> None:
        for stop in range(1, COUNT):
            made = generation(cluster)
            async with aclosing(made.tokens(COUNT)) as tokens:
                for _ in range(stop):
                    await anext(tokens)
            await cluster.background.drain()
            cluster.at_rest()

    case(body)


def test_a_client_that_leaves_at_any_moment_leaves_nothing_behind_and_hurts_nobody() -> None:
    async def body(cluster: FakeCluster) -> None:
        turns = 0
        while True:
            turns += 2
            made, other = generation(cluster), generation(cluster)
            made.session = "leaves"
            leaves = asyncio.ensure_future(ids_of(made, 3))
            stays = asyncio.ensure_future(ids_of(other, 3))
            for _ in range(turns):
                await asyncio.sleep(0)
            done = leaves.done()
            leaves.cancel()
            assert await stays == EXPECTED[:3]
            await asyncio.wait([leaves])
            await cluster.background.drain()
            cluster.at_rest()
            if done:
                break
        assert turns > 20

    case(body)


def test_a_client_that_leaves_while_its_station_computes_on_a_thread_leaves_nothing_behind() -> None:
    async def body(cluster: FakeCluster) -> None:
        for wait in (0.0005, 0.002, 0.005, 0.01):
            task = asyncio.ensure_future(ids_of(generation(cluster)))
            await asyncio.sleep(wait)
            task.cancel()
            await asyncio.wait([task])
            await cluster.background.drain()
            cluster.at_rest()

    case(body, host=make_native, RESIDENCY="fluid")
