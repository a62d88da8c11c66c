"""`knot run` and `knot serve`: a cluster on this machine, asked once or left open.

Imports of what runs a cluster are inside the functions: every other command starts without them.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import sys
import tempfile
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from knot.errors import KnotError
from knot.paths import resolve_model

if TYPE_CHECKING:
    from emulator.local import LocalCluster
    from knot.cli import Commands
    from protocol.calls import Call, Reply

RESIDENCIES = ("fluid", "pinned-prefix", "resident")


class GenerationFailed(KnotError):
    """The cluster refused or lost a generation; the sentence is the gateway's."""


def add_commands(commands: Commands) -> None:
    """Adds `run` and `serve` to the command line."""
    run = commands.add_parser("run", help="continue a prompt through a cluster on this machine")
    _add_cluster(run)
    run.add_argument(
        "--runtime", choices=("emulator", "workerd"), default="emulator", help="what the Workers run on"
    )
    what = run.add_mutually_exclusive_group(required=True)
    what.add_argument("-p", "--prompt", help="text to continue")
    what.add_argument("--ids", help="token ids to continue, such as 750,282,579")
    run.add_argument("--chat", action="store_true", help="take the prompt as a message of a user")
    run.add_argument("-n", "--max-tokens", type=int, default=64, help="tokens to make at most (64)")
    run.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (the default)")
    run.add_argument("--top-k", type=int, default=0)
    run.add_argument("--top-p", type=float, default=1.0)
    run.add_argument("--min-p", type=float, default=0.0)
    run.add_argument("--seed", type=int, help="makes sampling repeatable")
    run.add_argument("--stop", action="append", default=[], help="text to stop before; may be repeated")
    run.add_argument("--ignore-eos", action="store_true", help="go on after the end of a text")
    run.add_argument("--degrade", action="store_true", help="answer even if a shard is lost, and say so")
    run.add_argument("--json", action="store_true", help="print a line of JSON with all figures at the end")
    run.set_defaults(command=run_command)
    serve = commands.add_parser("serve", help="serve a cluster on local ports")
    _add_cluster(serve)
    serve.add_argument("--port", type=int, default=8080, help="the gateway's port; the others follow (8080)")
    serve.add_argument("--data", type=Path, help="folder of what lasts (.knot in the current folder)")
    serve.add_argument("--secret", help="the cluster's secret; made at first start and kept unless given")
    serve.set_defaults(command=serve_command)


def _add_cluster(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="a knot, a GGUF, or a model to fetch, such as smol")
    parser.add_argument("--stations", type=int, default=2, help="layer stations (2)")
    parser.add_argument("--shards", type=int, default=8, help="vocabulary shards (8)")
    parser.add_argument(
        "--residency", choices=RESIDENCIES, default="pinned-prefix", help="what stays in memory"
    )
    parser.add_argument("--engine", choices=("wasm", "native"), default="wasm", help="what computes (wasm)")


def run_command(arguments: argparse.Namespace) -> int:
    """`knot run`."""
    knot = resolve_model(arguments.model)
    return _run_to_end(_run(knot, arguments))


def serve_command(arguments: argparse.Namespace) -> int:
    """`knot serve`."""
    knot = resolve_model(arguments.model)
    return _run_to_end(_serve(knot, arguments))


def _run_to_end(main: Coroutine[Any, Any, int]) -> int:
    """Runs a command's coroutine; Ctrl-C or a termination signal cancels it once, and it cleans up."""

    async def watched() -> int:
        task = asyncio.current_task()
        assert task is not None
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, task.cancel)
        return await main

    try:
        return asyncio.run(watched())
    except asyncio.CancelledError:
        return 130


@contextlib.asynccontextmanager
async def _cluster(
    knot: Path,
    arguments: argparse.Namespace,
    data: Path,
    secret: str | None = None,
    log: Callable[[str], None] | None = None,
) -> AsyncGenerator[LocalCluster]:
    from emulator.errors import EmulatorError
    from emulator.local import local_cluster
    from protocol.ports import PeerLost

    try:
        async with local_cluster(
            knot,
            data,
            stations=arguments.stations,
            shards=arguments.shards,
            engine=arguments.engine,
            variables={"RESIDENCY": arguments.residency, **clients_keys()},
            secret=secret,
            log=log,
        ) as cluster:
            yield cluster
    except (EmulatorError, PeerLost) as error:
        raise GenerationFailed(str(error)) from error


