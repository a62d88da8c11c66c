"""The whole cluster in the emulator on a tiny model: what happens when parts are lost, late or wrong.

An answer may be the same as without trouble, or a refusal that says why; it is never another one.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from synth import make_tiny_gguf, make_tiny_knot

from emulator import Faults
from emulator.local import LocalCluster, local_cluster
from knot.convert import convert
from protocol.calls import Call, json_call

pytestmark = pytest.mark.wasm

PROMPT = [40, 41, 42, 43, 44, 45, 46, 47, 48, 49, 50, 51]
COUNT = 10
Trouble = Callable[[LocalCluster, int], Awaitable[None]]


@pytest.fixture(scope="module")
def knot(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_knot(tmp_path_factory.mktemp("model") / "tiny.knot")


@pytest.fixture(scope="module")
def expected(knot: Path, tmp_path_factory: pytest.TempPathFactory) -> list[int]:
    """What an untroubled cluster answers."""

    async def main() -> list[int]:
        async with local_cluster(knot, tmp_path_factory.mktemp("data")) as local:
            return (await complete(local))["ids"]

    return asyncio.run(main())


def request_for(local: LocalCluster, **body: Any) -> Call:
    whole = {"prompt": PROMPT, "max_tokens": COUNT, "temperature": 0, "ignore_eos": True}
    whole["details"] = True
    return json_call(
        "POST", "/v1/completions", {**whole, **body}, {"authorization": f"Bearer {local.secret}"}
    )


async def complete(local: LocalCluster, **body: Any) -> dict[str, Any]:
    """The details of an answer, or its error."""
    reply = await local.cluster.fetch("gateway", request_for(local, **body))
    assert isinstance(reply.body, bytes)
    answer = json.loads(reply.body)
    return answer.get("knot") or answer


async def stream_with(local: LocalCluster, trouble: Trouble, **body: Any) -> dict[str, Any]:
    """Streams an answer and makes trouble after each piece; the last event's details, or the error."""
    reply = await local.cluster.fetch("gateway", request_for(local, stream=True, **body))
    if isinstance(reply.body, bytes):
        return json.loads(reply.body)
    last: dict[str, Any] = {}
    number = 0
    async for event in events(reply.body):
        last = event
        await trouble(local, number)
        number += 1
    return last.get("knot") or last


async def events(body: Any) -> AsyncIterator[dict[str, Any]]:
    held = b""
    async for piece in body:
        held += piece
        *whole, held = held.split(b"\n\n")
        for event in whole:
            if event != b"data: [DONE]":
                yield json.loads(event.removeprefix(b"data: "))


async def stats(local: LocalCluster, worker: str, path: str) -> dict[str, Any]:
    reply = await local.cluster.fetch(worker, Call("GET", path, headers={"x-knot-secret": local.secret}))
    return json.loads(reply.bytes())


async def nothing_left(local: LocalCluster) -> None:
    """No session, no page, no task and no body is left behind."""
    for _ in range(200):
        if not local.cluster.pending():
            break
        await asyncio.sleep(0.01)
    assert not local.cluster.pending()
    for station in ("entry", "exit"):
        memory = await stats(local, station, "/memory")
        assert memory["sessions"] == {}
        # What is kept for sessions to come is given up whenever room is wanted.
        assert memory["engine"]["kv_free_pages"] + memory["kept_pages"] == memory["engine"]["kv_pages"]


def run(main: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(main(), 300))  # type: ignore[arg-type]


@pytest.mark.parametrize("worker", ["entry", "exit"])
@pytest.mark.parametrize("after", [0, 4])
def test_a_station_that_loses_its_isolate_is_replayed_from_zero(
    knot: Path, expected: list[int], tmp_path: Path, worker: str, after: int
):
    async def evict(local: LocalCluster, number: int) -> None:
        if number == after:
            await local.cluster.evict(worker)

    async def main() -> None:
        async with local_cluster(knot, tmp_path, variables={"SAVE_BYTES": "0"}) as local:
            answer = await stream_with(local, evict)
            assert answer["ids"] == expected
            assert answer["attempts"] == 2
            assert any("cache_miss" in reason or "lost" in reason for reason in answer["reasons"])
            await nothing_left(local)

    run(main)


