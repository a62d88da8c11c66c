"""What it costs when the engine lives in a JavaScript Worker beside its Python Worker, instead of inside it.

If production refuses WebAssembly inside a Python Worker, stations and shards ask an engine behind a binding:
the same calls, each a message between isolates. Both clusters run one after the other on the same random
model, whose weights stay in memory; what is asked for again and again is one token more.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from pathlib import Path
from statistics import median
from typing import Any, Final

from bench._arguments import count
from bench._tables import say, table
from bench._workerd import generate
from bench.synthetic import SHAPES, write_synthetic_knot
from knot.workerd import workerd_cluster

SUMMARY: Final = "the engine in a JavaScript Worker of its own against the one inside the Python isolate"
QUICK: Final = ("--tokens", "2", "--times", "1")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this measurement."""
    parser.add_argument("--shape", choices=sorted(SHAPES), default="small", help="the model's shape (small)")
    parser.add_argument("--tokens", type=count, default=16, help="tokens of a generation (16)")
    parser.add_argument("--times", type=count, default=5, help="generations, of which the median counts (5)")


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Milliseconds a token in both places, and their ratio."""
    found: dict[str, float] = {}
    with tempfile.TemporaryDirectory(prefix="places-") as folder:
        knot = Path(folder) / "model.knot"
        write_synthetic_knot(knot, SHAPES[arguments.shape])
        for name, separate in (("python", False), ("javascript", True)):
            say(f"the engine in {name}")
            found[name] = asyncio.run(_ms_per_token(knot, Path(folder) / name, arguments, separate))
    ratio = round(found["javascript"] / found["python"], 2)
    if not arguments.json:
        say(table(["engine in", "ms a token"], [[name, f"{ms:.1f}"] for name, ms in found.items()]))
        say(f"{ratio} times")
    return {"shape": arguments.shape, "ms_per_token": found, "javascript_against_python": ratio}


async def _ms_per_token(knot: Path, data: Path, arguments: argparse.Namespace, separate: bool) -> float:
    async with workerd_cluster(
        knot, data, stations=1, shards=2, log=lambda line: None, separate_engines=separate,
        variables={"RESIDENCY": "pinned-prefix"},
    ) as cluster:  # fmt: skip
        await cluster.wait_until_healthy()
        await generate(cluster, 2)
        seconds = [await generate(cluster, arguments.tokens) for _ in range(arguments.times)]
    return round(1000 * median(seconds) / arguments.tokens, 2)
