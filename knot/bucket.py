"""A knot that lies in a bucket: its header, and ranges of its payload, all of one and the same upload.

Every read carries the etag that the header was read under, so that a knot uploaded again under the same key
is noticed and never mixed with its predecessor. Standard library only: it also runs in Workers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import Final, TypeVar

from knot.header import DIGEST_BYTES, KnotHeader, TensorInfo
from knot.reader import read_header
from protocol.calls import Inflow, ShortBody
from protocol.ports import BlobFailed, BlobMissing, BlobSource

T = TypeVar("T")
ATTEMPTS: Final = 4
PAUSE_SECONDS: Final = 0.05


class BucketKnot:
    """An opened knot. Offsets count from the payload's first byte."""

    def __init__(self, blobs: BlobSource, key: str, etag: str, header: KnotHeader) -> None:
        self._blobs = blobs
        self.key = key
        self.etag = etag
        self.header = header

    @classmethod
    async def open(cls, blobs: BlobSource, key: str) -> BucketKnot:
        """Reads the header: a head and one or two range reads.

        Raises `BlobMissing`, `BlobChanged` when the upload changes meanwhile, and `KnotError`.
        """
        info = await _patiently(lambda: blobs.head(key))
        return cls(blobs, key, info.etag, await read_header(_Upload(blobs, key, info.etag, info.size)))

    async def is_current(self) -> bool:
        """Whether this upload is still the one under its key; True where that cannot be told just now."""
        try:
            return (await self._blobs.head(self.key)).etag == self.etag
        except BlobFailed:
            return True
        except BlobMissing:
            return False

    @property
    def id(self) -> str:
        """What wardens, caches and object names are keyed by: the key and the content's fingerprint."""
        return f"{self.key}@{self.header.fingerprint}"

    async def read(self, offset: int, length: int) -> bytes:
        """A short range of the payload, whole."""
        at = self.header.file_offset(offset)
        return await _patiently(lambda: self._blobs.read(self.key, at, length, self.etag))

    async def stream(self, offset: int, length: int) -> Inflow:
        """A long range of the payload as one read."""
        at = self.header.file_offset(offset)
        return await _patiently(lambda: self._blobs.open(self.key, at, length, self.etag))

    async def digests(self, tensors: Iterable[TensorInfo]) -> Digests:
        """The digests of some tensors, in one read that covers them all."""
        listed = list(tensors)
        first = min(tensor.first_digest for tensor in listed)
        end = max(tensor.first_digest + tensor.group_count for tensor in listed)
        return Digests(first, await self.read(*self.header.digest_range(first, end - first)))


class Digests:
    """Digests from number `first` on, as the knot has them: little-endian u64s."""

    def __init__(self, first: int, data: bytes) -> None:
        self._first = first
        self._data = data

    def of(self, first: int, count: int) -> bytes:
        """`count` digests from number `first`."""
        at = (first - self._first) * DIGEST_BYTES
        found = self._data[at : at + count * DIGEST_BYTES] if at >= 0 else b""
        if len(found) != count * DIGEST_BYTES:
            raise ValueError(f"digests [{first}, {first + count}) were not read")
        return found


class _Upload:
    """One upload of a blob as a range source."""

    def __init__(self, blobs: BlobSource, key: str, etag: str, size: int) -> None:
        self._blobs, self._key, self._etag, self._size = blobs, key, etag, size

    async def read(self, offset: int, length: int) -> bytes:
        return await _patiently(lambda: self._blobs.read(self._key, offset, length, self._etag))

    async def size(self) -> int:
        return self._size


async def _patiently(read: Callable[[], Awaitable[T]]) -> T:
    """Reads again what a store could not give just now."""
    for attempt in range(ATTEMPTS - 1):
        try:
            return await read()
        except (BlobFailed, ShortBody):
            await asyncio.sleep(PAUSE_SECONDS * 2**attempt)
    return await read()
