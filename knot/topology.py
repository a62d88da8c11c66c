"""Which Workers make a cluster: their names, variables and bindings, for any number of stations and shards.

The emulator runs these, and wrangler's configuration says the same: a Worker is described once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Final

from knot.config import ModelConfig
from knot.errors import ConfigError

BUCKET: Final = "knots"
ROW_CACHE: Final = "embed-cache"


@dataclass(frozen=True, slots=True)
class ObjectBinding:
    """A namespace of Durable Objects: the class, and the Worker that has it (None: this one)."""

    class_name: str
    script: str | None = None


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """One Worker: `folder` holds its entry.py; bindings map a name in `env` to what it stands for."""

    name: str
    folder: str
    variables: Mapping[str, str]
    buckets: Mapping[str, str] = field(default_factory=dict[str, str])
    key_values: Mapping[str, str] = field(default_factory=dict[str, str])
    services: Mapping[str, str] = field(default_factory=dict[str, str])
    objects: Mapping[str, ObjectBinding] = field(default_factory=dict[str, ObjectBinding])


@dataclass(frozen=True, slots=True)
class Topology:
    """Ranges of layers for stations and of ids for shards, each meeting end to end."""

    stations: tuple[tuple[int, int], ...]
    shards: tuple[tuple[int, int], ...]


def even_topology(model: ModelConfig, stations: int, shards: int) -> Topology:
    """Ranges as even as can be. Raises `ConfigError` when there are fewer layers or ids than parts."""
    for count, things, total in (
        (stations, "stations", model.num_layers),
        (shards, "shards", model.vocab_size),
    ):
        if not 1 <= count <= total:
            raise ConfigError(f"{count} {things} cannot share {total}; take from 1 to {total}")
    return Topology(split(model.num_layers, stations), split(model.vocab_size, shards))


def topology_of(model: ModelConfig, stations: str, shards: str) -> Topology:
    """The topology that two texts name: a number of even ranges, or ranges such as `0-10,10-28`.

    Raises `ConfigError` that says what would do.
    """
    return Topology(
        _ranges_of("stations", stations, "layers", model.num_layers),
        _ranges_of("shards", shards, "ids", model.vocab_size),
    )


def _ranges_of(parts: str, text: str, things: str, total: int) -> tuple[tuple[int, int], ...]:
    if text.isascii() and text.isdigit() and len(text) < 10:
        if not 1 <= int(text) <= total:
            raise ConfigError(f"{text} {parts} cannot share {total} {things}; take from 1 to {total}")
        return split(total, int(text))
    found: list[tuple[int, int]] = []
    for piece in text.split(","):
        start, _, end = piece.strip().partition("-")
        last = found[-1][1] if found else 0
        if not (start.isascii() and start.isdigit() and end.isascii() and end.isdigit()) or len(end) > 9:
            raise ConfigError(
                f"--{parts} is {text[:200]!r}; take a number of {parts}, or ranges of {things} such as "
                f"0-{total // 2},{total // 2}-{total}"
            )
        if int(start) != last or int(end) <= last:
            raise ConfigError(
                f"--{parts} has {piece.strip()[:40]!r} where a range from {last} on was expected, such as "
                f"{last}-{total}: ranges begin at 0 and meet end to end"
            )
        found.append((int(start), int(end)))
    if found[-1][1] != total:
        raise ConfigError(
            f"--{parts} ends at {found[-1][1]}, but the model has {total} {things}; end it there"
        )
    return tuple(found)


def split(total: int, parts: int) -> tuple[tuple[int, int], ...]:
    """[0, total) in `parts` ranges whose sizes differ by one at most, larger ones last."""
    edges = [total * i // parts for i in range(parts + 1)]
    return tuple(pairwise(edges))


def role_of(start_layer: int, end_layer: int, num_layers: int) -> str:
    """The role of a station that owns layers [start_layer, end_layer) of `num_layers`."""
    first, last = start_layer == 0, end_layer == num_layers
    return "whole" if first and last else "entry" if first else "exit" if last else "middle"


def workers(
    model: ModelConfig, topology: Topology, knot_key: str, variables: Mapping[str, str]
) -> list[WorkerSpec]:
    """The Workers of a cluster on the knot `knot_key`; `variables` are added to those of every Worker."""
    return cluster_workers(model.num_layers, topology, knot_key, variables)


def with_separate_engines(specs: Sequence[WorkerSpec]) -> list[WorkerSpec]:
    """The same Workers, where each station and shard has its engine in a JavaScript Worker of its own."""
    found: list[WorkerSpec] = []
    for spec in specs:
        if spec.folder not in ("workers/station", "workers/cobordism"):
            found.append(spec)
            continue
        name = f"{spec.name}-engine"
        found.append(replace(spec, objects={**spec.objects, "ENGINE": ObjectBinding("EngineObject", name)}))
        engine = {"ENGINE": ObjectBinding("EngineObject")}
        found.append(WorkerSpec(name, "workers/engine", {}, objects=engine))
    return found


def cluster_workers(
    num_layers: int, topology: Topology, knot_key: str, variables: Mapping[str, str]
) -> list[WorkerSpec]:
    """The Workers of a cluster on a model of which only the number of layers is known.

    Names are the seed's for two stations (`entry`, `exit`), and `station-0` and so on for any other number.
    """
    stations = station_names(topology)
    shards = [f"shard-{i}" for i in range(len(topology.shards))]
    bucket = {"KNOT_BUCKET": BUCKET}
    common = {"KNOT_KEY": knot_key, **variables}
    # Clients' keys are the gateway's alone.
    keys = {name: common.pop(name) for name in ("API_KEYS",) if name in common}
    specs = [
        _station(name, layers, num_layers, common)
        for name, layers in zip(stations, topology.stations, strict=True)
    ]
    specs += [_shard(name, ids, common) for name, ids in zip(shards, topology.shards, strict=True)]
    specs += [
        WorkerSpec(
            "layer-warden",
            "workers/layer_warden",
            common,
            bucket,
            objects={"LAYER_WARDEN": ObjectBinding("LayerWarden")},
        ),
        WorkerSpec(
            "cobordism-warden",
            "workers/cobordism_warden",
            common,
            bucket,
            objects={"COBORDISM_WARDEN": ObjectBinding("CobordismWarden")},
        ),
        WorkerSpec(
            "gateway",
            "workers/gateway",
            {
                **common,
                **keys,
                "STATION_RANGES": ranges(topology.stations),
                "SHARD_RANGES": ranges(topology.shards),
            },
            bucket,
            # Their objects, not their Workers: calls of objects do not count as invocations of Workers.
            objects={
                "SESSIONS": ObjectBinding("SessionObject"),
                **{f"STATION_{i}": ObjectBinding("StationObject", name) for i, name in enumerate(stations)},
                **{f"SHARD_{i}": ObjectBinding("ShardObject", name) for i, name in enumerate(shards)},
            },
        ),
    ]
    return specs


def station_names(topology: Topology) -> list[str]:
    """The names of the stations' Workers."""
    if len(topology.stations) == 2:
        return ["entry", "exit"]
    return [f"station-{i}" for i in range(len(topology.stations))]


