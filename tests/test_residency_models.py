"""A real model in all three residencies, each within the memory of an isolate: the same logits to the bit."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from functools import cache

import numpy as np
import pytest
from core_support import run
from model_files import model_file, model_knot
from reference import Model
from shard_support import shard_on
from station_support import station_on

from engine.blocks import RESIDENCIES
from engine.budget import CEILING_BYTES
from knot.header import KnotHeader
from knot.plan.report import Wish, smallest_topology
from knot.reader import load_header
from knot.topology import Topology, even_topology
from protocol.fluid import Flow, check_fluid
from protocol.recorder import Recorder
from protocol.steps import Choice

pytestmark = [pytest.mark.models]

IDS = [785, 6722, 315, 9625, 374, 12095, 13, 576]
# Rows whose logits are compared: the first, whose activations are by far the largest, and the last.
LOGITS_OF = (0, len(IDS) - 1)
VARIABLES = {"KV_BYTES": "4000000", "BLOCK_BYTES": str(4 << 20)}


@cache
def header() -> KnotHeader:
    return load_header(model_knot("q15"))


@cache
def topology(residency: str) -> Topology:
    """Two stations and eight shards; what is resident has as many as hold all weights."""
    if residency != "resident":
        return even_topology(header().config, 2, 8)
    return smallest_topology(header(), Wish("resident", 32, 16, "f32", 1, VARIABLES), "resident")


def rows_and_logits(residency: str) -> tuple[bytes, list[bytes], list[Flow]]:
    """All rows as they leave the last station, logits of some by id, and what flowed through every part."""
    path, flows = model_knot("q15"), list[Flow]()

    async def station(layers: tuple[int, int], hidden: np.ndarray) -> np.ndarray:
        recorder = Recorder()
        one = await station_on(path, layers, moved=recorder.moved("part"), RESIDENCY=residency, **VARIABLES)
        assert one.station.budget.total <= CEILING_BYTES
        # The prompt in pieces, then a token, so that what stays is used again.
        pieces = [(0, 5), (5, len(IDS) - 1), (len(IDS) - 1, len(IDS))]
        found = [await one.forward("s", start, hidden[start:end]) for start, end in pieces]
        flows.append(check_fluid(recorder)["part"])
        return np.concatenate(found)

    async def shard(ids: tuple[int, int], rows: Sequence[np.ndarray]) -> list[bytes]:
        recorder = Recorder()
        one = await shard_on(path, ids, moved=recorder.moved("part"), RESIDENCY=residency,
                             BLOCK_BYTES=VARIABLES["BLOCK_BYTES"])  # fmt: skip
        assert one.shard.budget.total <= CEILING_BYTES
        found: list[bytes] = []
        for number, row in enumerate(rows):
            told = await one.logits(row, Choice(top_k=ids[1] - ids[0]), f"logits-{number}")
            logits = np.full(ids[1] - ids[0], np.nan, "<f4")
            for candidate in told.candidates:
                logits[candidate.id - ids[0]] = candidate.raw
            found.append(logits.tobytes())
        flows.append(check_fluid(recorder)["part"])
        return found

    async def body() -> tuple[bytes, list[bytes], list[Flow]]:
        hidden = Model(model_file("q15")).rows("token_embd.weight", IDS).astype("<f4")
        for layers in topology(residency).stations:
            hidden = await station(layers, hidden)
            gc.collect()
        slices = [await shard(ids, [hidden[i] for i in LOGITS_OF]) for ids in topology(residency).shards]
        return hidden.tobytes(), [b"".join(found) for found in zip(*slices, strict=True)], flows

    return run(body(), 300)


def test_logits_do_not_depend_on_what_stays_in_memory() -> None:
    results = {residency: rows_and_logits(residency) for residency in RESIDENCIES}
    rows, logits, _ = results["fluid"]
    for number in range(len(LOGITS_OF)):
        values = np.frombuffer(logits[number], "<f4")
        assert len(values) == header().config.vocab_size == 151_936
        assert np.isfinite(values).sum() == 151_665, "all but the unused ids"
        assert np.nanmax(values) > 5
    for residency in ("pinned-prefix", "resident"):
        assert results[residency][0] == rows, residency
        assert results[residency][1] == logits, residency
    pinned = {residency: [flow.pinned_bytes for flow in found[2]] for residency, found in results.items()}
    assert not any(pinned["fluid"])
    assert all(pinned["pinned-prefix"])
    assert all(flow.order == [] for flow in results["resident"][2]), "nothing passes where all stays"
