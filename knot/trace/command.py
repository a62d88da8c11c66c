"""`knot trace`: runs a prompt under a recorder, draws every isolate's memory, and checks what flowed."""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

from knot.cluster_options import add_cluster_options, choose
from knot.errors import ConfigError, KnotError, OutputError

if TYPE_CHECKING:
    from knot.cli import Commands
    from knot.cluster_options import Chosen
    from knot.header import KnotHeader
    from knot.trace.curves import Curve
    from knot.trace.picture import Times
    from protocol.fluid import Flow
    from protocol.recorder import Recorder

PICTURES: Final = (".png", ".svg")
# A pass of a 7B model is some 2,500 events.
MOST_EVENTS: Final = 4_000_000


class TraceFailed(KnotError):
    """A run that could not be recorded, or that was not what it should be; the sentence says what was."""


def add_commands(commands: Commands) -> None:
    """Adds `trace` to the command line."""
    parser = commands.add_parser("trace", help="draw the memory of every isolate while a prompt runs")
    add_cluster_options(parser)
    parser.add_argument("--engine", choices=("wasm", "native"), default="wasm", help="what computes (wasm)")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("-p", "--prompt", help="text to continue")
    what.add_argument("--ids", help="token ids to continue, such as 750,282,579")
    what.add_argument("--tokens", type=int, help="a prompt of so many ids, whatever they mean (64)")
    parser.add_argument("-n", "--max-tokens", type=int, default=4, help="tokens to make (4)")
    parser.add_argument(
        "--picture", action="append", default=[], type=Path, help="a PNG or SVG to draw (trace.png)"
    )
    parser.add_argument("--json", action="store_true", help="print one line of JSON at the end")
    parser.set_defaults(command=trace_command)


def trace_command(arguments: argparse.Namespace) -> int:
    """`knot trace`."""
    from knot.paths import resolve_model
    from knot.reader import load_header
    from knot.trace.curves import curves
    from knot.trace.picture import draw
    from protocol.fluid import NotFluid, check_fluid
    from protocol.recorder import Recorder

    pictures: list[Path] = arguments.picture or [Path("trace.png")]
    for picture in pictures:
        if picture.suffix not in PICTURES:
            raise OutputError(f"--picture is {picture}; name a file that ends in {' or '.join(PICTURES)}")
    if arguments.max_tokens < 1:
        raise ConfigError(f"--max-tokens is {arguments.max_tokens}, expected at least 1")
    knot = resolve_model(arguments.model)
    header = load_header(knot)
    prompt = _prompt(arguments, header)
    # How many ids a text makes is known when it has been read; the model's tokenizer never makes more.
    length = len(prompt.encode()) if isinstance(prompt, str) else len(prompt)
    chosen = choose(arguments, header, length + arguments.max_tokens)
    recorder = Recorder(most=MOST_EVENTS)
    times, details = asyncio.run(_run(knot, chosen, arguments, prompt, recorder))
    try:
        flows = check_fluid(recorder)
    except NotFluid as error:
        raise TraceFailed(f"memory was not fluid: {error}") from None
    except ValueError as error:
        raise TraceFailed(f"{error}: trace fewer tokens") from None
    found = curves(recorder.events)
    print(_as_text(header, chosen, found, flows, times, details))
    counts = f"{len(chosen.topology.stations)} stations, {len(chosen.topology.shards)} shards"
    tokens = f"{len(details['prompt_ids'])} tokens of prompt, {len(details['ids'])} made"
    title = f"{header.name}: {counts}, {arguments.residency}; {tokens}"
    for picture in pictures:
        draw(title, found, times, picture)
        print(f"drawn: {picture}")
    if arguments.json:
        print(json.dumps(_as_json(chosen, found, flows, times, details)))
    return 0


def _prompt(arguments: argparse.Namespace, header: KnotHeader) -> str | list[int]:
    from knot.prompt import read_ids

    if arguments.prompt is not None:
        return arguments.prompt
    if arguments.ids is not None:
        return read_ids(arguments.ids)
    count = 64 if arguments.tokens is None else arguments.tokens
    longest = header.config.context_length - arguments.max_tokens
    if not 1 <= count <= longest:
        raise ConfigError(f"--tokens is {count}, expected 1 to {longest} for this model")
    # Spread over the vocabulary, so that every shard has some.
    return [(i * 7919 + 17) % header.config.vocab_size for i in range(count)]