def ranges(of: Sequence[tuple[int, int]]) -> str:
    """Ranges as a variable states them: `0-14,14-28`."""
    return ",".join(f"{start}-{end}" for start, end in of)


def _station(name: str, layers: tuple[int, int], num_layers: int, common: Mapping[str, str]) -> WorkerSpec:
    start, end = layers
    return WorkerSpec(
        name,
        "workers/station",
        {
            **common,
            "SPECIALIZATION_ROLE": role_of(start, end, num_layers),
            "SPECIALIZATION_START_LAYER": str(start),
            "SPECIALIZATION_END_LAYER": str(end),
        },
        {"KNOT_BUCKET": BUCKET},
        objects={
            "STATION": ObjectBinding("StationObject"),
            "LAYER_WARDEN": ObjectBinding("LayerWarden", "layer-warden"),
        },
    )


def _shard(name: str, ids: tuple[int, int], common: Mapping[str, str]) -> WorkerSpec:
    return WorkerSpec(
        name,
        "workers/cobordism",
        {**common, "VOCAB_START": str(ids[0]), "VOCAB_END": str(ids[1])},
        {"KNOT_BUCKET": BUCKET},
        key_values={"EMBED_CACHE": ROW_CACHE},
        objects={
            "SHARD": ObjectBinding("ShardObject"),
            "COBORDISM_WARDEN": ObjectBinding("CobordismWarden", "cobordism-warden"),
        },
    )
