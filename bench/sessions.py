"""Many sessions at once: tokens a second of all together, the time to a first token, and the cluster's cost.

Sessions write at the same time through one cluster. Where weights are read for every pass (fluid), a pass
costs nearly the same for eight sessions as for one; where they stay in memory (resident), what is shared is
only their way through the caches of the processor. The same tokens are made whoever is beside whom, and a run
in which they are not fails.

The cluster's cost is its rate over that of one station and one shard of the same engine, called by plain
function calls in one process: no frames, no objects, no gateway.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any, Final

from bench._arguments import count
from bench._tables import say, table
from bench.synthetic import SHAPES, write_synthetic_knot
from emulator.limits import Limits
from emulator.local import local_cluster
from engine.values import KV_PAGE_TOKENS
from knot.header import KnotHeader
from knot.paths import resolve_model
from knot.reader import load_header
from knot.topology import even_topology
from protocol.calls import Call, Reply, json_call

SUMMARY: Final = "1, 2, 4 and 8 sessions at once: tokens a second of all, first tokens, the cluster's cost"
QUICK: Final = ("q05", "--tokens", "8", "--sessions", "1", "4", "--rounds", "1", "--no-first-token")
ROOT: Final = Path(__file__).resolve().parent.parent
MODES: Final = ("fluid", "resident")
# One station's share of a model in memory; the platform's limit is not what is measured here.
ROOMY: Final = {"ISOLATE_BYTES": str(4 << 30), "ENGINE_BYTES": str(1 << 30)}
# A slow machine must not let an object seem idle, which would lose its sessions.
ROOMY_LIMITS: Final = Limits(memory_bytes=8 << 30, object_idle_seconds=3600)
# Rows of the vocabulary for each layer of a synthetic model: those of the whole model, in proportion.
ROWS_A_LAYER: Final = 5_432


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds models, modes, counts and lengths."""
    parser.add_argument(
        "models", nargs="*", default=["7b", "q15"],
        help="keys, knots, GGUFs, or 7b for synthetic 7B shapes with fewer layers (7b q15)",
    )  # fmt: skip
    parser.add_argument("--layers", type=count, default=4, help="most layers of synthetic models (4)")
    parser.add_argument("--sessions", type=count, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--tokens", type=count, default=16, help="tokens that each session writes (16)")
    parser.add_argument("--prompt", type=count, default=16, help="tokens of each prompt (16)")
    parser.add_argument("--long", type=count, default=256, help="tokens of the long prompt (256)")
    parser.add_argument("--rounds", type=count, default=2, help="measured runs of each (2)")
    parser.add_argument("--stations", type=count, default=2)
    parser.add_argument("--shards", type=count, default=2)
    parser.add_argument("--engine", choices=("wasm", "native"), default="wasm")
    parser.add_argument("--runtime", choices=("emulator", "workerd"), default="emulator")
    parser.add_argument("--first-token", action=argparse.BooleanOptionalAction, default=True)


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measures every model in every mode."""
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="bench-sessions-") as folder:
        for model in arguments.models:
            knot = _knot(model, Path(folder), arguments.layers)
            found[model] = {
                mode: asyncio.run(_mode(model, knot, mode, arguments)) for mode in arguments.modes
            }
    return found


def _knot(model: str, folder: Path, layers: int) -> Path:
    if model not in SHAPES:
        return resolve_model(model)
    knot = folder / f"{model}.knot"
    shape = SHAPES[model]
    if layers < shape.layers:
        shape = replace(shape, layers=layers, vocab=layers * ROWS_A_LAYER, rows=layers * ROWS_A_LAYER)
    write_synthetic_knot(knot, shape)
    return knot


async def _mode(model: str, knot: Path, mode: str, arguments: argparse.Namespace) -> dict[str, Any]:
    header = load_header(knot)
    most = max(arguments.sessions)
    tokens = max(arguments.long, most * (arguments.prompt + arguments.tokens + 16)) + 64
    variables = {
        "RESIDENCY": mode, "PREFIX_CACHE": "off", "SAVE_BYTES": "0", "USE_LAYER_WARDEN": "off",
        "KV_BYTES": str(_kv_bytes(header, arguments.stations, tokens)),
        **(ROOMY if arguments.runtime == "emulator" else {}),
    }  # fmt: skip
    rates: dict[str, float] = {}
    tokens_of: dict[int, list[int]] = {}
    found: dict[str, Any] = {}
    async with _cluster(knot, variables, arguments) as ask:
        await _together(ask, header, 1, arguments, tokens_of)  # everything boots and fills
        for count in arguments.sessions:
            runs = [
                await _together(ask, header, count, arguments, tokens_of) for _ in range(arguments.rounds)
            ]
            rates[str(count)] = round(median(runs), 3)
            say(f"{model} {mode}: {count} sessions, {rates[str(count)]} tokens a second together")
        if arguments.first_token:
            found["first_token_seconds"] = await _first_token(ask, header, arguments)
    if arguments.first_token:
        async with _cluster(knot, {**variables, "PIPELINE": "off"}, arguments) as ask:
            await _together(ask, header, 1, arguments, tokens_of)
            found["first_token_seconds_without_pipelining"] = await _first_token(ask, header, arguments)
    alone = await _one_process(knot, header, variables, arguments, tokens_of[0])
    one = rates[str(min(arguments.sessions))]
    found |= {
        "tokens_per_second": rates,
        "over_one": {count: round(rate / one, 2) for count, rate in rates.items()},
        "one_process_tokens_per_second": round(alone, 3),
        "cluster_over_one_process": round(one / alone, 3),
    }
    heads = ["sessions", "tokens/s", "over one"]
    say(table(heads, [[count, f"{rate:.2f}", f"{rate / one:.2f}"] for count, rate in rates.items()]))
    return found


class _Ask:
    """Asks a cluster's gateway for completions."""

    def __init__(self, fetch: Any, secret: str) -> None:
        self._fetch = fetch
        self._headers = {"authorization": f"Bearer {secret}"}

    async def __call__(self, prompt: Sequence[int], tokens: int) -> dict[str, Any]:
        body = {
            "prompt": list(prompt), "max_tokens": tokens, "temperature": 0, "ignore_eos": True,
            "details": True,
        }  # fmt: skip
        call: Call = json_call("POST", "/v1/completions", body, self._headers)
        reply: Reply = await self._fetch("gateway", call)
        if reply.status != 200:
            raise RuntimeError(f"the cluster refused: {reply.bytes()[:1000].decode(errors='replace')}")
        return reply.json()["knot"]


@asynccontextmanager
async def _cluster(
    knot: Path, variables: dict[str, str], arguments: argparse.Namespace
) -> AsyncGenerator[_Ask]:
    with tempfile.TemporaryDirectory(prefix="bench-sessions-") as data:
        if arguments.runtime == "workerd":
            from knot.workerd import workerd_cluster

            async with workerd_cluster(
                knot, Path(data), stations=arguments.stations, shards=arguments.shards,
                variables=variables, log=_no_log,
            ) as cluster:  # fmt: skip
                yield _Ask(cluster.fetch, cluster.secret)
            return
        topology = even_topology(load_header(knot).config, arguments.stations, arguments.shards)
        async with local_cluster(
            knot, Path(data), topology=topology, engine=arguments.engine, variables=variables,
            limits=ROOMY_LIMITS, log=_no_log,
        ) as local:  # fmt: skip
            yield _Ask(local.cluster.fetch, local.secret)


def _no_log(line: str) -> None:
    pass


async def _together(
    ask: _Ask, header: KnotHeader, count: int, arguments: argparse.Namespace, tokens_of: dict[int, list[int]]
) -> float:
    """Tokens a second of `count` sessions together, while they write."""
    prompts = [_prompt(header, arguments.prompt, number) for number in range(count)]
    answers = await asyncio.gather(*(ask(prompt, arguments.tokens) for prompt in prompts))
    for number, answer in enumerate(answers):
        if tokens_of.setdefault(number, answer["ids"]) != answer["ids"]:
            raise AssertionError(f"session {number} of {count} made other tokens than before")
    seconds = max(answer["decode_seconds"] for answer in answers)
    return sum(answer["decoded"] for answer in answers) / seconds


async def _first_token(ask: _Ask, header: KnotHeader, arguments: argparse.Namespace) -> float:
    """Seconds to the first token after a long prompt."""
    found = [
        (await ask(_prompt(header, arguments.long, 100 + number), 1))["first_token_seconds"]
        for number in range(arguments.rounds)
    ]
    return round(median(found), 3)


def _prompt(header: KnotHeader, length: int, number: int) -> list[int]:
    """Other ids for every session."""
    return [(i * 7919 + 104_729 * number + 17) % min(8_000, header.config.vocab_size) for i in range(length)]


def _kv_bytes(header: KnotHeader, stations: int, tokens: int) -> int:
    layers = -(-header.config.num_layers // stations)
    return -(-tokens // KV_PAGE_TOKENS) * KV_PAGE_TOKENS * layers * 2 * header.config.kv_dim * 4


async def _one_process(
    knot: Path, header: KnotHeader, variables: dict[str, str], arguments: argparse.Namespace, ids: list[int]
) -> float:
    """Tokens a second of one station and one shard in this process; they must make the same tokens."""
    prompt = _prompt(header, arguments.prompt, 0)
    kv = str(2 * _kv_bytes(header, 1, len(prompt) + arguments.tokens + 16))
    async with one_process(knot, header, {**variables, **ROOMY, "KV_BYTES": kv}, arguments.engine) as step:
        await step(prompt)  # everything fills
        made: list[int] = []
        token = await step(prompt, again=True)
        began = time.perf_counter()
        for _ in range(arguments.tokens - 1):
            made.append(token)
            token = await step([token])
        seconds = time.perf_counter() - began
        made.append(token)
    if made != ids:
        raise AssertionError(f"one process makes {made}, the cluster {ids}")
    return (arguments.tokens - 1) / seconds


@asynccontextmanager
async def one_process(
    knot: Path, header: KnotHeader, variables: dict[str, str], engine: str
) -> AsyncGenerator[Any]:
    """A whole model in this process: a function from ids to the id that follows them, greedily."""
    for folder in ("tests", "workers", "workers/station", "workers/cobordism", "workers/gateway"):
        path = os.fspath(ROOT / folder)
        if path not in sys.path:
            sys.path.append(path)
    import bench._whole as whole

    async with whole.model(knot, header, variables, engine) as step:
        yield step
