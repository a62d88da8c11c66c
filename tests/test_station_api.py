"""A station's endpoints as people and gateways meet them."""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np
import pytest
from core_support import grouped, run
from station_support import OneStation, embedded, station_on, values

from engine.budget import OverBudgetError
from protocol.calls import JSON, Call, Reply
from protocol.frames import Kind, Part, encode
from protocol.settings import SettingsError

PATH = grouped()
HIDDEN = embedded(PATH, [7, 260, 31, 299])


def case(body: Callable[[OneStation], Coroutine[Any, Any, None]], **variables: Any) -> None:
    async def main() -> None:
        one = await station_on(PATH, **variables)
        await body(one)
        await one.background.drain()

    run(main())


async def curl(one: OneStation, **body: Any) -> Reply:
    return await one.post(json.dumps(body).encode(), JSON)


def test_people_with_curl_send_rows_and_get_rows() -> None:
    async def body(one: OneStation) -> None:
        expected = await one.forward("frame", 0, HIDDEN)
        reply = await curl(one, hidden=HIDDEN.tolist(), session="mine", rows="all")
        assert reply.status == 200
        answer = reply.json()
        assert answer["status"] == "ok"
        assert answer["cache_length"] == 4
        assert answer["session"] == "mine"
        assert np.array(answer["normed"], "<f4").tobytes() == expected.tobytes()
        more = await curl(one, hidden=HIDDEN[:1].tolist(), session="mine", position=4)
        assert more.json()["cache_length"] == 5
        assert len(more.json()["normed"]) == 1

    case(body)


def test_curl_may_repeat_itself_and_may_change_its_mind_about_what_it_wants() -> None:
    async def body(one: OneStation) -> None:
        last = await curl(one, hidden=HIDDEN.tolist())
        assert (await curl(one, hidden=HIDDEN.tolist())).json() == last.json()
        every = await curl(one, hidden=HIDDEN.tolist(), rows="all")
        assert every.status == 200
        assert len(every.json()["normed"]) == 4
        assert every.json()["normed"][3] == last.json()["normed"][0]
        other = await curl(one, hidden=HIDDEN[::-1].tolist())
        assert other.status == 200

    case(body)


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"", "not JSON"),
        (b"[]", "a list, expected an object"),
        (b'{"hidden": NaN}', "NaN"),
        (b"{}", "lacks the field 'hidden'"),
        (b'{"hidden": 3}', "expected a list"),
        (b'{"hidden": []}', "count is 0"),
        (b'{"hidden": [[1, 2]]}', "not a list of 96 numbers"),
        (json.dumps({"hidden": [["x"] * 96]}).encode(), "no f32"),
        (json.dumps({"hidden": [[0.5] * 96], "position": -1}).encode(), "position"),
        (json.dumps({"hidden": [[0.5] * 96], "rows": "some"}).encode(), "rows"),
        (json.dumps({"hidden": [[0.5] * 96], "tokens": [1]}).encode(), "unknown field 'tokens'"),
        (json.dumps({"hidden": [[0.5] * 96], "session": "x" * 300}).encode(), "session"),
    ],
)
def test_json_that_is_no_step_is_400_with_the_reason(body: bytes, reason: str) -> None:
    async def ask(one: OneStation) -> None:
        reply = await one.post(body, JSON)
        assert reply.status == 400
        assert reply.json()["error"]["kind"] == "bad_frame"
        assert reason in reply.json()["error"]["detail"]
        assert (await curl(one, hidden=HIDDEN.tolist())).status == 200, "the station lives on"

    case(ask)


def test_refusals_are_http_errors_to_curl() -> None:
    async def body(one: OneStation) -> None:
        reply = await curl(one, hidden=HIDDEN.tolist(), position=7)
        assert reply.status == 409
        assert reply.json()["error"]["kind"] == "cache_miss"
        await curl(one, hidden=HIDDEN.tolist(), epoch=3)
        assert (await curl(one, hidden=HIDDEN.tolist(), epoch=2)).json()["error"]["kind"] == "stale_epoch"

    case(body)


@pytest.mark.parametrize(
    "spoil",
    [lambda data: data[:-1], lambda data: data + b"\0", lambda data: b"AWFR" + data[5:], lambda data: b""],
)
def test_bytes_that_are_no_frame_are_400_and_the_station_lives_on(spoil: Callable[[bytes], bytes]) -> None:
    async def body(one: OneStation) -> None:
        good = encode(Kind.FORWARD, [one.step("s", 0, HIDDEN)])
        reply = await one.post(spoil(good))
        assert reply.status == 400
        assert reply.json()["error"]["kind"] == "bad_frame"
        assert (await one.post(good)).status == 200

    case(body)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda e, t: t.pop("hidden"), "no tensor 'hidden'"),
        (lambda e, t: e.update(count=3), r"hidden is [4, 96], expected [3, 96]"),
        (lambda e, t: e.update(version=2), "version"),
        (lambda e, t: e.update(priority=1), "unknown field 'priority'"),
        (lambda e, t: e.pop("session"), "lacks the field 'session'"),
        (lambda e, t: e.update(position=1), "expected its cache_length, 0"),
    ],
)
def test_a_step_that_contradicts_itself_is_a_bad_frame_of_its_own(change: Any, reason: str) -> None:
    async def body(one: OneStation) -> None:
        bad = one.step("bad", 0, HIDDEN)
        envelope, tensors = dict(bad.envelope), dict(bad.tensors)
        change(envelope, tensors)
        answers = await one.send(Part(envelope, tensors), one.step("good", 0, HIDDEN))
        assert answers[0].envelope["status"] == "bad_frame"
        assert reason in answers[0].envelope["detail"]
        assert len(values(answers[1])) == 4

    case(body)


