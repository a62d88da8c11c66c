"""The gateway as an OpenAI client meets it: answers, events, errors, keys."""

from __future__ import annotations

import functools
import json
from collections.abc import Coroutine
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from api_support import ask, case
from core_support import greedy, knot_of
from fake_cluster import SECRET, FakeCluster
from generation_support import COUNT, EXPECTED, PROMPT
from synth import make_tiny_knot

import answering
from generation import Limits
from protocol.calls import Call


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answering, "Limits", functools.partial(Limits, pause=0))


def events(answer: dict[str, Any]) -> list[Any]:
    """The events of a stream; [DONE] is the word."""
    lines = answer["events"].split("\n\n")
    assert lines[-1] == ""
    assert all(line.startswith("data: ") and "\n" not in line for line in lines[:-1])
    return [line[6:] if line == "data: [DONE]" else json.loads(line[6:]) for line in lines[:-1]]


def text_of(cluster: FakeCluster, ids: list[int]) -> str:
    return cluster.gateway._tokenizer.decode(ids)


def test_a_completion_has_openais_shape_and_the_exact_ids() -> None:
    async def body(cluster: FakeCluster) -> None:
        answer = await cluster.complete(prompt=list(PROMPT), max_tokens=COUNT)
        assert answer["status"] == 200
        assert answer["object"] == "text_completion"
        assert answer["id"].startswith("cmpl-")
        assert answer["model"] == cluster.knot.header.name
        [choice] = answer["choices"]
        assert choice == {
            "index": 0, "text": text_of(cluster, EXPECTED), "logprobs": None, "finish_reason": "length",
        }  # fmt: skip
        assert answer["usage"] == {
            "prompt_tokens": len(PROMPT), "completion_tokens": COUNT, "total_tokens": len(PROMPT) + COUNT,
            "prompt_tokens_details": {"cached_tokens": 0},
        }  # fmt: skip
        assert answer["knot"]["ids"] == EXPECTED
        assert answer["knot"]["prompt_ids"] == list(PROMPT)
        assert answer["knot"]["degraded"] is False
        assert (answer["knot"]["stations"], answer["knot"]["shards"]) == (2, 3)

    case(body)


def test_a_prompt_may_be_text_and_what_the_cluster_did_is_told_only_when_asked() -> None:
    async def body(cluster: FakeCluster) -> None:
        answer = await cluster.complete(prompt="def add(one", max_tokens=2, details=False)
        assert answer["usage"]["prompt_tokens"] == len(cluster.gateway._tokenizer.encode("def add(one"))
        assert "knot" not in answer

    case(body)


def test_a_stream_is_deltas_then_the_reason_then_done() -> None:
    async def body(cluster: FakeCluster) -> None:
        whole = await cluster.complete(prompt=list(PROMPT), max_tokens=COUNT)
        answer = await cluster.complete(prompt=list(PROMPT), max_tokens=COUNT, stream=True)
        *deltas, last, done = events(answer)
        assert done == "[DONE]"
        assert all(delta["object"] == "text_completion" for delta in deltas)
        assert len({delta["id"] for delta in (*deltas, last)}) == 1
        assert all(delta["choices"][0]["finish_reason"] is None for delta in deltas)
        assert all(delta["choices"][0]["text"] for delta in deltas), "no empty deltas"
        assert last["choices"][0]["finish_reason"] == "length"
        assert last["choices"][0]["text"] == ""
        assert "".join(delta["choices"][0]["text"] for delta in deltas) == whole["choices"][0]["text"]
        assert last["knot"]["ids"] == whole["knot"]["ids"]
        assert len(deltas) > 1, "they come as they are made"

    case(body)


def test_no_delta_has_half_a_character_and_together_they_are_the_text_of_the_ids() -> None:
    async def body(cluster: FakeCluster) -> None:
        # Hot, over a vocabulary of single bytes: most of what is made is no whole character.
        answer = await cluster.complete(
            prompt=list(PROMPT), max_tokens=40, temperature=1.9, seed=4, stream=True, ignore_eos=True
        )
        *deltas, last, _ = events(answer)
        seen = [delta["choices"][0]["text"] for delta in deltas]
        ids = last["knot"]["ids"]
        broken = sum(text_of(cluster, [token]) == "\ufffd" for token in ids)
        assert broken > 3, "or this tests nothing"
        assert "".join(seen) == text_of(cluster, ids)
        assert len(seen) < len(ids), "some were held back"

    case(body)


