"""Sessions beside each other: each gets exactly the tokens that it gets alone, whoever comes or leaves."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import Any

import pytest
from core_support import knot_of, run
from fake_cluster import FakeCluster, fake_cluster, make_native
from generation_support import LIMITS, ids_of

from generation import Generation
from protocol.steps import Phase
from sampling import Sampler
from station import ForwardWork

CONTEXT = 2048
LONG = 500
Batch = list[tuple[str, Phase, int]]


def ids(seed: int, count: int) -> tuple[int, ...]:
    return tuple((seed * 7919 + i * i * 31 + i * 17) % 250 + 20 for i in range(count))


# Prompts of different lengths, how many tokens each writes, and how it samples.
SESSIONS: list[tuple[tuple[int, ...], int, Sampler]] = [
    (ids(1, 3), 30, Sampler()),
    (ids(2, 40), 12, Sampler(0.9, top_p=0.9, seed=2)),
    (ids(3, 17), 25, Sampler(1.1, seed=3)),
    (ids(4, 1), 40, Sampler()),
    (ids(5, 90), 8, Sampler(0.8, top_k=40, seed=5)),
    (ids(6, 9), 33, Sampler(1.0, min_p=0.02, seed=6)),
    (ids(7, 33), 20, Sampler()),
    (ids(8, LONG), 6, Sampler(0.7, seed=8)),
]
# Of those, who leaves after how many tokens.
LEAVERS = {2: 9, 5: 14}


def case(body: Callable[[FakeCluster], Awaitable[None]], **variables: str) -> None:
    path = knot_of("qwen2", 4096, context=CONTEXT)

    async def main() -> None:
        async with fake_cluster(
            path, host=make_native, wardens=False, **{"KV_BYTES": "2500000", **variables}
        ) as cluster:
            await body(cluster)
            await cluster.background.drain()
            cluster.at_rest()

    run(main(), 120)


def made(cluster: FakeCluster, name: str, number: int) -> tuple[Generation, int]:
    prompt, count, sampler = SESSIONS[number]
    [place] = cluster.shared.enter(name, 1, len(prompt), count)
    return Generation(cluster.shared, name, prompt, sampler, limits=LIMITS, place=place), count


async def alone(cluster: FakeCluster, numbers: Sequence[int]) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for number in numbers:
        found[number] = await ids_of(*made(cluster, f"alone-{number}", number))
        await cluster.background.drain()
    return found


def watched(cluster: FakeCluster, station: int = 0) -> list[Batch]:
    """The batches that a station runs from now on."""
    batches: list[Batch] = []
    loop = cluster.stations[station].loop
    original = loop._run

    async def run_batch(works: Sequence[ForwardWork]) -> Any:
        batches.append([(work.session, work.step.phase, work.rows) for work in works])
        return await original(works)

    loop._run = run_batch
    return batches


@pytest.mark.parametrize("residency", ["fluid", "resident"])
def test_four_sessions_beside_each_other_give_what_each_gives_alone(residency: str) -> None:
    async def body(cluster: FakeCluster) -> None:
        expected = await alone(cluster, range(4))
        batches = watched(cluster)
        read, everybody = 0, asyncio.Event()

        async def one(number: int) -> list[int]:
            nonlocal read
            generation, count = made(cluster, f"b{number}", number)
            found: list[int] = []
            async with aclosing(generation.tokens(count)) as tokens:
                async for scored in tokens:
                    found.append(scored.id)
                    if len(found) == 1:
                        read += 1
                        if read == 4:
                            everybody.set()
                        await everybody.wait()
            return found

        beside = await asyncio.gather(*map(one, range(4)))
        assert dict(enumerate(beside)) == expected
        most = max(len(batch) for batch in batches)
        assert most >= (4 if residency == "fluid" else 2), "they went together"
        if residency == "fluid":
            # As long as all four write, the steps of a group are one frame and one pass.
            shared = [batch for batch in batches if all(phase is Phase.DECODE for _, phase, _ in batch)][:10]
            assert sum(map(len, shared)) >= 3 * len(shared)

    case(body, RESIDENCY=residency, PREFIX_CACHE="off")


@pytest.mark.parametrize("residency", ["fluid", "resident"])
def test_eight_of_different_lengths_with_leavers_and_a_late_long_prompt_give_what_each_gives_alone(
    residency: str,
) -> None:
    async def body(cluster: FakeCluster) -> None:
        expected = await alone(cluster, range(8))
        batches = watched(cluster)
        others_have_written = asyncio.Event()

        async def one(number: int) -> list[int]:
            if number == 7:
                await others_have_written.wait()
            generation, count = made(cluster, f"b{number}", number)
            found: list[int] = []
            async with aclosing(generation.tokens(count)) as tokens:
                async for scored in tokens:
                    found.append(scored.id)
                    if number == 3 and len(found) == 4:
                        others_have_written.set()
                    if len(found) == LEAVERS.get(number):
                        break
            return found

        beside = await asyncio.gather(*map(one, range(8)))
        for number, found in enumerate(beside):
            assert found == expected[number][: LEAVERS.get(number, len(expected[number]))], number
        assert max(len(batch) for batch in batches) >= (4 if residency == "fluid" else 2)
        if residency == "fluid":
            # Where nothing is read, a pass waits for nobody, and who meets in it is chance.
            together = [batch for batch in batches if len({phase for _, phase, _ in batch}) == 2]
            assert together, "prompts were read in passes in which others wrote"

    case(body, RESIDENCY=residency, PREFIX_CACHE="off")


def test_while_a_long_prompt_is_read_every_pass_has_all_writers_that_are_ready() -> None:
    """In passes, not in seconds: every pass that sets out has all writers that are ready, and no more rows of
    a prompt than the gap allows beside them; so between being ready and being computed there is one pass at
    most, the one that is under way."""

    async def body(cluster: FakeCluster) -> None:
        batches = watched(cluster)
        pieces: list[int] = []
        measure = cluster.shared.rounds.piece_rows

        def piece_rows(most: int) -> int:
            rows = measure(most)
            if cluster.shared.rounds.writers:
                pieces.append(rows)
            return rows

        rounds, left_behind = cluster.shared.rounds, 0
        rounds.piece_rows = piece_rows  # type: ignore[method-assign]
        go = rounds._go

        def sets_out(most: int) -> None:
            nonlocal left_behind
            go(most)
            left_behind += sum(waiting.name in rounds._writers for waiting in rounds._queue)

        rounds._go = sets_out  # type: ignore[method-assign]
        writing = asyncio.Event()

        done = False

        async def writer(number: int) -> None:
            generation, _ = made(cluster, f"w{number}", number)
            async with aclosing(generation.tokens(1500)) as tokens:
                async for _ in tokens:
                    if generation.report.decoded == 5:
                        writing.set()
                    if done:
                        break

        async def late() -> None:
            nonlocal done
            await writing.wait()
            await ids_of(made(cluster, "late", 7)[0], 1)
            done = True

        await asyncio.gather(writer(0), writer(3), late())
        prompts = [i for i, batch in enumerate(batches) if any(name == "late" for name, *_ in batch)]
        during = batches[prompts[0] : prompts[-1] + 1]
        read = [rows for batch in during for name, phase, rows in batch if name == "late"]
        assert sum(read) == LONG
        assert len(read) > 3, "it was cut, so that writers could go between"
        assert max(read) <= max(pieces)
        assert left_behind == 0
        beside = [batch for batch in during if len(batch) > 1]
        assert len(beside) > len(during) // 2

    case(body, RESIDENCY="fluid", PREFIX_CACHE="off", PREFILL_GAP="2")


def test_the_heads_of_many_sessions_pass_over_a_shards_slice_together() -> None:
    async def body(cluster: FakeCluster) -> None:
        before = cluster.shards[0].loop.load.batches
        await asyncio.gather(*(ids_of(*made(cluster, f"b{i}", i)) for i in (0, 2, 3, 5)))
        load = cluster.shards[0].loop.load
        assert load.rows_peak >= 4
        written = sum(SESSIONS[i][1] for i in (0, 2, 3, 5))
        assert load.batches - before < written, "fewer passes over the head than tokens"

    case(body, RESIDENCY="fluid", PREFIX_CACHE="off")


def test_sessions_that_begin_alike_share_pages_and_give_what_they_give_without() -> None:
    common = ids(9, 70)
    prompts = [(*common, *ids(20 + i, 5 + i)) for i in range(4)]

    async def all_of(cluster: FakeCluster, name: str) -> list[list[int]]:
        found: list[list[int]] = []
        for number, prompt in enumerate(prompts):
            [place] = cluster.shared.enter(name, 1, len(prompt), 6)
            generation = Generation(
                cluster.shared, f"{name}-{number}", prompt, Sampler(), limits=LIMITS, place=place
            )
            found.append(await ids_of(generation, 6))
            await cluster.background.drain()
        return found

    def counts(cluster: FakeCluster) -> list[tuple[int, int]]:
        return [
            (api.station.sessions.prefixes.counts.hits, api.station.sessions.prefixes.counts.tokens)
            for api in cluster.stations
        ]

    without: list[list[int]] = []

    async def off(cluster: FakeCluster) -> None:
        without.extend(await all_of(cluster, "off"))
        assert counts(cluster) == [(0, 0)] * 2
        assert cluster.shared.telemetry.cached_tokens == 0

    async def on(cluster: FakeCluster) -> None:
        rows = cluster.stations[0].loop.load.rows
        assert await all_of(cluster, "on") == without
        # All but the first begin with the four whole pages that they have in common.
        assert counts(cluster) == [(3, 3 * 64)] * 2
        assert cluster.shared.telemetry.cached_tokens == 3 * 64
        computed = cluster.stations[0].loop.load.rows - rows
        assert computed == sum(map(len, prompts)) - 3 * 64 + 4 * 5

    case(off, PREFIX_CACHE="off")
    case(on)
