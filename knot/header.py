"""A knot's header as values: configuration, tensors, sections, and where each range of the payload lies.

Offsets count from the payload's first byte; `KnotHeader.file_offset` makes them offsets into the file. The
payload starts at 1 mod 4, so nothing in it is aligned. Standard library only: it also runs in Workers.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final, NamedTuple

from knot.architectures import (
    OUTPUT,
    OUTPUT_NORM,
    PHASES,
    ROPE_FREQS,
    TABLES,
    TOKEN_EMBD,
    VECTORS,
    phase_names,
    vector_names,
)
from knot.config import ModelConfig, RopeScaling
from knot.container import frame_metadata
from knot.errors import HeaderError, MissingTensorError
from knot.quants import row_bytes

__all__ = [
    "ALGORITHM",
    "DIGEST_BYTES",
    "PHASES",
    "KnotHeader",
    "ModelConfig",
    "RopeScaling",
    "RowGroups",
    "Section",
    "Span",
    "TensorInfo",
    "build_header",
]

ALGORITHM: Final = "xxh3-64"
DIGEST_BYTES: Final = 8
GROUP_BYTES: Final = 1 << 20
EMBEDDING_GROUP_ROWS: Final = 16
NO_SHA256: Final = "0" * 64
NO_DIGEST: Final = "0" * 16


class Span(NamedTuple):
    """A contiguous range of the payload, and the tensors that it consists of, in order."""

    offset: int
    length: int
    tensors: tuple[TensorInfo, ...]


class RowGroups(NamedTuple):
    """Whole row groups of one tensor: rows `[row_start, row_end)`, their bytes and digest numbers."""

    row_start: int
    row_end: int
    offset: int
    length: int
    first_digest: int
    digest_count: int


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor in the payload.

    `shape` is (rows, cols), or (n,) for a vector, which counts as one row. Every `group_rows` rows have a
    digest; `first_digest` is the number of the first of them in the digests section.
    """

    name: str
    type: str
    shape: tuple[int, ...]
    offset: int
    length: int
    group_rows: int
    first_digest: int

    @property
    def rows(self) -> int:
        """Rows; 1 for a vector."""
        return self.shape[0] if len(self.shape) == 2 else 1

    @property
    def cols(self) -> int:
        """Elements of a row."""
        return self.shape[-1]

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        return row_bytes(self.type, self.cols)

    @property
    def end(self) -> int:
        """The payload offset after the tensor's last byte."""
        return self.offset + self.length

    @property
    def group_count(self) -> int:
        """How many row groups, and so digests, the tensor has."""
        return -(-self.rows // self.group_rows)

    def row_range(self, start: int, end: int) -> tuple[int, int]:
        """(offset, length) of rows `[start, end)`. Raises `HeaderError` off range."""
        if not 0 <= start <= end <= self.rows:
            raise HeaderError(f"rows [{start}, {end}) of {self.name} do not exist; it has {self.rows}")
        return self.offset + start * self.row_bytes, (end - start) * self.row_bytes

    def groups(self, start: int, end: int) -> RowGroups:
        """The whole groups that hold rows `[start, end)`, which must not be empty. Raises `HeaderError`."""
        if not 0 <= start < end <= self.rows:
            raise HeaderError(f"rows [{start}, {end}) of {self.name} do not exist; it has {self.rows}")
        first, last = start // self.group_rows, (end - 1) // self.group_rows
        row_start, row_end = first * self.group_rows, min((last + 1) * self.group_rows, self.rows)
        offset, length = self.row_range(row_start, row_end)
        return RowGroups(row_start, row_end, offset, length, self.first_digest + first, last - first + 1)

    def group_lengths(self) -> Iterable[int]:
        """The byte length of every row group, in order."""
        full, rest = divmod(self.rows, self.group_rows)
        size = self.row_bytes
        for _ in range(full):
            yield self.group_rows * size
        if rest:
            yield rest * size


@dataclass(frozen=True, slots=True)
class Section:
    """A part of the payload that is no tensor. `digest` is its XXH3-64, 16 hexadecimal digits."""

    offset: int
    length: int
    digest: str

    @property
    def end(self) -> int:
        """The payload offset after the section's last byte."""
        return self.offset + self.length


@dataclass(frozen=True, slots=True)
class KnotHeader:
    """Everything a knot says of itself. Made by `knot.parse.parse_header`, which checks it all.

    - `tensors`: name → info, in payload order. `sections`: "digests" always, "tokenizer" nearly always.
    - `sha256`: of the whole payload. `fingerprint`: SHA-256 of the header's bytes, which contain `sha256`,
      so that it changes with any byte of the file; caches, sessions and object ids are keyed by it.
    - `payload_offset`, `file_size`: bytes.
    """

    name: str
    config: ModelConfig
    tensors: Mapping[str, TensorInfo]
    sections: Mapping[str, Section]
    sha256: str
    payload_offset: int
    file_size: int
    fingerprint: str

    def file_offset(self, offset: int) -> int:
        """Where a payload offset lies in the file."""
        return self.payload_offset + offset

    def tensor(self, name: str, phase: str = TABLES, layer: int | None = None) -> TensorInfo:
        """A tensor by name. Raises `MissingTensorError`, which says that `phase` of `layer` needed it."""
        info = self.tensors.get(name)
        if info is None:
            raise MissingTensorError(phase, layer, name)
        return info

    def phase_tensors(self, layer: int, phase: str) -> tuple[TensorInfo, ...]:
        """The matrices of one phase of one layer, in the order the engine takes them.

        Raises `MissingTensorError` with phase, layer and tensor: no tensor is ever skipped.
        """
        return tuple(self.tensor(name, phase, layer) for name in phase_names(self.config, layer, phase))

    def phase_range(self, layer: int, phase: str) -> Span:
        """The one contiguous range of a phase of a layer. Raises `MissingTensorError`."""
        return _span(self.phase_tensors(layer, phase), f"phase {phase} of layer {layer}")

    def vector_range(self, start: int, end: int) -> Span:
        """The one contiguous range of the norms and biases of layers `[start, end)`.

        With the last layer comes output_norm. The table of rope frequencies, if any, is apart: `rope_freqs`.
        Raises `MissingTensorError`, and `HeaderError` for an empty range or layers that do not exist.
        """
        if not 0 <= start < end <= self.config.num_layers:
            raise HeaderError(f"layers [{start}, {end}) do not exist; the model has {self.config.num_layers}")
        found = [
            self.tensor(name, VECTORS, layer)
            for layer in range(start, end)
            for name in vector_names(self.config, layer)
        ]
        if end == self.config.num_layers:
            found.append(self.output_norm())
        return _span(tuple(found), f"the vectors of layers [{start}, {end})")

    def output_norm(self) -> TensorInfo:
        """The norm before the head."""
        return self.tensor(OUTPUT_NORM, VECTORS)

    def rope_freqs(self) -> TensorInfo | None:
        """The factors that rope frequencies are divided by, F32 [rope_dim / 2], where the model has them."""
        return self.tensors.get(ROPE_FREQS)

    def embedding_tensor(self) -> TensorInfo:
        """The embedding table, [embedding_rows, hidden_size]."""
        return self.tensor(TOKEN_EMBD)

    def head_tensor(self) -> TensorInfo:
        """The head, [embedding_rows, hidden_size]: output_weight, or the embedding table when tied."""
        return self.tensor(TOKEN_EMBD if self.config.tie_embeddings else OUTPUT)

    @property
    def tokenizer(self) -> Section | None:
        """The tokenizer's section; None in a repaired knot that never had one."""
        return self.sections.get("tokenizer")

    @property
    def digests(self) -> Section:
        """The section with the digests of every row group: little-endian u64s, in payload order."""
        section = self.sections.get("digests")
        if section is None:
            raise HeaderError("the knot has no section of digests; run `knot repair` on it")
        return section

    def digest_range(self, first: int, count: int) -> tuple[int, int]:
        """(offset, length) in the payload of `count` digests from number `first`. Raises `HeaderError`."""
        section = self.digests
        if not (first >= 0 and count >= 0 and (first + count) * DIGEST_BYTES <= section.length):
            raise HeaderError(
                f"digests [{first}, {first + count}) do not exist; the knot has "
                f"{section.length // DIGEST_BYTES}"
            )
        return section.offset + first * DIGEST_BYTES, count * DIGEST_BYTES

    def span_digests(self, tensors: Sequence[TensorInfo]) -> tuple[int, int]:
        """(offset, length) in the payload of the digests of consecutive tensors, such as a `Span`'s."""
        return self.digest_range(tensors[0].first_digest, sum(tensor.group_count for tensor in tensors))


def group_rows(name: str, type: str, shape: Sequence[int]) -> int:
    """How many rows of a tensor share a digest.

    About 1 MiB of rows, in sixteens where so many fit, since kernels take rows in tiles; 16 rows of the
    embedding table, so that reading one row means reading little more; a vector whole.
    """
    if len(shape) == 1:
        return 1
    if name == TOKEN_EMBD:
        return min(EMBEDDING_GROUP_ROWS, shape[0])
    rows = max(1, min(GROUP_BYTES // row_bytes(type, shape[1]), shape[0]))
    return rows if rows == shape[0] or rows < 16 else rows - rows % 16


def build_header(
    name: str,
    config: ModelConfig,
    tensors: Iterable[TensorInfo],
    sections: Mapping[str, Section],
    sha256: str = NO_SHA256,
) -> bytes:
    """The header's bytes. Its length does not depend on the values of digests, so it can be written twice:
    first to keep the place, and at the end with what the payload turned out to be.
    """
    meta: dict[str, Any] = {
        "name": name,
        "config": config.to_json(),
        "tensors": {
            info.name: {
                "type": info.type,
                "shape": list(info.shape),
                "offset": info.offset,
                "length": info.length,
                "group_rows": info.group_rows,
            }
            for info in tensors
        },
        "sections": {
            key: {
                "offset": section.offset,
                "length": section.length,
                **({"algorithm": ALGORITHM} if key == "digests" else {}),
                "digest": section.digest,
            }
            for key, section in sections.items()
        },
        "sha256": sha256,
    }
    return frame_metadata(
        json.dumps(meta, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()
    )


def fingerprint(header: bytes) -> str:
    """The identity of the knot whose header, up to the payload, is `header`: 64 hexadecimal digits."""
    return hashlib.sha256(header).hexdigest()


def _span(tensors: tuple[TensorInfo, ...], what: str) -> Span:
    for before, after in pairwise(tensors):
        if before.end != after.offset:
            raise HeaderError(
                f"{what} is not one range: {before.name} ends at {before.end}, {after.name} begins at "
                f"{after.offset}"
            )
    first, last = tensors[0], tensors[-1]
    return Span(first.offset, last.end - first.offset, tensors)
