"""Chats as a client meets them: the model's own form, and messages and templates that go wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from api_support import PATH, case, chat, complete, post, refused
from fake_cluster import FakeCluster
from synth import CHAT_TEMPLATE, SPECIALS, make_tiny_knot

from knot.chat import render
from knot.tokenizer import Tokenizer

CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "the fox"}]


def tokenizer_of(cluster: FakeCluster) -> Tokenizer:
    return cluster.gateway._tokenizer


def ids_of(cluster: FakeCluster, messages: list[dict[str, str]], template: str = CHAT_TEMPLATE) -> list[int]:
    return tokenizer_of(cluster).encode(render(template, messages), allow_special=True)


def with_template(folder: Path, template: str | None, **more: Any) -> Path:
    return make_tiny_knot(folder / "templated.knot", chat_template=template, **more)


def test_a_chat_is_the_completion_of_the_models_own_form() -> None:
    async def body(cluster: FakeCluster) -> None:
        expected = ids_of(cluster, HELLO)
        start, end = (tokenizer_of(cluster).encode(word, allow_special=True) for word in SPECIALS[1:])
        assert expected[:1] == start
        assert expected.count(start[0]) == 2
        assert expected.count(end[0]) == 1, "control tokens are tokens, not their letters"
        answer = await chat(cluster, "the fox", max_tokens=5, seed=3)
        plain = await complete(cluster, prompt=expected, max_tokens=5)
        assert answer["object"] == "chat.completion"
        assert answer["id"].startswith("chatcmpl-")
        assert answer["model"] == cluster.knot.header.name
        assert answer["system_fingerprint"].startswith("fp_")
        [choice] = answer["choices"]
        assert choice["message"] == {
            "role": "assistant", "content": plain["choices"][0]["text"], "refusal": None,
        }  # fmt: skip
        assert choice["finish_reason"] == "length"
        assert choice["logprobs"] is None
        assert answer["usage"]["prompt_tokens"] == len(expected)
        assert answer["usage"]["completion_tokens"] == 5
        assert answer["knot"]["prompt_ids"] == expected
        assert answer["knot"]["ids"] == plain["knot"]["ids"]
        assert answer["knot"]["seed"] == 3

    case(body)


def test_a_streamed_chat_says_who_speaks_then_what_then_why_it_ended() -> None:
    async def body(cluster: FakeCluster) -> None:
        whole = await chat(cluster, "the fox", max_tokens=5)
        first, *deltas, last, usage, done = await chat(
            cluster, "the fox", max_tokens=5, stream=True, stream_options={"include_usage": True}
        )
        assert done == "[DONE]"
        assert all(event["object"] == "chat.completion.chunk" for event in (first, *deltas, last, usage))
        assert len({event["id"] for event in (first, *deltas, last, usage)}) == 1
        assert first["choices"][0]["delta"] == {"role": "assistant", "content": "", "refusal": None}
        assert all(set(event["choices"][0]["delta"]) == {"content"} for event in deltas)
        assert all(event["choices"][0]["delta"]["content"] for event in deltas), "no empty ones in between"
        assert all(event["choices"][0]["finish_reason"] is None for event in (first, *deltas))
        assert (last["choices"][0]["delta"], last["choices"][0]["finish_reason"]) == ({}, "length")
        text = "".join(event["choices"][0]["delta"]["content"] for event in deltas)
        assert text == whole["choices"][0]["message"]["content"]
        assert all(event["usage"] is None for event in (first, *deltas, last))
        assert usage["choices"] == []
        assert usage["usage"]["total_tokens"] == whole["usage"]["total_tokens"]

    case(body)


def test_without_max_tokens_a_chat_is_as_long_as_there_is_room_for() -> None:
    async def body(cluster: FakeCluster) -> None:
        answer = await chat(cluster, "the fox", ignore_eos=True)
        assert answer["usage"]["completion_tokens"] == 7
        around = len(ids_of(cluster, [{"role": "user", "content": ""}]))
        answer = await chat(cluster, "z" * (508 - around), ignore_eos=True)
        assert answer["usage"]["prompt_tokens"] == 508
        assert answer["usage"]["completion_tokens"] == 4, "the context's end"

    case(body, MAX_GENERATED_TOKENS="7")


def test_a_system_message_in_mid_chat_and_content_in_parts_are_served() -> None:
    async def body(cluster: FakeCluster) -> None:
        plain = [
            {"role": "user", "content": "the fox"},
            {"role": "assistant", "content": "jumps"},
            {"role": "system", "content": "over"},
            {"role": "user", "content": "the dog"},
        ]
        parts = [{"type": "text", "text": "the "}, {"type": "text", "text": "dog"}]
        answer = await chat(cluster, *plain[:3], {"role": "user", "content": parts}, max_tokens=1)
        assert answer["knot"]["prompt_ids"] == ids_of(cluster, plain)
        answer = await chat(cluster, {"role": "developer", "content": "over"}, max_tokens=1)
        assert answer["knot"]["prompt_ids"] == ids_of(cluster, [plain[2]])

    case(body)


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "unsafe"),
        ("{{ cycler.__init__.__globals__.os.popen('id').read() }}", "unsafe"),
        ("{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}", "rounds"),
        ("{{ 'x' * 10 ** 10 }}", "wants"),
        ("{% if %}", "Expected an expression"),
        ("{{ messages[7]['content'] + 1 }}", "chat template"),
        ("{% include 'secrets' %}", "chat template"),
        ("{{ messages.append(1) }}", "unsafe"),
    ],
)
def test_a_template_that_raises_or_tries_to_run_code_is_a_400_in_its_words(
    tmp_path: Path, template: str, words: str
) -> None:
    async def body(cluster: FakeCluster) -> None:
        for stream in (False, True):
            status, error = await refused(cluster, CHAT, messages=HELLO, stream=stream)
            assert status == 400
            assert (error["type"], error["param"]) == ("invalid_request_error", "messages")
            assert error["code"] == "chat_template_error"
            assert words in error["message"]
        assert (await complete(cluster, prompt="the", max_tokens=1))["usage"]["completion_tokens"] == 1

    case(body, with_template(tmp_path, template), stations=1, shards=1)


def test_a_model_without_a_template_says_so(tmp_path: Path) -> None:
    async def body(cluster: FakeCluster) -> None:
        status, error = await refused(cluster, CHAT, messages=HELLO)
        assert (status, error["code"]) == (400, "no_chat_template")
        assert "/v1/completions" in error["message"]

    case(body, with_template(tmp_path, None), stations=1, shards=1)


def test_a_beginning_of_text_that_the_template_has_is_not_doubled(tmp_path: Path) -> None:
    template = "{{ bos_token }}" + CHAT_TEMPLATE
    bos = {"tokenizer.ggml.bos_token_id": 297 - 3, "tokenizer.ggml.add_bos_token": True}

    async def body(cluster: FakeCluster) -> None:
        info = tokenizer_of(cluster).info
        assert info.add_bos
        found = (await chat(cluster, "the fox", max_tokens=1))["knot"]["prompt_ids"]
        assert found[0] == info.bos_id
        assert found.count(info.bos_id) == 1
        plain = (await complete(cluster, prompt="the fox", max_tokens=1))["knot"]["prompt_ids"]
        assert plain[0] == info.bos_id
        assert plain.count(info.bos_id) == 1

    case(body, with_template(tmp_path, template, arch="llama", extra=bos), stations=1, shards=1)


def test_a_model_without_a_beginning_of_text_gets_none() -> None:
    async def body(cluster: FakeCluster) -> None:
        info = tokenizer_of(cluster).info
        assert not info.add_bos
        found = (await complete(cluster, prompt="the fox", max_tokens=1))["knot"]["prompt_ids"]
        assert found == tokenizer_of(cluster).encode("the fox", add_bos=False)

    case(body, stations=1, shards=1)


def test_templates_get_the_variables_of_the_request(tmp_path: Path) -> None:
    template = "{% if loud %}THE FOX{% else %}the fox{% endif %}"

    async def body(cluster: FakeCluster) -> None:
        answer = await chat(cluster, "x", max_tokens=1, chat_template_kwargs={"loud": True})
        assert answer["knot"]["prompt_ids"] == tokenizer_of(cluster).encode("THE FOX")
        answer = await chat(cluster, "x", max_tokens=1)
        assert answer["knot"]["prompt_ids"] == tokenizer_of(cluster).encode("the fox")

    case(body, with_template(tmp_path, template), stations=1, shards=1)


def test_a_chat_longer_than_the_context_is_refused_with_both_numbers_and_never_cut() -> None:
    async def body(cluster: FakeCluster) -> None:
        messages = [{"role": "user", "content": "z" * 600}]
        count = len(ids_of(cluster, messages))
        status, error = await refused(cluster, CHAT, messages=messages)
        assert (status, error["code"], error["param"]) == (400, "context_length_exceeded", "messages")
        assert f"{count} tokens" in error["message"]
        assert "context of 512" in error["message"]
        status, error = await refused(cluster, CHAT, messages=HELLO, max_completion_tokens=508)
        assert (status, error["code"]) == (400, "context_length_exceeded")
        assert "508" in error["message"]

    case(body, stations=1, shards=1)


def test_a_message_that_is_wrong_is_a_400_that_names_it() -> None:
    async def body(cluster: FakeCluster) -> None:
        status, error = await refused(cluster, CHAT, messages=[*HELLO, {"role": "king", "content": "x"}])
        assert (status, error["param"], error["code"]) == (400, "messages[1].role", "invalid_value")
        status, error = await refused(cluster, CHAT, messages=HELLO, tool=1)
        assert (status, error["param"], error["code"]) == (400, "tool", "unknown_parameter")
        status, error = await refused(cluster, CHAT)
        assert (status, error["param"], error["code"]) == (400, "messages", "missing_required_parameter")

    case(body, stations=1, shards=1)


def test_no_token_at_all_is_an_answer_like_any_other() -> None:
    async def body(cluster: FakeCluster) -> None:
        answer = await chat(cluster, "the fox", max_tokens=0)
        assert answer["choices"][0]["message"]["content"] == ""
        assert answer["choices"][0]["finish_reason"] == "length"
        first, last, done = await chat(cluster, "the fox", max_tokens=0, stream=True)
        assert first["choices"][0]["delta"]["role"] == "assistant"
        assert last["choices"][0]["finish_reason"] == "length"
        assert done == "[DONE]"

    case(body, PATH, stations=1, shards=1)


def test_several_answers_to_a_streamed_chat_come_side_by_side() -> None:
    async def body(cluster: FakeCluster) -> None:
        asked: dict[str, Any] = {"max_tokens": 4, "n": 3, "temperature": 1.5, "seed": 5, "ignore_eos": True}
        whole = await chat(cluster, "the fox", **asked)
        *events, done = await chat(cluster, "the fox", stream=True, **asked)
        assert done == "[DONE]"
        for index in range(3):
            own = [e["choices"][0] for e in events if e["choices"][0]["index"] == index]
            assert own[0]["delta"]["role"] == "assistant"
            assert own[-1]["finish_reason"] == "length"
            text = "".join(choice["delta"].get("content", "") for choice in own)
            assert text == whole["choices"][index]["message"]["content"]
        order = [event["choices"][0]["index"] for event in events]
        assert order != sorted(order), "and not one after the other"

    case(body)


def test_the_status_of_a_chat_that_cannot_be_served_comes_before_any_event() -> None:
    async def body(cluster: FakeCluster) -> None:
        status, answer = await post(cluster, CHAT, messages=HELLO, stream=True, model="another")
        assert (status, answer["error"]["code"]) == (404, "model_not_found")
        assert "another" in answer["error"]["message"]
        assert cluster.knot.header.name in answer["error"]["message"]

    case(body, stations=1, shards=1)
