"""What it costs to start: each Worker's bundle, its CPU until the first answer, and a whole cluster.

CPU is that of a workerd with one Worker in it until its first answer, less that of one with a Worker in
JavaScript; with the snapshot of Python's memory, and with `--cold` also without. A cluster is started twice,
the second time with bundles, snapshot and bucket in place.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any, Final

import httpx

from bench._arguments import count
from bench._tables import say, table
from bench.synthetic import SHAPES, write_synthetic_knot
from knot.topology import WorkerSpec, even_topology, workers
from knot.workerd import bundle_bytes, run_workers, workerd_cluster

SUMMARY: Final = (
    "bundle sizes, start-up CPU of every Worker on workerd, and the time until a cluster is ready"
)
QUICK: Final = ("--times", "1", "--workers", "gateway", "--stations", "1", "--shards", "1")
STARTUP_SECONDS: Final = 1.0  # what the platform allows
JAVASCRIPT: Final = WorkerSpec("engine", "workers/engine", {})


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this measurement."""
    parser.add_argument(
        "--times", type=count, default=3, help="starts of each Worker, of which the median counts (3)"
    )
    parser.add_argument("--workers", nargs="+", help="kinds of Workers, such as station (all)")
    parser.add_argument("--cold", action="store_true", help="also without the snapshot")
    parser.add_argument("--stations", type=count, default=2, help="stations of the cluster (2)")
    parser.add_argument("--shards", type=count, default=8, help="shards of the cluster (8)")


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Bytes and seconds by Worker, and seconds until a cluster is ready."""
    with tempfile.TemporaryDirectory(prefix="startup-") as folder:
        return asyncio.run(_run(arguments, Path(folder)))


async def _run(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    knot = folder / "model.knot"
    header = write_synthetic_knot(knot, SHAPES["small"])
    topology = even_topology(header.config, arguments.stations, arguments.shards)
    specs = workers(header.config, topology, knot.name, {"CLUSTER_SECRET": "s" * 24})
    kinds = {spec.folder: spec for spec in specs}.values()
    chosen = [one for one in kinds if not arguments.workers or Path(one.folder).name in arguments.workers]
    found: dict[str, dict[str, Any]] = {}
    bare = await _median_cpu(JAVASCRIPT, folder, arguments.times, snapshot=True)
    for spec in chosen:
        say(f"starting {spec.folder}")
        alone = WorkerSpec(spec.name, spec.folder, spec.variables, spec.buckets, spec.key_values)
        warm = await _median_cpu(alone, folder, arguments.times, snapshot=True) - bare
        found[Path(spec.folder).name] = {
            "gzipped_bytes": bundle_bytes(spec.folder),
            "startup_cpu_seconds": round(warm, 3),
        }
        if arguments.cold:
            cold = await _median_cpu(alone, folder, 1, snapshot=False) - bare
            found[Path(spec.folder).name]["cold_cpu_seconds"] = round(cold, 3)
    ready: list[float] = []
    for _ in range(2):
        started = time.monotonic()
        async with workerd_cluster(
            knot, folder / "data", topology=topology, log=lambda line: None
        ) as cluster:
            await cluster.wait_until_healthy()
            ready.append(round(time.monotonic() - started, 1))
    if not arguments.json:
        heads = list(next(iter(found.values())))
        say(table(["Worker", *heads], [[name, *(str(one[h]) for h in heads)] for name, one in found.items()]))
        say(f"{len(specs)} Workers ready in {ready[1]} s, the first time in {ready[0]} s")
    return {
        "workers": found,
        "slowest_startup_cpu_seconds": max(one["startup_cpu_seconds"] for one in found.values()),
        "allowed_startup_seconds": STARTUP_SECONDS,
        "cluster": {"workers": len(specs), "ready_seconds": ready[1], "first_ready_seconds": ready[0]},
    }


async def _median_cpu(spec: WorkerSpec, folder: Path, times: int, *, snapshot: bool) -> float:
    return median([await _cpu(spec, folder / "alone", snapshot) for _ in range(times)])


async def _cpu(spec: WorkerSpec, data: Path, snapshot: bool) -> float:
    """CPU seconds of a workerd with one Worker, from its start to its first answer."""
    async with (
        run_workers([spec], data, log=lambda line: None, snapshot=snapshot) as (addresses, _),
        httpx.AsyncClient(timeout=120) as client,
    ):
        await client.get(f"{addresses[spec.name]}/health")
        return sum(_cpu_of(process) for process in _below(os.getpid()) if _name(process) == "workerd")


def _below(process: int) -> Iterator[int]:
    """The processes that a process has started, directly or not."""
    for other in Path("/proc").glob("[0-9]*"):
        try:
            parent = int(_stat(int(other.name))[1])
        except (OSError, ValueError):
            continue  # it has ended meanwhile
        if parent == process:
            yield int(other.name)
            yield from _below(int(other.name))


def _name(process: int) -> str:
    return Path(f"/proc/{process}/comm").read_text().strip()


def _cpu_of(process: int) -> float:
    user, system = map(int, _stat(process)[11:13])
    return (user + system) / os.sysconf("SC_CLK_TCK")


def _stat(process: int) -> list[str]:
    """What follows the command's name: state, parent, and so on."""
    return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
