"""Which hops a cluster has, from the gateway's variables; and whether they agree before they are used."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from canary import CanaryFailed, admit
from hops import ShardHop, StationHop
from knot.header import KnotHeader
from lanes import Wire
from protocol.agreement import agreement, disagreement
from protocol.calls import Call, Reply, brief
from protocol.deadlines import DeadlineExceeded, together, within
from protocol.ports import Peer, PeerLost, Storage
from protocol.settings import Settings, SettingsError, Variables
from protocol.steps import Refusal
from rounds import GAP
from shared import Route, Sharing
from turns import CALLS

HEALTH_ATTEMPTS = 4
PAUSE_SECONDS = 0.1
HEALTH_SECONDS = 60.0


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
    max_sessions: int
    max_waiting: int
    prefill_gap: int
    turn_seconds: float
    turn_calls: int
    pipeline: bool
    canary: bool
    prefixes: bool
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
            max_sessions=env.integer("MAX_SESSIONS", 1, 4096, 64),
            max_waiting=env.integer("MAX_WAITING", 0, 100_000, 64),
            prefill_gap=env.integer("PREFILL_GAP", 1, 1000, GAP),
            turn_seconds=float(env.integer("TURN_SECONDS", 1, 25, 10)),
            turn_calls=env.integer("TURN_CALLS", 1, 1_000_000, CALLS),
            pipeline=env.choice("PIPELINE", ("on", "off"), "on") == "on",
            canary=env.choice("CANARY", ("on", "off"), "on") == "on",
            prefixes=env.choice("PREFIX_CACHE", ("on", "off"), "on") == "on",
            secret=env.secret(),
            api_keys=() if keys == ("-",) else keys,
        )

    @property
    def sharing(self) -> Sharing:
        """How sessions share the route."""
        return Sharing(self.max_sessions, self.max_waiting, self.prefill_gap, self.prefixes, self.pipeline)

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
    wire: Wire,
    known: Storage | None = None,
) -> Route:
    """Asks every part what it is, and makes a route of those that agree. Raises `RouteUnavailable`.

    With `known`, which remembers the answers, stations are admitted by a canary.
    """
    config, common = header.config, agreement(header)
    asked = [
        *(_health(f"station {i}", peer, wire) for i, peer in enumerate(stations)),
        *(_health(f"shard {i}", peer, wire) for i, peer in enumerate(shards)),
    ]
    found = await together(asked)
    about_stations, about_shards = found[: len(stations)], found[len(stations) :]
    for i, (health, layers) in enumerate(zip(about_stations, settings.stations, strict=True)):
        _agree(f"station {i}", health, {"kind": "station", "layers": list(layers), **common})
        _numbers(f"station {i}", health, max_rows="rows", kv_tokens="tokens")
        if not isinstance(health.get("resident"), bool):
            raise RouteUnavailable(
                f"station {i} has resident {health.get('resident')!r}, expected true or false"
            )
    for i, (health, ids) in enumerate(zip(about_shards, settings.shards, strict=True)):
        _agree(f"shard {i}", health, {"kind": "shard", "vocab": list(ids), **common})
        _numbers(f"shard {i}", health, max_tokens="tokens")
    hops = [
        StationHop(layers, peer, wire, config.hidden_size)
        for layers, peer in zip(settings.stations, stations, strict=True)
    ]
    if settings.canary and known is not None:
        try:
            await together(
                admit(hop, header.fingerprint, common["abi"], config.hidden_size, known) for hop in hops
            )
        except (CanaryFailed, Refusal) as error:
            raise RouteUnavailable(str(error)) from error
    return Route(
        model=header.fingerprint,
        hidden_size=config.hidden_size,
        stations=hops,
        shards=[
            ShardHop(ids, peer, wire, config.hidden_size)
            for ids, peer in zip(settings.shards, shards, strict=True)
        ],
        max_rows=min(health["max_rows"] for health in about_stations),
        resident=all(health["resident"] is True for health in about_stations),
        max_tokens=min(health["max_tokens"] for health in about_shards),
        kv_tokens=min(health["kv_tokens"] for health in about_stations),
    )


async def _health(name: str, peer: Peer, wire: Wire) -> dict[str, Any]:
    found = "was not asked"
    for attempt in range(HEALTH_ATTEMPTS):
        await asyncio.sleep(PAUSE_SECONDS * attempt)
        try:
            # A part that starts reads its knot's header first.
            asked = peer.call(Call("GET", "/health", headers=wire.headers))
            reply = await within(HEALTH_SECONDS, asked, name, wire.background)
            if reply.status == 200:
                return dict(reply.json())
            found = f"answered {reply.status}: {_said(reply)}"
        except (PeerLost, DeadlineExceeded, ValueError, TypeError) as error:
            found = f"cannot be reached: {brief(error)}"
    raise RouteUnavailable(f"{name} {found}")


def _said(reply: Reply) -> str:
    """What a part that is not well says of itself."""
    try:
        return str(reply.json()["error"]["detail"])[:400]
    except (ValueError, LookupError, TypeError):
        return reply.bytes()[:400].decode(errors="replace")


def _agree(name: str, health: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    found = disagreement(health, expected)
    if found is not None:
        raise RouteUnavailable(f"{name} has {found}")


def _numbers(name: str, health: Mapping[str, Any], **fields: str) -> None:
    for field, what in fields.items():
        value = health.get(field)
        if type(value) is not int or value < 1:
            raise RouteUnavailable(f"{name} has {field} {value!r}, expected a number of {what}")
