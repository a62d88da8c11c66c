"""What `POST /v1/completions` takes, and that whatever it does not take is named."""

from __future__ import annotations

import json
from typing import Any

import pytest

from completions import MAX_STOPS, CompletionRequest, error_body, event, usage
from protocol.fields import BadField, Fields
from sampling import Sampler


def read(**body: Any) -> CompletionRequest:
    return CompletionRequest.from_fields(Fields({"prompt": "hello", **body}, "the request"))


def test_what_is_left_out_is_as_openai_has_it() -> None:
    request = read()
    assert request == CompletionRequest(
        model=None, prompt="hello", max_tokens=16, sampler=Sampler(temperature=1.0), seed=None, stops=(),
        stream=False, include_usage=False, allow_degraded=False, ignore_end=False, details=False,
    )  # fmt: skip


def test_everything_that_is_taken_is_taken() -> None:
    request = read(
        model="m", prompt=[1, 2], max_tokens=0, temperature=0, top_k=5, top_p=0.5, min_p=0.1, seed=-3,
        stop="x", stream=True, stream_options={"include_usage": True}, on_shard_failure="degrade",
        ignore_eos=True, details=True, user="somebody",
    )  # fmt: skip
    assert request == CompletionRequest(
        model="m", prompt=(1, 2), max_tokens=0, sampler=Sampler(0.0, 5, 0.5, 0.1), seed=-3, stops=("x",),
        stream=True, include_usage=True, allow_degraded=True, ignore_end=True, details=True,
    )  # fmt: skip
    assert read(stop=["a", "b"]).stops == ("a", "b")


def test_null_is_as_good_as_left_out_since_clients_send_it() -> None:
    names = [
        "model", "max_tokens", "temperature", "top_k", "top_p", "min_p", "seed", "stop", "stream",
        "stream_options", "on_shard_failure", "ignore_eos", "details", "user",
    ]  # fmt: skip
    assert read(**dict.fromkeys(names)) == read()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tokens", -1), ("max_tokens", 1.5), ("max_tokens", "16"), ("max_tokens", True),
        ("max_tokens", 1 << 21),
        ("temperature", -0.1), ("temperature", 2.1), ("temperature", "hot"), ("temperature", True),
        ("top_k", -1), ("top_k", 0.5), ("top_p", -0.1), ("top_p", 1.1), ("min_p", -0.1), ("min_p", 1.5),
        ("seed", 1 << 63), ("seed", 0.5), ("seed", "x"),
        ("stop", 3), ("stop", [1]), ("stop", ""), ("stop", ["a", ""]), ("stop", {}),
        ("stop", ["x"] * (MAX_STOPS + 1)),
        ("stream", 1), ("stream", "true"), ("stream_options", 3), ("stream_options", {"include_usage": 1}),
        ("on_shard_failure", "ignore"), ("ignore_eos", 0), ("details", "yes"), ("model", 3), ("model", ""),
        ("prompt", 3), ("prompt", {}), ("prompt", [1, -1]), ("prompt", [1.5]), ("prompt", ["a", "b"]),
        ("prompt", [[1, 2]]), ("prompt", [True]), ("prompt", None), ("prompt", "x" * ((4 << 20) + 1)),
    ],
)  # fmt: skip
def test_a_parameter_that_is_wrong_is_named(name: str, value: Any) -> None:
    with pytest.raises(BadField, match=name) as caught:
        read(**{name: value})
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("name", ["n", "logprobs", "best_of", "presence_penalty", "top-k", "max_token"])
def test_a_parameter_that_nobody_would_honour_is_named_and_not_ignored(name: str) -> None:
    with pytest.raises(BadField, match=f"unknown field '{name}'"):
        read(**{name: 1})
    with pytest.raises(BadField, match="unknown field 'chunk'"):
        read(stream_options={"chunk": 1})


def test_an_event_is_one_line_of_data_whatever_is_in_it() -> None:
    data = event({"text": 'line\none "two" 歪\r\n\u2028'})
    assert data.startswith(b"data: ")
    assert data.endswith(b"\n\n")
    assert data.count(b"\n") == 2
    assert b"\r" not in data
    assert json.loads(data[6:]) == {"text": 'line\none "two" 歪\r\n\u2028'}
    assert event("[DONE]") == b"data: [DONE]\n\n"


def test_errors_and_usage_have_openais_shape() -> None:
    assert error_body("why", "server_error", code="lost") == {
        "error": {"message": "why", "type": "server_error", "param": None, "code": "lost"}
    }
    assert usage(3, 4) == {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}
