"""Every parameter of the API does what it says; what concerns numbers is compared with exact arithmetic."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from api_support import PATH, ask, case, chat, complete
from core_support import exact_logits, greedy, header_of, reference_of
from fake_cluster import FakeCluster
from generation_support import COUNT, EXPECTED, PROMPT
from synth import make_tiny_knot
from test_sampling import chi_squared

from protocol.frames import decode

HELLO = {"role": "user", "content": "the fox"}
VOCAB = header_of(PATH).config.vocab_size
# The engine multiplies quantised weights with activations of 16 bits; the reference does not.
NEAR = 0.005


def text_of(cluster: FakeCluster, ids: list[int]) -> str:
    return cluster.gateway._tokenizer.decode(ids)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    values = logits.astype(np.float64)
    top = values.max()
    return values - top - math.log(np.exp(values - top).sum())


def exact_logprobs(prompt: tuple[int, ...]) -> np.ndarray:
    """Of the token after every position, by exact arithmetic: the model's own, so unused ids count here."""
    [logits] = reference_of(PATH).logits([prompt])
    return np.array([log_softmax(row) for row in logits])


# -- several answers ----------------------------------------------------------------------------------------


def test_each_of_n_answers_is_the_one_that_its_seed_gives_alone_and_the_prompt_is_read_once() -> None:
    async def body(cluster: FakeCluster) -> None:
        asked: dict[str, Any] = {"max_tokens": 5, "temperature": 1.3, "ignore_eos": True}
        alone = [
            (await complete(cluster, prompt=list(PROMPT), seed=40 + i, **asked))["knot"]["ids"]
            for i in range(3)
        ]
        assert len(set(map(tuple, alone))) == 3, "or this tests nothing"
        read = rows_read(cluster)
        answer = await complete(cluster, prompt=list(PROMPT), n=3, seed=40, **asked)
        assert rows_read(cluster) - read == len(PROMPT) + 3 * 4, "the prompt once, then each its own"
        assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
        assert [choice["text"] for choice in answer["choices"]] == [text_of(cluster, ids) for ids in alone]
        assert [one["ids"] for one in answer["knot"]["choices"]] == alone
        assert [one["seed"] for one in answer["knot"]["choices"]] == [40, 41, 42]
        assert answer["usage"]["prompt_tokens"] == len(PROMPT)
        assert answer["usage"]["completion_tokens"] == 15

    case(body, PREFIX_CACHE="off")


def rows_read(cluster: FakeCluster) -> int:
    """Rows that the first station has taken through its layers so far."""
    found = 0
    for call in cluster.station_peers[0].calls:
        if call.path == "/forward":
            found += sum(part.envelope["count"] for part in decode(call.body).parts)
    return found


def test_several_prompts_are_answered_in_their_order() -> None:
    async def body(cluster: FakeCluster) -> None:
        prompts = [list(PROMPT), [137, 148, 218], list(PROMPT[:5])]
        answer = await complete(cluster, prompt=prompts, max_tokens=3, n=2, ignore_eos=True)
        expected = [greedy(PATH, tuple(prompt), 3) for prompt in prompts for _ in range(2)]
        assert [one["ids"] for one in answer["knot"]["choices"]] == expected
        assert [choice["index"] for choice in answer["choices"]] == list(range(6))
        assert answer["usage"]["prompt_tokens"] == sum(map(len, prompts))
        *found, done = await complete(cluster, prompt=prompts, max_tokens=3, stream=True, ignore_eos=True)
        assert done == "[DONE]"
        for index in range(3):
            own = [e["choices"][0] for e in found if e["choices"][0]["index"] == index]
            assert "".join(choice["text"] for choice in own) == text_of(cluster, expected[2 * index])
            assert own[-1]["finish_reason"] == "length"

    case(body)


def test_one_of_several_answers_may_end_before_the_others() -> None:
    async def body(cluster: FakeCluster) -> None:
        asked: dict[str, Any] = {"prompt": list(PROMPT), "max_tokens": 6, "temperature": 1.3, "seed": 40}
        whole = await complete(cluster, n=3, ignore_eos=True, **asked)
        stop = text_of(cluster, whole["knot"]["choices"][1]["ids"][1:3])
        others = [choice["text"] for choice in whole["choices"] if stop not in choice["text"]]
        assert len(others) == 2
        answer = await complete(cluster, n=3, ignore_eos=True, stop=stop, **asked)
        assert [choice["finish_reason"] for choice in answer["choices"]] == ["length", "stop", "length"]
        assert answer["choices"][1]["text"] == whole["choices"][1]["text"].split(stop)[0]
        assert [answer["choices"][i]["text"] for i in (0, 2)] == others

    case(body)


