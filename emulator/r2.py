"""R2: buckets of objects, as bindings see them. What they lie in is `emulator.r2_store`.

Reads and writes are strongly consistent. Bodies are read from the file when they are read, never before.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

from emulator.context import current
from emulator.errors import JsException, StreamBroken
from emulator.faults import Faults
from emulator.headers import HeaderList
from emulator.limits import Limits
from emulator.r2_store import Entry, R2Store, r2_error
from emulator.r2_uploads import Upload, Uploads
from emulator.streams import FileSource, ReadableStream, Source
from emulator.values import JsDict, options_of


class Bucket:
    """A bucket: its objects, and the uploads that are to become some."""

    def __init__(self, folder: Path, limits: Limits) -> None:
        self.objects = R2Store(folder, limits)
        self.uploads = Uploads(self.objects)

    def register(self, key: str, path: Path, custom_metadata: Mapping[str, str] | None = None) -> Entry:
        """Makes a file an object without copying it."""
        return self.objects.register(key, path, custom_metadata)

    def close(self) -> None:
        """Closes what it lies in."""
        self.objects.close()


class R2Object:
    """An object's metadata."""

    def __init__(self, entry: Entry, range: tuple[int, int] | None = None) -> None:
        self.key = entry.key
        self.version = entry.version
        self.size = entry.size
        self.etag = entry.etag
        self.httpEtag = f'"{entry.etag}"'
        self.uploaded = datetime.fromtimestamp(entry.uploaded_ms / 1000)
        self.httpMetadata = JsDict(entry.http_metadata)
        self.customMetadata = JsDict(entry.custom_metadata)
        self.storageClass = "Standard"
        self.checksums = JsDict({"md5": memoryview(entry.md5)} if entry.md5 else {})
        if range is not None:
            self.range = JsDict(offset=range[0], length=range[1])

    def writeHttpMetadata(self, headers: HeaderList) -> None:  # noqa: N802
        """Puts the object's HTTP metadata into headers."""
        raise NotImplementedError("R2Object.writeHttpMetadata is not emulated: it takes JavaScript headers")


class R2ObjectBody(R2Object):
    """An object with the body that a `get` asked for."""

    def __init__(self, entry: Entry, range: tuple[int, int], stream: ReadableStream) -> None:
        super().__init__(entry, range)
        self.body = stream

    @property
    def bodyUsed(self) -> bool:  # noqa: N802
        """Whether the body was read."""
        return self.body.used

    async def arrayBuffer(self) -> memoryview:  # noqa: N802
        """The body, whole."""
        if self.body.used:
            raise JsException("TypeError", "Body has already been used. It can only be used once.")
        event = current()
        # What was asked for lands in one buffer, however large it is.
        size = self.body.length or 0
        event.count(size)
        try:
            return memoryview(await self.body.read_all())
        finally:
            event.uncount(size)

    async def bytes(self) -> memoryview:
        """The body, whole."""
        return await self.arrayBuffer()

    async def text(self) -> str:
        """The body as text."""
        return bytes(await self.arrayBuffer()).decode("utf-8-sig", "replace")

    async def json(self) -> Any:
        """The body as JSON."""
        return json.loads(await self.text(), object_hook=JsDict)

    async def blob(self) -> Any:
        """Blobs are not emulated."""
        raise NotImplementedError("R2ObjectBody.blob is not emulated")