def test_usage_comes_as_an_event_of_its_own_when_asked_for() -> None:
    async def body(cluster: FakeCluster) -> None:
        answer = await cluster.complete(
            prompt=list(PROMPT), max_tokens=2, stream=True, stream_options={"include_usage": True}
        )
        *_, last, done = events(answer)
        assert done == "[DONE]"
        assert last["choices"] == []
        assert last["usage"]["total_tokens"] == len(PROMPT) + 2

    case(body)


def test_a_stream_gives_each_token_before_the_next_one_is_made() -> None:
    async def body(cluster: FakeCluster) -> None:
        request = {"prompt": list(PROMPT), "max_tokens": COUNT, "stream": True, "temperature": 0}
        reply = await ask(cluster, "POST", "/v1/completions", json.dumps(request).encode())
        assert reply.headers["content-type"].startswith("text/event-stream")
        calls: list[int] = []
        async for _ in reply.body:  # type: ignore[union-attr]
            calls.append(len(cluster.shard_peers[0].calls))
        assert calls[0] < calls[1] < calls[2]

    case(body)


@pytest.mark.parametrize("after", [0, 1, 2])
def test_a_client_that_leaves_in_mid_stream_frees_everything(after: int) -> None:
    async def body(cluster: FakeCluster) -> None:
        host, decoders = cluster.gateway._tokenizer._host, {"tok_stream_create": 0, "tok_stream_finish": 0}
        original = host.call

        def counted(name: str, *arguments: int) -> int:
            if name in decoders:
                decoders[name] += 1
            return original(name, *arguments)

        host.call = counted  # type: ignore[method-assign]
        request = {"prompt": list(PROMPT), "max_tokens": 100, "stream": True}
        for _ in range(4):
            reply = await ask(cluster, "POST", "/v1/completions", json.dumps(request).encode())
            stream: Any = reply.body
            for _ in range(after):
                await anext(stream)
            await stream.aclose()
            await cluster.background.drain()
            cluster.at_rest()
        assert decoders == dict.fromkeys(decoders, 4 if after else 0), "decoders in the engine as well"

    case(body)


@pytest.mark.parametrize("count", [0, 1])
@pytest.mark.parametrize("stream", [False, True])
def test_no_token_and_one_token_are_answers_like_any_other(count: int, stream: bool) -> None:
    async def body(cluster: FakeCluster) -> None:
        calls = len(cluster.station_peers[0].calls)
        answer = await cluster.complete(prompt=list(PROMPT), max_tokens=count, stream=stream)
        if stream:
            *_, last, done = events(answer)
            assert done == "[DONE]"
            assert last["choices"][0]["finish_reason"] == "length"
            assert last["knot"]["ids"] == EXPECTED[:count]
        else:
            assert answer["choices"][0]["finish_reason"] == "length"
            assert answer["usage"]["completion_tokens"] == count
            assert answer["choices"][0]["text"] == text_of(cluster, EXPECTED[:count])
        if count == 0:
            assert len(cluster.station_peers[0].calls) == calls, "nothing was run for nothing"

    case(body)


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_over_several_tokens_ends_the_text_and_nothing_of_it_leaks(stream: bool) -> None:
    async def body(cluster: FakeCluster) -> None:
        whole = (await cluster.complete(prompt=list(PROMPT), max_tokens=COUNT))["choices"][0]["text"]
        pieces = [text_of(cluster, EXPECTED[:n]) for n in range(COUNT + 1)]
        # From inside the second token to inside the last.
        start, end = len(pieces[1]), len(pieces[COUNT - 1])
        stop = whole[start:end]
        assert len(stop) > 2
        assert whole.find(stop) == start
        answer = await cluster.complete(
            prompt=list(PROMPT), max_tokens=COUNT, stop=[stop, "@@@"], stream=stream
        )
        if stream:
            *deltas, last, _ = events(answer)
            text = "".join(delta["choices"][0]["text"] for delta in deltas)
        else:
            last, text = answer, answer["choices"][0]["text"]
        assert text == whole[:start]
        assert last["choices"][0]["finish_reason"] == "stop"
        assert len(last["knot"]["ids"]) == COUNT - 1, "and no token is made after it"

    case(body)


