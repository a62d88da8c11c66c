"""A model of 7B shapes through isolates of 128 MB on real workerd: memory of each, seconds, reads and bytes.

Without a model, the synthetic 7B is written first (4.7 GB), and removed afterwards. Memory is what parts say
of themselves (Python's heap and WebAssembly, which never shrink, and the most that buffers have been) and
what the inspector says of JavaScript's heap when the answer has come.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from pathlib import Path
from typing import Any, Final

from bench._arguments import count
from bench._tables import say, table
from bench.synthetic import SHAPES, write_synthetic_knot
from knot.paths import resolve_model
from knot.plan.search import best_plan
from knot.reader import load_header
from knot.topology import topology_of
from knot.workerd import workerd_cluster
from protocol.calls import json_call

SUMMARY: Final = "a 7B model through workerd: memory of every isolate, seconds, reads and bytes (minutes)"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the model, the cluster and the prompt."""
    parser.add_argument("model", nargs="?", help="a knot, a GGUF or a key; the synthetic 7B unless given")
    parser.add_argument("--stations", default="2")
    parser.add_argument("--shards", default="8")
    parser.add_argument("--prompt", type=count, default=8, help="tokens of the prompt (8)")
    parser.add_argument("--tokens", type=count, default=1, help="tokens made after it (1)")
    parser.add_argument("--context", type=count, default=528, help="tokens that keys and values fit (528)")
    parser.add_argument("--wardens", action="store_true", help="read through LayerWardens")
    parser.add_argument("--data", type=Path, help="folder of the local bucket, which is kept; temporary else")


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Runs one prompt."""
    with tempfile.TemporaryDirectory(prefix="bench-whole-") as folder:
        if arguments.model:
            knot = resolve_model(arguments.model)
        else:
            knot = Path(folder) / "synthetic-7b.knot"
            write_synthetic_knot(knot, SHAPES["7b"])
        return asyncio.run(_run(knot, arguments.data or Path(folder) / "data", arguments))


async def _run(knot: Path, data: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    header = load_header(knot)
    variables = {
        "RESIDENCY": "fluid",
        "USE_LAYER_WARDEN": "on" if arguments.wardens else "off",
        "SAVE_BYTES": "0",
        "CANARY": "off",
        # Kernels as slow as they may be on a busy machine are no reason to give up.
        "STEP_DEADLINE_SECONDS": "3600",
    }
    plan = best_plan(
        header,
        topology_of(header.config, arguments.stations, arguments.shards),
        variables,
        context=arguments.context,
        prompt=arguments.prompt,
        kv_type="f16",
    )
    prompt = [(i * 7919 + 17) % header.config.vocab_size for i in range(arguments.prompt)]
    body = {
        "prompt": prompt, "max_tokens": arguments.tokens, "temperature": 0, "ignore_eos": True,
        "details": True,
    }  # fmt: skip
    async with workerd_cluster(
        knot, data, topology=plan.topology, variables=plan.variables, log=lambda line: None
    ) as cluster:
        await cluster.wait_until_healthy()
        say("the knot is in the bucket, and the cluster is healthy")
        bearer = {"authorization": f"Bearer {cluster.secret}"}
        began = time.monotonic()
        reply = await cluster.fetch("gateway", json_call("POST", "/v1/completions", body, bearer))
        seconds = time.monotonic() - began
        say(f"answered after {seconds:.0f} s")
        # At once, before garbage is collected; while it computes, nobody answers the inspector.
        heaps = {name: _heap(seen) for name, seen in (await cluster.heaps()).items()}
        if reply.status != 200:
            raise RuntimeError(f"the cluster refused: {reply.bytes()[:1000].decode()}")
        told = reply.json()["knot"]
        memory = await cluster.memory()
        metrics = {part.name: await cluster.ask(part.name, "/metrics") for part in plan.parts}
    isolates = {name: _isolate(seen, heaps.get(name, {})) for name, seen in memory.items()}
    reads = {name: found["reads"] for name, found in metrics.items()}
    predicted = plan.part_reads(arguments.prompt, arguments.tokens)
    columns = (
        "python_heap",
        "wasm",
        "javascript_heap",
        "buffers",
        "kept",
        "weights_in_flight_peak",
        "together",
    )
    rows = [(name, *(f"{found[column] / 1e6:.1f}" for column in columns)) for name, found in isolates.items()]
    say(table(("MB", *columns), rows))
    return {
        "variables": dict(plan.variables),
        "prompt_tokens": arguments.prompt,
        "made_tokens": len(told["ids"]),
        "seconds": round(seconds, 1),
        "first_token_seconds": round(told["first_token_seconds"], 1),
        "weights_bytes": sum(part.weights for part in plan.parts),
        "reads": sum(found["opened"] for found in reads.values()),
        "read_bytes": sum(found["bytes"] for found in reads.values()),
        "planned_reads": sum(found.operations for found in predicted.values()),
        "planned_read_bytes": sum(found.bytes for found in predicted.values()),
        "fullest_isolate_bytes": max(found["together"] for found in isolates.values()),
        "most_weights_in_flight": max(found.get("weights_in_flight_peak", 0) for found in memory.values()),
        "isolates": isolates,
    }


def _heap(seen: dict[str, int]) -> dict[str, int]:
    """What the inspector says of a Worker's JavaScript heap, garbage included, and of its ArrayBuffers."""
    return {
        "javascript_heap": seen["totalSize"] + seen.get("embedderHeapUsedSize", 0),
        "backing_stores": seen["backingStorageSize"],
    }


def _isolate(seen: dict[str, int], heap: dict[str, int]) -> dict[str, int]:
    """An isolate's memory by purpose. Where the inspector was not answered, JavaScript counts as measured."""
    found = {
        "python_heap": seen["python_heap"],
        "wasm": seen["wasm"],
        "javascript_heap": heap.get("javascript_heap") or seen["javascript_heap"],
        # What holds buffers is told from inside and from outside; the larger counts.
        "buffers": max(seen["buffers_peak"], heap.get("backing_stores", 0)),
        "kept": seen.get("kept", 0),
        "weights_in_flight_peak": seen.get("weights_in_flight_peak", 0),
    }
    return {**found, "together": sum(found.values()) - found["weights_in_flight_peak"]}
