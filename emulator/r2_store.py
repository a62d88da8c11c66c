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
class Page:
    """A piece of a listing; `cursor` leads to the next."""

    entries: list[Entry]
    prefixes: list[str]
    cursor: str | None


@dataclass(slots=True)
class Written:
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
        self.limits = limits
        self.database = connect(folder / "index.sqlite", _SCHEMA)
        self.blobs = folder / "blobs"
        self.blobs.mkdir(exist_ok=True)

    def close(self) -> None:
        """Closes the index."""
        self.database.close()

    def register(self, key: str, path: Path, custom_metadata: Mapping[str, str] | None = None) -> Entry:
        """Makes a file an object without copying it. If it is one already and unchanged, nothing changes."""
        check_key(key, "put", self.limits.r2_key_bytes)
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
        check_key(key, "get", self.limits.r2_key_bytes)
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
        check_key(key, "put", self.limits.r2_key_bytes)
        http, custom = self.metadata(options, "put")
        wanted = [name for name in HASHES if options.get(name) is not None]
        if len(wanted) > 1:
            raise JsException("TypeError", "You cannot specify multiple hashing algorithms.")
        written = await self.write(stream, wanted)
        try:
            for name in wanted:
                _check_digest(name, written.digests[name].digest(), options[name])
            if not allowed():
                written.path.unlink()
                return None
        except BaseException:
            written.path.unlink(missing_ok=True)
            raise
        return self.keep(key, written, written.etag(), written.digests["md5"].digest(), http, custom)

    def keep(
        self,
        key: str,
        written: Written,
        etag: str,
        md5: bytes | None,
        http: Mapping[str, Any],
        custom: Mapping[str, str],
    ) -> Entry:
        """Makes a file that was written an object, in place of the one that had the key."""
        entry = Entry(key, written.path.name, written.size, etag, md5, _now(), http, custom, written.path)
        old = self._row(key)
        self._insert(entry)
        self._discard(old)
        return entry

    async def write(self, stream: ReadableStream, hashes: list[str]) -> Written:
        """Writes a body to a file of its own, that no object is until it is whole."""
        written = Written(self.blobs / secrets.token_hex(16))
        for name in hashes:
            written.digests[name] = hashlib.new(name)
        try:
            with written.path.open("xb", buffering=0) as file:
                while piece := await stream.read(WRITE):
                    written.size += len(piece)
                    if written.size > self.limits.r2_put_bytes:
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
            check_key(key, "delete", self.limits.r2_key_bytes)
            old = self._row(key)
            self.database.execute("DELETE FROM objects WHERE key = ?", (key.encode(),))
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
            row = self.database.execute(
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

    def metadata(self, options: Mapping[str, Any], what: str) -> tuple[Mapping[str, Any], Mapping[str, str]]:
        """HTTP metadata and custom metadata of an upload. Raises when there is too much."""
        http, custom = dict(options.get("httpMetadata") or {}), dict(options.get("customMetadata") or {})
        size = sum(len(name.encode()) + len(str(value).encode()) for name, value in custom.items())
        if size > self.limits.r2_metadata_bytes:
            raise r2_error(what, "Your metadata headers exceed the maximum allowed metadata size.", 10012)
        return http, {name: str(value) for name, value in custom.items()}

    def _row(self, key: str) -> Entry | None:
        row = self.database.execute("SELECT * FROM objects WHERE key = ?", (key.encode(),)).fetchone()
        return None if row is None else self._entry_of(row)

    def _entry_of(self, row: tuple[Any, ...]) -> Entry:
        key, version, size, etag, md5, uploaded, http, custom, path, stamp = row
        where = self.blobs / version if path is None else Path(path)
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
        self.database.execute(
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

    def sweep(self, kept: set[str]) -> None:
        """Removes what a process that was killed left behind: all files but those of objects and `kept`."""
        kept |= {row[0] for row in self.database.execute("SELECT version FROM objects WHERE path IS NULL")}
        for path in self.blobs.iterdir():
            if path.name not in kept:
                path.unlink()


def check_key(key: object, what: str, most: int) -> None:
    """Raises for what cannot be a key."""
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