def test_an_end_token_ends_the_text_without_being_in_it(tmp_path: Path) -> None:
    made = EXPECTED[:3]
    assert made[-1] not in made[:-1]
    path = make_tiny_knot(tmp_path / "ends.knot", extra={"tokenizer.ggml.eos_token_id": made[-1]})

    async def body(cluster: FakeCluster) -> None:
        assert made[-1] in cluster.gateway._tokenizer.info.end_ids
        answer = await cluster.complete(prompt=list(PROMPT), max_tokens=COUNT)
        assert answer["choices"][0]["finish_reason"] == "stop"
        assert answer["knot"]["ids"] == made
        assert answer["choices"][0]["text"] == text_of(cluster, made[:-1])
        answer = await cluster.complete(prompt=list(PROMPT), max_tokens=COUNT, ignore_eos=True)
        assert answer["knot"]["ids"] == EXPECTED
        assert answer["choices"][0]["finish_reason"] == "length"
        answer = await cluster.complete(prompt=list(PROMPT), max_tokens=3)
        assert answer["choices"][0]["finish_reason"] == "stop", "also when it is the last one asked for"

    case(body, path)


def test_the_same_seed_gives_the_same_text_and_another_one_another() -> None:
    async def body(cluster: FakeCluster) -> None:
        def asked(**more: Any) -> Coroutine[Any, Any, dict[str, Any]]:
            return cluster.complete(
                prompt=list(PROMPT), max_tokens=8, temperature=1.5, ignore_eos=True, **more
            )

        first = await asked(seed=-5)
        assert (await asked(seed=-5))["knot"]["ids"] == first["knot"]["ids"]
        assert (await asked(seed=6))["knot"]["ids"] != first["knot"]["ids"]
        free = await asked()
        assert (await asked(seed=free["knot"]["seed"]))["knot"]["ids"] == free["knot"]["ids"], (
            "told afterwards"
        )

    case(body)


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        ({}, ["prompt"]),
        ({"prompt": ""}, ["prompt is empty"]),
        ({"prompt": []}, ["prompt is empty"]),
        ({"prompt": [300]}, ["token id 300 does not exist", "300 ids"]),
        ({"prompt": "a", "temperature": 3}, ["temperature", "0 to 2"]),
        ({"prompt": "a", "temprature": 0}, ["unknown field 'temprature'"]),
        ({"prompt": "a", "n": 0}, ["request.n is", "1 to 128"]),
        ({"prompt": ["a", ""]}, ["prompt is empty"]),
        ({"prompt": "a", "logit_bias": {"300": 1}}, ["token id 300 does not exist"]),
        ({"prompt": "a", "max_tokens": 5000}, ["max_tokens is 5000", "4096 is most"]),
        ({"prompt": [1] * 500, "max_tokens": 13}, ["500 tokens", "max_tokens is 13", "context of 512"]),
        ({"prompt": [1] * 513, "max_tokens": 0}, ["513 tokens", "context of 512"]),
    ],
)
def test_a_request_that_cannot_be_served_is_400_with_what_is_wrong(
    request_: dict[str, Any], words: list[str]
) -> None:
    async def body(cluster: FakeCluster) -> None:
        reply = await ask(cluster, "POST", "/v1/completions", json.dumps(request_).encode())
        assert reply.status == 400
        error = reply.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["type"] == "invalid_request_error"
        for word in words:
            assert word in error["message"]

    case(body, stations=1, shards=1)


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"\xff", b'{"prompt": "a", "prompt": "b"}', b'{"prompt": NaN}']
)
def test_a_body_that_is_no_request_is_400(body: bytes) -> None:
    async def check(cluster: FakeCluster) -> None:
        reply = await ask(cluster, "POST", "/v1/completions", body)
        assert reply.status == 400
        assert reply.json()["error"]["type"] == "invalid_request_error"

    case(check, stations=1, shards=1)


def test_a_prompt_that_just_fits_the_context_is_served() -> None:
    async def body(cluster: FakeCluster) -> None:
        answer = await cluster.complete(prompt=[1] * 508, max_tokens=4, ignore_eos=True)
        assert answer["usage"]["total_tokens"] == 512

    case(body, stations=1, shards=1)