@dataclass(frozen=True, slots=True)
class Asked:
    """A running cluster, whatever it runs on."""

    fetch: Callable[[str, Call], Awaitable[Reply]]
    secret: str
    peak_isolate_bytes: Callable[[], Awaitable[int]]


@contextlib.asynccontextmanager
async def _asked(knot: Path, arguments: argparse.Namespace, data: Path) -> AsyncGenerator[Asked]:
    from knot.workerd import workerd_cluster
    from protocol.ports import PeerLost

    if arguments.runtime == "emulator":
        # What goes wrong is said by the answer; the cluster's log is for those who leave one open.
        async with _cluster(knot, arguments, data, log=lambda line: None) as local:

            async def peak() -> int:
                return local.peak_isolate_bytes()

            yield Asked(local.cluster.fetch, local.secret, peak)
        return
    if arguments.engine != "wasm":
        raise GenerationFailed("--engine native runs in the emulator only; workerd runs WebAssembly")
    try:
        async with workerd_cluster(
            knot,
            data,
            stations=arguments.stations,
            shards=arguments.shards,
            variables={"RESIDENCY": arguments.residency},
        ) as real:
            yield Asked(real.fetch, real.secret, real.peak_isolate_bytes)
    except PeerLost as error:
        raise GenerationFailed(str(error)) from error


async def _run(knot: Path, arguments: argparse.Namespace) -> int:
    prompt = _prompt(knot, arguments)
    with tempfile.TemporaryDirectory(prefix="knot-run-") as data:
        async with _asked(knot, arguments, Path(data)) as asked:
            text, last = await _generate(asked, _request(arguments, prompt))
            if arguments.json:
                print(json.dumps(summary(text, last, await asked.peak_isolate_bytes()), ensure_ascii=False))
            elif last["knot"]["degraded"]:
                print(f"knot: degraded: {last['knot']['degraded']}", file=sys.stderr)
    return 0


def _prompt(knot: Path, arguments: argparse.Namespace) -> str | list[int]:
    from engine.wasm import WasmEngine
    from knot.prompt import PromptError, chat_ids, read_ids

    if arguments.ids is not None:
        if arguments.chat:
            raise PromptError("--chat takes a message (-p); ids are what the model gets as they are")
        return read_ids(arguments.ids)
    if arguments.chat:
        return chat_ids(knot, WasmEngine(40 << 20), arguments.prompt)
    return arguments.prompt


def _request(arguments: argparse.Namespace, prompt: str | list[int]) -> dict[str, Any]:
    request: dict[str, Any] = {
        "prompt": prompt,
        "max_tokens": arguments.max_tokens,
        "temperature": arguments.temperature,
        "top_k": arguments.top_k,
        "top_p": arguments.top_p,
        "min_p": arguments.min_p,
        "stop": arguments.stop,
        "ignore_eos": arguments.ignore_eos,
        "on_shard_failure": "degrade" if arguments.degrade else "refuse",
        "stream": True,
        "details": True,
    }
    if arguments.seed is not None:
        request["seed"] = arguments.seed
    return request


