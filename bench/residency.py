"""What a LayerWarden is worth by its policy and its memory, on real workerd.

A station in fluid memory asks for the same tensors in the same order for every token. Its warden may keep a
share of them: `pinned-prefix` keeps the first ones that fit, `lru` those asked for last, which in a cycle are
never the next. The model is random, with a range of layers that one warden could hold whole; the figures are
those of the passes after the first ones.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from pathlib import Path
from typing import Any, Final

from bench._arguments import count
from bench._tables import say, table
from bench._workerd import generate
from bench.synthetic import Shape, write_synthetic_knot
from durable_objects.budget import MOST_KEPT
from durable_objects.layer_cache import POLICIES
from knot.architectures import payload_order
from knot.header import KnotHeader
from knot.workerd import WorkerdCluster, workerd_cluster
from protocol.access import HEADER
from protocol.calls import Call
from protocol.identity import Identity

SUMMARY: Final = "LayerWarden policies on a cyclic scan, by the share of the weights that fits"
QUICK: Final = ("--layers", "1", "--tokens", "2", "--shares", "50")
# Large enough that no tensor of weight counts as small, which LRU would let stay.
HIDDEN: Final = 1536
WARM: Final = 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this measurement."""
    parser.add_argument("--layers", type=count, default=2, help="layers of the model (2)")
    parser.add_argument("--tokens", type=count, default=8, help="passes that are measured (8)")
    parser.add_argument(
        "--shares",
        type=int,
        nargs="+",
        default=[25, 50, 90, 100],
        help="percent of the weights (25 50 90 100)",
    )


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Figures by share and policy, and of a station without a warden."""
    with tempfile.TemporaryDirectory(prefix="residency-") as folder:
        knot = Path(folder) / "cycle.knot"
        shape = Shape("qwen2", arguments.layers, HIDDEN, 3 * HIDDEN, 12, 2, 128, 1024, 1024)
        header = write_synthetic_knot(knot, shape, name="cycle")
        cycle = _cycle_bytes(header)
        if cycle > MOST_KEPT:
            raise SystemExit(
                f"the layers have {cycle} bytes, a warden keeps {MOST_KEPT}: take fewer --layers"
            )
        say(f"a cycle of {cycle / 1e6:.1f} MB a token")

        def measured(name: str, **variables: str) -> dict[str, Any]:
            data = Path(folder) / name
            return asyncio.run(_measure(knot, data, header, arguments.tokens, variables))

        without = measured("without", USE_LAYER_WARDEN="off")
        found = [
            {
                "share_percent": share,
                "policy": policy,
                **measured(
                    f"{policy}-{share}", WARDEN_POLICY=policy, MEMORY_BUDGET_BYTES=str(cycle * share // 100)
                ),
            }
            for share in arguments.shares
            for policy in POLICIES
        ]
    for one in found:
        one["time_against_none"] = round(one["ms_per_token"] / without["ms_per_token"], 2)
    if not arguments.json:
        say(_table(found, without))
    return {"cycle_bytes": cycle, "without_warden": without, "with_warden": found}


def _cycle_bytes(header: KnotHeader) -> int:
    """Bytes that a pass over all layers reads; norms and biases stay with the station."""
    names = [place.name for place in payload_order(header.config) if place.layer is not None]
    tensors = [header.tensor(name) for name in names if name in header.tensors]
    return sum(tensor.length for tensor in tensors if len(tensor.shape) > 1)


async def _measure(
    knot: Path, data: Path, header: KnotHeader, tokens: int, variables: dict[str, str]
) -> dict[str, Any]:
    given = {"RESIDENCY": "fluid", **variables}
    async with workerd_cluster(
        knot, data, stations=1, shards=1, variables=given, log=lambda line: None
    ) as cluster:
        await cluster.wait_until_healthy()
        await generate(cluster, WARM)
        before = await _counts(cluster, header, knot.name)
        seconds = await generate(cluster, tokens)
        after = await _counts(cluster, header, knot.name)
    change = {name: after[name] - before[name] for name in after}
    asked = change["hits"] + change["misses"]
    passes = change["passes"]
    from_bucket = change["bucket_bytes"] // passes
    return {
        "hit_share": round(change["hits"] / asked, 3) if asked else None,
        "memory_bytes_share": round(1 - from_bucket / _cycle_bytes(header), 3),
        "bucket_bytes_per_token": from_bucket,
        "ms_per_token": round(1000 * seconds / passes, 1),
    }


async def _counts(cluster: WorkerdCluster, header: KnotHeader, key: str) -> dict[str, int]:
    """What the warden has found and read, and how many passes the station has made."""
    metrics = await cluster.ask("station-0", "/metrics")
    found = {"passes": metrics["batches"]["batches"], "hits": 0, "misses": 0}
    if not metrics["sources"]["warden"]:
        return {**found, "bucket_bytes": metrics["reads"]["bytes"]}
    who = Identity("layer", f"{key}@{header.fingerprint}", key, 0, header.config.num_layers)
    headers = {HEADER: cluster.secret, **who.headers()}
    stats = (await cluster.fetch("layer-warden", Call("GET", "/stats", headers=headers))).json()
    found |= {name: stats[name] for name in ("hits", "misses")}
    return {**found, "bucket_bytes": stats["passed_bytes"] + stats["admitted_bytes"]}


def _table(found: list[dict[str, Any]], without: dict[str, Any]) -> str:
    rows = [
        [
            f"{one['share_percent']} % {one['policy']}",
            f"{100 * one['hit_share']:.0f} %",
            f"{100 * one['memory_bytes_share']:.0f} %",
            f"{one['bucket_bytes_per_token'] / 1e6:.1f}",
            f"{one['ms_per_token']:.0f}",
            f"{one['time_against_none']:.2f}",
        ]
        for one in found
    ]
    rows.append(
        [
            "no warden",
            "-",
            "-",
            f"{without['bucket_bytes_per_token'] / 1e6:.1f}",
            f"{without['ms_per_token']:.0f}",
            "1",
        ]
    )
    return table(
        [
            "memory and policy",
            "hits",
            "bytes from memory",
            "MB from R2 a token",
            "ms a token",
            "against none",
        ],
        rows,
    )
