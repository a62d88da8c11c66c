"""Which hops a cluster has, from the gateway's variables; and whether they agree before they are used."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from generation import Route
from hops import ShardHop, StationHop
from knot.header import KnotHeader
from protocol.calls import Call, brief
from protocol.deadlines import DeadlineExceeded, together, within
from protocol.ports import Background, Peer, PeerLost
from protocol.settings import Settings, SettingsError, Variables

HEALTH_ATTEMPTS = 4
PAUSE_SECONDS = 0.1


class RouteUnavailable(Exception):
    """A part is not there, or disagrees; the sentence says which part and which field."""


@dataclass(frozen=True, slots=True)
class GatewaySettings:
    """A gateway's settings. Times in seconds."""

    knot_key: str
    stations: tuple[tuple[int, int], ...]
    shards: tuple[tuple[int, int], ...]
    deadline: float
    attempts: int
    max_tokens: int
    secret: str
    api_keys: tuple[str, ...]

    @classmethod
    def read(cls, variables: Variables) -> GatewaySettings:
        """Reads the variables. Raises `SettingsError` that names the one at fault."""
        env = Settings(variables)
        keys = tuple(key for key in env.text("API_KEYS", "-").split(",") if key)
        return cls(
            knot_key=env.text("KNOT_KEY"),
            stations=env.ranges("STATION_RANGES"),
            shards=env.ranges("SHARD_RANGES"),
            deadline=float(env.integer("STEP_DEADLINE_SECONDS", 1, 3600, 120)),
            attempts=env.integer("MAX_ATTEMPTS", 1, 100, 3),
            max_tokens=env.integer("MAX_GENERATED_TOKENS", 1, 1 << 20, 4096),
            secret=env.secret(),
            api_keys=() if keys == ("-",) else keys,
        )

    def check(self, header: KnotHeader) -> None:
        """Raises `SettingsError` unless layers and vocabulary are covered exactly."""
        layers, ids = header.config.num_layers, header.config.vocab_size
        if self.stations[-1][1] != layers:
            raise SettingsError(
                f"STATION_RANGES ends at layer {self.stations[-1][1]}, but {self.knot_key} has {layers}"
            )
        if self.shards[-1][1] != ids:
            raise SettingsError(
                f"SHARD_RANGES ends at id {self.shards[-1][1]}, but {self.knot_key} has {ids} ids"
            )


async def find_route(
    settings: GatewaySettings,
    header: KnotHeader,
    stations: Sequence[Peer],
    shards: Sequence[Peer],
    headers: Mapping[str, str],
    background: Background,
) -> Route:
    """Asks every part what it is, and makes a route of those that agree. Raises `RouteUnavailable`."""
    config = header.config
    common = {"model": header.fingerprint, "hidden_size": config.hidden_size, "vocab_size": config.vocab_size}
    asked = [
        *(_health(f"station {i}", peer, headers, background) for i, peer in enumerate(stations)),
        *(_health(f"shard {i}", peer, headers, background) for i, peer in enumerate(shards)),
    ]
    found = await together(asked)
    for i, (health, layers) in enumerate(zip(found, settings.stations, strict=False)):
        _agree(f"station {i}", health, {**common, "kind": "station", "layers": list(layers)})
    for i, (health, ids) in enumerate(zip(found[len(stations) :], settings.shards, strict=True)):
        _agree(f"shard {i}", health, {**common, "kind": "shard", "vocab": list(ids)})
    about_stations = found[: len(stations)]
    for i, health in enumerate(about_stations):
        rows, resident = health.get("max_rows"), health.get("resident")
        if type(rows) is not int or rows < 1:
            raise RouteUnavailable(f"station {i} has max_rows {rows!r}, expected a number of rows")
        if not isinstance(resident, bool):
            raise RouteUnavailable(f"station {i} has resident {resident!r}, expected true or false")
    about_shards = found[len(stations) :]
    for i, health in enumerate(about_shards):
        tokens = health.get("max_tokens")
        if type(tokens) is not int or tokens < 1:
            raise RouteUnavailable(f"shard {i} has max_tokens {tokens!r}, expected a number of tokens")
    station_hops = [
        StationHop(layers, peer, dict(headers), settings.deadline, background, config.hidden_size)
        for layers, peer in zip(settings.stations, stations, strict=True)
    ]
    shard_hops = [
        ShardHop(ids, peer, dict(headers), settings.deadline, background, config.hidden_size)
        for ids, peer in zip(settings.shards, shards, strict=True)
    ]
    return Route(
        model=header.fingerprint,
        hidden_size=config.hidden_size,
        stations=station_hops,
        shards=shard_hops,
        max_rows=min(health["max_rows"] for health in about_stations),
        resident=all(health["resident"] is True for health in about_stations),
        max_tokens=min(health["max_tokens"] for health in about_shards),
    )


async def _health(
    name: str, peer: Peer, headers: Mapping[str, str], background: Background
) -> dict[str, Any]:
    found = "was not asked"
    for attempt in range(HEALTH_ATTEMPTS):
        await asyncio.sleep(PAUSE_SECONDS * attempt)
        try:
            # A part that starts reads its knot's header first.
            reply = await within(60, peer.call(Call("GET", "/health", headers=headers)), name, background)
            if reply.status == 200:
                return dict(reply.json())
            found = f"answered {reply.status}: {reply.bytes()[:400].decode(errors='replace')}"
        except (PeerLost, DeadlineExceeded, ValueError, TypeError) as error:
            found = f"cannot be reached: {brief(error)}"
    raise RouteUnavailable(f"{name} {found}")


def _agree(name: str, health: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    for field, value in expected.items():
        if health.get(field) != value:
            raise RouteUnavailable(f"{name} has {field} {health.get(field)!r}, expected {value!r}")
