"""Random blocks of every format, and engines to try them on."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_support import make_host
from gguf.constants import GGML_QUANT_SIZES
from gguf.constants import GGMLQuantizationType as Kind
from reference import Model
from synth import make_tiny_gguf

from engine.client import Engine

FORMATS = (
    "F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0",
    "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS", "MXFP4",
)  # fmt: skip
# Where a block's half-precision scales lie. MXFP4 has an exponent in byte 0 instead.
SCALES = {"Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,)}
SCALES |= {"Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "Q2_K": (80, 82), "Q3_K": (108,)}
SCALES |= {"IQ4_NL": (0,), "IQ4_XS": (0,), "MXFP4": ()}

HOSTS = [
    pytest.param("native", id="native"),
    pytest.param("wasm", id="wasm", marks=pytest.mark.wasm),
    pytest.param("relaxed", id="relaxed", marks=pytest.mark.wasm),
]


@functools.cache
def arena(kind: str, bytes: int = 24 << 20) -> Engine:
    """An engine with nothing but an arena, shared by the tests of this process."""
    host = make_host(kind)
    host.call("engine_reserve_arena", bytes)
    return Engine(host)


def random_blocks(name: str, count: int, rng: np.random.Generator, *, wild: bool = False) -> np.ndarray:
    """u8 [count, block bytes] of random elements and finite scales.

    Scales are of ordinary size, or, when `wild`, any finite number: subnormal, negative, the largest.
    """
    _, size = GGML_QUANT_SIZES[Kind[name]]
    if name in ("F32", "F16", "BF16"):
        width, exponent = {"F32": (4, 0x7F80_0000), "F16": (2, 0x7C00), "BF16": (2, 0x7F80)}[name]
        if wild:
            bits = rng.integers(0, 1 << 8 * width, count, dtype=np.uint64).astype(f"<u{width}")
            bits[(bits & exponent) == exponent] ^= exponent & -exponent
        else:
            values = rng.standard_normal(count).astype(np.float32)
            bits = values.view("<u4") if name != "BF16" else (values.view("<u4") >> 16).astype("<u2")
            bits = bits if name != "F16" else values.astype("<f2")
        return bits.view(np.uint8).reshape(count, size)
    blocks = rng.integers(0, 256, (count, size), dtype=np.uint8)
    for at in SCALES[name]:
        if wild:
            bits = rng.integers(0, 1 << 16, count).astype("<u2")
            bits[(bits & 0x7C00) == 0x7C00] ^= 0x0400
            bits[: count // 4] &= 0x83FF  # subnormal
        else:
            bits = (rng.standard_normal(count) * 0.01).astype("<f2").view("<u2")
        blocks[:, at : at + 2] = bits.view(np.uint8).reshape(count, 2)
    if name == "MXFP4":
        # Exponents of ordinary sizes, or all whose values are finite numbers.
        blocks[:, 0] = rng.integers(0, 251, count) if wild else rng.integers(118, 124, count)
    return blocks


def random_rows(name: str, rows: int, cols: int, rng: np.random.Generator) -> np.ndarray:
    """u8 [rows, row bytes]."""
    elements, _ = GGML_QUANT_SIZES[Kind[name]]
    return random_blocks(name, rows * cols // elements, rng).reshape(rows, -1)


_FOLDER = tempfile.TemporaryDirectory(prefix="tiny-models-")


@functools.cache
def tiny(arch: str = "qwen2", **changes: Any) -> Model:
    """A synthetic model, made once a process."""
    name = "-".join([arch, *(f"{key}-{value}" for key, value in changes.items())])
    given = {key: dict(value) if isinstance(value, tuple) else value for key, value in changes.items()}
    return Model(make_tiny_gguf(Path(_FOLDER.name) / f"{name}.gguf", arch=arch, **given))
