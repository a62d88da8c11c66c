"""How far logits are from exact arithmetic: ours, and llama.cpp's over the same file and the same prompts.

At every position of every prompt: max |Δ| of the log-softmax over the whole vocabulary, and KL(exact ‖ found)
in nats. The first position stands by itself: in qwen2 models its activations are a thousand times larger than
elsewhere. llama.cpp runs on one thread without flash attention, and is asked for its whole distribution.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import httpx
import numpy as np

from bench._arguments import count
from bench._oracles import F64, encode, engine_logits, exact, model_file
from bench._tables import say, table

SUMMARY: Final = "max |Δlogit| and KL at every position against exact arithmetic, beside llama.cpp"
QUICK: Final = ("smol", "--prompts", "1")
PROMPTS: Final = (
    "The capital of France is Paris, and that of Italy is",
    "def fibonacci(n):\n    if n < 2:\n        return",
    "Bonjour, ça va? 你好 世界 🚀 12345",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this measurement."""
    parser.add_argument("models", nargs="*", default=["smol", "q05", "q15"], help="keys (smol q05 q15)")
    parser.add_argument("--host", choices=("native", "wasm", "relaxed"), default="native")
    parser.add_argument("--prompts", type=count, default=len(PROMPTS), help="how many of the prompts (all)")


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Figures by model: ours and llama.cpp's, each {mean, max, first} of max |Δ| and of KL."""
    return {
        "host": arguments.host,
        "models": {
            key: measure(key, arguments.host, PROMPTS[: arguments.prompts], quiet=arguments.json)
            for key in arguments.models
        },
    }


def measure(key: str, host: str, texts: Sequence[str], *, quiet: bool = False) -> dict[str, Any]:
    """One model's figures."""
    path = model_file(key)
    prompts = encode(key, texts)
    say(f"{key}: {sum(map(len, prompts))} positions; exact arithmetic")
    truth = [log_softmax(logits) for logits in exact(path).logits(prompts)]
    say(f"{key}: ours ({host})")
    ours = [log_softmax(logits) for logits in engine_logits(path, host, prompts)]
    say(f"{key}: llama.cpp")
    # Normalised once more: what arrives is rounded to f32, and KL would see it.
    theirs = [log_softmax(logits) for logits in llama_cpp(path, prompts, truth[0].shape[1])]
    rows = [
        (position, token, differences(right, own), differences(right, other))
        for prompt, *logits in zip(prompts, truth, ours, theirs, strict=True)
        for position, (token, right, own, other) in enumerate(zip(prompt, *logits, strict=True))
    ]
    if not quiet:
        heads = ["position", "token", "ours |Δ|", "llama.cpp |Δ|", "ours KL", "llama.cpp KL"]
        lines = [
            [str(position), str(token), *(f"{pair[i]:.2e}" for i in (0, 1) for pair in (own, other))]
            for position, token, own, other in rows
        ]
        say(table(heads, lines))
    # Both are judged by the same positions.
    rows = [row for row in rows if not np.isnan(row[3][0])]
    return {
        "positions": len(rows),
        "ours": summary([(position, own) for position, _, own, _ in rows]),
        "llama.cpp": summary([(position, other) for position, _, _, other in rows]),
    }


def log_softmax(logits: F64) -> F64:
    """Natural logarithms of probabilities, by row, in f64."""
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def differences(truth: F64, found: F64) -> tuple[float, float]:
    """(max |Δ|, KL in nats) of two log-softmaxes."""
    return float(np.abs(truth - found).max()), float((np.exp(truth) * (truth - found)).sum())


def summary(rows: Sequence[tuple[int, tuple[float, float]]]) -> dict[str, dict[str, float]]:
    """{"delta" | "kl": {mean, max, first}}; `first` is the worst of the prompts' first positions."""
    return {
        name: {
            "mean": float(np.mean([figures[i] for _, figures in rows])),
            "max": max(figures[i] for _, figures in rows),
            "first": max(figures[i] for position, figures in rows if position == 0),
        }
        for i, name in enumerate(("delta", "kl"))
    }


def llama_cpp(path: Path, prompts: Sequence[Sequence[int]], vocab: int) -> list[F64]:
    """llama.cpp's log-softmax [tokens, vocab] at every position of every prompt.

    NaN where its most likely token is a part of a character: then it answers without probabilities.
    """
    xllamacpp: Any = importlib.import_module("xllamacpp")

    parameters = xllamacpp.CommonParams()
    parameters.model.path = str(path)
    parameters.n_ctx = 256
    parameters.warmup = False
    parameters.verbosity = -1
    parameters.cpuparams.n_threads = 1
    parameters.cpuparams_batch.n_threads = 1
    parameters.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    server = xllamacpp.Server(parameters)
    asked = {"n_predict": 1, "temperature": 0, "n_probs": vocab, "cache_prompt": False}
    found: list[F64] = []
    with httpx.Client(base_url=server.listening_address, trust_env=False, timeout=600) as client:
        for prompt in prompts:
            rows = np.full((len(prompt), vocab), np.nan)
            for position in range(len(prompt)):
                reply = client.post("/completion", json={"prompt": list(prompt[: position + 1]), **asked})
                for step in reply.raise_for_status().json().get("completion_probabilities", []):
                    for entry in step["top_logprobs"]:
                        rows[position, entry["id"]] = entry["logprob"]
            found.append(rows)
    return found