def test_a_station_object_that_is_restarted_is_replayed_from_zero(
    knot: Path, expected: list[int], tmp_path: Path
):
    async def restart(local: LocalCluster, number: int) -> None:
        if number == 3:
            await local.cluster.restart_object("exit", "StationObject", "station")

    async def main() -> None:
        async with local_cluster(knot, tmp_path, variables={"SAVE_BYTES": "0"}) as local:
            answer = await stream_with(local, restart)
            assert (answer["ids"], answer["attempts"]) == (expected, 2)
            await nothing_left(local)

    run(main)


def test_a_sampled_answer_is_the_same_after_a_replay(knot: Path, tmp_path: Path):
    async def evict(local: LocalCluster, number: int) -> None:
        if number == 5:
            await local.cluster.evict("entry")

    async def nothing(local: LocalCluster, number: int) -> None:
        pass

    async def main() -> None:
        async with local_cluster(knot, tmp_path) as local:
            options = {"temperature": 1.1, "top_p": 0.95, "seed": 12}
            calm = await stream_with(local, nothing, **options)
            troubled = await stream_with(local, evict, **options)
            assert calm["ids"] == troubled["ids"]
            assert (calm["attempts"], troubled["attempts"]) == (1, 2)

    run(main)


def test_an_evicted_shard_comes_back_and_the_answer_is_exact(knot: Path, expected: list[int], tmp_path: Path):
    async def evict(local: LocalCluster, number: int) -> None:
        await local.cluster.evict(f"shard-{number % 8}")

    async def main() -> None:
        async with local_cluster(knot, tmp_path) as local:
            answer = await stream_with(local, evict)
            assert answer["ids"] == expected
            assert not answer["degraded"]
            await nothing_left(local)

    run(main)


def test_a_dead_shard_is_refused_with_its_name_and_nothing_is_left(knot: Path, tmp_path: Path):
    async def kill(local: LocalCluster, number: int) -> None:
        if number == 2:
            await local.cluster.kill("shard-3")

    async def main() -> None:
        async with local_cluster(knot, tmp_path) as local:
            answer = await stream_with(local, kill)
            assert "shard" in answer["error"]["message"]
            assert answer["error"]["code"] == "lost"
            local.cluster.revive("shard-3")
            await nothing_left(local)

    run(main)


class LostEmbeddings(Faults):
    """Loses the calls by which a prompt is embedded at one shard: those after the question how it is."""

    def __init__(self, shard: int, calls: int) -> None:
        super().__init__(0, {})
        self._site = f"gateway>shard-{shard}.ShardObject/shard"
        self._lost = range(1, 1 + calls)
        self._seen = 0

    def strikes(self, kind: str, site: str) -> bool:
        if kind != "lost_call" or site != self._site:
            return False
        self._seen += 1
        return self._seen - 1 in self._lost


@pytest.mark.parametrize("on_failure", ["refuse", "degrade"])
@pytest.mark.parametrize("shard", range(8))
def test_a_shard_that_is_lost_while_a_prompt_is_embedded_is_never_silently_wrong(
    knot: Path, expected: list[int], tmp_path: Path, shard: int, on_failure: str
):
    """Exact where no token of the prompt is the shard's; else refused, or degraded with the count."""

    async def main() -> None:
        variables = {"MAX_ATTEMPTS": "1"}
        async with local_cluster(
            knot, tmp_path, variables=variables, faults=LostEmbeddings(shard, 3)
        ) as local:
            start, end = local.topology.shards[shard]
            own = sum(start <= token < end for token in PROMPT)
            answer = await complete(local, on_shard_failure=on_failure, max_tokens=1)
            if not own:
                # The lost calls were those for logits, and a missing slice is an error.
                assert answer.get("ids") == expected[:1] or answer["error"]["code"] == "lost"
            elif on_failure == "refuse":
                assert answer["error"]["code"] == "lost"
                assert f"shard {start}-{end}" in answer["error"]["message"]
            else:
                assert answer["degraded"] == {"shards": {f"{start}-{end}": own}, "tokens": own}
                assert len(answer["ids"]) == 1
            await nothing_left(local)

    run(main)


