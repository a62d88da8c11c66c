"""A whole cluster and generations over it, for tests."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import aclosing, asynccontextmanager
from typing import Any

from core_support import greedy, grouped, run
from fake_cluster import FakeCluster, fake_cluster
from station_support import inline

from generation import Generation, Limits, Report
from sampling import Sampler

PATH = grouped()
PROMPT = (137, 148, 218, 275, 10, 41, 238, 275, 72)
COUNT = 5
EXPECTED = greedy(PATH, PROMPT, COUNT)
LIMITS = Limits(pause=0, busy_retries=5)


@asynccontextmanager
async def cluster_on(**more: Any) -> AsyncIterator[FakeCluster]:
    """A cluster without wardens, at rest before and afterwards."""
    async with fake_cluster(PATH, **{"wardens": False, "host": inline, **more}) as cluster:
        cluster.at_rest()
        yield cluster
        await cluster.background.drain()
        cluster.at_rest()


def case(body: Callable[[FakeCluster], Coroutine[Any, Any, None]], **more: Any) -> None:
    async def main() -> None:
        async with cluster_on(**more) as cluster:
            await body(cluster)

    run(main())


def generation(cluster: FakeCluster, sampler: Sampler | None = None, **more: Any) -> Generation:
    number = len(cluster.station_peers[0].calls)
    return Generation(
        more.pop("shared", cluster.shared),
        f"session-{number}",
        more.pop("prompt", PROMPT),
        sampler or Sampler(),
        limits=more.pop("limits", LIMITS),
        **more,
    )


async def ids_of(made: Generation, count: int = COUNT) -> list[int]:
    async with aclosing(made.tokens(count)) as tokens:
        return [sampled.id async for sampled in tokens]


async def generate(
    cluster: FakeCluster, sampler: Sampler | None = None, count: int = COUNT, **more: Any
) -> tuple[list[int], Report]:
    """The ids of a generation and what it did, when everything has come to rest."""
    made = generation(cluster, sampler, **more)
    found = await ids_of(made, count)
    await cluster.background.drain()
    return found, made.report
