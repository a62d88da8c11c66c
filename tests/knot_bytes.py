"""Knots taken apart and put together wrongly, for tests of what reads them."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from typing import Any

from knot.container import MARKER, PREFIX, frame_metadata
from knot.parse import parse_header

OLD_KEYS = (
    "architecture",
    "num_layers",
    "hidden_size",
    "ffn_size",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "vocab_size",
    "rope_theta",
    "norm_eps",
    "tie_embeddings",
)


def split_knot(data: bytes) -> tuple[dict[str, Any], bytes]:
    """(metadata, payload) of a sound knot."""
    header = parse_header(data, len(data))
    length = PREFIX.unpack_from(data)[2]
    return json.loads(data[PREFIX.size : PREFIX.size + length]), data[header.payload_offset :]


def join_knot(meta: dict[str, Any] | bytes, payload: bytes) -> bytes:
    """A knot of today's layout with whatever metadata and payload."""
    return frame_metadata(meta if isinstance(meta, bytes) else json.dumps(meta).encode()) + payload


def edited(data: bytes, edit: Callable[[dict[str, Any]], object]) -> bytes:
    """`data` after `edit` has changed its metadata in place."""
    meta, payload = split_knot(data)
    edit(meta)
    return join_knot(meta, payload)


def old_layout(meta: dict[str, Any], payload: bytes) -> bytes:
    """A knot as the old encoder wrote it: padded JSON, its padded length, the marker, the payload at once."""
    text = json.dumps(meta).encode()
    text += b" " * ((3 - (10 + len(text))) % 4)
    return struct.pack("<4sHI", b"KNOT", 1, len(text)) + text + bytes([MARKER]) + payload


def as_old(data: bytes, *, field: str = "type", keep_config: bool = False) -> bytes:
    """The old layout of a sound knot: no sections, no digests, no tokenizer, tensors in alphabetical order.

    `field` is what the old table calls a tensor's type. Without `keep_config`, the configuration has only
    what old encoders stated.
    """
    meta, payload = split_knot(data)
    tensors: dict[str, Any] = {}
    moved = b""
    for name in sorted(meta["tensors"]):
        entry = meta["tensors"][name]
        piece = payload[entry["offset"] : entry["offset"] + entry["length"]]
        tensors[name] = {
            field: entry["type"],
            "shape": entry["shape"],
            "offset": len(moved),
            "length": entry["length"],
        }
        moved += piece
    config = meta["config"] if keep_config else {key: meta["config"][key] for key in OLD_KEYS}
    return old_layout({"name": meta["name"], "config": config, "tensors": tensors}, moved)
