"""Reads a knot's header from anywhere that serves byte ranges, in two fetches at most.

Standard library only: it also runs in Workers.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final, Protocol

from knot.container import PREFIX, header_bytes
from knot.errors import SourceError
from knot.header import KnotHeader
from knot.parse import parse_header

# Holds the header of a model of some 500 tensors; a longer one takes a second fetch.
PROBE_BYTES: Final = 65_536


class RangeSource(Protocol):
    """An immutable sequence of bytes that can be read in ranges: a file, an object in a bucket, a URL."""

    async def read(self, offset: int, length: int) -> bytes:
        """Exactly `length` bytes from `offset`."""
        ...

    async def size(self) -> int:
        """How many bytes there are."""
        ...


async def read_header(source: RangeSource) -> KnotHeader:
    """The header of the knot in `source`, in one fetch or, when it is longer than 64 KiB, two.

    Raises `SourceError` for a short read and a subclass of `HeaderError` for what cannot be trusted.
    """
    size = await source.size()
    data = await _read(source, 0, min(PROBE_BYTES, size))
    end = header_bytes(data[: PREFIX.size], size)
    if end > len(data):
        data += await _read(source, len(data), end - len(data))
    return parse_header(data, size)


def load_header(path: Path) -> KnotHeader:
    """The header of a knot in a file. Raises `OSError` and what `read_header` raises."""
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        data = file.read(PROBE_BYTES)
        end = header_bytes(data[: PREFIX.size], size)
        if end > len(data):
            data += file.read(end - len(data))
    return parse_header(data, size)


async def _read(source: RangeSource, offset: int, length: int) -> bytes:
    data = await source.read(offset, length)
    if len(data) != length:
        raise SourceError(f"bytes [{offset}, {offset + length}) were asked for, but {len(data)} came")
    return data
