"""What an R2 bucket lies in: a folder of files and an index in SQLite.

An object is a file of its own, or a file elsewhere that was registered: a knot of gigabytes is served from
where it is. A registered file that changes becomes another upload, with another etag.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from emulator.errors import JsException, StreamBroken
from emulator.limits import Limits
from emulator.storage import connect
from emulator.streams import FileSource, ReadableStream

_SCHEMA = """
CREATE TABLE IF NOT EXISTS objects (
    key BLOB PRIMARY KEY, version TEXT NOT NULL, size INTEGER NOT NULL, etag TEXT NOT NULL, md5 BLOB,
    uploaded_ms INTEGER NOT NULL, http_metadata TEXT NOT NULL, custom_metadata TEXT NOT NULL,
    path TEXT, stamp TEXT
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS uploads (
    id TEXT PRIMARY KEY, key TEXT NOT NULL, options TEXT NOT NULL, done INTEGER NOT NULL DEFAULT 0
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS parts (
    id TEXT NOT NULL, number INTEGER NOT NULL, size INTEGER NOT NULL, etag TEXT NOT NULL, file TEXT NOT NULL,
    PRIMARY KEY (id, number)
) WITHOUT ROWID;
"""
SAMPLE: Final = 64 << 10
WRITE: Final = 1 << 20
HASHES: Final = ("md5", "sha1", "sha256", "sha384", "sha512")


def r2_error(what: str, sentence: str, code: int) -> JsException:
    """An error as R2 words it."""
    return JsException("Error", f"{what}: {sentence} ({code})")


@dataclass(frozen=True, slots=True)
class Entry:
    """An object: where it lies and what is known of it."""

    key: str
    version: str
    size: int
    etag: str
    md5: bytes | None
    uploaded_ms: int
    http_metadata: Mapping[str, Any]
    custom_metadata: Mapping[str, str]
    path: Path
    stamp: str | None = None


@dataclass(frozen=True, slots=True)
class Upload:
    """An upload in parts."""

    key: str
    id: str


@dataclass(frozen=True, slots=True)
class Page:
    """A piece of a listing; `cursor` leads to the next."""

    entries: list[Entry]
    prefixes: list[str]
    cursor: str | None


@dataclass(slots=True)
class _Written:
    """A file that was written and is not an object yet."""

    path: Path
    size: int = 0
    digests: dict[str, Any] = field(default_factory=lambda: {"md5": hashlib.md5()})

    def etag(self) -> str:
        """The etag of an object that was put in one piece."""
        return self.digests["md5"].hexdigest()


class R2Store:
    """One bucket."""

    def __init__(self, folder: Path, limits: Limits) -> None:
        self.folder = folder
        self._limits = limits
        self._database = connect(folder / "index.sqlite", _SCHEMA)
        self._blobs = folder / "blobs"
        self._blobs.mkdir(exist_ok=True)
        self._sweep()

    def close(self) -> None:
        """Closes the index."""
        self._database.close()

    def register(self, key: str, path: Path, custom_metadata: Mapping[str, str] | None = None) -> Entry:
        """Makes a file an object without copying it. If it is one already and unchanged, nothing changes."""
        _check_key(key, "put", self._limits.r2_key_bytes)
        path = path.resolve()
        stamp = _stamp(path.stat())
        known = self._row(key)
        if known is not None and known.path == path and known.stamp == stamp:
            return known
        entry = Entry(
            key, secrets.token_hex(16), path.stat().st_size, _registered_etag(path, stamp), None, _now(), {},
            dict(custom_metadata or {}), path, stamp,
        )  # fmt: skip
        self._insert(entry)
        return entry

    def entry(self, key: str) -> Entry | None:
        """An object, or None."""
        _check_key(key, "get", self._limits.r2_key_bytes)
        found = self._row(key)
        return None if found is None else self._current(found)

    def _current(self, entry: Entry) -> Entry | None:
        """The object as its file is now: a registered one may have changed, or be gone."""
        if entry.stamp is None:
            return entry
        try:
            stamp = _stamp(entry.path.stat())
        except FileNotFoundError:
            return None
        if stamp != entry.stamp:
            return self.register(entry.key, entry.path, entry.custom_metadata)
        return entry

    def open(self, entry: Entry, offset: int, length: int) -> FileSource:
        """A range of an object's body. It stays what it was when the object is replaced meanwhile."""
        descriptor = os.open(entry.path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))

        def check(descriptor: int) -> None:
            if entry.stamp is not None and _stamp(os.fstat(descriptor)) != entry.stamp:
                raise StreamBroken(f"{entry.path} was changed while it was read as {entry.key}")

        return FileSource(descriptor, offset, length, check)

    async def put(
        self, key: str, stream: ReadableStream, options: Mapping[str, Any], allowed: Callable[[], bool]
    ) -> Entry | None:
        """Stores a body; `allowed` is asked once more when it is there. Raises when a checksum is wrong."""
        _check_key(key, "put", self._limits.r2_key_bytes)
        http, custom = self._metadata(options, "put")
        wanted = [name for name in HASHES if options.get(name) is not None]
        if len(wanted) > 1:
            raise JsException("TypeError", "You cannot specify multiple hashing algorithms.")
        written = await self._write(stream, wanted)
        try:
            for name in wanted:
                _check_digest(name, written.digests[name].digest(), options[name])
            if not allowed():
                written.path.unlink()
                return None
        except BaseException:
            written.path.unlink(missing_ok=True)
            raise
        return self._keep(key, written, written.etag(), written.digests["md5"].digest(), http, custom)

    def _keep(
        self,
        key: str,
        written: _Written,
        etag: str,
        md5: bytes | None,
        http: Mapping[str, Any],
        custom: Mapping[str, str],
    ) -> Entry:
        entry = Entry(key, written.path.name, written.size, etag, md5, _now(), http, custom, written.path)
        old = self._row(key)
        self._insert(entry)
        self._discard(old)
        return entry

    async def _write(self, stream: ReadableStream, hashes: list[str]) -> _Written:
        """Writes a body to a file of its own, that no object is until it is whole."""
        written = _Written(self._blobs / secrets.token_hex(16))
        for name in hashes:
            written.digests[name] = hashlib.new(name)
        try:
            with written.path.open("xb", buffering=0) as file:
                while piece := await stream.read(WRITE):
                    written.size += len(piece)
                    if written.size > self._limits.r2_put_bytes:
                        raise r2_error(
                            "put", "Your proposed upload exceeds the maximum allowed object size.", 10012
                        )
                    for digest in written.digests.values():
                        digest.update(piece)
                    file.write(piece)
            if stream.length is not None and stream.length != written.size:
                raise StreamBroken(f"a body of {stream.length} bytes was promised, {written.size} came")
        except BaseException:
            written.path.unlink(missing_ok=True)
            raise
        return written

    def delete(self, keys: list[str]) -> None:
        """Deletes objects. A registered file stays where it is."""
        if len(keys) > 1000:
            raise r2_error("delete", "The number of keys to delete must be at most 1000.", 10012)
        for key in keys:
            _check_key(key, "delete", self._limits.r2_key_bytes)
            old = self._row(key)
            self._database.execute("DELETE FROM objects WHERE key = ?", (key.encode(),))
            self._discard(old)

    def list(self, options: Mapping[str, Any]) -> Page:
        """A page of objects, in the order of their keys' UTF-8."""
        limit = options.get("limit")
        limit = 1000 if limit is None else limit
        if not isinstance(limit, int) or not 1 <= limit <= 1000:
            raise r2_error("list", "MaxKeys params must be positive integer <= 1000.", 10022)
        prefix, delimiter = (options.get("prefix") or "").encode(), (options.get("delimiter") or "").encode()
        after = b""
        if options.get("startAfter"):
            after = options["startAfter"].encode()
        if options.get("cursor"):
            after = _uncursor(options["cursor"])
        entries: list[Entry] = []
        prefixes: list[bytes] = []
        while True:
            row = self._database.execute(
                "SELECT * FROM objects WHERE key > ? AND key >= ? ORDER BY key LIMIT 1", (after, prefix)
            ).fetchone()
            if row is None or not row[0].startswith(prefix):
                return Page(entries, [name.decode() for name in prefixes], None)
            if len(entries) + len(prefixes) == limit:
                return Page(entries, [name.decode() for name in prefixes], _cursor(after))
            cut = row[0].find(delimiter, len(prefix)) if delimiter else -1
            if cut >= 0:
                # Everything below a common prefix is passed over: no key is larger than prefix + 0xff.
                prefixes.append(row[0][: cut + len(delimiter)])
                after = prefixes[-1] + b"\xff"
                continue
            after = row[0]
            entry = self._current(self._entry_of(row))
            if entry is not None:
                entries.append(entry)

    def begin_upload(self, key: str, options: Mapping[str, Any]) -> Upload:
        """Begins an upload in parts."""
        _check_key(key, "createMultipartUpload", self._limits.r2_key_bytes)
        http, custom = self._metadata(options, "createMultipartUpload")
        upload = Upload(key, secrets.token_hex(32))
        self._database.execute(
            "INSERT INTO uploads (id, key, options) VALUES (?, ?, ?)",
            (upload.id, key, json.dumps({"httpMetadata": http, "customMetadata": custom})),
        )
        return upload

    async def put_part(self, upload: Upload, number: int, stream: ReadableStream) -> str:
        """Stores a part; returns its etag."""
        if not 1 <= number <= self._limits.r2_parts:
            raise r2_error("uploadPart", f"Part number must be between 1 and {self._limits.r2_parts}", 10025)
        self._options_of(upload, "uploadPart")
        written = await self._write(stream, [])
        etag = hashlib.md5(written.digests["md5"].digest() + upload.id.encode()).hexdigest()
        old = self._parts(upload).get(number)
        self._database.execute(
            "INSERT OR REPLACE INTO parts VALUES (?, ?, ?, ?, ?)",
            (upload.id, number, written.size, etag, written.path.name),
        )
        if old is not None:
            (self._blobs / old[2]).unlink(missing_ok=True)
        return etag

    async def complete(self, upload: Upload, named: list[tuple[int, str]]) -> Entry:
        """Makes an object of parts, in the order of their numbers."""
        options = self._options_of(upload, "completeMultipartUpload")
        parts = self._parts(upload)
        chosen: list[tuple[int, str, str]] = []
        for number, etag in sorted(named):
            part = parts.get(number)
            if part is None or part[1] != etag:
                raise r2_error(
                    "completeMultipartUpload", "One or more of the specified parts could not be found.", 10025
                )
            chosen.append(part)
        if len({number for number, _ in named}) != len(named) or not chosen:
            raise r2_error("completeMultipartUpload", "There was a problem with the multipart upload.", 10024)
        for size, _, _ in chosen[:-1]:
            if size < self._limits.r2_part_bytes:
                raise r2_error(
                    "completeMultipartUpload",
                    "Your proposed upload is smaller than the minimum allowed object size.",
                    10011,
                )
        if len({size for size, _, _ in chosen[:-1]}) > 1 or chosen[-1][0] > chosen[0][0]:
            raise r2_error("completeMultipartUpload", "There was a problem with the multipart upload.", 10048)
        written = _Written(self._blobs / secrets.token_hex(16))
        whole = hashlib.md5()
        try:
            with written.path.open("xb", buffering=0) as target:
                for size, _, file in chosen:
                    digest = _append(target, self._blobs / file)
                    whole.update(digest)
                    written.size += size
        except BaseException:
            written.path.unlink(missing_ok=True)
            raise
        etag = f"{whole.hexdigest()}-{len(chosen)}"
        entry = self._keep(
            upload.key, written, etag, None, options["httpMetadata"], options["customMetadata"]
        )
        self._forget(upload)
        return entry

    def abort(self, upload: Upload) -> None:
        """Forgets an upload; one that is over is no error."""
        self._forget(upload)

    def _forget(self, upload: Upload) -> None:
        for _, _, file in self._parts(upload).values():
            (self._blobs / file).unlink(missing_ok=True)
        self._database.execute("DELETE FROM parts WHERE id = ?", (upload.id,))
        self._database.execute("UPDATE uploads SET done = 1 WHERE id = ?", (upload.id,))

    def _options_of(self, upload: Upload, what: str) -> dict[str, Any]:
        row = self._database.execute(
            "SELECT options FROM uploads WHERE id = ? AND key = ? AND NOT done", (upload.id, upload.key)
        ).fetchone()
        if row is None:
            raise r2_error(what, "The specified multipart upload does not exist.", 10024)
        return json.loads(row[0])

    def _parts(self, upload: Upload) -> dict[int, tuple[int, str, str]]:
        rows = self._database.execute("SELECT number, size, etag, file FROM parts WHERE id = ?", (upload.id,))
        return {number: (size, etag, file) for number, size, etag, file in rows}

    def _metadata(self, options: Mapping[str, Any], what: str) -> tuple[Mapping[str, Any], Mapping[str, str]]:
        http, custom = dict(options.get("httpMetadata") or {}), dict(options.get("customMetadata") or {})
        size = sum(len(name.encode()) + len(str(value).encode()) for name, value in custom.items())
        if size > self._limits.r2_metadata_bytes:
            raise r2_error(what, "Your metadata headers exceed the maximum allowed metadata size.", 10012)
        return http, {name: str(value) for name, value in custom.items()}

    def _row(self, key: str) -> Entry | None:
        row = self._database.execute("SELECT * FROM objects WHERE key = ?", (key.encode(),)).fetchone()
        return None if row is None else self._entry_of(row)

    def _entry_of(self, row: tuple[Any, ...]) -> Entry:
        key, version, size, etag, md5, uploaded, http, custom, path, stamp = row
        where = self._blobs / version if path is None else Path(path)
        return Entry(
            key.decode(),
            version,
            size,
            etag,
            md5,
            uploaded,
            json.loads(http),
            json.loads(custom),
            where,
            stamp,
        )

    def _insert(self, entry: Entry) -> None:
        path = None if entry.stamp is None else str(entry.path)
        self._database.execute(
            "INSERT OR REPLACE INTO objects VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (
                entry.key.encode(), entry.version, entry.size, entry.etag, entry.md5, entry.uploaded_ms,
                json.dumps(entry.http_metadata, default=str), json.dumps(entry.custom_metadata), path,
                entry.stamp,
            ),
        )  # fmt: skip

    def _discard(self, entry: Entry | None) -> None:
        if entry is not None and entry.stamp is None:
            entry.path.unlink(missing_ok=True)

    def _sweep(self) -> None:
        """Removes what a process that was killed left behind."""
        kept = {row[0] for row in self._database.execute("SELECT version FROM objects WHERE path IS NULL")}
        kept |= {row[0] for row in self._database.execute("SELECT file FROM parts")}
        for path in self._blobs.iterdir():
            if path.name not in kept:
                path.unlink()


