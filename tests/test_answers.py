"""Answers have the shapes of OpenAI's two endpoints, token by token."""

from __future__ import annotations

import json

import pytest
from core_support import knot_of, tokenizer_of

from answers import Answer, ChatAnswer, CompletionAnswer, Delta, Head, Token, Written, event, usage
from choosing import Scored
from failures import ApiError, bad_request, not_serving, of_field, of_refusal
from knot.tokenizer import Tokenizer
from protocol.fields import BadField, MissingField, UnknownField
from protocol.steps import Refusal, RefusalKind

HEAD = Head("id-1", 1700000000, "tiny", "fp_1")


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return tokenizer_of(knot_of())


def tokens(tokenizer: Tokenizer, text: str) -> list[Token]:
    """The tokens of a text, each as likely as its number says, with itself and the next id as the best."""
    found: list[Token] = []
    for number, id in enumerate(tokenizer.encode(text)):
        best = ((id, -0.5 * number), (id + 1, -9.0))
        found.append(Token(id, number, Scored(id, -0.5 * number, best)))
    return found


def test_a_chunk_of_a_completion_says_what_openais_do(tokenizer: Tokenizer) -> None:
    answer: Answer = CompletionAnswer(HEAD, tokenizer, False)
    assert answer.opening(0) is None
    assert answer.delta(1, Delta("hi", tokens(tokenizer, "h"))) == {
        "id": "id-1", "object": "text_completion", "created": 1700000000, "model": "tiny",
        "system_fingerprint": "fp_1",
        "choices": [{"index": 1, "text": "hi", "logprobs": None, "finish_reason": None}],
    }  # fmt: skip
    assert answer.ending(0, "stop")["choices"] == [
        {"index": 0, "text": "", "logprobs": None, "finish_reason": "stop"}
    ]
    assert answer.counts()["choices"] == []
    whole = answer.whole([Written("a"), Written("b", finish="stop")])
    assert [choice["text"] for choice in whole["choices"]] == ["a", "b"]
    assert [choice["finish_reason"] for choice in whole["choices"]] == ["length", "stop"]


def test_a_chunk_of_a_chat_says_what_openais_do(tokenizer: Tokenizer) -> None:
    answer: Answer = ChatAnswer(HEAD, tokenizer, False)
    head = {
        "id": "id-1", "object": "chat.completion.chunk", "created": 1700000000, "model": "tiny",
        "system_fingerprint": "fp_1",
    }  # fmt: skip
    opening = {"role": "assistant", "content": "", "refusal": None}
    assert answer.opening(0) == {
        **head, "choices": [{"index": 0, "delta": opening, "logprobs": None, "finish_reason": None}],
    }  # fmt: skip
    assert answer.delta(1, Delta("hi", tokens(tokenizer, "h"))) == {
        **head,
        "choices": [{"index": 1, "delta": {"content": "hi"}, "logprobs": None, "finish_reason": None}],
    }
    assert answer.ending(0, "stop") == {
        **head, "choices": [{"index": 0, "delta": {}, "logprobs": None, "finish_reason": "stop"}],
    }  # fmt: skip
    assert answer.counts() == {**head, "choices": []}
    [choice] = answer.whole([Written("hi", finish="stop")])["choices"]
    message = {"role": "assistant", "content": "hi", "refusal": None}
    assert choice == {"index": 0, "message": message, "logprobs": None, "finish_reason": "stop"}


def test_log_probabilities_of_a_completion_are_lists_side_by_side(tokenizer: Tokenizer) -> None:
    answer = CompletionAnswer(HEAD, tokenizer, True)
    given = tokens(tokenizer, "歪")
    assert len(given) == 3, "this vocabulary has a token for every byte"
    [choice] = answer.delta(0, Delta("歪", [Token(given[0].id, 0, None), *given[1:]]))["choices"]
    found = choice["logprobs"]
    assert found["tokens"] == ["bytes:\\xe6", "bytes:\\xad", "bytes:\\xaa"]
    assert found["token_logprobs"] == [None, -0.5, -1.0]
    assert found["text_offset"] == [0, 1, 2]
    assert found["top_logprobs"][0] is None
    assert found["top_logprobs"][1]["bytes:\\xad"] == -0.5
    assert len(found["top_logprobs"][1]) == 2
    assert answer.ending(0, "length")["choices"][0]["logprobs"] is None
    assert answer.whole([Written()])["choices"][0]["logprobs"]["tokens"] == []


