"""AWFR, the frame for calls between a cluster's own parts. Little-endian:

    0   4s   "AWFR"
    4   u8   version = 1
    5   u8   kind: 1 forward, 2 embed, 3 logits, 4 rows, 5 control; an answer has bit 7 set
    6   u16  flags, 0
    8   u32  header length H
    12  u32  payload length
    16  u32  CRC-32 (zlib's) of everything after the prefix
    20  H    JSON {"steps": [...]}, UTF-8, then zeros to a multiple of 8 from the frame's start
             payload

A step is an object with its own envelope and `tensors`, a list of {name, dtype, shape, offset, length};
offsets count from the payload's first byte and are multiples of 8. One frame carries the steps of several
sessions, and answers carry one status a step. The decoder trusts no length.
"""

from __future__ import annotations

import json
import math
import struct
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, Final, cast

from knot.errors import HeaderError
from knot.strict_json import is_int, kind, parse_object

MAGIC: Final = b"AWFR"
VERSION: Final = 1
PREFIX: Final = struct.Struct("<4sBBHIII")
ANSWER_BIT: Final = 0x80
ALIGNMENT: Final = 8

MAX_HEADER: Final = 1 << 20
MAX_PAYLOAD: Final = 64 << 20
MAX_STEPS: Final = 1024
MAX_TENSORS: Final = 16
MAX_RANK: Final = 4
MAX_NAME: Final = 64
MAX_REASON: Final = 300  # characters of a reason that quotes what it was sent

# Bytes and elements of a unit of each dtype.
DTYPES: Final[Mapping[str, tuple[int, int]]] = {
    "f32": (4, 1),
    "f16": (2, 1),
    "bf16": (2, 1),
    "i32": (4, 1),
    "u8": (1, 1),
    "q8_0": (34, 32),
}


class BadFrame(ValueError):
    """Bytes that are no frame; the sentence says where they stop being one."""


class Kind(IntEnum):
    """What a frame asks for."""

    FORWARD = 1
    EMBED = 2
    LOGITS = 3
    ROWS = 4
    CONTROL = 5


