"""How much of reading hides behind computing on workerd, when the blobs are served from outside of it.

Three passes over the same weights are timed in one run: computing alone (a station that holds everything
resident), reading alone (the same ranges, drained into WebAssembly memory by the same code), and both (a
station in fluid memory). What is hidden is a share of the shorter of the first two.
"""

from __future__ import annotations

import argparse
import asyncio
import http.server
import json
import multiprocessing
import os
import re
import tempfile
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any, Final

import httpx
import numpy as np

from bench._arguments import count
from bench._tables import say, table
from bench.synthetic import Shape, write_synthetic_knot
from engine.blocks import phase_units, total_bytes
from knot.header import PHASES, KnotHeader
from knot.topology import WorkerSpec, even_topology, workers
from knot.workerd import bundle_of, run_workers
from protocol.access import headers
from protocol.calls import FRAME
from protocol.frames import Kind, Part, Tensor, decode, encode
from protocol.steps import Envelope, ForwardStep, Phase, Rows

QUICK: Final = ["--rows", "1,8", "--rounds", "3"]
SUMMARY: Final = "reading that hides behind computing, on workerd with blobs from another process"

# All weights of this layer fit one isolate, so that computing can be timed alone; its phases are long.
SHAPE: Final = Shape("qwen2", 1, 2048, 7168, 16, 2, 128, 1024, 1024)
SECRET: Final = "only for this bench"
BLOCK_BYTES: Final = 2 << 20

# The bucket as another process serves it, in place of the binding.
_BUCKET: Final = """
export async function head(bucket, key) {
  const found = await fetch(`ORIGIN/${key}`, { method: "HEAD" });
  return JSON.stringify([Number(found.headers.get("content-length")), "etag"]);
}

export async function range(bucket, key, offset, length, etag) {
  const range = `bytes=${offset}-${offset + length - 1}`;
  const found = await fetch(`ORIGIN/${key}`, { headers: { range } });
  return ["found", "etag", found.body, length];
}
"""