def test_the_token_that_was_taken_is_among_the_best_of_a_completion(tokenizer: Tokenizer) -> None:
    answer = CompletionAnswer(HEAD, tokenizer, True)
    [a, b] = tokenizer.encode("x"), tokenizer.encode("y")
    one = Token(a[0], 0, Scored(a[0], -3.0, ((b[0], -0.1),)))
    [choice] = answer.delta(0, Delta("x", [one]))["choices"]
    assert choice["logprobs"]["top_logprobs"] == [{"y": -0.1, "x": -3.0}]


def test_log_probabilities_of_a_chat_are_a_list_of_tokens_with_their_bytes(tokenizer: Tokenizer) -> None:
    answer = ChatAnswer(HEAD, tokenizer, True)
    given = tokens(tokenizer, "é")
    [choice] = answer.delta(0, Delta("é", given))["choices"]
    assert choice["logprobs"]["refusal"] is None
    first, second = choice["logprobs"]["content"]
    assert (first["token"], first["bytes"], first["logprob"]) == ("\ufffd", [0xC3], 0.0)
    assert second["bytes"] == [0xA9]
    assert [entry["logprob"] for entry in second["top_logprobs"]] == [-0.5, -9.0]
    assert answer.delta(0, Delta("x"))["choices"][0]["logprobs"] is None
    [whole] = answer.whole([Written("é", given)])["choices"]
    assert whole["logprobs"]["content"] == [first, second]


def test_an_event_is_one_line_of_data_whatever_is_in_it() -> None:
    data = event({"text": 'line\none "two" 歪\r\n\u2028'})
    assert data.startswith(b"data: ")
    assert data.endswith(b"\n\n")
    assert data.count(b"\n") == 2
    assert b"\r" not in data
    assert json.loads(data[6:]) == {"text": 'line\none "two" 歪\r\n\u2028'}
    assert event("[DONE]") == b"data: [DONE]\n\n"


def test_usage_counts_what_was_read_and_what_was_not() -> None:
    assert usage(3, 4, 2) == {
        "prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7,
        "prompt_tokens_details": {"cached_tokens": 2},
    }  # fmt: skip


def test_an_error_has_openais_shape_and_its_status() -> None:
    error = ApiError(404, "why", param="model", code="model_not_found", headers={"allow": "GET"})
    assert error.body == {
        "error": {
            "message": "why", "type": "invalid_request_error", "param": "model", "code": "model_not_found",
        }
    }  # fmt: skip
    assert error.reply.status == 404
    assert error.reply.json() == error.body
    assert error.reply.headers["allow"] == "GET"
    assert bad_request("why", "n").status == 400


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (BadField("x", "n"), "invalid_value"), (MissingField("x", "n"), "missing_required_parameter"),
        (UnknownField("x", "n"), "unknown_parameter"), (BadField("x"), "invalid_json"),
    ],
)  # fmt: skip
def test_a_parameters_error_says_which_and_of_what_sort(error: BadField, code: str) -> None:
    found = of_field(error)
    assert (found.status, found.code, found.param) == (400, code, error.name)


@pytest.mark.parametrize("kind", list(RefusalKind))
def test_every_refusal_of_the_cluster_is_a_servers_error_with_its_kind_as_code(kind: RefusalKind) -> None:
    found = of_refusal(Refusal(kind, "why"))
    assert found.kind == "server_error"
    assert found.code == str(kind)
    assert 500 <= found.status < 600
    assert ("retry-after" in found.headers) == (found.status == 503)


def test_a_gateway_that_cannot_serve_says_whether_to_come_back() -> None:
    found = not_serving(OSError("the bucket is away"), True)
    assert (found.status, found.code, found.headers) == (503, "unavailable", {"retry-after": "1"})
    found = not_serving(ValueError("KNOT_KEY is not set"), False)
    assert (found.status, found.code, found.headers) == (500, "cannot_start", {})
    assert "KNOT_KEY is not set" in str(found)


@pytest.mark.parametrize(("wait", "said"), [(None, "1"), (0, "1"), (1, "1"), (1000, "1"), (1001, "2")])
def test_who_is_to_come_back_is_told_when_in_whole_seconds(wait: int | None, said: str) -> None:
    assert of_refusal(Refusal(RefusalKind.BUSY, "full", wait)).headers["retry-after"] == said