@pytest.mark.parametrize("after", [0, 1, 4])
def test_a_client_that_leaves_several_answers_frees_all_of_them(after: int) -> None:
    async def body(cluster: FakeCluster) -> None:
        request = b'{"prompt": [5, 17, 42, 7], "n": 4, "max_tokens": 50, "stream": true, "ignore_eos": true}'
        for _ in range(3):
            reply = await ask(cluster, "POST", "/v1/completions", request)
            stream: Any = reply.body
            for _ in range(after):
                await anext(stream)
            await stream.aclose()
            await cluster.background.drain()
            cluster.at_rest()

    case(body)


# -- log-probabilities --------------------------------------------------------------------------------------


def test_log_probabilities_of_a_completion_are_those_of_the_models_softmax() -> None:
    async def body(cluster: FakeCluster) -> None:
        answer = await complete(cluster, prompt=list(PROMPT), max_tokens=COUNT, logprobs=4)
        found = answer["choices"][0]["logprobs"]
        exact = exact_logprobs((*PROMPT, *EXPECTED))[len(PROMPT) - 1 : -1]
        assert found["token_logprobs"] == pytest.approx(
            [row[id] for row, id in zip(exact, EXPECTED, strict=True)], abs=NEAR
        )
        assert [name.startswith("bytes:") for name in found["tokens"]].count(True) == 1
        pieces = [text_of(cluster, [id]) for id in EXPECTED]
        assert "".join(pieces) == answer["choices"][0]["text"]
        assert found["text_offset"] == [0, *np.cumsum([len(piece) for piece in pieces])[:-1]]
        for row, best, own in zip(exact, found["top_logprobs"], found["token_logprobs"], strict=True):
            values = list(best.values())
            assert values == sorted(values, reverse=True)
            assert len(values) == 4
            assert values == pytest.approx(sorted(row, reverse=True)[:4], abs=NEAR)
            assert own == values[0], "greedy takes the best"

    case(body)


def test_log_probabilities_of_a_chat_are_those_of_the_completion_of_its_prompt() -> None:
    async def body(cluster: FakeCluster) -> None:
        one = await chat(cluster, "the fox", max_tokens=4, logprobs=True, top_logprobs=3, ignore_eos=True)
        other = await complete(
            cluster, prompt=one["knot"]["prompt_ids"], max_tokens=4, logprobs=3, ignore_eos=True
        )
        content = one["choices"][0]["logprobs"]["content"]
        flat = other["choices"][0]["logprobs"]
        assert [entry["logprob"] for entry in content] == flat["token_logprobs"]
        assert b"".join(bytes(entry["bytes"]) for entry in content) == b"".join(
            cluster.gateway._tokenizer.token_bytes(id) for id in other["knot"]["ids"]
        )
        assert [[best["logprob"] for best in entry["top_logprobs"]] for entry in content] == [
            list(best.values()) for best in flat["top_logprobs"]
        ]
        one = await chat(cluster, "the fox", max_tokens=2, logprobs=True, ignore_eos=True)
        assert [entry["top_logprobs"] for entry in one["choices"][0]["logprobs"]["content"]] == [[], []]

    case(body)


@pytest.mark.parametrize("temperature", [0, 1.7])
def test_streamed_log_probabilities_are_those_of_the_whole_answer(temperature: float) -> None:
    async def body(cluster: FakeCluster) -> None:
        # Hot, so that tokens are no whole characters.
        asked: dict[str, Any] = {
            "max_tokens": 24, "temperature": temperature, "seed": 4, "ignore_eos": True,
        }  # fmt: skip
        whole = await complete(cluster, prompt=list(PROMPT), logprobs=2, **asked)
        *found, _ = await complete(cluster, prompt=list(PROMPT), logprobs=2, stream=True, **asked)
        joined: dict[str, list[Any]] = {}
        text = ""
        for event in found:
            choice = event["choices"][0]
            for name, values in (choice["logprobs"] or {}).items():
                joined.setdefault(name, []).extend(values)
            text += choice["text"]
        assert joined == whole["choices"][0]["logprobs"]
        assert text == whole["choices"][0]["text"]
        assert len(joined["tokens"]) == 24
        *found, _ = await chat(cluster, "the fox", logprobs=True, top_logprobs=1, stream=True, **asked)
        whole = await chat(cluster, "the fox", logprobs=True, top_logprobs=1, **asked)
        content = [
            entry
            for event in found
            if event["choices"][0]["logprobs"]
            for entry in event["choices"][0]["logprobs"]["content"]
        ]
        assert content == whole["choices"][0]["logprobs"]["content"]

    case(body)