def test_an_embedding_that_is_lost_less_often_than_it_is_asked_for_is_exact(
    knot: Path, expected: list[int], tmp_path: Path
):
    async def main() -> None:
        async with local_cluster(knot, tmp_path, faults=LostEmbeddings(1, 2)) as local:
            answer = await complete(local)
            assert (answer["ids"], answer["degraded"]) == (expected, False)

    run(main)


def test_wardens_are_consulted_and_keep_what_was_asked_for(knot: Path, expected: list[int], tmp_path: Path):
    """Counters move: a warden that nobody asks is a cache that does not exist."""

    async def main() -> None:
        # Stations that keep nothing ask for every phase of every step.
        async with local_cluster(knot, tmp_path, variables={"RESIDENCY": "fluid"}) as local:
            for _ in range(3):
                assert (await complete(local))["ids"] == expected
            entry = await stats(local, "entry", "/metrics")
            assert entry["sources"]["warden"] > 0
            assert entry["sources"]["bucket"] == 0
            fingerprint = local.header.fingerprint
            for start, end in local.topology.stations:
                warden = await warden_stats(local, "layer", fingerprint, start, end)
                assert warden["hits"] > warden["misses"] > 0
                assert warden["tensors"] == warden["admitted"] > 0
            rows = {"warden": 0, "kv": 0, "filled": 0, "kv_written": 0}
            for index in range(8):
                counts = (await stats(local, f"shard-{index}", "/metrics"))["rows"]
                rows = {name: rows[name] + counts[name] for name in rows}
            assert rows["filled"] > 0
            assert rows["warden"] > 0
            assert rows["kv_written"] > 0

    run(main)


async def warden_stats(
    local: LocalCluster, what: str, fingerprint: str, start: int, end: int
) -> dict[str, Any]:
    name = {"layer": "layer-warden", "vocab": "cobordism-warden"}[what]
    headers = {
        "x-knot-secret": local.secret,
        "x-knot-id": f"tiny.knot@{fingerprint}",
        "x-knot-key": "tiny.knot",
        f"x-{what}-start": str(start),
        f"x-{what}-end": str(end),
    }
    reply = await local.cluster.fetch(name, Call("GET", "/stats", headers=headers))
    assert reply.status == 200, reply.bytes()
    return json.loads(reply.bytes())


def test_rows_survive_in_kv_when_wardens_are_lost(knot: Path, expected: list[int], tmp_path: Path):
    async def main() -> None:
        async with local_cluster(knot, tmp_path) as local:
            for _ in range(2):
                await complete(local)
            await nothing_left(local)
            await local.cluster.kill("cobordism-warden")
            for index in range(8):
                await local.cluster.evict(f"shard-{index}")
            assert (await complete(local))["ids"] == expected
            counts = [(await stats(local, f"shard-{i}", "/metrics"))["rows"] for i in range(8)]
            assert sum(count["kv"] for count in counts) > 0
            assert sum(count["warden"] for count in counts) == 0

    run(main)


def test_a_cluster_without_wardens_answers_from_the_bucket(knot: Path, expected: list[int], tmp_path: Path):
    async def main() -> None:
        async with local_cluster(knot, tmp_path) as local:
            await local.cluster.kill("layer-warden")
            await local.cluster.kill("cobordism-warden")
            assert (await complete(local))["ids"] == expected
            assert (await stats(local, "entry", "/metrics"))["sources"]["bucket"] > 0

    run(main)


