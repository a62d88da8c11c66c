"""What `POST /v1/completions` takes, and that whatever it does not take is named."""

from __future__ import annotations

from typing import Any

import pytest

from completions import MAX_PROMPT_CHARS, CompletionRequest
from parameters import MAX_CHOICES, MAX_STOPS, SEEDS, Parameters
from protocol.fields import BadField, Fields, MissingField, UnknownField
from sampling import Sampler
from shaping import Shaping


def read(**body: Any) -> CompletionRequest:
    return CompletionRequest.from_fields(Fields({"prompt": "hello", **body}, "the request"))


def test_what_is_left_out_is_as_openai_has_it() -> None:
    assert read() == CompletionRequest(
        prompts=("hello",),
        echo=False,
        parameters=Parameters(
            model=None, n=1, max_tokens=16, sampler=Sampler(temperature=1.0), shaping=Shaping(), seed=None,
            stops=(), logprobs=None, stream=False, include_usage=False, allow_degraded=False,
            ignore_end=False, details=False,
        ),
    )  # fmt: skip


def test_everything_that_is_taken_is_taken() -> None:
    request = read(
        model="m", prompt=[1, 2], n=3, best_of=3, max_tokens=0, temperature=0, top_k=5, top_p=0.5, min_p=0.1,
        presence_penalty=-2, frequency_penalty=2, repetition_penalty=1.5, logit_bias={"7": -100, "0": 1.5},
        seed=-3, stop="x", logprobs=0, echo=True, stream=True,
        stream_options={"include_usage": True, "include_obfuscation": False}, on_shard_failure="degrade",
        ignore_eos=True, details=True, suffix="",
    )  # fmt: skip
    assert request == CompletionRequest(
        prompts=((1, 2),),
        echo=True,
        parameters=Parameters(
            model="m", n=3, max_tokens=0, sampler=Sampler(0.0, 5, 0.5, 0.1),
            shaping=Shaping(-2.0, 2.0, 1.5, {7: -100.0, 0: 1.5}), seed=-3, stops=("x",), logprobs=0,
            stream=True, include_usage=True, allow_degraded=True, ignore_end=True, details=True,
        ),
    )  # fmt: skip
    assert read(stop=["a", "b"]).parameters.stops == ("a", "b")
    assert read(stop=[]).parameters.stops == ()
    assert read(max_completion_tokens=3).parameters.max_tokens == 3
    assert read(max_tokens=3, max_completion_tokens=3).parameters.max_tokens == 3


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("", ("",)),
        ([], ((),)),
        (["a", "b"], ("a", "b")),
        ([[1, 2], [3]], ((1, 2), (3,))),
        ([[]], ((),)),
        ([""], ("",)),
    ],
)
def test_a_prompt_is_a_text_or_ids_or_several_of_them(prompt: Any, prompts: Any) -> None:
    assert read(prompt=prompt).prompts == prompts


def test_null_is_as_good_as_left_out_since_clients_send_it() -> None:
    names = [
        "model", "n", "best_of", "max_tokens", "max_completion_tokens", "temperature", "top_k", "top_p",
        "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "seed", "stop",
        "logprobs", "echo", "suffix", "stream", "stream_options", "on_shard_failure", "ignore_eos", "details",
        "user", "metadata", "store", "service_tier",
    ]  # fmt: skip
    assert read(**dict.fromkeys(names)) == read()