def test_no_log_probability_tells_of_what_a_stop_string_took() -> None:
    async def body(cluster: FakeCluster) -> None:
        whole = await complete(cluster, prompt=list(PROMPT), max_tokens=COUNT, logprobs=0)
        text, tokens = whole["choices"][0]["text"], whole["choices"][0]["logprobs"]["tokens"]
        assert len(tokens[2]) > 3
        # From the beginning of a token to inside the next one; and within one.
        for stop, left in ((tokens[1] + tokens[2][:2], 1), (tokens[2][2:], 2)):
            at = text.find(stop)
            assert at > 0
            answer = await complete(cluster, prompt=list(PROMPT), max_tokens=COUNT, logprobs=0, stop=stop)
            assert answer["choices"][0]["text"] == text[:at]
            assert answer["choices"][0]["logprobs"]["tokens"] == tokens[:left]
            assert answer["choices"][0]["finish_reason"] == "stop"

    case(body)


# -- echo ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", ["def add(one", list(PROMPT)])
def test_an_echo_begins_with_the_prompt(stream: bool, prompt: Any) -> None:
    async def body(cluster: FakeCluster) -> None:
        plain = await complete(cluster, prompt=prompt, max_tokens=3)
        answer = await complete(cluster, prompt=prompt, max_tokens=3, echo=True, stream=stream)
        if stream:
            text = "".join(event["choices"][0]["text"] for event in answer[:-1])
        else:
            text = answer["choices"][0]["text"]
        own = prompt if isinstance(prompt, str) else text_of(cluster, prompt)
        assert text == own + plain["choices"][0]["text"]

    case(body)


def test_a_prompt_is_scored_without_writing_a_token() -> None:
    async def body(cluster: FakeCluster) -> None:
        exact = exact_logprobs(PROMPT)
        for count in (0, 2):
            answer = await complete(
                cluster, prompt=list(PROMPT), max_tokens=count, echo=True, logprobs=2, n=2, ignore_eos=True
            )
            assert answer["usage"]["completion_tokens"] == 2 * count
            for choice in answer["choices"]:
                found = choice["logprobs"]
                assert found["token_logprobs"][0] is None
                assert found["top_logprobs"][0] is None
                scored = found["token_logprobs"][1 : len(PROMPT)]
                expected = [exact[at][id] for at, id in enumerate(PROMPT[1:])]
                assert scored == pytest.approx(expected, abs=NEAR)
                assert len(found["tokens"]) == len(PROMPT) + count
                assert choice["text"].startswith(text_of(cluster, list(PROMPT)))
                assert choice["finish_reason"] == "length"
        *found, last, done = await complete(
            cluster, prompt=list(PROMPT), max_tokens=0, echo=True, logprobs=2, stream=True
        )
        assert done == "[DONE]"
        assert [len(event["choices"][0]["logprobs"]["tokens"]) for event in found] == [len(PROMPT)]
        assert last["choices"][0]["finish_reason"] == "length"

    case(body)


def test_offsets_in_an_echo_count_from_its_beginning() -> None:
    async def body(cluster: FakeCluster) -> None:
        answer = await complete(cluster, prompt="def add(one", max_tokens=2, echo=True, logprobs=0)
        found = answer["choices"][0]["logprobs"]
        ends = np.cumsum([len(token) for token in found["tokens"]])
        assert found["text_offset"] == [0, *ends[:-1]]
        assert "".join(found["tokens"]) == answer["choices"][0]["text"]

    case(body)


def test_a_beginning_that_the_tokenizer_puts_there_is_scored_with_but_not_echoed(tmp_path: Path) -> None:
    path = make_tiny_knot(
        tmp_path / "begins.knot",
        arch="llama",
        extra={"tokenizer.ggml.bos_token_id": 294, "tokenizer.ggml.add_bos_token": True},
    )

    async def body(cluster: FakeCluster) -> None:
        asked: dict[str, Any] = {"max_tokens": 1, "echo": True, "logprobs": 0, "ignore_eos": True}
        answer = await complete(cluster, prompt="the fox", **asked)
        assert answer["knot"]["prompt_ids"][0] == 294
        [choice] = answer["choices"]
        assert choice["text"].startswith("the fox")
        found = choice["logprobs"]
        assert len(found["tokens"]) == len(answer["knot"]["prompt_ids"])
        assert found["text_offset"][0] == 0
        assert None not in found["token_logprobs"], "the beginning came before all of them"
        by_ids = await complete(cluster, prompt=answer["knot"]["prompt_ids"], **asked)
        assert by_ids["choices"][0]["logprobs"]["token_logprobs"] == [None, *found["token_logprobs"]]

    case(body, path)


# -- what changes the distribution --------------------------------------------------------------------------


