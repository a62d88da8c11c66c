"""Sessions of a whole cluster in the emulator: floods, leavers, parts that die or hang, and the platform's
limits. Afterwards every counter of what is going on is back at zero."""

from __future__ import annotations

import asyncio
import json
import re
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from synth import make_tiny_knot

from emulator import Faults, Limits
from emulator.local import LocalCluster, local_cluster
from protocol.calls import Call, Reply, json_call

pytestmark = pytest.mark.wasm

PROMPT = [40, 41, 42, 43, 44, 45, 46, 47, 48, 49, 50, 51]
COUNT = 10


@pytest.fixture(scope="module")
def knot(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_knot(tmp_path_factory.mktemp("model") / "tiny.knot", context=1024)


@pytest.fixture(scope="module")
def expected(knot: Path, tmp_path_factory: pytest.TempPathFactory) -> list[int]:
    async def main() -> list[int]:
        async with local_cluster(knot, tmp_path_factory.mktemp("data"), shards=2) as local:
            return (await ask(local)).json()["knot"]["ids"]

    return asyncio.run(main())


def request_for(local: LocalCluster, **body: Any) -> Call:
    whole = {"prompt": PROMPT, "max_tokens": COUNT, "temperature": 0, "ignore_eos": True, "details": True}
    return json_call(
        "POST", "/v1/completions", {**whole, **body}, {"authorization": f"Bearer {local.secret}"}
    )


async def ask(local: LocalCluster, **body: Any) -> Reply:
    return await local.cluster.fetch("gateway", request_for(local, **body))


async def read(reply: Reply, stop_after: int | None = None) -> list[dict[str, Any]]:
    """The events of a stream; the client leaves after so many."""
    found: list[dict[str, Any]] = []
    held = b""
    pieces: Any = reply.body
    async for piece in pieces:
        held += piece
        *whole, held = held.split(b"\n\n")
        found += [json.loads(event[6:]) for event in whole if event != b"data: [DONE]"]
        if stop_after is not None and len(found) >= stop_after:
            await pieces.aclose()
            break
    return found


async def figures(local: LocalCluster) -> dict[str, float]:
    """/metrics of the gateway: name with labels → value."""
    call = Call("GET", "/metrics", headers={"authorization": f"Bearer {local.secret}"})
    text = (await local.cluster.fetch("gateway", call)).bytes().decode()
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}


async def at_rest(local: LocalCluster) -> dict[str, float]:
    """The figures when nothing is going on any more; fails when something stays."""
    for _ in range(300):
        if not local.cluster.pending():
            break
        await asyncio.sleep(0.01)
    assert not local.cluster.pending()
    found = await figures(local)
    for name in ("sessions_active", "sessions_waiting", "sessions_writing", "kv_tokens_reserved"):
        assert found[f"knot_{name}"] == 0, name
    for name, value in found.items():
        if name.startswith(("knot_part_memory_sessions{", "knot_part_metrics_queue{")):
            assert value == 0, name
        if name.startswith('knot_part_memory_engine_kv_free_pages{part="station'):
            labels = name[name.index("{") :]
            kept = found[f"knot_part_memory_kept_pages{labels}"]
            assert value + kept == found[f"knot_part_memory_engine_kv_pages{labels}"]
    return found


def run(main: Callable[[], Awaitable[None]], seconds: float = 100) -> None:
    asyncio.run(asyncio.wait_for(main(), seconds))  # type: ignore[arg-type]


def test_of_a_flood_as_many_are_served_as_may_and_the_rest_is_refused_at_once(
    knot: Path, expected: list[int], tmp_path: Path
):
    async def main() -> None:
        variables = {"MAX_SESSIONS": "6", "MAX_WAITING": "10"}
        async with local_cluster(knot, tmp_path, shards=2, variables=variables) as local:
            await ask(local)  # everybody is there
            await at_rest(local)
            order: list[int] = []

            async def one() -> Reply:
                reply = await ask(local)
                order.append(reply.status)
                return reply

            replies = await asyncio.gather(*(one() for _ in range(200)))
            assert Counter(reply.status for reply in replies) == {200: 16, 503: 184}
            assert order[:184] == [503] * 184, "those who are refused do not wait for anybody"
            for reply in replies:
                if reply.status == 200:
                    assert reply.json()["knot"]["ids"] == expected
                else:
                    assert reply.json()["error"]["code"] == "busy"
                    assert int(reply.headers["retry-after"]) >= 1
            found = await at_rest(local)
            assert found['knot_requests_refused_total{kind="busy"}'] == 184
            assert found['knot_generations_total{end="ended"}'] == 17
            assert (await ask(local)).json()["knot"]["ids"] == expected

    run(main)