def test_sessions_beside_each_other_get_what_each_gets_alone(knot: Path, tmp_path: Path):
    prompts = [PROMPT[:3], PROMPT, PROMPT[::-1], [90, 91], PROMPT * 4, [60]]

    async def main() -> None:
        # The canary's two passes share one batch.
        variables = {"RESIDENCY": "fluid", "CANARY": "off"}
        async with local_cluster(knot, tmp_path, variables=variables) as local:
            alone = [(await complete(local, prompt=prompt))["ids"] for prompt in prompts]
            before = await stats(local, "exit", "/metrics")
            beside = await asyncio.gather(*(complete(local, prompt=prompt) for prompt in prompts))
            after = await stats(local, "exit", "/metrics")
            assert [answer["ids"] for answer in beside] == alone
            assert after["batches"]["sessions_peak"] > before["batches"]["sessions_peak"] == 1
            await nothing_left(local)

    run(main)


def test_a_client_that_leaves_frees_everything(knot: Path, tmp_path: Path):
    async def main() -> None:
        async with local_cluster(knot, tmp_path) as local:
            reply = await local.cluster.fetch("gateway", request_for(local, stream=True, max_tokens=400))
            pieces: Any = reply.body
            await anext(pieces)
            await pieces.aclose()
            await nothing_left(local)

    run(main)


def test_a_knot_uploaded_again_never_mixes_with_the_one_before(tmp_path: Path):
    """Another model under the same key: every answer is of one of the two, and soon of the new one."""
    first = make_tiny_gguf(tmp_path / "first.gguf", seed=1)
    second = make_tiny_gguf(tmp_path / "second.gguf", seed=2)
    folder = tmp_path / "bucket"
    folder.mkdir()
    knot = folder / "tiny.knot"

    async def answer_of(gguf: Path, data: str) -> list[int]:
        convert(gguf, knot, force=True)
        async with local_cluster(knot, tmp_path / data) as local:
            return (await complete(local))["ids"]

    async def main() -> None:
        old, new = await answer_of(first, "a"), await answer_of(second, "b")
        assert old != new
        convert(first, knot, force=True)
        async with local_cluster(knot, tmp_path / "c", variables={"RESIDENCY": "fluid"}) as local:
            assert (await complete(local))["ids"] == old
            convert(second, knot, force=True)
            local.cluster.bucket("knots").register("tiny.knot", knot)
            found = []
            for _ in range(6):
                answer = await complete(local)
                found.append(answer.get("ids"))
            assert all(ids in (None, new) for ids in found)
            assert found[-1] == new

    run(main)


def test_a_part_that_cannot_start_says_what_is_wrong_and_that_asking_again_does_not_help(
    knot: Path, tmp_path: Path
):
    async def main() -> None:
        async with local_cluster(knot, tmp_path, variables={"KV_TYPE": "f64"}) as local:
            headers = {"x-knot-secret": local.secret}
            reply = await local.cluster.fetch("entry", Call("GET", "/health", headers=headers))
            assert reply.status == 500
            error = reply.json()["error"]
            assert error["kind"] == "cannot_start"
            assert "KV_TYPE" in error["detail"]
            answer = await complete(local)
            assert "station 0" in json.dumps(answer)
            assert error["detail"] in json.dumps(answer)

    run(main)


@pytest.mark.parametrize("seed", range(6))
def test_under_faults_an_answer_is_right_or_a_refusal_and_nothing_is_left(
    knot: Path, expected: list[int], tmp_path: Path, seed: int
):
    rates = {"lost_call": 0.01, "lost_answer": 0.01, "slow_call": 0.05, "restart": 0.003, "evict": 0.001}
    rates |= {"r2_error": 0.02, "r2_torn": 0.02, "r2_slow": 0.02, "kv_stale": 0.2}
    faults = Faults(seed, rates)

    async def main() -> None:
        variables = {"RESIDENCY": "fluid", "MAX_ATTEMPTS": "6"}
        async with local_cluster(knot, tmp_path, variables=variables, faults=faults) as local:
            answers = [await complete(local) for _ in range(4)]
            for answer in answers:
                assert answer.get("ids") == expected or "error" in answer, answer
            assert any("ids" in answer for answer in answers)

    run(main)
