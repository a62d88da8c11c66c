"""A cluster in the emulator under a recorder: the fluid-memory invariant, on everything that it does."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from core_support import grouped, header_of

from emulator.local import LocalCluster, local_cluster
from knot.header import PHASES
from protocol.calls import json_call
from protocol.fluid import check_fluid
from protocol.recorder import BlobRead, IsolateEnded, MemoryUsed, Recorder

pytestmark = pytest.mark.wasm

PROMPT = [40, 41, 42, 43, 44, 45, 46, 47, 48, 49, 50, 51]
COUNT = 4
LAYERS = 3


async def complete(local: LocalCluster) -> dict[str, Any]:
    body = {"prompt": PROMPT, "max_tokens": COUNT, "temperature": 0, "ignore_eos": True, "details": True}
    call = json_call("POST", "/v1/completions", body, {"authorization": f"Bearer {local.secret}"})
    reply = await local.cluster.fetch("gateway", call)
    assert isinstance(reply.body, bytes)
    answer = json.loads(reply.body)
    assert reply.status == 200, answer
    return answer["knot"]


def record(tmp_path: Path, residency: str, *, evict: str | None = None, **variables: str) -> Recorder:
    """Two generations through two stations and three shards; in between `evict` loses its isolate."""
    recorder = Recorder()

    async def main() -> None:
        given = {
            "RESIDENCY": residency,
            "BLOCK_BYTES": "8192",
            "SAVE_BYTES": "0",
            "CANARY": "off",
            **variables,
        }
        async with local_cluster(
            grouped(), tmp_path, stations=2, shards=3, variables=given, recorder=recorder
        ) as local:
            first = await complete(local)
            if evict is not None:
                await local.cluster.evict(evict)
            assert (await complete(local))["ids"] == first["ids"]

    asyncio.run(asyncio.wait_for(main(), 300))
    return recorder


def test_fluid_memory_holds_two_blocks_of_one_phase_and_nothing_stays(tmp_path: Path) -> None:
    flows = check_fluid(record(tmp_path, "fluid"))
    header = header_of(grouped())
    assert set(flows) == {"entry", "exit", "shard-0", "shard-1", "shard-2"}
    assert all(flow.pinned_bytes == 0 and 1 <= flow.most_blocks <= 2 for flow in flows.values())
    passes = 2 * COUNT  # a prefill in one piece and three decode steps, twice
    for name, layers in (("entry", range(1)), ("exit", range(1, LAYERS))):
        cycle = [(layer, phase) for layer in layers for phase in PHASES]
        assert flows[name].order == passes * cycle, "phase by phase, layer by layer, every time"
        assert flows[name].passed == {unit: passes * header.phase_range(*unit).length for unit in cycle}


def test_what_is_pinned_arrives_once_and_the_rest_stays_fluid(tmp_path: Path) -> None:
    room = {
        "ENGINE_BYTES": str(1 << 20),
        "KV_BYTES": "780000",
        "MAX_BATCH_ROWS": "16",
        "KEPT_LOGITS_BYTES": "0",
    }
    exit = check_fluid(record(tmp_path, "pinned-prefix", **room))["exit"]
    header = header_of(grouped())
    whole = sum(header.phase_range(layer, phase).length for layer in range(1, LAYERS) for phase in PHASES)
    assert 0 < exit.pinned_bytes < whole
    # The others pass as often as there are passes, the pinned ones once.
    assert sum(exit.passed.values()) == exit.pinned_bytes + 2 * COUNT * (whole - exit.pinned_bytes)


def test_what_is_resident_arrives_once_and_is_there_again_after_an_eviction(tmp_path: Path) -> None:
    recorder = record(tmp_path, "resident", evict="entry")
    flows = check_fluid(recorder)
    assert flows["entry"].order == flows["exit"].order == [], "nothing passes"
    assert sum(flows["exit"].passed.values()) == flows["exit"].pinned_bytes
    assert sum(flows["entry"].passed.values()) == 2 * flows["entry"].pinned_bytes
    assert any(isinstance(event, IsolateEnded) and event.isolate == "entry" for event in recorder.events)


def test_memory_and_reads_are_taken_down_as_the_meter_and_the_bucket_see_them(tmp_path: Path) -> None:
    recorder = record(tmp_path, "fluid", USE_LAYER_WARDEN="off")
    used = [event for event in recorder.events if isinstance(event, MemoryUsed)]
    assert {event.isolate for event in used} >= {"entry", "exit", "gateway", "shard-0"}
    assert all(event.bodies >= 0 and event.kept >= 0 and event.engine >= 0 for event in used)
    for name in ("entry", "shard-1"):
        assert max(event.engine for event in used if event.isolate == name) > 0
    header, start = header_of(grouped()), header_of(grouped()).payload_offset
    reads = [event for event in recorder.events if isinstance(event, BlobRead) and event.isolate == "entry"]
    assert reads[0].operation == "head"
    assert {event.key for event in reads} == {grouped().name}
    for phase in PHASES:
        span = header.phase_range(0, phase)
        found = [r for r in reads if (r.offset, r.length) == (start + span.offset, span.length)]
        assert len(found) == 2 * COUNT, "one range read a phase and pass"
