"""`knot plan`: what a model needs, before anything runs."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Final

from engine.blocks import RESIDENCIES
from engine.budget import OverBudgetError
from engine.fit import KV_TYPES
from knot.cluster_options import PlanError, own_variables
from knot.errors import ConfigError, OutputError
from protocol.settings import SettingsError

if TYPE_CHECKING:
    from knot.cli import Commands
    from knot.header import KnotHeader
    from knot.plan.report import Report, Wish
    from knot.topology import Topology

PICTURES: Final = (".png", ".svg")
DEFAULT_CONTEXT: Final = 1024
DEFAULT_PROMPT: Final = 512


def add_commands(commands: Commands) -> None:
    """Adds `plan` to the command line."""
    parser = commands.add_parser("plan", help="what a model needs: topology, memory, reads, speed, cost")
    parser.add_argument("model", help="a knot, a GGUF, or the beginning of a GGUF with its header")
    parser.add_argument("--stations", help="a number, or ranges of layers such as 0-10,10-28; searched for")
    parser.add_argument("--shards", help="a number, or ranges of ids; searched for")
    parser.add_argument("--residency", choices=RESIDENCIES, default="pinned-prefix")
    parser.add_argument("--context", type=int, help="tokens in all sessions together (1024 at most)")
    parser.add_argument("--prompt", type=int, help="tokens of the prompt reckoned with (512 at most)")
    parser.add_argument("--kv", choices=tuple(KV_TYPES), default="f32", help="how keys and values are kept")
    parser.add_argument("--sessions", type=int, default=8, help="sessions that share a pass, in one cost (8)")
    parser.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE", help="a Worker's variable"
    )
    parser.add_argument("--rates", type=Path, help="a file of measured rates instead of the project's")
    parser.add_argument("--prices", type=Path, help="a file of prices instead of the project's")
    parser.add_argument("--picture", action="append", default=[], type=Path, help="a PNG or SVG to draw")
    parser.add_argument("--write-wrangler", type=Path, metavar="FILE", help="wrangler's configuration for it")
    parser.add_argument("--knot-key", help="the knot's name in the bucket; the model's name unless given")
    parser.add_argument("--json", action="store_true", help="print one line of JSON at the end")
    parser.set_defaults(command=plan_command)


def plan_command(arguments: argparse.Namespace) -> int:
    """`knot plan`."""
    from knot.plan.figures import prices, rates
    from knot.plan.report import as_json, make_report
    from knot.plan.source import model_header
    from knot.plan.table import as_text

    for picture in arguments.picture:
        if picture.suffix not in PICTURES:
            raise OutputError(f"--picture is {picture}; name a file that ends in {' or '.join(PICTURES)}")
    header = model_header(arguments.model)
    wish = _wish(arguments, header)
    topology = _topology(arguments, header, wish)
    try:
        report = make_report(header, topology, wish, rates(arguments.rates), prices(arguments.prices))
    except SettingsError as error:
        raise PlanError(f"--set: {error}") from None
    except OverBudgetError as error:
        raise PlanError(f"{error}. {_would_work(header, wish)}") from None
    print(as_text(report))
    if arguments.picture:
        from knot.plan.picture import draw

        for picture in arguments.picture:
            draw(report, picture)
            print(f"drawn: {picture}")
    if arguments.write_wrangler:
        _write_wrangler(report, arguments.write_wrangler, arguments.knot_key or _key(arguments.model))
    if arguments.json:
        print(json.dumps(as_json(report)))
    return 0


def _wish(arguments: argparse.Namespace, header: KnotHeader) -> Wish:
    from knot.plan.report import Wish

    longest = header.config.context_length
    context = min(DEFAULT_CONTEXT, longest) if arguments.context is None else arguments.context
    most = min(context, longest)
    usual = DEFAULT_PROMPT if most > DEFAULT_PROMPT else max(1, most // 2)
    prompt = usual if arguments.prompt is None else arguments.prompt
    for name, value in (("context", context), ("prompt", prompt), ("sessions", arguments.sessions)):
        if value < 1:
            raise ConfigError(f"--{name} is {value}, expected at least 1")
    if prompt >= min(context, longest):
        raise ConfigError(
            f"--prompt is {prompt}, which leaves no token of --context {context} (the model has at most "
            f"{longest}): take a shorter prompt or more context"
        )
    return Wish(
        arguments.residency,
        context,
        prompt,
        arguments.kv,
        arguments.sessions,
        own_variables(arguments),
    )


def _topology(arguments: argparse.Namespace, header: KnotHeader, wish: Wish) -> Topology:
    from knot.plan.report import smallest_topology
    from knot.topology import Topology, topology_of

    stations, shards = arguments.stations, arguments.shards
    # What is given is checked before anything is searched for.
    given = topology_of(header.config, stations or "1", shards or "1")
    if stations and shards:
        return given
    try:
        found = smallest_topology(header, wish, wish.residency)
    except SettingsError as error:
        raise PlanError(f"--set: {error}") from None
    except OverBudgetError as error:
        if wish.residency != "resident":
            raise PlanError(str(error)) from None
        raise PlanError(f"{error}. {_would_work(header, wish)}") from None
    return Topology(given.stations if stations else found.stations, given.shards if shards else found.shards)


def _would_work(header: KnotHeader, wish: Wish) -> str:
    """What to ask for instead."""
    from knot.plan.report import smallest_topology
    from knot.plan.table import search_line

    lines: list[str] = []
    for residency in dict.fromkeys((wish.residency, "pinned-prefix")):
        try:
            found = smallest_topology(header, wish, residency)
        except OverBudgetError:
            continue
        lines.append(f"--residency {residency} {search_line(found)}")
    return f"What would work: {'; or '.join(lines)}" if lines else "Plan for fewer tokens (--context)"


def _write_wrangler(report: Report, path: Path, key: str) -> None:
    from knot.topology import workers
    from knot.wrangler_file import render

    plan = report.plan
    specs = workers(plan.header.config, plan.topology, key, plan.variables)
    path.write_text(render(specs, "knot plan"), encoding="utf-8")
    print(f"written: {path}, an environment for each of {len(specs)} Workers")


def _key(model: str) -> str:
    return f"{Path(model).stem}.knot"
