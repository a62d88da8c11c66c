"""Real models through the whole cluster in the emulator: 2 stations, 8 shards, wardens, WebAssembly."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from model_files import goldens, model_file, model_knot, shared_file
from reference import Reference

from emulator.local import LocalCluster, local_cluster
from knot.convert import convert
from protocol.calls import json_call

LIMIT_OF_AN_ISOLATE = 120_000_000


async def complete(local: LocalCluster, ids: Sequence[int], count: int) -> dict[str, Any]:
    body = {"prompt": list(ids), "max_tokens": count, "temperature": 0, "ignore_eos": True, "details": True}
    call = json_call("POST", "/v1/completions", body, {"authorization": f"Bearer {local.secret}"})
    reply = await local.cluster.fetch("gateway", call)
    assert isinstance(reply.body, bytes)
    answer = json.loads(reply.body)
    assert reply.status == 200, answer
    return answer["knot"]


def continue_all(
    knot: Path, data: Path, prompts: Sequence[Sequence[int]], counts: Sequence[int]
) -> list[list[int]]:
    """Greedy ids of every prompt, through one cluster; no isolate may pass its limit."""

    async def main() -> list[list[int]]:
        async with local_cluster(knot, data) as local:
            made = [await complete(local, ids, count) for ids, count in zip(prompts, counts, strict=True)]
            assert local.peak_isolate_bytes() <= LIMIT_OF_AN_ISOLATE
            assert {(answer["stations"], answer["shards"]) for answer in made} == {(2, 8)}
            assert not any(answer["degraded"] for answer in made)
            return [answer["ids"] for answer in made]

    return asyncio.run(main())


@pytest.mark.wasm
@pytest.mark.shared
def test_the_founders_tiny_model_continues_as_six_engines_agree(tmp_path: Path):
    knot, _ = convert(shared_file("tiny-qwen2.gguf"), tmp_path / "tiny.knot")
    prompt = [750, 282, 579, 263, 580, 66, 72, 1445, 1648]
    assert continue_all(knot, tmp_path / "data", [prompt], [8]) == [[1491, 1745, 832, 1436, 924, 89, 5, 1453]]


@pytest.mark.wasm
@pytest.mark.models
@pytest.mark.shared
@pytest.mark.parametrize(("key", "name"), [("q05", "q05"), ("q15", "q15"), ("q15", "q15_chat")])
def test_greedy_ids_equal_those_of_llama_cpp(key: str, name: str, tmp_path: Path):
    lines = goldens(name)
    found = continue_all(
        model_knot(key),
        tmp_path,
        [line["prompt_ids"] for line in lines],
        [len(line["gen_ids"]) for line in lines],
    )
    assert found == [line["gen_ids"] for line in lines]


@pytest.mark.wasm
@pytest.mark.models
def test_greedy_ids_of_smol_are_those_of_exact_arithmetic(tmp_path: Path):
    """At every step the id is the best one of an exact float64 pass over the same ids."""
    prompts = [[1604, 3987, 46477, 24, 94, 727], [504, 3575, 282, 4649, 314], [30904, 24583, 28, 5549]]
    made = continue_all(model_knot("smol"), tmp_path, prompts, [24] * len(prompts))
    texts = [prompt + ids[:-1] for prompt, ids in zip(prompts, made, strict=True)]
    for prompt, ids, logits in zip(prompts, made, Reference(model_file("smol")).logits(texts), strict=True):
        assert np.argmax(logits[len(prompt) - 1 :], axis=1).tolist() == ids
