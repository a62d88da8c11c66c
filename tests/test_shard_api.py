"""A shard's endpoints: partial embeddings that add up, JSON for people, and what it says of itself."""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np
import pytest
from core_support import grouped, header_of, knot_of, run
from shard_support import OneShard, shard_on
from station_support import embedded, exact_states

from engine.budget import OverBudgetError
from knot.topology import split
from protocol.calls import JSON, Call
from protocol.frames import Kind
from protocol.settings import SettingsError
from protocol.steps import Choice

PATH = grouped()
IDS = (7, 260, 31, 299, 0, 128, 77, 260, 5)
# Normalised rows as an exit station would send them.
NORMED = exact_states(PATH, IDS)[-1].astype("<f4")


def case(body: Callable[[OneShard], Coroutine[Any, Any, None]], **more: Any) -> None:
    async def main() -> None:
        one = await shard_on(more.pop("path", PATH), **more)
        await body(one)
        await one.background.drain()

    run(main())


async def shards_on(count: int, **more: Any) -> list[OneShard]:
    return [await shard_on(PATH, ids, **more) for ids in split(300, count)]


def test_a_partial_has_the_rows_of_its_own_tokens_and_says_where_they_go() -> None:
    async def body(one: OneShard) -> None:
        tokens = [5, 100, 299, 150, 100, 199, 200, 0]
        found = await one.embed(tokens)
        expected = embedded(PATH, tokens)
        assert found == {i: expected[i].tobytes() for i in (1, 3, 4, 5)}

    case(body, ids=(100, 200))


@pytest.mark.parametrize("count", [1, 3, 8])
def test_the_partials_of_all_shards_add_up_to_the_embedding(count: int) -> None:
    async def main() -> None:
        tokens = [int(t) for t in np.random.default_rng(2).integers(0, 300, 40)]
        merged = np.zeros((len(tokens), 96), "<f4")
        for one in await shards_on(count):
            for position, row in (await one.embed(tokens)).items():
                assert not merged[position].any(), "zero everywhere else"
                merged[position] += np.frombuffer(row, "<f4")
        assert np.array_equal(merged, embedded(PATH, tokens))

    run(main())


def test_a_shard_that_owns_no_token_answers_with_no_rows() -> None:
    async def body(one: OneShard) -> None:
        assert await one.embed([1, 2, 3]) == {}
        assert await one.embed([]) == {}

    case(body, ids=(100, 200))


@pytest.mark.parametrize("token", [-1, 300, 311, 2**31 - 1])
def test_an_id_outside_the_vocabulary_is_refused_and_never_zero(token: int) -> None:
    async def body(one: OneShard) -> None:
        [answer] = await one.send("/embed", Kind.EMBED, one.embed_step([5, token]))
        assert answer.envelope["status"] == "bad_frame"
        assert f"token id {token} does not exist; the vocabulary has 300 ids" in answer.envelope["detail"]

    case(body, path=knot_of(padded_rows=12))


def test_rows_padded_behind_the_vocabulary_belong_to_no_shard_and_win_no_choice() -> None:
    path = knot_of(padded_rows=12, unused_tokens=0)
    assert header_of(path).head_tensor().rows == 312

    async def main() -> None:
        with pytest.raises(SettingsError, match=r"VOCAB_END is 312, but .* has 300 ids"):
            await shard_on(path, (150, 312))
        one = await shard_on(path, (150, 300))
        found = await one.logits(NORMED[0], Choice(top_k=400))
        assert sorted(candidate.id for candidate in found.candidates) == list(range(150, 300))

    run(main())


def test_too_many_tokens_in_one_step_are_over_budget_with_both_numbers() -> None:
    async def body(one: OneShard) -> None:
        [answer] = await one.send("/embed", Kind.EMBED, one.embed_step([1] * 9))
        assert answer.envelope["status"] == "over_budget"
        assert "9 tokens in one step, 8 are taken" in answer.envelope["detail"]

    case(body, MAX_TOKENS="8")