@dataclass(frozen=True, slots=True)
class Tensor:
    """Numbers with a name: `data` has exactly the bytes that `dtype` and `shape` say."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: bytes | memoryview

    def __post_init__(self) -> None:
        expected = tensor_bytes(self.dtype, self.shape)
        if len(self.data) != expected:
            raise BadFrame(
                f"tensor {self.name!r}: {self.dtype} of shape {list(self.shape)} is {expected} bytes, "
                f"got {len(self.data)}"
            )


@dataclass(frozen=True, slots=True)
class Part:
    """One step of a frame: its envelope as JSON values, and its tensors by name."""

    envelope: Mapping[str, Any]
    tensors: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor])

    def tensor(self, name: str, dtype: str, rank: int) -> Tensor:
        """The tensor `name`. Raises `BadFrame` when it is missing or of another dtype or rank."""
        found = self.tensors.get(name)
        if found is None:
            raise BadFrame(f"the step has no tensor {name!r}; it has {sorted(self.tensors)}")
        if found.dtype != dtype or len(found.shape) != rank:
            raise BadFrame(
                f"tensor {name!r} is {found.dtype} {list(found.shape)}, expected {dtype} of {rank} dimensions"
            )
        return found


@dataclass(frozen=True, slots=True)
class Frame:
    """A decoded frame."""

    kind: Kind
    answer: bool
    parts: tuple[Part, ...]


def tensor_bytes(dtype: str, shape: Sequence[int]) -> int:
    """Bytes of a tensor; rows of a block type must consist of whole blocks. Raises `BadFrame`."""
    unit = DTYPES.get(dtype)
    if unit is None:
        raise BadFrame(f"dtype {dtype[:MAX_NAME]!r} is not known; the known ones are {', '.join(DTYPES)}")
    size, elements = unit
    count = math.prod(shape)
    if elements > 1 and (not shape or shape[-1] % elements):
        raise BadFrame(f"{dtype} rows have blocks of {elements} elements, which {list(shape)} does not hold")
    return count // elements * size


def encode(kind: Kind, parts: Iterable[Part], answer: bool = False) -> bytes:
    """The frame's bytes. Raises `BadFrame` for what a decoder would refuse."""
    steps: list[dict[str, Any]] = []
    pieces: list[bytes | memoryview] = []
    at = 0
    for part in parts:
        table: list[dict[str, Any]] = []
        for name, tensor in part.tensors.items():
            length = len(tensor.data)
            table.append(
                {"name": name, "dtype": tensor.dtype, "shape": tensor.shape, "offset": at, "length": length}
            )
            pieces.append(tensor.data)
            pieces.append(bytes(-length % ALIGNMENT))
            at += length + -length % ALIGNMENT
        if "tensors" in part.envelope:
            raise BadFrame("a step's envelope has the key 'tensors', which is where its tensors go")
        steps.append({**part.envelope, "tensors": table})
    try:
        text = json.dumps({"steps": steps}, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
        header = text.encode()
    except ValueError as error:  # NaN, half a character
        raise BadFrame(f"a step's envelope is no JSON: {error}") from None
    if len(header) > MAX_HEADER or at > MAX_PAYLOAD or len(steps) > MAX_STEPS:
        raise BadFrame(
            f"the frame would have {len(steps)} steps, {len(header)} bytes of header and {at} of payload; "
            f"at most {MAX_STEPS}, {MAX_HEADER} and {MAX_PAYLOAD} are taken"
        )
    padding = bytes(_padding(len(header)))
    body = b"".join((header, padding, *pieces))
    _parts(header, memoryview(body)[len(header) + len(padding) :])
    bits = kind | (ANSWER_BIT if answer else 0)
    return PREFIX.pack(MAGIC, VERSION, bits, 0, len(header), at, zlib.crc32(body)) + body


def decode(data: bytes | memoryview) -> Frame:
    """The frame in `data`, whose tensors are views into it. Raises `BadFrame`."""
    if len(data) < PREFIX.size:
        raise BadFrame(f"a frame begins with {PREFIX.size} bytes of prefix, got {len(data)} bytes")
    magic, version, bits, flags, header_length, payload_length, checksum = PREFIX.unpack_from(data)
    if magic != MAGIC:
        raise BadFrame(f"a frame begins with {MAGIC!r}, got {magic!r}")
    if version != VERSION or flags:
        raise BadFrame(f"the frame has version {version} and flags {flags}, expected {VERSION} and 0")
    try:
        what = Kind(bits & ~ANSWER_BIT)
    except ValueError:
        raise BadFrame(f"the frame's kind is {bits & ~ANSWER_BIT}, expected 1 to {max(Kind)}") from None
    if header_length > MAX_HEADER or payload_length > MAX_PAYLOAD:
        raise BadFrame(
            f"the frame states {header_length} bytes of header and {payload_length} of payload; "
            f"at most {MAX_HEADER} and {MAX_PAYLOAD} are taken"
        )
    payload_at = PREFIX.size + header_length + _padding(header_length)
    if len(data) != payload_at + payload_length:
        raise BadFrame(f"the frame states {payload_at + payload_length} bytes in all, got {len(data)}")
    view = memoryview(data)
    if zlib.crc32(view[PREFIX.size :]) != checksum:
        raise BadFrame("the frame's CRC-32 does not match its bytes")
    if any(view[PREFIX.size + header_length : payload_at]):
        raise BadFrame("the padding after the frame's header is not zero")
    header = bytes(view[PREFIX.size : PREFIX.size + header_length])
    return Frame(what, bool(bits & ANSWER_BIT), _parts(header, view[payload_at:]))


def _padding(header_length: int) -> int:
    return -(PREFIX.size + header_length) % ALIGNMENT


def _parts(header: bytes, payload: memoryview) -> tuple[Part, ...]:
    try:
        steps: object = parse_object(header, "the frame's header").get("steps")
    except HeaderError as error:
        raise BadFrame(str(error)[:MAX_REASON]) from None
    if not isinstance(steps, list):
        raise BadFrame(f"the header's steps are {kind(steps)}, expected a list")
    listed = cast(list[object], steps)
    if len(listed) > MAX_STEPS:
        raise BadFrame(f"the frame has {len(listed)} steps, at most {MAX_STEPS} are taken")
    end = 0
    parts: list[Part] = []
    for step in listed:
        if not isinstance(step, dict):
            raise BadFrame(f"a step is {kind(step)}, expected an object")
        envelope = dict(cast(dict[str, Any], step))
        table: object = envelope.pop("tensors", [])
        if not isinstance(table, list) or len(cast(list[object], table)) > MAX_TENSORS:
            raise BadFrame(
                f"a step's tensors are {kind(cast(object, table))}, expected a list of at most {MAX_TENSORS}"
            )
        tensors: dict[str, Tensor] = {}
        for entry in cast(list[object], table):
            tensor, end = _tensor(entry, payload, end)
            if tensor.name in tensors:
                raise BadFrame(f"a step has the tensor {tensor.name!r} twice")
            tensors[tensor.name] = tensor
        parts.append(Part(envelope, tensors))
    if end + -end % ALIGNMENT != len(payload):
        raise BadFrame(f"the tensors end at byte {end} of a payload of {len(payload)}")
    return tuple(parts)


def _tensor(entry: object, payload: memoryview, end: int) -> tuple[Tensor, int]:
    """One tensor, which begins where the last one ended: so none overlaps and nothing lies between."""
    if not isinstance(entry, dict):
        raise BadFrame(f"a tensor is {kind(entry)}, expected an object")
    fields = cast(dict[str, Any], entry)
    if set(fields) != {"name", "dtype", "shape", "offset", "length"}:
        keys = str(sorted(fields))[:MAX_REASON]
        raise BadFrame(f"a tensor has the keys {keys}, expected name, dtype, shape, offset, length")
    name, dtype, offset, length = fields["name"], fields["dtype"], fields["offset"], fields["length"]
    if not isinstance(name, str) or not 1 <= len(name) <= MAX_NAME:
        raise BadFrame(f"a tensor's name is {kind(name)}, expected 1 to {MAX_NAME} characters")
    if not isinstance(dtype, str):
        raise BadFrame(f"the dtype of tensor {name!r} is {kind(dtype)}, expected a string")
    raw_shape: object = fields["shape"]
    shape = tuple(cast(list[Any], raw_shape)) if isinstance(raw_shape, list) else ()
    if not 1 <= len(shape) <= MAX_RANK or not all(is_int(n) and 0 <= n <= MAX_PAYLOAD for n in shape):
        found = str(cast(object, raw_shape))[:MAX_REASON]
        raise BadFrame(
            f"the shape of tensor {name!r} is {found}, expected 1 to {MAX_RANK} sizes up to {MAX_PAYLOAD}"
        )
    if not is_int(offset) or offset != end + -end % ALIGNMENT:
        raise BadFrame(f"tensor {name!r} begins at {_said(offset)}, expected {end + -end % ALIGNMENT}")
    expected = tensor_bytes(dtype, shape)
    if not is_int(length) or length != expected:
        raise BadFrame(
            f"tensor {name!r}: {dtype} of shape {list(shape)} is {expected} bytes, "
            f"but {_said(length)} is stated"
        )
    if offset + length > len(payload):
        raise BadFrame(f"tensor {name!r} ends at {offset + length}, but the payload has {len(payload)} bytes")
    return Tensor(name, dtype, shape, payload[offset : offset + length]), offset + length


def _said(value: object) -> str:
    return str(value) if is_int(value) else kind(value)