def test_clients_that_leave_at_any_time_leave_nothing_behind(knot: Path, expected: list[int], tmp_path: Path):
    async def main() -> None:
        variables = {"MAX_SESSIONS": "3", "MAX_WAITING": "20"}
        async with local_cluster(knot, tmp_path, shards=2, variables=variables) as local:

            async def leaves(after: int) -> None:
                reply = await ask(local, stream=True, max_tokens=300, prompt=PROMPT * (1 + after % 3))
                if after:
                    await read(reply, after)
                else:  # before a byte was read: its place was taken all the same
                    pieces: Any = reply.body
                    await pieces.aclose()

            async def stays() -> None:
                assert (await ask(local)).json()["knot"]["ids"] == expected

            await asyncio.gather(*(leaves(after) for after in (0, 1, 5, 0, 2, 9, 3)), stays(), stays())
            found = await at_rest(local)
            assert found['knot_generations_total{end="left"}'] == 7
            assert found['knot_generations_total{end="ended"}'] == 2

    run(main)


def test_a_station_killed_in_the_middle_fails_its_sessions_and_when_it_is_back_all_is_well(
    knot: Path, expected: list[int], tmp_path: Path
):
    async def main() -> None:
        variables = {"MAX_ATTEMPTS": "2"}
        async with local_cluster(knot, tmp_path, shards=2, variables=variables) as local:

            async def one(number: int) -> dict[str, Any]:
                reply = await ask(local, stream=True, max_tokens=60, prompt=[*PROMPT, 60 + number])
                events: list[dict[str, Any]] = []
                pieces: Any = reply.body
                held = b""
                async for piece in pieces:
                    held += piece
                    *whole, held = held.split(b"\n\n")
                    events += [json.loads(event[6:]) for event in whole if event != b"data: [DONE]"]
                    if number == 0 and len(events) == 4:
                        await local.cluster.kill("exit")
                return events[-1]

            for answer in await asyncio.gather(*(one(number) for number in range(3))):
                assert answer["error"]["code"] == "lost"
                assert "station" in answer["error"]["message"]
            local.cluster.revive("exit")
            assert (await ask(local)).json()["knot"]["ids"] == expected
            found = await at_rest(local)
            assert found['knot_generations_total{end="failed"}'] == 3

    run(main)


class Hangs(Faults):
    """One shard does not answer for a while."""

    def __init__(self, calls: int) -> None:
        super().__init__(0, {})
        self.left = calls

    def strikes(self, kind: str, site: str) -> bool:
        if kind != "slow_call" or site != "gateway>shard-1.ShardObject/shard" or self.left <= 0:
            return False
        self.left -= 1
        return True

    def delay(self, site: str) -> float:
        return 3600.0


@pytest.mark.parametrize(("calls", "exact"), [(2, True), (10_000, False)])
def test_a_shard_that_hangs_is_given_up_at_the_deadline_and_nothing_is_left(
    knot: Path, expected: list[int], tmp_path: Path, calls: int, exact: bool
):
    async def main() -> None:
        faults = Hangs(0)
        variables = {"STEP_DEADLINE_SECONDS": "1", "MAX_ATTEMPTS": "1"}
        async with local_cluster(knot, tmp_path, shards=2, variables=variables, faults=faults) as local:
            await ask(local, max_tokens=1)
            faults.left = calls
            reply = await ask(local)
            if exact:
                assert reply.json()["knot"]["ids"] == expected
                assert reply.json()["knot"]["retries"] >= 2
            else:
                assert reply.json()["error"]["code"] == "lost"
                assert re.search(r"shard \d+-\d+", reply.json()["error"]["message"])
            faults.left = 0
            await at_rest(local)

    run(main)