def penalised(prompt: tuple[int, ...], count: int, **asked: Any) -> list[int]:
    """Greedy ids under penalties and bias, by exact arithmetic; fails where rounding could turn one."""
    ids = list(prompt)
    for _ in range(count):
        logits = exact_logits(PATH, tuple(ids))[-1].astype(np.float64)
        written = Counter(ids[len(prompt) :])
        repetition = asked.get("repetition_penalty", 1.0)
        for id in set(ids) if repetition != 1 else ():
            logits[id] = logits[id] / repetition if logits[id] > 0 else logits[id] * repetition
        for id, times in written.items():
            logits[id] -= asked.get("presence_penalty", 0) + asked.get("frequency_penalty", 0) * times
        for id, bias in asked.get("logit_bias", {}).items():
            logits[int(id)] += bias
        best, second = np.argsort(-logits, kind="stable")[:2]
        assert logits[best] - logits[second] > NEAR, "take another prompt: this one is nearly a tie"
        ids.append(int(best))
    return ids[len(prompt) :]


# With this bias the model would say the same two ids again and again.
AGAIN = {"7": 11}


@pytest.mark.parametrize(
    "asked",
    [
        {"logit_bias": AGAIN},
        {"logit_bias": {str(EXPECTED[0]): -100, "90": 7.5}},
        {"logit_bias": AGAIN, "presence_penalty": 1.9},
        {"logit_bias": AGAIN, "frequency_penalty": 1.9},
        {"logit_bias": AGAIN, "repetition_penalty": 4.0},
        {"logit_bias": AGAIN, "presence_penalty": 1.0, "frequency_penalty": 0.5, "repetition_penalty": 1.7},
        {"presence_penalty": -2.0, "frequency_penalty": -1.0},
        {"repetition_penalty": 0.25},
    ],
    ids=lambda asked: " ".join(asked),
)
@pytest.mark.parametrize("shards", [1, 3])
def test_penalties_and_bias_change_what_they_say(asked: dict[str, Any], shards: int) -> None:
    expected = penalised(PROMPT, 6, **asked)
    without = penalised(
        PROMPT, 6, **({"logit_bias": AGAIN} if len(asked) > 1 and "logit_bias" in asked else {})
    )
    assert expected != without, "or this tests nothing"

    async def body(cluster: FakeCluster) -> None:
        answer = await complete(
            cluster, prompt=list(PROMPT), max_tokens=6, ignore_eos=True, logprobs=1, **asked
        )
        assert answer["knot"]["ids"] == expected
        # Log-probabilities are the model's own, whatever was done to the logits afterwards.
        exact = exact_logprobs((*PROMPT, *expected))[len(PROMPT) - 1 : -1]
        found = answer["choices"][0]["logprobs"]["token_logprobs"]
        assert found == pytest.approx([row[id] for row, id in zip(exact, expected, strict=True)], abs=NEAR)

    case(body, shards=shards)


@pytest.mark.parametrize(
    "asked",
    [
        {"temperature": 1.6},
        {"temperature": 1.7, "repetition_penalty": 1.6, "logit_bias": {"7": 6, "90": 5.5}, "top_p": 0.9},
    ],
    ids=lambda asked: " ".join(asked),
)
def test_answers_come_as_often_as_one_softmax_over_the_whole_vocabulary_says(asked: dict[str, Any]) -> None:
    logits = exact_logits(PATH, PROMPT)[-1].astype(np.float64)
    repetition = asked.get("repetition_penalty", 1.0)
    for id in set(PROMPT):
        logits[id] = logits[id] / repetition if logits[id] > 0 else logits[id] * repetition
    for id, bias in asked.get("logit_bias", {}).items():
        logits[int(id)] += bias
    shares = np.exp(log_softmax(logits / asked["temperature"]))
    order = np.argsort(-shares, kind="stable")[: asked.get("top_k", VOCAB)]
    if "top_p" in asked:
        order = order[: int(np.searchsorted(np.cumsum(shares[order]), asked["top_p"])) + 1]
    if "min_p" in asked:
        order = order[shares[order] >= asked["min_p"] * shares[order[0]]]
    kept = {int(id): shares[id] / shares[order].sum() for id in order if shares[id] > 0}
    counts: Counter[int] = Counter()

    async def body(cluster: FakeCluster) -> None:
        for seed in range(0, 384, 128):
            answer = await complete(
                cluster, prompt=list(PROMPT), max_tokens=1, n=128, seed=seed, ignore_eos=True, **asked
            )
            counts.update(one["ids"][0] for one in answer["knot"]["choices"])

    case(body)
    assert counts.total() == 384
    chi_squared(counts, list(kept), list(kept.values()))
