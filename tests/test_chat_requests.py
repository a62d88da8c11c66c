"""What `POST /v1/chat/completions` takes, and what a template gets of it."""

from __future__ import annotations

from typing import Any

import pytest

from chat import ChatRequest
from parameters import Parameters
from protocol.fields import BadField, Fields, MissingField, UnknownField

HELLO = {"role": "user", "content": "hello"}


def read(**body: Any) -> ChatRequest:
    return ChatRequest.from_fields(Fields({"messages": [HELLO], **body}, "the request"))


def messages(*given: Any) -> list[dict[str, Any]]:
    return [dict(message) for message in read(messages=list(given)).messages]


def test_what_is_left_out_is_as_openai_has_it() -> None:
    assert read() == ChatRequest((HELLO,), Parameters())
    assert read().parameters.max_tokens is None, "as many as there is room for"
    assert read().parameters.sampler.temperature == 1


def test_log_probabilities_are_asked_for_by_two_parameters() -> None:
    assert read().parameters.logprobs is None
    assert read(logprobs=False).parameters.logprobs is None
    assert read(logprobs=True).parameters.logprobs == 0
    assert read(logprobs=True, top_logprobs=20).parameters.logprobs == 20
    with pytest.raises(BadField, match="top_logprobs is given without logprobs"):
        read(top_logprobs=2)


def test_the_number_of_tokens_has_two_names() -> None:
    assert read(max_tokens=3).parameters.max_tokens == 3
    assert read(max_completion_tokens=0).parameters.max_tokens == 0
    with pytest.raises(BadField, match="max_completion_tokens 3 and max_tokens 4"):
        read(max_completion_tokens=3, max_tokens=4)


def test_parts_of_text_become_one_text() -> None:
    parts = [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]
    assert messages({"role": "user", "content": parts}) == [HELLO]
    assert messages({"role": "user", "content": []}) == [{"role": "user", "content": ""}]


def test_system_messages_may_stand_anywhere_and_developers_are_of_the_system() -> None:
    system = {"role": "system", "content": "be brief"}
    assert messages(HELLO, system, HELLO) == [HELLO, system, HELLO]
    assert messages({"role": "developer", "content": "be brief"}) == [system]


def test_an_answer_that_a_client_sends_back_is_taken() -> None:
    answer = {
        "role": "assistant", "content": "hi", "refusal": None, "annotations": [], "audio": None,
        "function_call": None, "tool_calls": None,
    }  # fmt: skip
    assert messages(HELLO, answer, HELLO) == [HELLO, {"role": "assistant", "content": "hi"}, HELLO]


def test_calls_of_tools_and_their_results_reach_the_template() -> None:
    calls = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
    found = messages(
        HELLO,
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "content": "5", "tool_call_id": "1", "name": "f"},
    )
    assert found[1:] == [
        {"role": "assistant", "content": "", "tool_calls": calls},
        {"role": "tool", "content": "5", "name": "f", "tool_call_id": "1"},
    ]


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ([], "messages"), ({}, "messages"), ("hello", "messages"), ([HELLO] * 4097, "messages"),
        (["hello"], "messages[0]"), ([None], "messages[0]"), ([HELLO, 3], "messages[1]"),
        ([{"content": "x"}], "messages[0].role"), ([{"role": "king", "content": "x"}], "messages[0].role"),
        ([{"role": 3, "content": "x"}], "messages[0].role"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": None}], "messages[0].content"),
        ([{"role": "assistant", "content": None}], "messages[0].content"),
        ([{"role": "user", "content": 3}], "messages[0].content"),
        ([{"role": "user", "content": {}}], "messages[0].content"),
        ([{"role": "user", "content": ["x"]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [{"type": "text", "text": "x", "more": 1}]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
         "messages[0].content[0]"),
        ([HELLO, {"role": "user", "content": "x", "colour": "red"}], "messages[1].colour"),
        ([{"role": "user", "content": "x", "tool_calls": [{}]}], "messages[0].tool_calls"),
        ([{"role": "assistant", "content": "x", "audio": {"id": "a"}}], "messages[0].audio"),
        ([{"role": "user", "content": "x", "name": 3}], "messages[0].name"),
    ],
)  # fmt: skip
def test_a_message_that_is_wrong_is_named(given: Any, name: str) -> None:
    with pytest.raises(BadField) as caught:
        read(messages=given)
    assert caught.value.name == name
    assert "messages" in str(caught.value)
    assert len(str(caught.value)) < 300


def test_messages_that_are_missing_are_said_to_be_missing() -> None:
    with pytest.raises(MissingField, match="messages"):
        ChatRequest.from_fields(Fields({}, "the request"))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("prompt", "x"), ("echo", True), ("best_of", 1), ("tools", [{"type": "function"}]),
        ("tool_choice", "required"), ("response_format", {"type": "json_object"}), ("modalities", ["audio"]),
        ("functions", [{}]), ("reasoning_effort", "high"), ("audio", {}), ("prediction", {}),
        ("max_token", 1), ("web_search_options", {}), ("store", True),
    ],
)  # fmt: skip
def test_a_parameter_that_nobody_would_honour_is_named_and_not_ignored(name: str, value: Any) -> None:
    with pytest.raises(UnknownField, match=name) as caught:
        read(**{name: value})
    assert caught.value.name == name


def test_what_changes_nothing_is_taken() -> None:
    harmless = {
        "tools": [], "tool_choice": "none", "response_format": {"type": "text"}, "modalities": ["text"],
        "parallel_tool_calls": True, "store": False, "user": "me", "reasoning_effort": None,
    }  # fmt: skip
    assert read(**harmless) == read()


def test_templates_may_be_given_variables_but_not_those_that_the_gateway_says() -> None:
    assert read(chat_template_kwargs={"enable_thinking": False}).variables == {"enable_thinking": False}
    for name in ("messages", "tools", "add_generation_prompt", "bos_token", "eos_token"):
        with pytest.raises(BadField, match=f"{name}.*the gateway says itself") as caught:
            read(chat_template_kwargs={name: 1})
        assert caught.value.name == "chat_template_kwargs"
    with pytest.raises(BadField, match="chat_template_kwargs"):
        read(chat_template_kwargs=[])
