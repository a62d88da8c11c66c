"""GGUF files byte by byte, for tests of what a hostile or broken one does."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

U8, I8, U16, I16, U32, I32, F32, BOOL, STRING, ARRAY, U64, I64, F64 = range(13)
_FORMS = {
    U8: "B",
    I8: "b",
    U16: "H",
    I16: "h",
    U32: "I",
    I32: "i",
    F32: "f",
    BOOL: "B",
    U64: "Q",
    I64: "q",
    F64: "d",
}


def text(value: str | bytes) -> bytes:
    """A GGUF string."""
    data = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(data)) + data


def value(kind: int, item: Any) -> bytes:
    """A value without its type; an array is (element kind, items)."""
    if kind == STRING:
        return text(item)
    if kind == ARRAY:
        element, items = item
        return struct.pack("<IQ", element, len(items)) + b"".join(value(element, each) for each in items)
    return struct.pack("<" + _FORMS[kind], item)


def pair(key: str | bytes, kind: int, item: Any) -> bytes:
    """A metadata key with its value."""
    return text(key) + struct.pack("<I", kind) + value(kind, item)


def tensor(name: str | bytes, dimensions: Sequence[int], kind: int = 0, offset: int = 0) -> bytes:
    """An entry of the tensor table; dimensions in GGUF's order, columns first."""
    return (
        text(name)
        + struct.pack(f"<I{len(dimensions)}Q", len(dimensions), *dimensions)
        + struct.pack("<IQ", kind, offset)
    )


def gguf_bytes(
    pairs: Sequence[bytes] = (),
    tensors: Sequence[bytes] = (),
    data: bytes = b"",
    *,
    version: int = 3,
    n_tensors: int | None = None,
    n_pairs: int | None = None,
    alignment: int = 32,
    magic: bytes = b"GGUF",
) -> bytes:
    """A whole file; the counts say what they are told to say."""
    counts = (len(tensors) if n_tensors is None else n_tensors, len(pairs) if n_pairs is None else n_pairs)
    head = magic + struct.pack("<IQQ", version, *counts) + b"".join(pairs) + b"".join(tensors)
    return head + b"\0" * (-len(head) % alignment) + data