def test_what_says_nothing_about_the_answer_changes_nothing() -> None:
    harmless = {
        "user": "somebody", "metadata": {"a": "b"}, "store": False, "service_tier": "auto",
        "safety_identifier": "x", "prompt_cache_key": "y", "prompt_cache_retention": "24h",
    }  # fmt: skip
    assert read(**harmless) == read()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("n", 0), ("n", -1), ("n", 1.5), ("n", MAX_CHOICES + 1), ("n", True),
        ("max_tokens", -1), ("max_tokens", 1.5), ("max_tokens", "16"), ("max_tokens", True),
        ("max_tokens", 1 << 21), ("max_completion_tokens", -1),
        ("temperature", -0.1), ("temperature", 2.1), ("temperature", "hot"), ("temperature", True),
        ("top_k", -1), ("top_k", 0.5), ("top_p", -0.1), ("top_p", 1.1), ("min_p", -0.1), ("min_p", 1.5),
        ("presence_penalty", 2.1), ("presence_penalty", -2.1), ("presence_penalty", "x"),
        ("frequency_penalty", 2.1), ("frequency_penalty", -2.1),
        ("repetition_penalty", 0), ("repetition_penalty", 11), ("repetition_penalty", -1),
        ("logit_bias", 3), ("logit_bias", []), ("logit_bias", {"x": 1}), ("logit_bias", {"-1": 1}),
        ("logit_bias", {"01": 1}), ("logit_bias", {"1": 101}), ("logit_bias", {"1": -101}),
        ("logit_bias", {"1": "5"}), ("logit_bias", {"1": None}), ("logit_bias", {"1": True}),
        ("logit_bias", {"٣": 1}), ("logit_bias", {"99999999999": 1}),
        ("logit_bias", {str(i): 0 for i in range(1025)}),
        ("seed", 1 << 63), ("seed", 0.5), ("seed", "x"),
        ("stop", 3), ("stop", [1]), ("stop", ""), ("stop", ["a", ""]), ("stop", {}), ("stop", "x" * 1025),
        ("stop", ["x"] * (MAX_STOPS + 1)),
        ("logprobs", -1), ("logprobs", 21), ("logprobs", True), ("logprobs", 1.5), ("echo", 1),
        ("stream", 1), ("stream", "true"), ("stream_options", 3), ("stream_options", {"include_usage": True}),
        ("on_shard_failure", "ignore"), ("ignore_eos", 0), ("details", "yes"), ("model", 3), ("model", ""),
        ("prompt", 3), ("prompt", {}), ("prompt", [1, -1]), ("prompt", [1.5]), ("prompt", ["a", 1]),
        ("prompt", [[1, 2], "a"]), ("prompt", [[1, -2]]), ("prompt", [True]), ("prompt", [[[1]]]),
        ("prompt", "x" * (MAX_PROMPT_CHARS + 1)), ("prompt", ["a"] * (MAX_CHOICES + 1)),
    ],
)  # fmt: skip
def test_a_parameter_that_is_wrong_is_named(name: str, value: Any) -> None:
    with pytest.raises(BadField, match=name) as caught:
        read(**{name: value})
    assert caught.value.name == name
    assert len(str(caught.value)) < 300


def test_a_prompt_that_is_missing_is_said_to_be_missing() -> None:
    for prompt in ({}, {"prompt": None}):
        with pytest.raises(MissingField, match="prompt"):
            CompletionRequest.from_fields(Fields(prompt, "the request"))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("top-k", 1), ("max_token", 1), ("messages", []), ("top_logprobs", 1), ("best_of", 2),
        ("suffix", "end"), ("store", True), ("service_tier", "priority"), ("tools", []), ("best_of_n", 1),
    ],
)  # fmt: skip
def test_a_parameter_that_nobody_would_honour_is_named_and_not_ignored(name: str, value: Any) -> None:
    with pytest.raises(UnknownField, match=name) as caught:
        read(**{name: value})
    assert caught.value.name == name
    with pytest.raises(UnknownField, match="unknown field 'chunk'"):
        read(stream=True, stream_options={"chunk": 1})


def test_two_names_for_the_same_with_two_values_are_refused() -> None:
    with pytest.raises(BadField, match="max_tokens 3 and max_completion_tokens 4"):
        read(max_tokens=3, max_completion_tokens=4)


def test_more_answers_than_may_be_are_refused_whether_by_n_or_by_prompts() -> None:
    assert len(read(prompt=["a"] * 64, n=2).prompts) == 64
    with pytest.raises(BadField, match="130 answers"):
        read(prompt=["a"] * 65, n=2)


def test_every_choice_has_a_seed_of_its_own_and_the_first_has_the_one_given() -> None:
    def seeds(seed: int, count: int) -> list[int]:
        parameters = read(seed=seed).parameters
        return [parameters.sampler_of(choice).seed for choice in range(count)]

    assert seeds(7, 3) == [7, 8, 9]
    assert seeds(SEEDS[1], 2) == [SEEDS[1], SEEDS[0]]
    assert seeds(-1, 2) == [-1, 0]