async def _generate(asked: Asked, request: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Streams an answer to stdout; returns its text and the last event, which has the details."""
    from protocol.calls import json_call

    call = json_call("POST", "/v1/completions", request, {"authorization": f"Bearer {asked.secret}"})
    reply = await asked.fetch("gateway", call)
    if isinstance(reply.body, bytes):
        raise GenerationFailed(sentence(reply.body))
    text, last = "", dict[str, Any]()
    async for event in events(_pieces(reply.body)):
        if "error" in event:
            print(flush=True)
            raise GenerationFailed(str(event["error"]["message"]))
        delta = event["choices"][0]["text"]
        text += delta
        print(delta, end="", flush=True)
        last = event
    print(flush=True)
    return text, last


def sentence(body: bytes) -> str:
    """What an error's body says, in whatever shape it says it."""
    try:
        error = json.loads(body)["error"]
        return str(error.get("message") or f"{error['kind']}: {error['detail']}")
    except (ValueError, LookupError, TypeError, AttributeError):
        return body[:1000].decode(errors="replace")


async def _pieces(body: Any) -> AsyncIterator[bytes]:
    async for piece in body:
        yield piece


async def events(pieces: AsyncIterator[bytes]) -> AsyncIterator[dict[str, Any]]:
    """The JSON of server-sent events, up to [DONE]."""
    held = b""
    async for piece in pieces:
        held += piece
        while b"\n\n" in held:
            event, held = held.split(b"\n\n", 1)
            data = event.removeprefix(b"data: ")
            if data == b"[DONE]":
                return
            yield json.loads(data)


def summary(text: str, last: dict[str, Any], peak: int) -> dict[str, Any]:
    """What `--json` prints: the answer, what it took, and what the cluster used."""
    details = last["knot"]
    prompt, decoded = len(details["prompt_ids"]), details["decoded"]
    return {
        "prompt_ids": details["prompt_ids"],
        "ids": details["ids"],
        "text": text,
        "finish_reason": last["choices"][0]["finish_reason"],
        "ttft_ms": round(1000 * details["first_token_seconds"], 1),
        "prefill_tok_s": _rate(prompt, details["prefill_seconds"]),
        "decode_tok_s": _rate(decoded, details["decode_seconds"]),
        "stations": details["stations"],
        "shards": details["shards"],
        "degraded": details["degraded"],
        "attempts": details["attempts"],
        "seed": details["seed"],
        "peak_isolate_bytes": peak,
    }


def _rate(tokens: int, seconds: float) -> float | None:
    return round(tokens / seconds, 2) if tokens and seconds else None


async def _serve(knot: Path, arguments: argparse.Namespace) -> int:
    from emulator.http import HttpFront

    data: Path = arguments.data or Path(".knot")
    secret = arguments.secret or kept_secret(data)
    async with _cluster(knot, arguments, data, secret) as local:
        names = ["gateway", *(name for name in local.cluster.workers if name != "gateway")]
        doors = {name: arguments.port + i for i, name in enumerate(names)}
        async with HttpFront(local.cluster, doors) as front:
            addresses = {name: f"http://127.0.0.1:{port}" for name, port in doors.items()}
            print(json.dumps({"ready": True, "secret": secret, **addresses}), flush=True)
            print(curl_lines(addresses, secret), file=sys.stderr, flush=True)
            await front.until_interrupted()
    return 0


def kept_secret(data: Path) -> str:
    """The secret of the cluster in `data`, made at its first start. Only its owner may read the file."""
    import secrets

    data.mkdir(parents=True, exist_ok=True)
    path = data / "secret"
    if not path.exists():
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(secrets.token_urlsafe(24))
    return path.read_text().strip()


def clients_keys() -> dict[str, str]:
    """The keys that clients may come with, if the environment has some. The secret opens it, too."""
    keys = os.environ.get("API_KEYS", "")
    return {"API_KEYS": keys} if keys else {}


def curl_lines(addresses: dict[str, str], secret: str) -> str:
    """How to ask the cluster by hand."""
    station = next(address for name, address in addresses.items() if name in ("entry", "station-0"))
    shard = addresses["shard-0"]
    known = f"-H 'X-Knot-Secret: {secret}'"
    bearer = f"-H 'Authorization: Bearer {secret}'"
    ask = json.dumps({"prompt": "Hello", "max_tokens": 8})
    tokens = json.dumps({"tokens": [1, 2, 3]})
    return "\n".join(
        (
            f"curl -s {addresses['gateway']}/v1/completions {bearer} -d '{ask}'",
            f"curl -s {station}/health {known}",
            f"curl -s {shard}/embed {known} -d '{tokens}'",
        )
    )
