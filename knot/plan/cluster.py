"""A whole cluster as it would be: every part, what a prompt and a token read, and from where."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from durable_objects.budget import most_kept
from engine.fit import ShardMemory, StationMemory
from knot.header import KnotHeader
from knot.plan.parts import PartPlan, Station, plan_gateway, plan_shard, plan_station
from knot.plan.reads import PassReads, Reads, warden_reads
from knot.topology import Topology, station_names
from protocol.pieces import pieces
from protocol.settings import Settings

# Whoever is asked for weights by a station is one of these.
BUCKET: Final = "bucket"
WARDEN: Final = "layer-warden"


@dataclass(frozen=True, slots=True)
class ClusterPlan:
    """A cluster on a model, under variables that are every Worker's.

    `warden` has what the LayerWardens read for each station's passes; None where stations read themselves.
    """

    header: KnotHeader
    topology: Topology
    variables: Mapping[str, str]
    stations: tuple[PartPlan, ...]
    shards: tuple[PartPlan, ...]
    gateway: Mapping[str, int]
    warden: tuple[PassReads, ...] | None

    @property
    def parts(self) -> tuple[PartPlan, ...]:
        """Stations, then shards."""
        return (*self.stations, *self.shards)

    @property
    def peak(self) -> int:
        """The most that any isolate uses."""
        return max(sum(self.gateway.values()), *(part.peak for part in self.parts))

    @property
    def resident(self) -> bool:
        """Whether the stations keep all their weights, by which the gateway cuts prompts."""
        return all(station.whole for station in self.stations)

    @property
    def kv_tokens(self) -> int:
        """Tokens that all sessions together can have."""
        return min(station.kv_tokens for station in self.stations)

    def pieces(self, prompt: int) -> list[int]:
        """Rows of the pieces that a prompt of so many tokens is cut into."""
        most = min(min(part.rows for part in self.stations), min(part.max_tokens for part in self.shards))
        return pieces(prompt, len(self.stations), most, self.resident)

    def part_reads(self, prompt: int, made: int) -> dict[str, Reads]:
        """What every station and shard reads for a prompt and so many tokens after it, having just booted.

        Each piece of the prompt and each token but the last is a pass through the stations, each token one
        through the head.
        """
        through = len(self.pieces(prompt)) + max(0, made - 1)
        return {
            **{part.name: part.passes.over(through) for part in self.stations},
            **{part.name: part.passes.over(made) for part in self.shards},
        }

    def bucket_reads(self, prompt: int, made: int) -> dict[str, Reads]:
        """The same as the bucket sees it, by who asks for weights: stations, or their wardens, and shards."""
        found = self.part_reads(prompt, made)
        if self.warden is None:
            return found
        through = len(self.pieces(prompt)) + max(0, made - 1)
        for part in self.stations:
            del found[part.name]
        found[WARDEN] = Reads.sum(passes.over(through) for passes in self.warden)
        return found

    def warm_reads(self) -> Reads:
        """What the bucket is asked for in one pass through all stations, once they are warm."""
        passes = self.warden or [part.passes for part in self.stations]
        return Reads.sum(found.warm for found in passes)

    def warm_head_reads(self) -> Reads:
        """What the bucket is asked for in one pass over the head, once the shards are warm."""
        return Reads.sum(part.passes.warm for part in self.shards)


def plan_cluster(
    header: KnotHeader, topology: Topology, variables: Mapping[str, str], *, prompt: int = 512
) -> ClusterPlan:
    """The plan of a cluster whose Workers all have these `variables`.

    Raises `OverBudgetError` for a part that does not fit, and `SettingsError` that names a variable.
    """
    env = Settings(variables.get)
    station, shard = StationMemory.of(env), ShardMemory.of(env)
    stations = [
        plan_station(header, name, layers, station)
        for name, layers in zip(station_names(topology), topology.stations, strict=True)
    ]
    shards = [plan_shard(header, f"shard-{i}", ids, shard) for i, ids in enumerate(topology.shards)]
    through_warden = env.choice("USE_LAYER_WARDEN", ("on", "off"), "on") == "on"
    plan = ClusterPlan(
        header,
        topology,
        variables,
        tuple(found.plan for found in stations),
        tuple(shards),
        {},
        _wardens(stations, env) if through_warden else None,
    )
    gateway = plan_gateway(header, len(stations), max(plan.pieces(prompt)))
    return ClusterPlan(header, topology, variables, plan.stations, plan.shards, gateway, plan.warden)


def _wardens(stations: Sequence[Station], env: Settings) -> tuple[PassReads, ...]:
    room = most_kept(env)
    return tuple(warden_reads([(found.units, found.arena) for found in stations], room))