async def _run(
    knot: Path, chosen: Chosen, arguments: argparse.Namespace, prompt: str | list[int], recorder: Recorder
) -> tuple[Times, dict[str, Any]]:
    """Continues the prompt, greedily. Returns when what happened, and the gateway's details."""
    from emulator.errors import EmulatorError
    from emulator.local import local_cluster
    from knot.run_command import events, sentence
    from knot.trace.picture import Times
    from protocol.calls import json_call
    from protocol.ports import PeerLost

    request = {
        "prompt": prompt, "max_tokens": arguments.max_tokens, "temperature": 0, "ignore_eos": True,
        "stream": True, "details": True,
    }  # fmt: skip
    first: float | None = None
    last: dict[str, Any] = {}
    try:
        with tempfile.TemporaryDirectory(prefix="knot-trace-") as data:
            async with local_cluster(
                knot,
                Path(data),
                topology=chosen.topology,
                engine=arguments.engine,
                # A canary is a pass of its own, which nobody asked for here.
                variables={"CANARY": "off", **chosen.variables},
                recorder=recorder,
            ) as local:
                asked = recorder.elapsed
                bearer = {"authorization": f"Bearer {local.secret}"}
                call = json_call("POST", "/v1/completions", request, bearer)
                reply = await local.cluster.fetch("gateway", call)
                if isinstance(reply.body, bytes):
                    raise TraceFailed(sentence(reply.body))
                async for last in events(cast("AsyncIterator[bytes]", reply.body)):
                    if "error" in last:
                        raise TraceFailed(str(last["error"]["message"]))
                    first = recorder.elapsed if first is None else first
                ended = recorder.elapsed
    except (EmulatorError, PeerLost) as error:
        raise TraceFailed(str(error)) from error
    return Times(asked, ended if first is None else first, ended), last["knot"]


def _as_text(
    header: KnotHeader,
    chosen: Chosen,
    found: Mapping[str, Curve],
    flows: Mapping[str, Flow],
    times: Times,
    details: Mapping[str, Any],
) -> str:
    from knot.plan.table import aligned

    rows = [("isolate", "peak", "engine", "bodies", "kept", "pinned", "in flight", "blocks", "reads", "read")]
    for name, curve in found.items():
        peak, flow = curve.peak, flows.get(name)
        rows.append(
            (
                name,
                _mb(peak.total),
                _mb(peak.engine),
                _mb(peak.bodies),
                _mb(peak.kept),
                _mb(flow.pinned_bytes) if flow else "",
                _mb(flow.most_bytes) if flow else "",
                str(flow.most_blocks) if flow else "",
                f"{curve.read.operations:,}",
                _mb(curve.read.bytes),
            )
        )
    most = max(curve.peak.total for curve in found.values())
    moved = sum(sum(flow.passed.values()) for flow in flows.values())
    first = times.first_token - times.asked
    return "\n".join(
        (
            f"{header.name}: {len(details['prompt_ids'])} tokens of prompt in {first:.1f} s, "
            f"{len(details['ids'])} made in {times.ended - times.asked:.1f} s in all",
            "variables: " + ", ".join(f"{name}={value}" for name, value in sorted(chosen.variables.items())),
            "",
            *aligned(rows),
            "",
            f"the fullest isolate had {_mb(most)} of 128 MB",
            f"{_mb(moved)} of weights went through memory; of them, never more than two blocks of one phase "
            "of one layer were on their way in an isolate, and they left before the next phase came",
        )
    )


def _as_json(
    chosen: Chosen,
    found: Mapping[str, Curve],
    flows: Mapping[str, Flow],
    times: Times,
    details: Mapping[str, Any],
) -> dict[str, Any]:
    isolates: dict[str, Any] = {}
    for name, curve in found.items():
        peak, flow = curve.peak, flows.get(name)
        isolates[name] = {
            "peak_bytes": peak.total,
            "engine_bytes": peak.engine,
            "bodies_bytes": peak.bodies,
            "kept_bytes": peak.kept,
            "pinned_bytes": flow.pinned_bytes if flow else 0,
            "most_in_flight_bytes": flow.most_bytes if flow else 0,
            "most_in_flight_blocks": flow.most_blocks if flow else 0,
            "passed_bytes": sum(flow.passed.values()) if flow else 0,
            "reads": {"operations": curve.read.operations, "bytes": curve.read.bytes},
        }
    return {
        "variables": dict(chosen.variables),
        "prompt_ids": details["prompt_ids"],
        "ids": details["ids"],
        "first_token_seconds": times.first_token - times.asked,
        "seconds": times.ended - times.asked,
        "peak_isolate_bytes": max(curve.peak.total for curve in found.values()),
        "isolates": isolates,
    }


def _mb(size: int) -> str:
    return f"{size / 1e6:,.1f} MB" if size < 1e9 else f"{size / 1e9:,.2f} GB"