class R2Bucket:
    """A bucket as a binding. `site` is its name for faults."""

    def __init__(self, bucket: Callable[[], Bucket], faults: Faults | None, site: str) -> None:
        self._open = bucket
        self._faults = faults
        self._site = site

    async def head(self, key: str) -> R2Object | None:
        """An object's metadata, or None."""
        async with self.operation("head"):
            _taken_down("head", key)
            entry = self.bucket.objects.entry(key)
            return None if entry is None else R2Object(entry)

    async def get(self, key: str, *args: Any, **kwargs: Any) -> R2Object | R2ObjectBody | None:
        """An object, or None; without a body where `onlyIf` does not hold. Options: `range`, `onlyIf`."""
        options = options_of(args, kwargs, "get")
        _known(options, ("range", "onlyIf"), "get")
        async with self.operation("get"):
            entry = self.bucket.objects.entry(key)
            if entry is None:
                _taken_down("get", key)
                return None
            if not holds(options.get("onlyIf"), entry):
                _taken_down("get", key)
                return R2Object(entry)
            offset, length = span(options.get("range"), entry.size)
            _taken_down("get", key, offset, length)
            try:
                source = self.bucket.objects.open(entry, offset, length)
            except FileNotFoundError:
                return None
        event = current()
        stream = ReadableStream(self._torn(source, length), length)
        event.adopt(stream)
        event.isolate.cluster.opened(stream)
        return R2ObjectBody(entry, (offset, length), stream)

    async def put(self, key: str, value: Any, *args: Any, **kwargs: Any) -> R2Object | None:
        """Stores an object, whole or not at all; None where `onlyIf` does not hold."""
        options = options_of(args, kwargs, "put")
        _known(
            options,
            (
                "onlyIf",
                "httpMetadata",
                "customMetadata",
                "md5",
                "sha1",
                "sha256",
                "sha384",
                "sha512",
                "storageClass",
            ),
            "put",
        )
        async with self.operation("put"):
            condition = options.get("onlyIf")

            def allowed() -> bool:
                return condition is None or holds(condition, self.bucket.objects.entry(key))

            if not allowed():
                return None
            entry = await self.bucket.objects.put(key, _stream(value), options, allowed)
            return None if entry is None else R2Object(entry)

    async def delete(self, keys: str | list[str]) -> None:
        """Deletes objects; missing ones are no error."""
        async with self.operation("delete"):
            self.bucket.objects.delete([keys] if isinstance(keys, str) else keys)

    async def list(self, *args: Any, **kwargs: Any) -> JsDict:
        """Objects by key: `prefix`, `delimiter`, `cursor`, `startAfter`, `limit`, `include`."""
        options = options_of(args, kwargs, "list")
        _known(options, ("prefix", "delimiter", "cursor", "startAfter", "limit", "include"), "list")
        async with self.operation("list"):
            page = self.bucket.objects.list(options)
        found = JsDict(
            objects=[R2Object(entry) for entry in page.entries],
            truncated=page.cursor is not None,
            delimitedPrefixes=page.prefixes,
        )
        if page.cursor is not None:
            found["cursor"] = page.cursor
        return found

    async def createMultipartUpload(self, key: str, *args: Any, **kwargs: Any) -> R2MultipartUpload:  # noqa: N802
        """Begins an upload in parts."""
        options = options_of(args, kwargs, "createMultipartUpload")
        _known(options, ("httpMetadata", "customMetadata", "storageClass"), "createMultipartUpload")
        async with self.operation("createMultipartUpload"):
            return R2MultipartUpload(self, self.bucket.uploads.begin(key, options))

    def resumeMultipartUpload(self, key: str, id: str) -> R2MultipartUpload:  # noqa: N802
        """An upload that was begun elsewhere; whether it exists shows when it is used."""
        return R2MultipartUpload(self, Upload(key, id))

    @asynccontextmanager
    async def operation(self, what: str) -> AsyncGenerator[None, None]:
        """One operation: a subrequest that takes a turn among the request's waiting connections."""
        spending = current().spending
        spending.subrequest()
        async with spending.connecting:
            faults = self._faults
            if faults is not None and what in ("head", "get"):
                if faults.strikes("r2_slow", self._site):
                    await asyncio.sleep(faults.delay(self._site))
                if faults.strikes("r2_error", self._site):
                    raise r2_error(what, "We encountered an internal error. Please try again.", 10001)
            yield

    def _torn(self, source: FileSource, length: int) -> Source:
        faults = self._faults
        if faults is None or not length or not faults.strikes("r2_torn", self._site):
            return source
        return TornSource(source, faults.cut(self._site, length))

    @property
    def bucket(self) -> Bucket:
        """What the binding means, opened when it is first used."""
        return self._open()


def _taken_down(operation: str, key: str, offset: int = 0, length: int = 0) -> None:
    isolate = current().isolate
    if isolate.recorder is not None:
        isolate.recorder.read(isolate.name, operation, key, offset, length)


class R2MultipartUpload:
    """An upload in parts: at least 5 MiB each and all of one size, but for the last."""

    def __init__(self, bucket: R2Bucket, upload: Upload) -> None:
        self._bucket = bucket
        self._upload = upload
        self.key = upload.key
        self.uploadId = upload.id

    async def uploadPart(self, number: int, value: Any, *args: Any, **kwargs: Any) -> JsDict:  # noqa: N802
        """Stores a part; returns what `complete` wants to know of it."""
        async with self._bucket.operation("uploadPart"):
            etag = await self._bucket.bucket.uploads.put_part(self._upload, number, _stream(value))
        return JsDict(partNumber=number, etag=etag)

    async def complete(self, parts: list[Mapping[str, Any]]) -> R2Object:
        """Makes the object of the parts named."""
        async with self._bucket.operation("completeMultipartUpload"):
            named = [(part["partNumber"], part["etag"]) for part in parts]
            return R2Object(await self._bucket.bucket.uploads.complete(self._upload, named))

    async def abort(self) -> None:
        """Forgets the upload."""
        async with self._bucket.operation("abortMultipartUpload"):
            self._bucket.bucket.uploads.abort(self._upload)


