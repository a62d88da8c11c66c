"""Reads single rows of the embedding table from a knot, checked against the digests of their groups."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import asynccontextmanager

from engine.client import Engine
from knot.bucket import BucketKnot, Digests
from knot.header import TensorInfo
from knot.quants import ggml_id
from protocol.ports import BlobFailed


class RowsUnavailable(Exception):
    """Rows that could not be had, or that are not what the knot says; names knot, tensor and rows."""


class Desk:
    """Room in an engine's region for bytes on their way, `size` bytes from `at`. One user at a time.

    A closed desk lets nobody on: the engine has another use for the place.
    """

    def __init__(self, at: int, size: int) -> None:
        self.at = at
        self.size = size
        self._lock = asyncio.Lock()
        self._closed = False

    @asynccontextmanager
    async def use(self) -> AsyncGenerator[None]:
        """The desk for oneself. Raises `BlobFailed` when it is closed: asking again finds the new one."""
        async with self._lock:
            if self._closed:
                raise BlobFailed("the part is starting anew; ask again")
            yield

    async def close(self) -> None:
        """Waits for whoever is using the desk, and lets nobody on it again."""
        async with self._lock:
            self._closed = True


class RowReader:
    """Rows of a knot's embedding table, raw or as f32."""

    def __init__(self, knot: BucketKnot, engine: Engine, desk: Desk) -> None:
        self._knot = knot
        self._engine = engine
        self._desk = desk
        self._digests: Digests | None = None
        self.table = knot.header.embedding_tensor()
        self.f32_bytes = 4 * self.table.cols

    async def read(self, tokens: Iterable[int]) -> dict[int, bytes]:
        """Raw rows from the bucket; adjacent groups come in one read. Raises `RowsUnavailable`."""
        table, wanted = self.table, sorted(set(tokens))
        if self._digests is None:
            self._digests = await self._knot.digests([table])
        group_bytes = table.group_rows * table.row_bytes
        found: dict[int, bytes] = {}
        numbers = sorted({token // table.group_rows for token in wanted})
        for start, end in runs(numbers, max(1, self._desk.size // group_bytes)):
            groups = table.groups(start * table.group_rows, min(end * table.group_rows, table.rows))
            data = await self._knot.read(groups.offset, groups.length)
            expected = self._digests.of(groups.first_digest, groups.digest_count)
            async with self._desk.use():
                self._engine.host.write(self._desk.at, data)
                bad = await self._engine.first_bad_group(self._desk.at, len(data), group_bytes, expected)
            if bad is not None:
                first = groups.row_start + bad * table.group_rows
                raise RowsUnavailable(
                    f"knot {self._knot.key}, tensor {table.name}, rows "
                    f"[{first}, {min(first + table.group_rows, table.rows)}): the digest is wrong; verify "
                    "the knot and upload it again"
                )
            for token in wanted:
                if groups.row_start <= token < groups.row_end:
                    at = (token - groups.row_start) * table.row_bytes
                    found[token] = data[at : at + table.row_bytes]
        return found

    async def dequantise(self, raw: dict[int, bytes]) -> dict[int, bytes]:
        """Raw rows as f32 [hidden_size], by the engine's one dequantiser."""
        found: dict[int, bytes] = {}
        size, f32 = self.table.row_bytes, self.f32_bytes
        at_once = max(1, (self._desk.size - 64) // (size + f32))
        tokens = list(raw)
        for first in range(0, len(tokens), at_once):
            some = tokens[first : first + at_once]
            data = b"".join(raw[token] for token in some)
            out_at = self._desk.at + len(data) + -len(data) % 64
            async with self._desk.use():
                self._engine.host.write(self._desk.at, data)
                length = await self._engine.embed_range_sliced(
                    ggml_id(self.table.type), self.table.cols, len(some), self._desk.at, len(data), out_at
                )
                values = self._engine.host.read(out_at, length)
            for i, token in enumerate(some):
                found[token] = values[i * f32 : (i + 1) * f32]
        return found


def desk_bytes(table: TensorInfo, least: int) -> int:
    """Bytes that a desk for rows of `table` needs: a group, a row both ways, and at least `least`."""
    row = table.row_bytes + 4 * table.cols + 128
    return max(least, table.group_rows * table.row_bytes, row) // 64 * 64 + 64


def runs(numbers: Sequence[int], longest: int) -> list[tuple[int, int]]:
    """Rising numbers as ranges [start, end) of at most `longest`."""
    found: list[tuple[int, int]] = []
    for number in numbers:
        if found and found[-1][1] == number and number - found[-1][0] < longest:
            found[-1] = (found[-1][0], number + 1)
        else:
            found.append((number, number + 1))
    return found
