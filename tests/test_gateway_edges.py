"""The gateway at its edges: what leaves no choice, what is told and refused, and strangers at the door."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from api_support import PATH, ask, case, complete, events, post, refused
from core_support import header_of
from fake_cluster import FakeCluster
from generation_support import COUNT, EXPECTED, PROMPT

from gateway_api import MAX_BODY
from protocol.calls import Call
from protocol.frames import Kind, Part, Tensor, decode, encode

HELLO = {"role": "user", "content": "the fox"}


@pytest.mark.parametrize(
    "asked",
    [
        {"temperature": 0, "top_p": 0.1, "top_k": 3, "min_p": 0.5},
        {"temperature": 2, "top_k": 1},
        {"temperature": 2, "top_p": 0},
        {"temperature": 2, "min_p": 1},
        {"temperature": 0, "top_k": 0},
    ],
)
def test_what_leaves_one_candidate_is_greedy(asked: dict[str, Any]) -> None:
    async def body(cluster: FakeCluster) -> None:
        for seed in (1, 2):
            answer = await complete(cluster, prompt=list(PROMPT), max_tokens=COUNT, seed=seed, **asked)
            assert answer["knot"]["ids"] == EXPECTED

    case(body)


def test_what_was_cached_is_told_and_changes_nothing() -> None:
    async def body(cluster: FakeCluster) -> None:
        prompt = list(range(5, 45))
        first = await complete(cluster, prompt=prompt, max_tokens=4, ignore_eos=True)
        again = await complete(cluster, prompt=prompt, max_tokens=4, ignore_eos=True)
        assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 32
        assert again["knot"]["timings"]["cached_tokens"] == 32
        assert again["knot"]["ids"] == first["knot"]["ids"]

    case(body)


def test_times_are_told_on_request() -> None:
    async def body(cluster: FakeCluster) -> None:
        answer = await complete(cluster, prompt=list(PROMPT), max_tokens=4, ignore_eos=True)
        found = answer["knot"]["timings"]
        for name in ("ttft_ms", "prefill_ms", "prefill_tok_s", "decode_ms"):
            assert found[name] > 0, name
        assert found["decode_tok_s"] > 0
        assert found["cached_tokens"] == 0
        answer = await complete(cluster, prompt=list(PROMPT), max_tokens=1, details=False)
        assert "knot" not in answer

    case(body)


def test_a_model_that_breaks_is_an_error_that_names_the_place_and_not_token_zero() -> None:
    async def body(cluster: FakeCluster) -> None:
        peer = cluster.station_peers[0]
        answer = peer.answer

        async def poisoned(call: Call) -> Any:
            reply = await answer(call)
            if call.path != "/forward":
                return reply
            parts = [
                Part(part.envelope, {name: broken(tensor) for name, tensor in part.tensors.items()})
                for part in decode(reply.bytes()).parts
            ]
            return type(reply)(reply.status, encode(Kind.FORWARD, parts, answer=True), reply.headers)

        def broken(tensor: Tensor) -> Tensor:
            values = np.frombuffer(bytes(tensor.data), "<f4").copy()
            values[-1] = np.nan
            return Tensor(tensor.name, tensor.dtype, tensor.shape, values.tobytes())

        peer.answer = poisoned
        status, error = await refused(cluster, "/v1/completions", prompt=list(PROMPT), max_tokens=2)
        assert (status, error["type"], error["code"]) == (500, "server_error", "non_finite")
        assert "station 1-3" in error["message"]
        assert "layer 1" in error["message"]

    case(body)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_beyond_the_places_a_request_is_refused_at_once_and_told_when_to_come_back(
    path: str, stream: bool
) -> None:
    async def body(cluster: FakeCluster) -> None:
        asked = {"prompt": list(PROMPT)} if path == "/v1/completions" else {"messages": [HELLO]}
        request = json.dumps({**asked, "max_tokens": 3, "stream": stream}).encode()
        busy = b'{"prompt": [5, 17, 42, 7], "max_tokens": 50, "stream": true, "ignore_eos": true}'
        served, waits = [await ask(cluster, "POST", "/v1/completions", busy) for _ in range(2)]
        await anext(served.body)  # type: ignore[arg-type]
        calls = len(cluster.station_peers[0].calls)
        reply = await ask(cluster, "POST", path, request)
        assert reply.status == 503
        assert int(reply.headers["retry-after"]) >= 1
        error = reply.json()["error"]
        assert (error["type"], error["code"]) == ("server_error", "busy")
        assert len(cluster.station_peers[0].calls) == calls, "nobody was asked for it"
        # One that waits may leave as well, and so does one that nobody has read of.
        for one in (waits, served):
            await one.body.aclose()  # type: ignore[union-attr]
        await cluster.background.drain()
        reply = await ask(cluster, "POST", path, request)
        assert reply.status == 200
        if stream:
            assert [event async for event in reply.body]  # type: ignore[union-attr]

    case(body, MAX_SESSIONS="1", MAX_WAITING="1")


def test_more_answers_than_there_will_ever_be_room_for_are_refused_for_good() -> None:
    async def body(cluster: FakeCluster) -> None:
        status, error = await refused(cluster, "/v1/completions", prompt="a", n=4)
        assert (status, error["param"]) == (400, "n")
        assert "4 answers" in error["message"]
        status, error = await refused(cluster, "/v1/completions", prompt=["a", "b"], n=2)
        assert status == 400
        answer = await complete(cluster, prompt="a", n=3, max_tokens=2, ignore_eos=True)
        assert len(answer["choices"]) == 3

    case(body, MAX_SESSIONS="2", MAX_WAITING="1")


# -- the door -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/v1/nothing", 404, "unknown_url"), ("POST", "/", 404, "unknown_url"),
        ("GET", "/v1/completions", 405, "method_not_allowed"),
        ("DELETE", "/v1/models", 405, "method_not_allowed"),
        ("PUT", "/v1/chat/completions", 405, "method_not_allowed"),
        ("DELETE", "/v1/models/x", 405, "method_not_allowed"),
        ("GET", "/v1/models/x", 404, "model_not_found"),
        ("POST", "/v1/embeddings", 404, "unknown_url"),
    ],
)  # fmt: skip
def test_what_is_not_there_is_said_in_openais_shape(method: str, path: str, status: int, code: str) -> None:
    async def body(cluster: FakeCluster) -> None:
        reply = await ask(cluster, method, path)
        assert reply.status == status
        error = reply.json()["error"]
        assert (error["type"], error["code"]) == ("invalid_request_error", code)
        if status == 405:
            assert reply.headers["allow"] in ("GET", "POST")
            assert reply.headers["allow"] in error["message"]

    case(body, stations=1, shards=1)


def test_the_model_may_be_left_out_but_not_be_another_one() -> None:
    async def body(cluster: FakeCluster) -> None:
        await complete(cluster, prompt="a", max_tokens=1, model=cluster.knot.header.name)
        for name in ("gpt-4", cluster.knot.header.name + " "):
            status, error = await refused(cluster, "/v1/completions", prompt="a", model=name)
            assert (status, error["param"], error["code"]) == (404, "model", "model_not_found")

    case(body, stations=1, shards=1)


def test_a_body_beyond_measure_is_413_with_both_numbers() -> None:
    async def body(cluster: FakeCluster) -> None:
        reply = await ask(cluster, "POST", "/v1/completions", b" " * (MAX_BODY + 1))
        assert reply.status == 413
        message = reply.json()["error"]["message"]
        assert str(MAX_BODY) in message
        assert str(MAX_BODY + 1) in message

    case(body, stations=1, shards=1)


def test_a_stranger_learns_nothing_but_that_a_key_is_wanted() -> None:
    async def body(cluster: FakeCluster) -> None:
        for header in ({}, {"authorization": "Bearer mistyped"}, {"authorization": "Basic " + "a secret"}):
            for method, path in (("GET", "/v1/nothing"), ("POST", "/v1/completions"), ("GET", "/health")):
                reply = await cluster.gateway.answer(Call(method, path, b"{", header))
                assert reply.status == 401
                assert reply.headers["www-authenticate"] == "Bearer"
                error = reply.json()["error"]
                assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_api_key")
                assert "mistyped" not in error["message"], "a mistyped key is nearly a key"

    case(body, stations=1, shards=1)


def test_unused_ids_are_never_written_however_they_are_wanted() -> None:
    [(start, end)] = header_of(PATH).config.unused_token_ranges

    async def body(cluster: FakeCluster) -> None:
        bias = {str(id): 100 for id in range(start, end)}
        answer = await complete(
            cluster, prompt=list(PROMPT), max_tokens=4, temperature=2, n=4, logit_bias=bias, ignore_eos=True
        )
        for one in answer["knot"]["choices"]:
            assert not any(start <= id < end for id in one["ids"])

    case(body)


def test_a_request_is_answered_the_same_whatever_surrounds_its_json() -> None:
    async def body(cluster: FakeCluster) -> None:
        reply = await ask(cluster, "POST", "/v1/completions", b'\n {"prompt":\t"a", "max_tokens": 1}\r\n')
        assert reply.status == 200
        status, found = await post(cluster, "/v1/completions", prompt="a", max_tokens=1, stream=True)
        assert (status, found[-1]) == (200, "[DONE]")
        assert events(b"data: [DONE]\n\n") == ["[DONE]"]

    case(body, stations=1, shards=1)
