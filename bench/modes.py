"""What stays in memory, compared: fluid, pinned-prefix and resident on the same model and topology.

The topology is the smallest that holds everything resident, so that all three modes run on it. Every mode
makes the same tokens, which is checked; bytes and reads are what the bucket was asked for after the first.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Final

from bench._arguments import count
from bench._tables import say, table
from emulator.local import LocalCluster, local_cluster
from engine.blocks import RESIDENCIES
from knot.header import KnotHeader
from knot.paths import resolve_model
from knot.plan.cluster import ClusterPlan
from knot.plan.report import Wish, smallest_topology
from knot.plan.search import best_plan
from knot.reader import load_header
from knot.topology import Topology
from protocol.calls import json_call
from protocol.recorder import BlobRead, Recorder

QUICK: Final = ["smol", "--rounds", "1"]
SUMMARY: Final = "tokens/s, bytes and reads a token of the three residencies, on q05 and q15"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the models, and how much is run."""
    parser.add_argument("models", nargs="*", default=["q05", "q15"], help="knots, GGUFs or keys (q05 q15)")
    parser.add_argument("--engine", choices=("wasm", "native"), default="wasm")
    parser.add_argument("--prompt", type=count, default=32, help="tokens of a prompt (32)")
    parser.add_argument("--tokens", type=count, default=9, help="tokens made after it (9)")
    parser.add_argument("--rounds", type=count, default=2, help="measured generations of every mode (2)")
    parser.add_argument(
        "--wardens", action="store_true", help="read through LayerWardens, as clusters do by default"
    )


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measures every model in every mode."""
    return {model: asyncio.run(_model(model, resolve_model(model), arguments)) for model in arguments.models}


async def _model(name: str, knot: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    header = load_header(knot)
    variables = {"USE_LAYER_WARDEN": "on" if arguments.wardens else "off", "CANARY": "off"}
    # Sessions that have ended stay for a while, for others that begin alike.
    context = 4 * (arguments.prompt + arguments.tokens) + 64
    wish = Wish("resident", context, arguments.prompt, "f32", 1, variables)
    topology = smallest_topology(header, wish, "resident")
    found: dict[str, Any] = {}
    made: set[tuple[tuple[int, ...], ...]] = set()
    for residency in RESIDENCIES:
        plan = best_plan(
            header, topology, {**variables, "RESIDENCY": residency}, context=context, prompt=arguments.prompt
        )
        rounds = await _mode(knot, header, plan, arguments)
        made.add(tuple(each.ids for each in rounds))
        found[residency] = {
            "prefill_tokens_per_second": _rate(arguments.prompt, [each.prefill for each in rounds]),
            "decode_tokens_per_second": _rate(arguments.tokens - 1, [each.decode for each in rounds]),
            "bytes_per_token": rounds[-1].bytes / (arguments.tokens - 1),
            "reads_per_token": rounds[-1].operations / (arguments.tokens - 1),
            "planned_bytes_per_token": (plan.warm_reads() + plan.warm_head_reads()).bytes,
            "peak_isolate_bytes": max(each.peak for each in rounds),
        }
    if len(made) != 1:
        raise AssertionError(f"the modes made different tokens: {made}")
    base = found["fluid"]["decode_tokens_per_second"]
    say(f"{name}: {len(topology.stations)} stations, {len(topology.shards)} shards")
    say(table(("", *found["fluid"]), [(mode, *map(str, row.values())) for mode, row in found.items()]))
    return {
        **_shape(topology),
        "modes": found,
        "decode_over_fluid": {
            mode: round(figures["decode_tokens_per_second"] / base, 2) for mode, figures in found.items()
        },
    }


@dataclass(frozen=True, slots=True)
class _Round:
    """One generation: seconds, and what was read from the bucket after its first token."""

    ids: tuple[int, ...]
    prefill: float
    decode: float
    operations: int
    bytes: int
    peak: int


async def _mode(
    knot: Path, header: KnotHeader, plan: ClusterPlan, arguments: argparse.Namespace
) -> list[_Round]:
    recorder = Recorder()
    with tempfile.TemporaryDirectory(prefix="bench-modes-") as data:
        async with local_cluster(
            knot,
            Path(data),
            topology=plan.topology,
            engine=arguments.engine,
            variables=plan.variables,
            recorder=recorder,
            log=lambda line: None,
        ) as local:
            rounds = [
                await _round(local, recorder, _prompt(header, arguments.prompt, number), arguments.tokens)
                for number in range(arguments.rounds + 1)
            ]
    return rounds[1:]  # the first one boots everything


def _prompt(header: KnotHeader, length: int, number: int) -> list[int]:
    """Other ids every time, so that nothing is remembered."""
    return [(i * 7919 + 104_729 * number + 17) % header.config.vocab_size for i in range(length)]


async def _round(local: LocalCluster, recorder: Recorder, prompt: list[int], tokens: int) -> _Round:
    recorder.clear()
    asked = recorder.elapsed
    body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "details": True}
    bearer = {"authorization": f"Bearer {local.secret}"}
    reply = await local.cluster.fetch("gateway", json_call("POST", "/v1/completions", body, bearer))
    if reply.status != 200:
        raise RuntimeError(f"the cluster refused: {json.dumps(reply.json())}")
    told = reply.json()["knot"]
    after = asked + told["first_token_seconds"]
    reads = [
        event
        for event in recorder.events
        if isinstance(event, BlobRead) and event.at > after and event.isolate != "cobordism-warden"
    ]
    return _Round(
        tuple(told["ids"]),
        told["prefill_seconds"],
        told["decode_seconds"],
        len(reads),
        sum(event.length for event in reads),
        local.peak_isolate_bytes(),
    )


def _rate(tokens: int, seconds: Sequence[float]) -> float:
    return round(tokens / median(seconds), 3)


def _shape(topology: Topology) -> dict[str, int]:
    return {"stations": len(topology.stations), "shards": len(topology.shards)}