def test_a_generation_makes_more_calls_than_one_event_may_and_goes_on_in_the_next(knot: Path, tmp_path: Path):
    """Limits of 120 calls an event instead of 10,000, and 80 tokens of some 5 calls each."""
    tokens = 80

    async def main() -> None:
        variables = {"TURN_CALLS": "100", "CANARY": "off"}
        limits = Limits(subrequests=120)
        async with local_cluster(knot, tmp_path, shards=2, variables=variables, limits=limits) as local:
            answer = (await ask(local, max_tokens=tokens)).json()
            assert len(answer["knot"]["ids"]) == tokens
            assert answer["knot"]["attempts"] == 1
            assert answer["knot"]["retries"] == 0
            found = await at_rest(local)
            assert found["knot_calls_total"] > 4 * tokens
            assert found["knot_turn_calls_peak"] <= 100
            assert found["knot_turns_total"] >= found["knot_calls_total"] / 100

    run(main)


def test_sessions_that_begin_alike_begin_with_pages_that_are_there(knot: Path, tmp_path: Path):
    common = [(i * i * 7 + i) % 200 + 30 for i in range(64)]
    prompts = [[*common, 40 + i, 50 + i] for i in range(4)]

    async def main() -> None:
        answers: dict[str, list[list[int]]] = {}
        for cache in ("off", "on"):
            data = tmp_path / cache
            async with local_cluster(knot, data, shards=2, variables={"PREFIX_CACHE": cache}) as local:
                first = [(await ask(local, prompt=prompts[0])).json()]
                together = await asyncio.gather(*(ask(local, prompt=prompt) for prompt in prompts[1:]))
                answers[cache] = [a["knot"]["ids"] for a in [*first, *(reply.json() for reply in together)]]
                found = await at_rest(local)
                hits = {name: value for name, value in found.items() if "prefixes_hits" in name}  # by station
                assert len(hits) == 2
                assert set(hits.values()) == ({3.0} if cache == "on" else {0.0})
                assert found["knot_cached_tokens_total"] == (3 * 64 if cache == "on" else 0)
        assert answers["on"] == answers["off"]

    run(main)


def test_metrics_say_how_fast_where_and_how_full_and_the_log_has_a_line_for_each_generation(
    knot: Path, tmp_path: Path
):
    async def main() -> None:
        lines: list[str] = []
        async with local_cluster(knot, tmp_path, shards=2, log=lines.append) as local:
            request = (await ask(local)).json()["id"]
            await ask(local, max_tokens=4)
            found = await at_rest(local)
        for quantile in ("0.5", "0.95"):
            for station in ("0-1", "1-3"):
                labels = f'{{part="station {station}",path="/forward",quantile="{quantile}"}}'
                assert found[f"knot_hop_seconds{labels}"] > 0
            assert found[f'knot_ttft_seconds{{quantile="{quantile}"}}'] > 0
            assert found[f'knot_decode_tokens_per_second{{quantile="{quantile}"}}'] > 0
        assert found["knot_ttft_seconds_count"] == 2
        assert found["knot_written_tokens_total"] == COUNT + 4
        assert found["knot_prompt_tokens_total"] == 2 * len(PROMPT)
        hidden = 96 * 4
        forward = '{part="station 0-1",path="/forward"}'
        assert found[f"knot_seam_sent_bytes_total{forward}"] > (2 * len(PROMPT) + COUNT) * hidden
        assert found[f"knot_seam_received_bytes_total{forward}"] > (2 * len(PROMPT) + COUNT) * hidden
        assert sum(value for name, value in found.items() if name.startswith("knot_part_up{")) == 4
        for name in (
            'knot_part_metrics_batches_sessions_peak{part="station 0-1"}',
            'knot_part_memory_engine_kv_free_pages{part="station 1-3"}',
            'knot_part_memory_host_bytes{part="station 1-3"}',
            'knot_gateway_memory_bytes{what="wasm"}',
        ):
            assert found[name] > 0, name
        assert found["knot_kv_tokens"] > 0
        logged = [json.loads(line) for line in lines]
        [ended] = [line for line in logged if line.get("request") == request]
        assert (ended["message"], ended["ended"], ended["written_tokens"]) == ("generation", "ended", COUNT)
        assert ended["ttft_ms"] > 0
        assert local.secret not in "".join(lines)

    run(main)
