"""Options of the commands that run a cluster, and what the planner makes of them."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import TYPE_CHECKING

from engine.blocks import RESIDENCIES
from engine.fit import KV_TYPES
from knot.errors import ConfigError, KnotError

if TYPE_CHECKING:
    from knot.header import KnotHeader
    from knot.topology import Topology


class PlanError(KnotError):
    """A cluster that cannot be; the sentence has the figures, and what would work."""


@dataclass(frozen=True, slots=True)
class Chosen:
    """A topology, and variables for every Worker of it."""

    topology: Topology
    variables: Mapping[str, str]


def add_cluster_options(parser: argparse.ArgumentParser) -> None:
    """Adds the model and the cluster's shape."""
    parser.add_argument("model", help="a knot, a GGUF, or a model to fetch, such as smol")
    parser.add_argument("--stations", default="2", help="layer stations, or ranges such as 0-10,10-28 (2)")
    parser.add_argument("--shards", default="8", help="vocabulary shards, or ranges of ids (8)")
    parser.add_argument(
        "--residency", choices=RESIDENCIES, default="pinned-prefix", help="what stays in memory"
    )
    parser.add_argument("--context", type=int, help="tokens that all sessions together can have")
    parser.add_argument("--kv", choices=tuple(KV_TYPES), default="f32", help="how keys and values are kept")
    parser.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE", help="a Worker's variable"
    )


def own_variables(arguments: argparse.Namespace) -> dict[str, str]:
    """What `--set` says. Raises `ConfigError`."""
    variables: dict[str, str] = {}
    for entry in arguments.set:
        name, equals, value = entry.partition("=")
        if not name or not equals:
            raise ConfigError(f"--set is {entry!r}, expected NAME=VALUE, such as BLOCK_BYTES=2097152")
        variables[name] = value
    known = planned_variables()
    for name in variables:
        option = {"RESIDENCY": "--residency", "KV_TYPE": "--kv"}.get(name)
        if option:
            raise ConfigError(f"{name} has an option of its own: {option}")
        near = get_close_matches(name, known, 1, 0.8)
        if name not in known and near:
            raise ConfigError(f"--set has {name}, which no Worker knows; did you mean {near[0]}?")
    return variables


def planned_variables() -> set[str]:
    """The variables that decide about memory and reads: what stations, shards and wardens ask for."""
    from engine.fit import ShardMemory, StationMemory
    from protocol.settings import Settings

    asked = {"USE_LAYER_WARDEN", "MEMORY_BUDGET_BYTES"}

    def ask(name: str) -> None:
        asked.add(name)

    StationMemory.of(Settings(ask))
    ShardMemory.of(Settings(ask))
    return asked


def choose(arguments: argparse.Namespace, header: KnotHeader, tokens: int | None = None) -> Chosen:
    """The topology that was asked for, with room for `--context`, or else for `tokens` tokens.

    With neither, keys and values get what a station gives them by itself. Raises `ConfigError` and
    `PlanError`, which says what would work.
    """
    from engine.budget import OverBudgetError
    from knot.plan.search import best_plan
    from knot.topology import topology_of
    from protocol.settings import SettingsError

    topology = topology_of(header.config, arguments.stations, arguments.shards)
    variables = {**own_variables(arguments), "RESIDENCY": arguments.residency}
    context = tokens if arguments.context is None else arguments.context
    if context is None:
        return Chosen(topology, {**variables, "KV_TYPE": arguments.kv})
    if context < 1:
        raise ConfigError(f"--context is {context}, expected at least 1")
    try:
        plan = best_plan(header, topology, variables, context=context, prompt=context, kv_type=arguments.kv)
    except SettingsError as error:
        raise PlanError(f"--set: {error}") from None
    except OverBudgetError as error:
        raise PlanError(f"{error}. `knot plan` says which topology would do") from None
    return Chosen(topology, plan.variables)