def _append(target: Any, path: Path) -> bytes:
    """Copies a part behind what is there; returns its digest."""
    digest = hashlib.md5()
    with path.open("rb") as source:
        while piece := source.read(WRITE):
            digest.update(piece)
            target.write(piece)
    return digest.digest()


def _check_key(key: object, what: str, most: int) -> None:
    if not isinstance(key, str):
        raise TypeError(f"an R2 key is text, found {key!r:.80}")
    if not key or len(key.encode()) > most:
        raise r2_error(what, "The specified object name is not valid.", 10020)


def _check_digest(name: str, found: bytes, wanted: Any) -> None:
    expected = bytes.fromhex(wanted) if isinstance(wanted, str) else bytes(wanted)
    if expected != found:
        raise r2_error(
            "put",
            f"The {name.upper()} checksum you specified did not match what we received.\n"
            f"You provided a {name.upper()} checksum with value: {expected.hex()}\n"
            f"Actual {name.upper()} was: {found.hex()}",
            10037,
        )


def _stamp(found: os.stat_result) -> str:
    return f"{found.st_dev}-{found.st_ino}-{found.st_size}-{found.st_mtime_ns}-{found.st_ctime_ns}"


def _registered_etag(path: Path, stamp: str) -> str:
    """An etag for a file that is too large to be digested whole: from where it is, its times and a sample."""
    digest = hashlib.md5(f"{path}\0{stamp}\0".encode())
    with path.open("rb") as file:
        digest.update(file.read(SAMPLE))
        file.seek(max(0, path.stat().st_size - SAMPLE))
        digest.update(file.read(SAMPLE))
    return digest.hexdigest()


def _cursor(key: bytes) -> str:
    return base64.urlsafe_b64encode(key).decode()


def _uncursor(cursor: str) -> bytes:
    try:
        return base64.urlsafe_b64decode(cursor)
    except ValueError:
        raise r2_error("list", "The continuation token you provided is not valid.", 10022) from None


def _now() -> int:
    return int(time.time() * 1000)
