"""What the tests of the cores share: tiny knots made once a process, and a loop that tells tales."""

from __future__ import annotations

import asyncio
import functools
import tempfile
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

import numpy as np
from engine_support import make_host
from reference import Model, Reference
from synth import make_tiny_knot

import knot.header
from knot.header import KnotHeader
from knot.reader import load_header
from knot.tokenizer import Tokenizer

T = TypeVar("T")
_FOLDER = tempfile.TemporaryDirectory(prefix="tiny-knots-")


def run(coroutine: Coroutine[Any, Any, T], seconds: float = 30) -> T:
    """The coroutine's result. Fails when it hangs, and when it leaves a task behind."""

    async def main() -> T:
        result = await asyncio.wait_for(coroutine, seconds)
        await asyncio.sleep(0)
        left = asyncio.all_tasks() - {asyncio.current_task()}
        assert not left, f"still running: {left}"
        return result

    return asyncio.run(main())


@functools.cache
def knot_of(arch: str = "qwen2", group_bytes: int | None = None, **changes: Any) -> Path:
    """A tiny knot, whose GGUF lies beside it. `group_bytes` makes row groups smaller than a tensor."""
    folder = Path(tempfile.mkdtemp(dir=_FOLDER.name))
    with mock.patch.object(knot.header, "GROUP_BYTES", group_bytes or knot.header.GROUP_BYTES):
        return make_tiny_knot(folder / f"tiny-{arch}.knot", arch=arch, **changes)


def grouped(arch: str = "qwen2") -> Path:
    """A tiny knot whose tensors have several row groups each, so that they can be cut into blocks."""
    return knot_of(arch, 4096)


@functools.cache
def header_of(path: Path) -> KnotHeader:
    """A knot's header."""
    return load_header(path)


def tokenizer_of(path: Path) -> Tokenizer:
    """A tokenizer of its own from what a knot carries."""
    section = header_of(path).tokenizer
    assert section is not None
    at = header_of(path).file_offset(section.offset)
    return Tokenizer(make_host("native", 8 << 20), path.read_bytes()[at : at + section.length])


@functools.cache
def reference_of(path: Path) -> Reference:
    """The exact forward pass of a tiny knot."""
    return Reference(Model(path.with_suffix(".gguf")))


@functools.cache
def exact_logits(path: Path, ids: tuple[int, ...]) -> np.ndarray:
    """Exact logits at every position of `ids`; those of unused ids are minus infinity."""
    [logits] = reference_of(path).logits([ids])
    for start, end in header_of(path).config.unused_token_ranges:
        logits[:, start:end] = -np.inf
    return logits


@functools.cache
def greedy(path: Path, prompt: tuple[int, ...], count: int) -> list[int]:
    """Greedy ids after a prompt by exact arithmetic.

    A margin that rounding could turn would make a test that tests nothing, so there must be none.
    """
    ids = list(prompt)
    for _ in range(count):
        last = exact_logits(path, tuple(ids))[-1]
        best, second = np.argsort(-last, kind="stable")[:2]
        assert last[best] - last[second] > 0.001, "take another prompt: this one is nearly a tie"
        ids.append(int(best))
    return ids[len(prompt) :]
