"""Shapes of real size: a table with more rows than ids over eight shards, and a layer of a 70B model."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from core_support import run
from shard_support import OneShard, shard_on

from bench.synthetic import SHAPES, write_synthetic_knot
from emulator.local import local_cluster
from engine.budget import CEILING_BYTES, MIB
from knot.header import KnotHeader
from knot.plan.search import best_plan
from knot.reader import load_header
from knot.topology import Topology, even_topology
from protocol.calls import json_call
from protocol.fluid import check_fluid
from protocol.frames import Kind
from protocol.recorder import BlobRead, Recorder
from protocol.steps import Choice

pytestmark = pytest.mark.slow

IDS, ROWS = 151_936, 152_064
TABLE = replace(SHAPES["7b"], layers=1, hidden=256, ffn=256, heads=2, kv_heads=1)


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A knot whose embedding table and head have 128 rows more than there are ids."""
    path = tmp_path_factory.mktemp("table") / "table.knot"
    write_synthetic_knot(path, TABLE)
    yield path
    path.unlink()


def raw_logits(found: list[Any], start: int, count: int) -> np.ndarray:
    logits = np.full(count, np.nan, "<f4")
    for candidate in found:
        logits[candidate.id - start] = candidate.raw
    return logits


def exact_head(header: KnotHeader, path: Path) -> np.ndarray:
    """The head's owned rows, dequantised by gguf."""
    tensor = header.head_tensor()
    assert (tensor.rows, tensor.type) == (ROWS, "Q6_K")
    with path.open("rb") as file:
        file.seek(header.file_offset(tensor.offset))
        data = np.frombuffer(file.read(tensor.length), np.uint8).reshape(tensor.rows, tensor.row_bytes)
    return gguf.quants.dequantize(data[:IDS], gguf.GGMLQuantizationType.Q6_K)


def test_eight_shards_own_every_id_and_no_row_beyond_and_their_logits_are_those_of_the_whole(
    table: Path,
) -> None:
    header = load_header(table)
    assert (header.config.vocab_size, header.config.embedding_rows) == (IDS, ROWS)
    shards = even_topology(header.config, 1, 8).shards
    assert [end - start for start, end in shards] == [18_992] * 8
    row = np.random.default_rng(5).standard_normal(256).astype("<f4")

    async def ask(one: OneShard, ids: tuple[int, int]) -> np.ndarray:
        found = await one.logits(row, Choice(top_k=ids[1] - ids[0]))
        return raw_logits(list(found.candidates), ids[0], ids[1] - ids[0])

    async def body() -> tuple[np.ndarray, np.ndarray]:
        parts: list[np.ndarray] = []
        for ids in shards:
            recorder = Recorder()
            one = await shard_on(
                table, ids, moved=recorder.moved("shard"), RESIDENCY="fluid", BLOCK_BYTES=str(MIB)
            )
            assert one.shard.budget.total <= CEILING_BYTES
            parts.append(await ask(one, ids))
            flow = check_fluid(recorder)["shard"]
            assert flow.most_blocks <= 2
            assert flow.pinned_bytes == 0
            rows = await one.embed([ids[0], ids[1] - 1])
            assert len(rows) == 2
        last = await shard_on(table, shards[-1])
        for beyond in (IDS, ROWS - 1):
            [answer] = await last.send("/embed", Kind.EMBED, last.embed_step([beyond]))
            assert answer.envelope["status"] == "bad_frame"
            assert answer.envelope["detail"] == (
                f"token id {beyond} does not exist; the vocabulary has {IDS} ids"
            )
        everything = await shard_on(
            table, (0, IDS), ISOLATE_BYTES=str(1 << 30), ENGINE_BYTES=str(1 << 29), BLOCK_BYTES=str(4 * MIB)
        )
        return np.concatenate(parts), await ask(everything, (0, IDS))

    merged, whole = run(body(), 240)
    assert np.isfinite(merged).all()
    assert merged.tobytes() == whole.tobytes(), "to the bit"
    exact = exact_head(header, table).astype(np.float64) @ row.astype(np.float64)
    assert np.abs(merged - exact).max() < 2e-3 * np.abs(exact).max()


@pytest.mark.wasm
def test_a_layer_of_a_70b_model_goes_through_an_isolate_of_128_mb(tmp_path: Path) -> None:
    """Its ffn_down is 193 MB, more than an isolate has; no weight, page or row takes it past its limit."""
    path = tmp_path / "70b.knot"
    header = write_synthetic_knot(path, replace(SHAPES["70b"], layers=1, vocab=2048, rows=2048))
    assert header.phase_range(0, "ffn_down").length == 192_675_840
    prompt = [(7919 * i + 3) % 2048 for i in range(24)]
    wished = {
        "RESIDENCY": "fluid",
        "USE_LAYER_WARDEN": "off",
        "SAVE_BYTES": "0",
        "MAX_BATCH_ROWS": "16",
        "CANARY": "off",
    }
    plan = best_plan(header, Topology(((0, 1),), ((0, 1000), (1000, 2048))), wished, context=64, prompt=24)
    recorder = Recorder()

    async def main() -> dict[str, Any]:
        async with local_cluster(
            path, tmp_path, topology=plan.topology, variables=plan.variables, recorder=recorder
        ) as local:
            body = {"prompt": prompt, "max_tokens": 2, "temperature": 0, "ignore_eos": True, "details": True}
            bearer = {"authorization": f"Bearer {local.secret}"}
            reply = await local.cluster.fetch("gateway", json_call("POST", "/v1/completions", body, bearer))
            assert reply.status == 200, reply
            assert local.peak_isolate_bytes() <= CEILING_BYTES
            return json.loads(reply.bytes())["knot"]

    told = asyncio.run(asyncio.wait_for(main(), 300))
    assert len(told["ids"]) == 2
    flow = check_fluid(recorder)["station-0"]
    assert flow.most_blocks == 2
    assert flow.most_bytes <= 16_000_000
    passes = len(plan.pieces(24)) + 1
    assert passes == 3
    assert flow.passed == {
        (0, phase): passes * header.phase_range(0, phase).length
        for phase in ("attn", "ffn_gate", "ffn_up", "ffn_down")
    }
    reads = [e for e in recorder.events if isinstance(e, BlobRead) and e.isolate == "station-0"]
    weights = [event.length for event in reads if event.length >= MIB]
    predicted = plan.part_reads(24, 2)["station-0"]
    assert (len(weights), sum(weights)) == (predicted.operations, predicted.bytes)
    path.unlink()
