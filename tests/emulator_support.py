"""Small Workers, and a cluster of them for one test."""

from __future__ import annotations

import ast
import asyncio
import gc
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from emulator import Cluster, WorkerConfig, bundle
from protocol.calls import Call, Reply

ROOT = Path(__file__).resolve().parent.parent
WORKERS = Path(__file__).resolve().parent / "workers_for_tests"
PARTS = {"protocol": ROOT / "protocol", "engine": ROOT / "engine"}
PARTS_OF = {"engine": ("client", "errors", "host", "values")}


def worker(name: str, entry: str, *files: str, **bindings: Any) -> WorkerConfig:
    """A Worker from the files of `workers_for_tests`: its entry, and others under their own names."""
    modules = bundle(packages=PARTS, only=PARTS_OF)
    modules |= {file: WORKERS / f"{file}.py" for file in files}
    modules["entry"] = WORKERS / f"{entry}.py"
    return WorkerConfig(name, modules, **bindings)


@asynccontextmanager
async def running(folder: Path, *workers: WorkerConfig, **options: Any) -> AsyncIterator[Cluster]:
    """A cluster that must have nothing left open when it stops."""
    options.setdefault("log", lambda line: None)
    async with Cluster(workers, folder / "data", **options) as cluster:
        yield cluster
        await settled(cluster)
    left = [name for name in sys.modules if name.startswith("isolate_")]
    assert not left, f"modules of isolates are still there: {left[:3]}"


async def settled(cluster: Cluster) -> None:
    """Waits until nothing is pending; bodies that nobody refers to count until they are collected."""
    for _ in range(200):
        if not cluster.pending():
            return
        gc.collect()
        await asyncio.sleep(0.005)
    raise AssertionError(f"still pending: {cluster.pending()}")


async def get(cluster: Cluster, path: str, worker: str = "probe", **options: Any) -> Reply:
    """GET `path?query` of a Worker."""
    path, _, query = path.partition("?")
    return await cluster.fetch(worker, Call("GET", path, query=query, **options))


async def body_of(reply: Reply) -> bytes:
    """A reply's body, however it comes."""
    if isinstance(reply.body, bytes):
        return reply.body
    return b"".join([piece async for piece in reply.body])  # type: ignore[union-attr]


async def until(condition: Callable[[], Any], what: str) -> None:
    """Waits until something holds."""
    for _ in range(400):
        if condition():
            return
        await asyncio.sleep(0.005)
    raise AssertionError(f"never happened: {what}")


def checks_in(file: str) -> list[str]:
    """The checks of a file in `workers_for_tests`: its public coroutine functions."""
    tree = ast.parse((WORKERS / f"{file}.py").read_bytes())
    return [node.name for node in tree.body if isinstance(node, ast.AsyncFunctionDef) and node.name[0] != "_"]


def run(test: Callable[[], Awaitable[None]]) -> None:
    """Runs an asynchronous test, with the event loop's own checks on."""

    async def whole() -> None:
        await test()

    asyncio.run(whole(), debug=True)
