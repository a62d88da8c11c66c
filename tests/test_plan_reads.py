"""What the planner says of reads and bytes is what a recorded run takes down: equal, not near."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from core_support import grouped, header_of

from emulator.local import local_cluster
from knot.plan.cluster import WARDEN, ClusterPlan, plan_cluster
from knot.plan.reads import Reads
from knot.topology import Topology, even_topology
from protocol.calls import Call, json_call
from protocol.fluid import check_fluid
from protocol.recorder import BlobRead, Recorder

pytestmark = pytest.mark.wasm

PROMPT = [40 + i for i in range(50)]
MADE = 4
# Admitting a station takes a pass over its weights, which is none of the prompt's.
COMMON = {"BLOCK_BYTES": "8192", "SAVE_BYTES": "0", "MAX_BATCH_ROWS": "24", "CANARY": "off"}
# The station has room for a part of its weights, and the warden of the others for a part of those.
TIGHT = {"ENGINE_BYTES": str(1 << 20), "KV_BYTES": "740000", "KEPT_LOGITS_BYTES": "0"}
CASES: dict[str, tuple[Topology | tuple[int, int], dict[str, str]]] = {
    "fluid": ((2, 3), {"RESIDENCY": "fluid", "USE_LAYER_WARDEN": "off"}),
    "fluid, one station, blocks of one row group": (
        (1, 1),
        {"RESIDENCY": "fluid", "USE_LAYER_WARDEN": "off", "BLOCK_BYTES": "1"},
    ),
    "fluid, uneven, with wardens": (
        Topology(((0, 2), (2, 3)), ((0, 1), (1, 200), (200, 300))),
        {"RESIDENCY": "fluid", "MEMORY_BUDGET_BYTES": "200000"},
    ),
    "fluid, wardens with no room": ((3, 2), {"RESIDENCY": "fluid", "MEMORY_BUDGET_BYTES": "0"}),
    "pinned prefix": ((2, 2), {"USE_LAYER_WARDEN": "off", **TIGHT}),
    "pinned prefix, with wardens": ((2, 4), {"MEMORY_BUDGET_BYTES": "150000", **TIGHT}),
    "resident": ((3, 2), {"RESIDENCY": "resident", "USE_LAYER_WARDEN": "off"}),
    "resident, with wardens": ((1, 3), {"RESIDENCY": "resident"}),
}  # fmt: skip


@cache
def planned(case: str) -> ClusterPlan:
    topology, variables = CASES[case]
    header = header_of(grouped())
    chosen = topology if isinstance(topology, Topology) else even_topology(header.config, *topology)
    return plan_cluster(header, chosen, {**COMMON, **variables}, prompt=len(PROMPT))


def record(plan: ClusterPlan, data: Path) -> tuple[Recorder, dict[str, Any]]:
    """A prompt and a few tokens through the cluster that was planned, and each part's own count of reads."""
    recorder = Recorder()

    async def main() -> dict[str, Any]:
        async with local_cluster(
            grouped(), data, topology=plan.topology, variables=plan.variables, recorder=recorder
        ) as local:
            body = {"prompt": PROMPT, "max_tokens": MADE, "temperature": 0, "ignore_eos": True}
            bearer = {"authorization": f"Bearer {local.secret}"}
            reply = await local.cluster.fetch("gateway", json_call("POST", "/v1/completions", body, bearer))
            assert reply.status == 200, reply
            found = {}
            for part in plan.parts:
                for path in ("/metrics", "/memory"):
                    call = Call("GET", path, headers={"x-knot-secret": local.secret})
                    answer = json.loads((await local.cluster.fetch(part.name, call)).bytes())
                    found[part.name, path] = answer
            return found

    return recorder, asyncio.run(asyncio.wait_for(main(), 300))


def of_bucket(recorder: Recorder, plan: ClusterPlan) -> tuple[dict[str, Reads], dict[str, Reads]]:
    """Reads of the bucket by who made them: those of weights, and those before."""
    header = plan.header
    first = header.file_offset(header.phase_range(0, "attn").offset)
    head = header.head_tensor()
    last = header.file_offset(
        max(head.end, header.phase_range(header.config.num_layers - 1, "ffn_down").offset)
    )
    weights: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    others: Counter[str] = Counter()
    other_sizes: Counter[str] = Counter()
    for event in recorder.events:
        if not isinstance(event, BlobRead):
            continue
        counts, bytes_of = (weights, sizes) if first <= event.offset < last else (others, other_sizes)
        counts[event.isolate] += 1
        bytes_of[event.isolate] += event.length
    return (
        {name: Reads(count, sizes[name]) for name, count in weights.items()},
        {name: Reads(count, other_sizes[name]) for name, count in others.items()},
    )


@pytest.mark.parametrize("case", CASES)
def test_predicted_reads_and_bytes_equal_those_of_a_recorded_run(case: str, tmp_path: Path) -> None:
    plan = planned(case)
    recorder, told = record(plan, tmp_path)
    flows = check_fluid(recorder)
    weights, others = of_bucket(recorder, plan)

    for part in plan.parts:
        reads = told[part.name, "/metrics"]["reads"]
        assert Reads(reads["opened"], reads["bytes"]) == plan.part_reads(len(PROMPT), MADE)[part.name]
        assert flows[part.name].pinned_bytes == part.weights - part.passes.warm.bytes
        assert told[part.name, "/memory"]["pinned_bytes"] == part.pinned
        assert flows[part.name].most_bytes <= part.in_flight
        assert told[part.name, "/memory"]["budget"] == {"ceiling": 120_000_000, **part.memory}
        assert others[part.name] == part.boot
    # Rows of the embedding table are read by their warden, and everything else of the weights by these.
    weights.pop("cobordism-warden")
    assert weights == plan.bucket_reads(len(PROMPT), MADE)
    stations = [told[part.name, "/metrics"]["batches"] for part in plan.stations]
    assert {load["batches"] for load in stations} == {len(plan.pieces(len(PROMPT))) + MADE - 1}
    assert {load["rows_peak"] for load in stations} == {max(plan.pieces(len(PROMPT)))}


def test_the_cases_above_are_what_they_say() -> None:
    plans = {case: planned(case) for case in CASES}
    assert len(plans["fluid"].pieces(len(PROMPT))) == 3, "a prompt is cut, or reads by piece are not tested"
    for case, plan in plans.items():
        pinned = [part.pinned for part in plan.stations]
        if case.startswith("fluid"):
            assert not any(pinned)
        elif case.startswith("resident"):
            assert all(part.whole for part in plan.parts)
        else:
            assert any(pinned)
            assert not all(part.whole for part in plan.stations)
    warm = plans["fluid, uneven, with wardens"].warden
    assert warm is not None
    assert Reads() != warm[0].warm
    assert warm[0].warm.bytes < warm[0].cold.bytes
    assert plans["fluid, wardens with no room"].bucket_reads(1, 1)[WARDEN].operations == 12
