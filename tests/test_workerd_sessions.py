"""Sessions on real workerd: generations longer than one event, clients that leave, the gateway's memory."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest
from core_support import knot_of
from test_workerd_cluster import ISOLATE_BYTES, UNSEEN_BYTES, Running

from protocol.calls import Call, json_call

pytestmark = [pytest.mark.workerd, pytest.mark.wasm]

TOKENS = 2000
PROMPT = 512
# What one event of the gateway's object may do here; the platform allows 10,000 calls of other parts.
TURN_CALLS = 1000


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    variables = {"TURN_CALLS": str(TURN_CALLS), "TURN_SECONDS": "2", "MAX_GENERATED_TOKENS": "4096"}
    # Few places, so that a flood finds them taken on a fast machine too.
    variables |= {"MAX_SESSIONS": "4", "MAX_QUEUE": "4"}
    knot = knot_of("qwen2", context=4096)
    found = Running(knot, tmp_path_factory.mktemp("workerd"), stations=2, shards=2, variables=variables)
    yield found
    print("\n".join(found.log)[-8000:])  # for whoever looks at a failure
    found.close()


def bearer(running: Running) -> dict[str, str]:
    return {"authorization": f"Bearer {running.cluster.secret}"}


def figures(running: Running) -> dict[str, float]:
    text = running.fetch("gateway", Call("GET", "/metrics", headers=bearer(running))).bytes().decode()
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}


def at_rest(running: Running) -> dict[str, float]:
    """The figures when nothing goes on any more; fails when something stays."""
    waited = ("sessions_active", "sessions_waiting", "sessions_writing", "kv_tokens_reserved")
    for _ in range(100):
        found = figures(running)
        if not any(found[f"knot_{name}"] for name in waited):
            break
        running.run(asyncio.sleep(0.2))
    assert not any(found[f"knot_{name}"] for name in waited), {name: found[f"knot_{name}"] for name in waited}
    for name, value in found.items():
        if name.startswith("knot_part_memory_sessions{"):
            assert value == 0, name
        if name.startswith('knot_part_memory_engine_kv_free_pages{part="station'):
            labels = name[name.index("{") :]
            pages = found[f"knot_part_memory_engine_kv_pages{labels}"]
            assert value + found[f"knot_part_memory_kept_pages{labels}"] == pages
    return found


async def last_of(running: Running, request: dict[str, Any]) -> dict[str, Any]:
    """The last event of a stream."""
    call = json_call("POST", "/v1/completions", request, bearer(running))
    reply = await running.cluster.fetch("gateway", call)
    assert reply.status == 200, reply.body
    text = b"".join([piece async for piece in reply.body])[-1_000_000:]  # type: ignore[union-attr]
    return json.loads(text.split(b"\n\n")[-3].removeprefix(b"data: "))


def test_whoever_comes_during_a_generation_is_let_in(running: Running) -> None:
    """All Workers share a thread here, and a generation alone would never leave it idle."""

    async def main() -> None:
        request = {"prompt": [5, 6, 7], "max_tokens": 100, "temperature": 0, "ignore_eos": True}
        call = json_call("POST", "/v1/completions", request, bearer(running))
        generating = asyncio.ensure_future(running.cluster.fetch("gateway", call))
        models = Call("GET", "/v1/models", headers=bearer(running))
        for _ in range(3):
            assert (await running.cluster.fetch("gateway", models)).status == 200
        assert not generating.done(), "they were answered after it"
        assert (await generating).status == 200

    running.run(main())


@pytest.mark.slow
def test_two_thousand_tokens_after_a_prompt_of_512_stay_within_what_one_event_may_do(
    running: Running,
) -> None:
    """More calls in all than the platform lets one event make, and in none of them more than was allowed."""
    before = figures(running)
    prompt = [(i * i * 7 + i * 3) % 200 + 30 for i in range(PROMPT)]
    request = {"prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
    details = running.run(last_of(running, {**request, "stream": True, "details": True}))["knot"]
    assert len(details["ids"]) == TOKENS
    assert details["attempts"] == 1
    after = at_rest(running)
    calls = after["knot_calls_total"] - before["knot_calls_total"]
    assert calls > 10_000, "one event would not have been allowed as many"
    assert after["knot_turn_calls_peak"] <= TURN_CALLS
    assert after["knot_turns_total"] - before["knot_turns_total"] >= calls / TURN_CALLS - 1
    # Every call of a station or a shard is an event of its own there, which may compute for 30 seconds. How
    # long a call takes bounds how long it computes.
    for name, value in after.items():
        if name.startswith("knot_hop_seconds{") and 'quantile="0.95"' in name:
            assert value < 30, name


def test_clients_that_leave_in_the_middle_leave_nothing_behind(running: Running) -> None:
    async def leaves(after: int) -> None:
        request = {"prompt": [40 + after] * 20, "max_tokens": 1500, "ignore_eos": True, "stream": True}
        reply = await running.cluster.fetch(
            "gateway", json_call("POST", "/v1/completions", request, bearer(running))
        )
        assert reply.status == 200
        seen = 0
        pieces: Any = reply.body
        async for piece in pieces:
            seen += piece.count(b"\n\n")
            if seen >= after:
                break
        await pieces.aclose()

    async def all_of_them() -> None:
        await asyncio.gather(*map(leaves, (1, 2, 5, 9)))

    before = figures(running).get('knot_generations_total{end="left"}', 0)
    running.run(all_of_them())
    assert at_rest(running)['knot_generations_total{end="left"}'] - before == 4


def test_beyond_the_places_requests_are_refused_at_once_and_the_others_get_their_tokens(
    running: Running,
) -> None:
    request = {"prompt": [50, 51, 52], "max_tokens": 3, "temperature": 0, "ignore_eos": True, "details": True}

    async def flood() -> list[Any]:
        call = json_call("POST", "/v1/completions", request, bearer(running))
        return await asyncio.gather(*(running.cluster.fetch("gateway", call) for _ in range(200)))

    replies = running.run(flood())
    served = [reply for reply in replies if reply.status == 200]
    refused = [reply for reply in replies if reply.status == 503]
    assert len(served) + len(refused) == 200
    assert len(refused) >= 1
    assert len({tuple(reply.json()["knot"]["ids"]) for reply in served}) == 1
    for reply in refused:
        assert reply.json()["error"]["code"] == "busy"
        assert int(reply.headers["retry-after"]) >= 1
    at_rest(running)


def test_the_gateways_isolate_leaves_room_for_what_cannot_be_seen(running: Running) -> None:
    memory = running.fetch("gateway", Call("GET", "/memory", headers=bearer(running))).json()
    seen = memory["isolate"]
    assert seen["python_heap"] >= 20 << 20
    assert seen["wasm"] > 0
    assert seen["python_heap"] + seen["wasm"] + seen["buffers_peak"] + UNSEEN_BYTES < ISOLATE_BYTES
    assert memory["budget"]["total"] <= memory["budget"]["ceiling"] == ISOLATE_BYTES


def test_log_lines_of_generations_carry_the_request_and_no_secret(running: Running) -> None:
    request = running.complete(prompt=[60, 61], max_tokens=2, temperature=0, ignore_eos=True).json()["id"]
    at_rest(running)
    text = "\n".join(running.log)
    lines = [line for line in text.splitlines() if request in line]
    assert any(json.loads(line[line.index("{") :])["message"] == "generation" for line in lines)
    assert running.cluster.secret not in text
