"""The outermost bytes of a knot: prefix, JSON, padding, marker. What the JSON says is read elsewhere.

    0   4s   "KNOT"
    4   u16  version = 1
    6   u32  metaLen, the JSON's length without padding
    10       JSON, then 0 to 3 NULs up to a multiple of 4, then the marker 0x40; the payload follows

Little-endian. Standard library only: it also runs in Workers.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Final

from knot.errors import HeaderError, OldLayoutError

MAGIC: Final = b"KNOT"
VERSION: Final = 1
PREFIX: Final = struct.Struct("<4sHI")
MAX_META: Final = 4 << 20
MARKER: Final = 0x40


@dataclass(frozen=True, slots=True)
class Frame:
    """Where the JSON ends and the payload begins, in bytes from the file's start.

    `old` marks the layout from before the padding was mended: JSON padded with spaces inside metaLen, the
    marker right after it, the payload one byte before where a reader of today looks.
    """

    meta_length: int
    payload_offset: int
    old: bool = False


def payload_offset(meta_length: int) -> int:
    """Where the payload begins after `meta_length` bytes of JSON."""
    return _align(PREFIX.size + meta_length) + 1


def header_bytes(prefix: bytes, file_size: int) -> int:
    """How many bytes from the file's start hold the header, told by its first 10. Raises `HeaderError`."""
    if file_size < PREFIX.size or len(prefix) < PREFIX.size:
        found = min(file_size, len(prefix))
        raise HeaderError(f"a knot begins with {PREFIX.size} bytes of prefix, but the file has {found}")
    magic, version, meta_length = PREFIX.unpack_from(prefix)
    if magic != MAGIC:
        raise HeaderError(f"this is no knot: it begins with {magic!r}, expected {MAGIC!r}")
    if version != VERSION:
        raise HeaderError(f"the knot has version {version}, expected {VERSION}; convert the model again")
    if not 1 <= meta_length <= MAX_META:
        raise HeaderError(f"the knot states {meta_length} bytes of metadata, expected 1 to {MAX_META}")
    end = payload_offset(meta_length)
    if end > file_size:
        raise HeaderError(
            f"the knot is cut short: its header is {end} bytes, but the file has {file_size}; fetch it again"
        )
    return end


def read_frame(data: bytes, file_size: int, *, allow_old: bool = False) -> Frame:
    """The frame of a knot of `file_size` bytes, of which `data` has at least the header.

    Raises `HeaderError`, and `OldLayoutError` for the old layout unless `allow_old`.
    """
    end = header_bytes(data, file_size)
    if len(data) < end:
        raise HeaderError(f"the knot's header is {end} bytes, but {len(data)} were given")
    meta_length: int = PREFIX.unpack_from(data)[2]
    meta_end = PREFIX.size + meta_length
    if meta_end % 4 == 3 and data[meta_end] == MARKER:
        if allow_old:
            return Frame(meta_length, meta_end + 1, old=True)
        raise OldLayoutError(
            f"the knot has the old layout: its marker is at byte {meta_end}, inside the padding, so that "
            "its payload "
            f"starts one byte early; run `knot repair` on it"
        )
    padding = data[meta_end : end - 1]
    if padding.strip(b"\0") or data[end - 1] != MARKER:
        raise HeaderError(
            f"the {end - meta_end} bytes after the knot's metadata are {data[meta_end:end].hex(' ')}, "
            f"expected {'00 ' * (end - 1 - meta_end)}{MARKER:02x}"
        )
    return Frame(meta_length, end)


def frame_metadata(meta: bytes) -> bytes:
    """The header of a knot whose JSON is `meta`: everything up to the payload. Raises `HeaderError`."""
    if not 1 <= len(meta) <= MAX_META:
        raise HeaderError(f"the metadata would be {len(meta)} bytes, expected 1 to {MAX_META}")
    head = PREFIX.pack(MAGIC, VERSION, len(meta)) + meta
    return head.ljust(_align(len(head)), b"\0") + bytes((MARKER,))


def _align(offset: int) -> int:
    return (offset + 3) & ~3