def test_another_model_or_slice_is_refused() -> None:
    async def body(one: OneShard) -> None:
        for changes, status in (({"model": "f" * 64}, "wrong_model"), ({"range": (0, 299)}, "wrong_range")):
            [answer] = await one.send("/logits", Kind.LOGITS, one.logits_step(NORMED[0], Choice(), **changes))
            assert answer.envelope["status"] == status
            [answer] = await one.send("/embed", Kind.EMBED, one.embed_step([1], **changes))
            assert answer.envelope["status"] == status

    case(body)


def test_a_shard_runs_no_layers() -> None:
    async def body(one: OneShard) -> None:
        for method in ("POST", "GET"):
            reply = await one.api.answer(Call(method, "/forward"))
            assert reply.status == 501
            assert "POST /forward to a station" in reply.json()["error"]["detail"]
        assert (await one.api.answer(Call("GET", "/embed"))).status == 404

    case(body)


def test_people_with_curl_send_tokens_and_rows_and_get_json() -> None:
    async def body(one: OneShard) -> None:
        reply = await one.post("/embed", json.dumps({"tokens": [5, 150, 299]}).encode(), JSON)
        answer = reply.json()
        assert (reply.status, answer["count"], answer["positions"]) == (200, 3, [1, 2])
        assert np.array(answer["rows"], "<f4").tobytes() == embedded(PATH, [150, 299]).tobytes()
        body = {"normed": NORMED[0].tolist(), "choice": {"top_k": 2, "wanted": [298]}}
        answer = (await one.post("/logits", json.dumps(body).encode(), JSON)).json()
        assert len(answer["candidates"]) == 2
        assert answer["wanted_values"][0][1:] == [None, None], "a banned id has no finite logit"
        answer = (await one.post("/logits", json.dumps({"normed": NORMED[0].tolist()}).encode(), JSON)).json()
        assert len(answer["candidates"]) == 5

    case(body, ids=(100, 300))


@pytest.mark.parametrize(
    ("path", "body", "reason"),
    [
        ("/embed", {}, "lacks the field 'tokens'"),
        ("/embed", {"tokens": [1.5]}, "tokens"),
        ("/embed", {"tokens": [1], "x": 1}, "unknown field 'x'"),
        ("/embed", {"tokens": [300]}, "token id 300 does not exist"),
        ("/embed", {"tokens": [-1]}, "token id -1 does not exist"),
        ("/logits", {}, "not a list of 96 numbers"),
        ("/logits", {"normed": [1, 2]}, "not a list of 96 numbers"),
        ("/logits", {"normed": [0.5] * 96, "choice": {"topk": 1}}, "unknown field 'topk'"),
    ],
)
def test_json_that_asks_for_nothing_is_400_with_the_reason(
    path: str, body: dict[str, Any], reason: str
) -> None:
    async def ask(one: OneShard) -> None:
        reply = await one.post(path, json.dumps(body).encode(), JSON)
        assert reply.status == 400
        assert reason in reply.json()["error"]["detail"]

    case(ask)


def test_health_memory_and_metrics_say_what_the_shard_is_holds_and_did() -> None:
    async def body(one: OneShard) -> None:
        await one.logits(NORMED[0], Choice())
        await one.embed([150])
        health = (await one.api.answer(Call("GET", "/health"))).json()
        assert (health["kind"], health["vocab"], health["vocab_size"]) == ("shard", [100, 200], 300)
        assert health["model"] == one.knot.header.fingerprint
        memory = (await one.api.answer(Call("GET", "/memory"))).json()
        engine = memory["engine"]
        assert engine["persistent"] + engine["scratch"] + engine["arena"] <= engine["region"]
        assert memory["kept_logits"] == 1
        metrics = (await one.api.answer(Call("GET", "/metrics"))).json()
        assert metrics["requests"] == 5
        assert metrics["batches"]["works"] == 1
        assert metrics["rows"]["filled"] == 1
        assert metrics["reads"]["opened"] == 1

    case(body, ids=(100, 200))


def test_what_does_not_fit_is_refused_at_boot_with_the_figures() -> None:
    async def main() -> None:
        await shard_on(PATH, ENGINE_BYTES=str(1 << 20), KEPT_LOGITS_BYTES=str(1 << 20))

    with pytest.raises(OverBudgetError, match=r"ids \[0, 300\) needs 1\.\d MB for \d+ slices .* is 1\.0 MB"):
        run(main())