def test_keys_open_the_gateway_and_nothing_else_does() -> None:
    async def body(cluster: FakeCluster) -> None:
        for key in ("first key", "second key", SECRET):
            assert (await ask(cluster, "GET", "/v1/models", key=key)).status == 200
        for key in ("", "first", "first key ", "FIRST KEY", "first key,second key", "\ud800"):
            for method, path in (("GET", "/v1/models"), ("POST", "/v1/completions"), ("GET", "/cluster")):
                reply = await ask(cluster, method, path, key=key)
                assert reply.status == 401
                assert reply.json()["error"]["type"] == "invalid_request_error"
        assert (await cluster.gateway.answer(Call("GET", "/v1/models"))).status == 401

    case(body, stations=1, shards=1, API_KEYS="first key,second key")


def test_models_health_and_cluster_say_what_there_is() -> None:
    async def body(cluster: FakeCluster) -> None:
        models = (await ask(cluster, "GET", "/v1/models")).json()
        assert [model["id"] for model in models["data"]] == [cluster.knot.header.name]
        health = (await ask(cluster, "GET", "/health")).json()
        assert (health["status"], health["model"]) == ("ok", cluster.knot.header.fingerprint)
        found = (await ask(cluster, "GET", "/cluster")).json()
        assert (found["stations"], found["shards"]) == ([[0, 1], [1, 3]], [[0, 100], [100, 200], [200, 300]])
        card = await ask(cluster, "GET", "/v1/models/" + quote(cluster.knot.header.name, safe=""))
        assert card.json() == models["data"][0]
        assert (await ask(cluster, "GET", "/v1/models/another")).json()["error"]["code"] == "model_not_found"

    case(body)


@pytest.mark.parametrize("stream", [False, True])
def test_a_part_that_is_gone_is_an_error_that_names_it(stream: bool) -> None:
    async def body(cluster: FakeCluster) -> None:
        cluster.station_peers[1].dead = True
        answer = await cluster.complete(prompt=list(PROMPT), max_tokens=COUNT, stream=stream)
        if stream:
            [only] = events(answer)
            error = only["error"]
            assert answer["status"] == 200, "it was sent already"
        else:
            error = answer["error"]
            assert answer["status"] == 502
        assert (error["type"], error["code"]) == ("server_error", "lost")
        assert "station 1-3" in error["message"]
        cluster.station_peers[1].dead = False
        for api in cluster.stations:
            api.station.sessions.clear()

    case(body)


def test_an_error_in_mid_stream_comes_after_what_was_made_and_nothing_comes_after_it() -> None:
    async def body(cluster: FakeCluster) -> None:
        request = {"prompt": list(PROMPT), "max_tokens": COUNT, "stream": True, "temperature": 0}
        reply = await ask(cluster, "POST", "/v1/completions", json.dumps(request).encode())
        stream: Any = reply.body
        seen = [await anext(stream)]
        cluster.shard_peers[0].dead = True
        seen += [event async for event in stream]
        found = events({"events": b"".join(seen).decode()})
        assert [set(event) >= {"error"} for event in found[:-1]] == [False] * (len(found) - 1)
        assert found[-1]["error"]["code"] == "lost"
        assert "shard 0-100" in found[-1]["error"]["message"]
        cluster.shard_peers[0].dead = False

    case(body)


def test_a_cluster_without_room_says_when_to_come_back() -> None:
    async def body(cluster: FakeCluster) -> None:
        reply = await ask(
            cluster, "POST", "/v1/completions", json.dumps({"prompt": [1] * 40, "max_tokens": 1}).encode()
        )
        assert reply.status == 503
        assert reply.json()["error"]["code"] == "over_budget"
        assert int(reply.headers["retry-after"]) >= 1

    case(body, stations=1, shards=1, KV_BYTES="25000")


def test_a_llama_with_a_tied_head_is_served_as_well() -> None:
    path = knot_of("llama")

    async def body(cluster: FakeCluster) -> None:
        answer = await cluster.complete(prompt=list(PROMPT), max_tokens=3, ignore_eos=True)
        assert answer["knot"]["ids"] == greedy(path, PROMPT, 3)

    case(body, path)
