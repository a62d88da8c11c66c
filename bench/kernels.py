"""Single products by weight type: one row of activations, 8 and 32, on every host, beside ggml.

GFLOP/s by time on the processor of one thread, two operations a weight and row; weights fit the cache, so
that kernels are compared and not memory. Next to them what reading the same bytes once would allow.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np
from gguf.constants import GGMLQuantizationType

from bench._arguments import count
from bench._ggml import Product
from bench._oracles import random_weights
from bench._resident import ROOT
from bench._tables import say, table
from bench.model import node
from engine.host import EngineHost
from engine.native import NativeEngine
from engine.wasm import WasmEngine

SUMMARY: Final = "products by weight type: one row, 8 and 32, in V8, wasmtime and native, beside ggml"
QUICK: Final = ("--types", "Q4_K", "Q5_0", "--size", "1024")
TYPES: Final = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "Q3_K", "Q2_K", "F16")
BATCHES: Final = (1, 8, 32)
MODULES: Final = {"relaxed": "pipeline-relaxed.wasm", "simd128": "pipeline.wasm"}
# Each time is the median of so many, after a few that are not counted.
TIMES: Final = 9


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this measurement."""
    names = [kind.name for kind in GGMLQuantizationType]
    parser.add_argument(
        "--types", nargs="*", choices=names, metavar="TYPE", default=list(TYPES), help="weight types"
    )
    parser.add_argument("--size", type=count, default=2048, help="rows and columns (2048)")


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """GFLOP/s by type, batch and host, and the ratios to ggml and to native."""
    found = {name: measure(name, arguments.size) for name in arguments.types}
    if not arguments.json:
        for batch in BATCHES:
            hosts = list(next(iter(found.values()))[str(batch)])
            rows = [
                [name, *(f"{one[str(batch)][host]:.1f}" for host in hosts)] for name, one in found.items()
            ]
            say(f"{batch} rows of activations, GFLOP/s")
            say(table(["type", *hosts], rows))
    return {"size": arguments.size, "gflops": found}


def measure(name: str, size: int) -> dict[str, dict[str, float]]:
    """GFLOP/s of one type, by batch and host."""
    kind, rng = int(GGMLQuantizationType[name]), np.random.default_rng(1)
    rows = random_weights(name, size, size, rng)
    x = rng.standard_normal((max(BATCHES), size)).astype("<f4")
    seconds: dict[str, dict[int, float]] = {}
    native = Job(NativeEngine(1 << 30), kind, rows, x)
    seconds["native"] = {batch: median(lambda batch=batch: native.run(batch)) for batch in BATCHES}
    seconds["ggml"] = {}
    for batch in BATCHES:
        product = Product(kind, rows, size, x[:batch])
        seconds["ggml"][batch] = median(product.run)
        exact = native.result(batch)
        # What is timed is the same product: ggml rounds activations to 8 bits.
        assert np.abs(product.result() - exact).max() < 0.05 * np.abs(exact).max(), name
        product.close()
    for build, module in MODULES.items():
        seconds[f"V8 {build}"] = in_v8(ROOT / "build" / module, kind, rows, x)
    # The build that the emulator runs.
    wasmtime = Job(WasmEngine(1 << 30), kind, rows, x)
    seconds["wasmtime"] = {batch: median(lambda batch=batch: wasmtime.run(batch)) for batch in BATCHES}
    words = np.frombuffer(rows.tobytes()[: rows.size // 8 * 8], "<u8")
    read = median(lambda: words.sum())
    seconds["a memory read"] = dict.fromkeys(BATCHES, read)
    say(f"{name}: measured")
    return {
        str(batch): {host: 2e-9 * batch * size * size / times[batch] for host, times in seconds.items()}
        for batch in BATCHES
    }


def median(once: Callable[[], Any]) -> float:
    """Seconds on the processor."""
    for _ in range(3):
        once()
    times: list[float] = []
    for _ in range(TIMES):
        began = time.process_time()
        once()
        times.append(time.process_time() - began)
    return statistics.median(times)


class Job:
    """Weights and activations in an engine that runs here."""

    def __init__(self, host: EngineHost, kind: int, rows: np.ndarray, x: np.ndarray):
        self._host, self._kind, self._rows, self._cols = host, kind, len(rows), x.shape[1]
        self._w = rows.size
        host.call("engine_reserve_arena", rows.size + x.nbytes + 4 * len(x) * len(rows) + 256)
        self._at = host.call("engine_arena_at")
        self._x = self._at + -(-rows.size // 64) * 64
        self._y = self._x + x.nbytes
        host.write(self._at, rows.tobytes())
        host.write(self._x, x.tobytes())

    def run(self, batch: int) -> None:
        """One product."""
        where = (self._at, self._w, batch, self._x, self._y)
        self._host.call("matmul_block", self._kind, self._cols, self._rows, *where)

    def result(self, batch: int) -> np.ndarray:
        """f32 [batch, rows] of the last run."""
        self.run(batch)
        data = self._host.read(self._y, 4 * batch * self._rows)
        return np.frombuffer(data, "<f4").reshape(batch, self._rows)


def in_v8(module: Path, kind: int, rows: np.ndarray, x: np.ndarray) -> dict[int, float]:
    """Seconds on the processor by batch, in V8."""
    with tempfile.TemporaryDirectory(prefix="kernels-") as folder:
        weights, activations = Path(folder) / "w", Path(folder) / "x"
        weights.write_bytes(rows.tobytes())
        activations.write_bytes(x.tobytes())
        script = Path(__file__).with_name("kernels.mjs")
        shape = [str(number) for number in (kind, x.shape[1], len(rows), TIMES, *BATCHES)]
        words = [node(), script, module, weights, activations, *shape]
        done = subprocess.run(words, capture_output=True, text=True, check=True)
    return {int(batch): seconds for batch, seconds in json.loads(done.stdout).items()}