# Drains ranges as a station does, and computes nothing.
_READER: Final = """
import { Inflow, Wasm, range } from "./boundary.js";

const AT = 1 << 20;
let wasm = null;

export default {
  async fetch(request) {
    const { key, ranges, block } = await request.json();
    if (!wasm) {
      wasm = new Wasm(false);
      wasm.memory.grow((AT + 2 * block) >> 16);
    }
    let read = 0;
    for (const [offset, length] of ranges) {
      const inflow = new Inflow((await range(null, key, offset, length, null))[2], length);
      for (let done = 0, turn = 0; done < length; done += block, turn ^= 1) {
        read += await inflow.pour(wasm, AT + turn * block, Math.min(block, length - done));
      }
      await inflow.cancel();
    }
    return Response.json(read);
  },
};
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds how many rows a pass has, and how often each is timed."""
    parser.add_argument("--rows", default="1,8,32", help="rows of a pass, several of them (1,8,32)")
    parser.add_argument("--rounds", type=count, default=7, help="passes of each kind (7)")


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Times the three kinds of passes for every number of rows."""
    rows = [int(piece) for piece in arguments.rows.split(",")]
    return asyncio.run(_run(rows, arguments.rounds))


async def _run(counts: list[int], rounds: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    async with _stations() as (header, ask):
        layers = range(header.config.num_layers)
        units = phase_units(header, layers, PHASES, BLOCK_BYTES)
        size = total_bytes(units)
        for rows in counts:
            passes = {
                "compute": lambda rows=rows: ask("resident", rows),
                "read": lambda: ask("reader", 0),
                "both": lambda rows=rows: ask("fluid", rows),
            }
            for each in passes.values():
                await each()
            seconds = {name: list[float]() for name in passes}
            for _ in range(rounds):
                for name, each in passes.items():
                    began = time.perf_counter()
                    await each()
                    seconds[name].append(time.perf_counter() - began)
            compute, read, both = (median(seconds[name]) for name in ("compute", "read", "both"))
            found[f"{rows} rows"] = {
                "compute_seconds": round(compute, 4),
                "read_seconds": round(read, 4),
                "both_seconds": round(both, 4),
                "hidden_share_of_the_shorter": round((compute + read - both) / min(compute, read), 3),
                "read_mb_per_second": round(size / read / 1e6),
            }
    heads = next(iter(found.values()))
    say(table(("", *heads), [(name, *map(str, row.values())) for name, row in found.items()]))
    return {"weights_bytes": size, **found}


Ask = Callable[[str, int], Awaitable[None]]


@asynccontextmanager
async def _stations() -> AsyncGenerator[tuple[KnotHeader, Ask]]:
    """A station in fluid memory, one that holds everything, and a reader, in one workerd."""
    with tempfile.TemporaryDirectory(prefix="bench-overlap-") as scratch:
        folder = Path(scratch)
        header = write_synthetic_knot(folder / "model.knot", SHAPE)
        with _blob_server(folder) as origin:
            modules = _modules(folder, origin)
            specs = [_station("fluid", header), _station("resident", header), _reader()]
            async with (
                run_workers(specs, folder / "data", modules=modules) as (addresses, _),
                httpx.AsyncClient(timeout=120) as client,
            ):
                number = 0

                async def ask(worker: str, rows: int) -> None:
                    nonlocal number
                    number += 1
                    if worker == "reader":
                        await _drain(client, addresses[worker], header)
                        return
                    await _forward(client, addresses[worker], header, rows, f"session-{number}")

                yield header, ask


def _station(name: str, header: KnotHeader) -> WorkerSpec:
    variables = {
        "CLUSTER_SECRET": SECRET,
        "RESIDENCY": name,
        "BLOCK_BYTES": str(BLOCK_BYTES),
        "KV_BYTES": "2000000",
        "MAX_BATCH_ROWS": "32",
        "USE_LAYER_WARDEN": "off",
        "SAVE_BYTES": "0",
    }
    [spec] = [
        spec
        for spec in workers(header.config, even_topology(header.config, 1, 1), "model.knot", variables)
        if spec.folder == "workers/station"
    ]
    return replace(spec, name=name, objects={"STATION": spec.objects["STATION"]})


def _reader() -> WorkerSpec:
    return WorkerSpec("reader", "", {})


def _modules(folder: Path, origin: str) -> dict[str, Mapping[str, str]]:
    """Bundles whose bucket is the blob server."""
    station = bundle_of("workers/station")
    text = Path(station["boundary.js"]).read_text(encoding="utf-8")
    for name in ("head", "range"):
        text, count = re.subn(rf"export async function {name}\(.*?\n}}\n", "", text, flags=re.DOTALL)
        if count != 1:
            raise RuntimeError(f"workers/boundary.js has {count} functions {name}, expected one")
    boundary = folder / "boundary.js"
    boundary.write_text(text + _BUCKET.replace("ORIGIN", origin), encoding="utf-8")
    entry = folder / "entry.js"
    entry.write_text(_READER, encoding="utf-8")
    wasm = {name: path for name, path in station.items() if name.endswith(".wasm")}
    changed = {**station, "boundary.js": str(boundary)}
    return {
        "fluid": changed,
        "resident": changed,
        "reader": {"entry.js": str(entry), "boundary.js": str(boundary), **wasm},
    }


async def _forward(
    client: httpx.AsyncClient, address: str, header: KnotHeader, rows: int, session: str
) -> None:
    """A session of one pass."""
    hidden = np.linspace(-1, 1, rows * SHAPE.hidden, dtype="<f4")
    envelope = Envelope("bench", session, 0, header.fingerprint, (0, SHAPE.layers), "a")
    step = ForwardStep(envelope, Phase.PREFILL, 0, rows, 0, Rows.LAST)
    tensor = Tensor("hidden", "f32", (rows, SHAPE.hidden), hidden.tobytes())
    end = ForwardStep(replace(envelope, step="b"), Phase.RELEASE, 0, 0, 0)
    for part in (Part(step.to_json(), {"hidden": tensor}), Part(end.to_json())):
        answer = await client.post(
            f"{address}/forward",
            content=encode(Kind.FORWARD, [part]),
            headers={**headers(SECRET), "content-type": FRAME},
        )
        status = decode(answer.content).parts[0].envelope if answer.status_code == 200 else answer.text
        if answer.status_code != 200 or decode(answer.content).parts[0].envelope["status"] != "ok":
            raise RuntimeError(f"the station refused: {status}")


async def _drain(client: httpx.AsyncClient, address: str, header: KnotHeader) -> None:
    ranges = [
        [header.file_offset(span.offset), span.length]
        for layer in range(SHAPE.layers)
        for span in (header.phase_range(layer, phase) for phase in PHASES)
    ]
    body = json.dumps({"key": "model.knot", "ranges": ranges, "block": BLOCK_BYTES})
    answer = await client.post(address, content=body)
    if answer.status_code != 200 or answer.json() != sum(length for _, length in ranges):
        raise RuntimeError(f"the reader failed: {answer.text[:500]}")


class _Blobs(http.server.BaseHTTPRequestHandler):
    """Ranges of files, sent by the kernel."""

    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self._begin(200, self._path().stat().st_size)

    def do_GET(self) -> None:
        with self._path().open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            first, _, last = self.headers["range"].removeprefix("bytes=").partition("-")
            offset, end = int(first), min(size, int(last) + 1)
            self._begin(206, end - offset)
            self.wfile.flush()
            while offset < end:
                sent = os.sendfile(self.connection.fileno(), file.fileno(), offset, end - offset)
                if not sent:
                    break
                offset += sent

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def _begin(self, status: int, length: int) -> None:
        self.send_response(status)
        self.send_header("content-length", str(length))
        self.end_headers()

    def _path(self) -> Path:
        return Path(os.environ["BENCH_BLOBS"]) / Path(self.path).name


def _serve(folder: str, told: Any) -> None:
    os.environ["BENCH_BLOBS"] = folder
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Blobs)
    told.send(server.server_address[1])
    server.serve_forever()


class _blob_server:  # noqa: N801
    """A process that serves the files of a folder; its address."""

    def __init__(self, folder: Path) -> None:
        here, there = multiprocessing.Pipe()
        self._here = here
        self._process = multiprocessing.get_context("spawn").Process(
            target=_serve, args=(str(folder), there), daemon=True
        )

    def __enter__(self) -> str:
        self._process.start()
        return f"http://127.0.0.1:{self._here.recv()}"

    def __exit__(self, *error: object) -> None:
        self._process.terminate()
        self._process.join()