def test_health_says_what_the_station_is() -> None:
    async def body(one: OneStation) -> None:
        reply = await one.api.answer(Call("GET", "/health"))
        health = reply.json()
        assert reply.status == 200
        assert health["status"] == "ok"
        assert (health["kind"], health["role"], health["layers"]) == ("station", "exit", [1, 3])
        assert (health["hidden_size"], health["vocab_size"], health["num_layers"]) == (96, 300, 3)
        assert health["model"] == one.knot.header.fingerprint
        assert health["max_rows"] == 16
        assert (health["residency"], health["resident"]) == ("fluid", False)

    case(body, layers=(1, 3), MAX_BATCH_ROWS="16", RESIDENCY="fluid")


def test_memory_says_where_every_byte_is_and_the_parts_fit_the_whole() -> None:
    async def body(one: OneStation) -> None:
        await one.forward("s", 0, HIDDEN)
        memory = (await one.api.answer(Call("GET", "/memory"))).json()
        engine = memory["engine"]
        assert engine["persistent"] + engine["scratch"] + engine["arena"] <= engine["region"]
        assert engine["region"] <= one.station.settings.engine_bytes
        assert memory["host_bytes"] >= engine["region"]
        assert memory["sessions"] == {"s": 4}
        assert memory["answers_bytes"] == HIDDEN.nbytes
        assert memory["pinned_bytes"] == one.station.weights.arena.pinned_bytes > 0
        assert (engine["kv_pages"] - engine["kv_free_pages"], engine["rows_peak"]) == (1, 4)
        assert memory["kv_page_bytes"] == 16 * 3 * 2 * 32 * 4

    case(body)


def test_metrics_count_what_was_done() -> None:
    async def body(one: OneStation) -> None:
        await one.send(one.step("a", 0, HIDDEN), one.step("b", 0, HIDDEN[:1]))
        one.clock.now += 7
        metrics = (await one.api.answer(Call("GET", "/metrics"))).json()
        assert metrics["uptime_seconds"] == 7
        assert metrics["requests"] == 2
        assert metrics["sessions"] == 2
        assert metrics["batches"] == {
            "batches": 1, "rows": 5, "works": 2, "rows_peak": 5, "sessions_peak": 2, "queue_peak": 2,
        }  # fmt: skip
        assert metrics["reads"]["opened"] == 12
        assert metrics["reads"]["bytes"] == sum(
            tensor.length for name, tensor in one.knot.header.tensors.items()
            if name.startswith("blk_") and "norm" not in name and "bias" not in name
        )  # fmt: skip
        assert metrics["sources"]["bucket"] == 12

    case(body)


@pytest.mark.parametrize(
    ("method", "path"), [("GET", "/forward"), ("POST", "/embed"), ("GET", "/"), ("PUT", "/health")]
)
def test_other_paths_are_404_with_those_there_are(method: str, path: str) -> None:
    async def body(one: OneStation) -> None:
        reply = await one.api.answer(Call(method, path))
        assert reply.status == 404
        assert "POST /forward, GET /health, /metrics and /memory" in reply.json()["error"]["detail"]

    case(body)


def test_a_batch_is_made_smaller_until_two_blocks_fit_beside_it() -> None:
    async def body(one: OneStation) -> None:
        assert one.station.max_rows < 2048
        memory = one.api.memory()["engine"]
        assert memory["region"] <= 1 << 20
        await one.forward("s", 0, HIDDEN)

    case(body, MAX_BATCH_ROWS="2048", ENGINE_BYTES=str(1 << 20), KV_BYTES="200000")


def test_what_does_not_fit_at_all_is_refused_at_boot_with_the_figures() -> None:
    async def body(**variables: str) -> None:
        await station_on(PATH, **variables)

    with pytest.raises(
        OverBudgetError, match=r"\[0, 3\) needs [\d.]+ MB .* and [\d.]+ MB for two blocks .* is 1\.0 MB"
    ):
        run(body(ENGINE_BYTES=str(1 << 20), KV_BYTES="1040000"))
    with pytest.raises(OverBudgetError, match=r"and [\d.]+ MB for all weights, .* is 1\.0 MB"):
        run(body(RESIDENCY="resident", ENGINE_BYTES=str(1 << 20), KV_BYTES="700000", MAX_BATCH_ROWS="16"))
    with pytest.raises(SettingsError, match="SPECIALIZATION_ROLE is 'middle'"):
        run(body(SPECIALIZATION_ROLE="middle"))
