"""What measurements share with the tests: the exact reference, and the engine over a GGUF file.

They live in `tests/`, beside what they judge; here is the way to them.
"""

from __future__ import annotations

import asyncio
import importlib
import sys
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from engine.native import NativeEngine
from knot.errors import ModelNotFoundError
from knot.paths import find_model, resolve_model
from knot.reader import load_header
from knot.tokenizer import Tokenizer

TESTS = Path(__file__).resolve().parent.parent / "tests"
F64 = NDArray[np.float64]


class Reference(Protocol):
    """A forward pass in f64 over exactly dequantised weights."""

    def logits(self, prompts: list[list[int]]) -> list[F64]:
        """Logits [tokens, vocab] at every position of every prompt."""
        ...


def model_file(key: str) -> Path:
    """The GGUF of a model. Raises `ModelNotFoundError`."""
    found = find_model(key)
    if found is None or found.suffix != ".gguf":
        raise ModelNotFoundError(
            f"the model {key} is not in models/ nor in $KNOT_MODELS; run `knot fetch {key}`"
        )
    return found


def encode(key: str, texts: Sequence[str]) -> list[list[int]]:
    """The ids of texts, by the tokenizer in a model's knot. Raises `ModelNotFoundError`."""
    knot = resolve_model(str(model_file(key)))
    header = load_header(knot)
    section = header.tokenizer
    assert section is not None, f"{knot.name} has no tokenizer"
    with knot.open("rb") as file:
        file.seek(header.file_offset(section.offset))
        tokenizer = Tokenizer(NativeEngine(64 << 20), file.read(section.length))
    return [tokenizer.encode(text) for text in texts]


def exact(path: Path) -> Reference:
    """The reference of a model."""
    return cast(Reference, tests_module("reference").Reference(path))


def engine_logits(path: Path, host: str, prompts: list[list[int]], **changes: Any) -> list[F64]:
    """Our logits [tokens, vocab] at every position of every prompt.

    `host` is native, wasm or relaxed; `changes` are fields of the station's configuration.
    """
    cluster = tests_module("engine_support").Cluster(path, host, **changes)
    forward = cast(Callable[[int, list[int]], Coroutine[Any, Any, F64]], cluster.forward)

    async def all_of_them() -> list[F64]:
        found: list[F64] = []
        for prompt in prompts:
            slot = cluster.station.engine.kv_open()
            found.append((await forward(slot, prompt)).astype(np.float64))
            cluster.station.engine.kv_close(slot)
        return found

    return asyncio.run(all_of_them())


def tests_module(name: str) -> Any:
    """A module of the tests."""
    if str(TESTS) not in sys.path:
        sys.path.insert(0, str(TESTS))
    return importlib.import_module(name)


def stored_model(path: Path) -> Any:
    """A GGUF file with its tensors as they are stored."""
    return tests_module("reference").Model(path)


def random_weights(name: str, rows: int, cols: int, rng: np.random.Generator) -> NDArray[np.uint8]:
    """u8 [rows, row bytes] of random blocks of a type, with scales of ordinary size."""
    return tests_module("engine_blocks").random_rows(name, rows, cols, rng)
