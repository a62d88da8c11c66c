"""The cluster of this project in the emulator: a knot, a topology, and every Worker it takes."""

from __future__ import annotations

import importlib.util
import secrets
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from emulator.cluster import Cluster, EngineKind
from emulator.config import ObjectBinding, WorkerConfig, bundle
from emulator.errors import EmulatorError
from emulator.faults import Faults
from emulator.limits import Limits
from knot.header import KnotHeader
from knot.reader import load_header
from knot.topology import BUCKET, Topology, WorkerSpec, even_topology, workers
from protocol.recorder import Recorder

ROOT: Final = Path(__file__).resolve().parent.parent
PACKAGES: Final = ("protocol", "engine", "knot", "durable_objects")
# Libraries that a Worker brings along; `scripts/stage.py` finds the same by their imports.
LIBRARIES: Final = {"workers/gateway": ("jinja2", "markupsafe")}
# The parts of those packages that have a place in a Worker; the others run the crate in CPython.
ENGINE_MODULES: Final = ("blocks", "budget", "client", "errors", "fit", "host", "rows", "values", "weights")


@dataclass(frozen=True, slots=True)
class LocalCluster:
    """A running cluster: its Workers by name, and the secret that its parts share."""

    cluster: Cluster
    header: KnotHeader
    topology: Topology
    secret: str

    def peak_isolate_bytes(self) -> int:
        """The most memory that any isolate has used."""
        return max((peak.total for _, peak in self.cluster.memory().values()), default=0)


@asynccontextmanager
async def local_cluster(
    knot: Path,
    data_folder: Path,
    *,
    stations: int = 2,
    shards: int = 8,
    topology: Topology | None = None,
    engine: EngineKind = "wasm",
    variables: Mapping[str, str] | None = None,
    secret: str | None = None,
    faults: Faults | None = None,
    log: Callable[[str], None] | None = None,
    recorder: Recorder | None = None,
    limits: Limits | None = None,
) -> AsyncGenerator[LocalCluster]:
    """Runs the Workers of a cluster on `knot`, which is read where it lies.

    Raises `KnotError` for a knot or a topology that cannot be, and `EmulatorError`.
    """
    header = load_header(knot)
    chosen = topology or even_topology(header.config, stations, shards)
    known = secret or secrets.token_urlsafe(24)
    specs = workers(header.config, chosen, knot.name, {"CLUSTER_SECRET": known, **(variables or {})})
    configs = [worker_config(spec) for spec in specs]
    async with Cluster(
        configs, data_folder, engine, limits=limits, faults=faults, log=log, recorder=recorder
    ) as cluster:
        cluster.bucket(BUCKET).register(knot.name, knot)
        yield LocalCluster(cluster, header, chosen, known)


def worker_config(spec: WorkerSpec) -> WorkerConfig:
    """A Worker of the project as the emulator takes it."""
    objects = {
        name: ObjectBinding(found.class_name, found.script) if found.script else found.class_name
        for name, found in spec.objects.items()
    }
    return WorkerConfig(
        name=spec.name,
        modules=worker_bundle(spec.folder),
        vars=dict(spec.variables),
        r2=dict(spec.buckets),
        kv=dict(spec.key_values),
        services=dict(spec.services),
        objects=objects,
    )


def worker_bundle(folder: str) -> dict[str, Path]:
    """The modules of a Worker: its own files, and the packages that all share."""
    packages = {name: ROOT / name for name in PACKAGES}
    packages |= {name: _library(name) for name in LIBRARIES.get(folder, ())}
    return bundle(ROOT / folder, packages=packages, only={"engine": ENGINE_MODULES})


def _library(name: str) -> Path:
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        raise EmulatorError(f"{name} is missing: run `make setup`")
    return Path(spec.origin).parent
