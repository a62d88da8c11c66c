"""Range sources outside of Workers: a file, and a URL whose server honours ranges."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

import httpx

from knot.errors import SourceError

_CONTENT_RANGE: Final = re.compile(r"bytes (\d+)-(\d+)/(\d+)")


class FileSource:
    """A file. Every read opens it anew, so that a file replaced in between is noticed by its size."""

    def __init__(self, path: Path) -> None:
        self._path = path

    async def read(self, offset: int, length: int) -> bytes:
        """Bytes `[offset, offset + length)`. Raises `SourceError`."""
        try:
            with self._path.open("rb") as file:
                file.seek(offset)
                data = file.read(length)
        except OSError as error:
            raise SourceError(f"{self._path} cannot be read: {error.strerror}") from error
        if len(data) != length:
            raise SourceError(
                f"{self._path}: bytes [{offset}, {offset + length}) were asked for, but it ends at "
                f"{offset + len(data)}"
            )
        return data

    async def size(self) -> int:
        """The file's size in bytes. Raises `SourceError`."""
        try:
            return self._path.stat().st_size
        except OSError as error:
            raise SourceError(f"{self._path} cannot be read: {error.strerror}") from error


class HttpSource:
    """A URL. A server that answers a range with the whole is refused before its body is read.

    Where the server gives an ETag, every read is conditional on it: a model replaced between two reads is
    an error, not a mixture.
    """

    def __init__(self, client: httpx.AsyncClient, url: str) -> None:
        self._client = client
        self._url = url
        self._size: int | None = None
        self._etag: str | None = None

    async def size(self) -> int:
        """The size in bytes, asked for once. Raises `SourceError`."""
        if self._size is None:
            await self._range(0, 1)
        assert self._size is not None
        return self._size

    async def read(self, offset: int, length: int) -> bytes:
        """Bytes `[offset, offset + length)`, at least one. Raises `SourceError`."""
        return await self._range(offset, length)

    async def _range(self, offset: int, length: int) -> bytes:
        headers = {"range": f"bytes={offset}-{offset + length - 1}", "accept-encoding": "identity"}
        if self._etag is not None:
            headers["if-match"] = self._etag
        try:
            async with self._client.stream("GET", self._url, headers=headers) as response:
                self._check(response, offset, length)
                data = bytearray()
                async for piece in response.aiter_bytes():
                    data += piece
                    if len(data) > length:
                        raise SourceError(f"{self._url} sent more than the {length} bytes asked for")
        except httpx.HTTPError as error:
            raise SourceError(f"{self._url} cannot be read: {error or type(error).__name__}") from error
        if len(data) != length:
            raise SourceError(f"{self._url} sent {len(data)} of the {length} bytes asked for")
        return bytes(data)

    def _check(self, response: httpx.Response, offset: int, length: int) -> None:
        if response.status_code == 412:
            raise SourceError(f"{self._url} changed while it was read; start again")
        if response.status_code != 206:
            hint = ", so it does not serve ranges" if response.status_code == 200 else ""
            raise SourceError(f"{self._url} answered {response.status_code}, expected 206{hint}")
        match = _CONTENT_RANGE.fullmatch(response.headers.get("content-range", ""))
        if match is None or (int(match[1]), int(match[2])) != (offset, offset + length - 1):
            raise SourceError(
                f"{self._url} answered with the range {response.headers.get('content-range')!r}, "
                f"expected {offset}-{offset + length - 1}"
            )
        size = int(match[3])
        if self._size not in (None, size):
            raise SourceError(f"{self._url} was {self._size} bytes and is {size} now; start again")
        self._size = size
        etag = response.headers.get("etag")
        # A weak tag cannot vouch for bytes.
        if etag and not etag.startswith("W/"):
            self._etag = etag
