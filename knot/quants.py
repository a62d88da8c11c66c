"""The one table of ggml's tensor types: how many elements a block holds, and in how many bytes.

Every byte length of the project follows from it; the crate's own figures are checked against it. Standard
library only: it also runs in Workers. Figures: ggml (`ggml-common.h`), as the `gguf` library states them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from knot.errors import QuantError

# name: (ggml id, elements of a block, bytes of a block)
QUANTS: Final[dict[str, tuple[int, int, int]]] = {
    "F32": (0, 1, 4),
    "F16": (1, 1, 2),
    "Q4_0": (2, 32, 18),
    "Q4_1": (3, 32, 20),
    "Q5_0": (6, 32, 22),
    "Q5_1": (7, 32, 24),
    "Q8_0": (8, 32, 34),
    "Q8_1": (9, 32, 40),
    "Q2_K": (10, 256, 84),
    "Q3_K": (11, 256, 110),
    "Q4_K": (12, 256, 144),
    "Q5_K": (13, 256, 176),
    "Q6_K": (14, 256, 210),
    "Q8_K": (15, 256, 292),
    "IQ2_XXS": (16, 256, 66),
    "IQ2_XS": (17, 256, 74),
    "IQ3_XXS": (18, 256, 98),
    "IQ1_S": (19, 256, 50),
    "IQ4_NL": (20, 32, 18),
    "IQ3_S": (21, 256, 110),
    "IQ2_S": (22, 256, 82),
    "IQ4_XS": (23, 256, 136),
    "I8": (24, 1, 1),
    "I16": (25, 1, 2),
    "I32": (26, 1, 4),
    "I64": (27, 1, 8),
    "F64": (28, 1, 8),
    "IQ1_M": (29, 256, 56),
    "BF16": (30, 1, 2),
    "TQ1_0": (34, 256, 54),
    "TQ2_0": (35, 256, 66),
    "MXFP4": (39, 32, 17),
    "NVFP4": (40, 64, 36),
    "Q1_0": (41, 128, 18),
}

# What the engine multiplies with. Conversion refuses other types by name.
ENGINE_TYPES: Final[frozenset[str]] = frozenset(
    (
        "F32",
        "F16",
        "BF16",
        "Q4_0",
        "Q4_1",
        "Q5_0",
        "Q5_1",
        "Q8_0",
        "Q2_K",
        "Q3_K",
        "Q4_K",
        "Q5_K",
        "Q6_K",
        "IQ4_NL",
        "IQ4_XS",
        "MXFP4",
    )
)

_NAMES: Final[dict[int, str]] = {ggml_id: name for name, (ggml_id, _, _) in QUANTS.items()}


def type_name(ggml_id: int) -> str:
    """The name of a ggml type id. Raises `QuantError` for an id that is not in the table."""
    name = _NAMES.get(ggml_id)
    if name is None:
        raise QuantError(f"ggml type {ggml_id} is unknown; the known ones are {_known()}")
    return name


def ggml_id(type: str) -> int:
    """The ggml id of a type name. Raises `QuantError` for a name that is not in the table."""
    return _entry(type)[0]


def block_size(type: str) -> tuple[int, int]:
    """(elements, bytes) of one block of `type`. Raises `QuantError` for an unknown name."""
    _, elements, size = _entry(type)
    return elements, size


def row_bytes(type: str, cols: int) -> int:
    """Bytes of one row of `cols` elements. Raises `QuantError` unless the row is a whole number of blocks."""
    _, elements, size = _entry(type)
    if cols <= 0:
        raise QuantError(f"a {type} row has {cols} columns, expected at least 1")
    if cols % elements:
        raise QuantError(
            f"a {type} row must be a multiple of {elements} elements, but has {cols} "
            f"({cols // elements} blocks and {cols % elements} elements over)"
        )
    return cols // elements * size


def tensor_bytes(type: str, shape: Sequence[int]) -> int:
    """Bytes of a tensor, `shape` being `[rows, cols]` or `[n]`. Raises `QuantError` like `row_bytes`."""
    if not shape:
        raise QuantError(f"a {type} tensor has no dimensions, expected 1 or 2")
    total = row_bytes(type, shape[-1])
    for size in shape[:-1]:
        if size <= 0:
            raise QuantError(
                f"a {type} tensor has the shape {list(shape)}; every dimension must be at least 1"
            )
        total *= size
    return total


def check_bytes(type: str, shape: Sequence[int], length: int) -> None:
    """Raises `QuantError` unless `length` is what `type` and `shape` make."""
    expected = tensor_bytes(type, shape)
    if length != expected:
        raise QuantError(f"{type} {list(shape)} is {expected} bytes, but {length} are stated")


def _entry(type: str) -> tuple[int, int, int]:
    entry = QUANTS.get(type)
    if entry is None:
        raise QuantError(f"tensor type {type!r} is unknown; the known ones are {_known()}")
    return entry


def _known() -> str:
    return ", ".join(QUANTS)