class TornSource:
    """A body that ends early."""

    def __init__(self, source: Source, left: int) -> None:
        self._source = source
        self._left = left

    async def read(self, most: int) -> bytes:
        """The next bytes, until it breaks."""
        if not self._left:
            raise StreamBroken("Network connection lost.")
        found = await self._source.read(min(most, self._left))
        self._left -= len(found)
        return found

    async def read_into(self, view: memoryview) -> int:
        """Fills what it can; then it breaks."""
        count = await self._source.read_into(view[: self._left])
        self._left -= count
        if count < len(view):
            raise StreamBroken("Network connection lost.")
        return count

    async def close(self) -> None:
        """Gives up the rest."""
        await self._source.close()


def span(wanted: Any, size: int) -> tuple[int, int]:
    """First byte and length of a range of an object of `size` bytes. Raises like R2."""
    if wanted is None:
        return 0, size
    options = cast(Mapping[str, Any], wanted)
    _known(options, ("offset", "length", "suffix"), "range")
    offset, length, suffix = (options.get(name) for name in ("offset", "length", "suffix"))
    for name, value in options.items():
        if value is not None and (not isinstance(value, int) or value < 0):
            raise JsException("TypeError", f"range.{name} is {value!r}, expected a whole number from 0 on")
    if suffix is not None:
        if offset is not None or length is not None:
            raise JsException("TypeError", "Suffix is incompatible with offset or length.")
        if suffix == 0:
            raise r2_error("get", "The requested range is not satisfiable", 10039)
        suffix = min(suffix, size)
        return size - suffix, suffix
    offset = offset or 0
    if offset > size or (offset == size and size) or length == 0:
        raise r2_error("get", "The requested range is not satisfiable", 10039)
    return offset, min(size - offset, size if length is None else length)


def holds(condition: Any, entry: Entry | None) -> bool:
    """Whether an `onlyIf` holds for an object, or for none."""
    if condition is None:
        return True
    wanted = cast(Mapping[str, Any], condition)
    names = ("etagMatches", "etagDoesNotMatch", "uploadedBefore", "uploadedAfter", "secondsGranularity")
    _known(wanted, names, "onlyIf")
    matches, differs = wanted.get("etagMatches"), wanted.get("etagDoesNotMatch")
    if entry is None:
        return matches is None and wanted.get("uploadedBefore") is None
    if matches is not None and not _names_etag(matches, entry.etag):
        return False
    if differs is not None and _names_etag(differs, entry.etag):
        return False
    uploaded = entry.uploaded_ms
    if wanted.get("secondsGranularity"):
        uploaded = uploaded // 1000 * 1000
    before, after = wanted.get("uploadedBefore"), wanted.get("uploadedAfter")
    if before is not None and not uploaded < _milliseconds(before):
        return False
    return after is None or uploaded > _milliseconds(after)


def _names_etag(wanted: str, etag: str) -> bool:
    names = [name.strip() for name in wanted.split(",")]
    if any(name.startswith(('"', "W/")) for name in names):
        raise JsException("TypeError", "Conditional ETag should not be wrapped in quotes")
    return "*" in names or etag in names


def _milliseconds(when: datetime) -> float:
    aware = when if when.tzinfo else when.astimezone(UTC)
    return aware.timestamp() * 1000


def _stream(value: Any) -> ReadableStream:
    match value:
        case None:
            return ReadableStream.of(b"")
        case str():
            return ReadableStream.of(value.encode())
        case bytes():
            return ReadableStream.of(value)
        case ReadableStream():
            if value.length is None:
                raise JsException(
                    "TypeError",
                    "Provided readable stream must have a known length (request/response body or readable "
                    "half of FixedLengthStream)",
                )
            return value
        case _:
            raise TypeError(f"{type(value)} cannot be stored in R2; bytes, text and bodies can")


def _known(options: Mapping[str, Any], known: tuple[str, ...], what: str) -> None:
    unknown = set(options) - set(known)
    if unknown:
        raise NotImplementedError(
            f"{what}: {', '.join(sorted(unknown))} is not emulated; {', '.join(known)} are"
        )
