"""Uploads to R2 in parts."""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from emulator.r2_store import WRITE, Entry, R2Store, Written, check_key, r2_error
from emulator.streams import ReadableStream

_SCHEMA = """
CREATE TABLE IF NOT EXISTS uploads (
    id TEXT PRIMARY KEY, key TEXT NOT NULL, options TEXT NOT NULL, done INTEGER NOT NULL DEFAULT 0
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS parts (
    id TEXT NOT NULL, number INTEGER NOT NULL, size INTEGER NOT NULL, etag TEXT NOT NULL, file TEXT NOT NULL,
    PRIMARY KEY (id, number)
) WITHOUT ROWID;
"""


@dataclass(frozen=True, slots=True)
class Upload:
    """An upload in parts."""

    key: str
    id: str


class Uploads:
    """The uploads of a bucket: parts lie beside its objects until they become one."""

    def __init__(self, store: R2Store) -> None:
        self._store = store
        store.database.executescript(_SCHEMA)
        store.sweep({row[0] for row in store.database.execute("SELECT file FROM parts")})

    def begin(self, key: str, options: Mapping[str, Any]) -> Upload:
        """Begins an upload in parts."""
        check_key(key, "createMultipartUpload", self._store.limits.r2_key_bytes)
        http, custom = self._store.metadata(options, "createMultipartUpload")
        upload = Upload(key, secrets.token_hex(32))
        self._store.database.execute(
            "INSERT INTO uploads (id, key, options) VALUES (?, ?, ?)",
            (upload.id, key, json.dumps({"httpMetadata": http, "customMetadata": custom})),
        )
        return upload

    async def put_part(self, upload: Upload, number: int, stream: ReadableStream) -> str:
        """Stores a part; returns its etag."""
        if not 1 <= number <= self._store.limits.r2_parts:
            raise r2_error(
                "uploadPart", f"Part number must be between 1 and {self._store.limits.r2_parts}", 10025
            )
        self._options_of(upload, "uploadPart")
        written = await self._store.write(stream, [])
        etag = hashlib.md5(written.digests["md5"].digest() + upload.id.encode()).hexdigest()
        old = self._parts(upload).get(number)
        self._store.database.execute(
            "INSERT OR REPLACE INTO parts VALUES (?, ?, ?, ?, ?)",
            (upload.id, number, written.size, etag, written.path.name),
        )
        if old is not None:
            (self._store.blobs / old[2]).unlink(missing_ok=True)
        return etag

    async def complete(self, upload: Upload, named: list[tuple[int, str]]) -> Entry:
        """Makes an object of parts, in the order of their numbers."""
        options = self._options_of(upload, "completeMultipartUpload")
        chosen = self._chosen(self._parts(upload), named)
        written = Written(self._store.blobs / secrets.token_hex(16))
        whole = hashlib.md5()
        try:
            with written.path.open("xb", buffering=0) as target:
                for size, _, file in chosen:
                    digest = _append(target, self._store.blobs / file)
                    whole.update(digest)
                    written.size += size
        except BaseException:
            written.path.unlink(missing_ok=True)
            raise
        etag = f"{whole.hexdigest()}-{len(chosen)}"
        entry = self._store.keep(
            upload.key, written, etag, None, options["httpMetadata"], options["customMetadata"]
        )
        self._forget(upload)
        return entry

    def _chosen(
        self, parts: dict[int, tuple[int, str, str]], named: list[tuple[int, str]]
    ) -> list[tuple[int, str, str]]:
        what = "completeMultipartUpload"
        chosen: list[tuple[int, str, str]] = []
        for number, etag in sorted(named):
            part = parts.get(number)
            if part is None or part[1] != etag:
                raise r2_error(what, "One or more of the specified parts could not be found.", 10025)
            chosen.append(part)
        if len({number for number, _ in named}) != len(named) or not chosen:
            raise r2_error(what, "There was a problem with the multipart upload.", 10024)
        if any(size < self._store.limits.r2_part_bytes for size, _, _ in chosen[:-1]):
            raise r2_error(
                what, "Your proposed upload is smaller than the minimum allowed object size.", 10011
            )
        if len({size for size, _, _ in chosen[:-1]}) > 1 or chosen[-1][0] > chosen[0][0]:
            raise r2_error(what, "There was a problem with the multipart upload.", 10048)
        return chosen

    def abort(self, upload: Upload) -> None:
        """Forgets an upload; one that is over is no error."""
        self._forget(upload)

    def _forget(self, upload: Upload) -> None:
        for _, _, file in self._parts(upload).values():
            (self._store.blobs / file).unlink(missing_ok=True)
        self._store.database.execute("DELETE FROM parts WHERE id = ?", (upload.id,))
        self._store.database.execute("UPDATE uploads SET done = 1 WHERE id = ?", (upload.id,))

    def _options_of(self, upload: Upload, what: str) -> dict[str, Any]:
        row = self._store.database.execute(
            "SELECT options FROM uploads WHERE id = ? AND key = ? AND NOT done", (upload.id, upload.key)
        ).fetchone()
        if row is None:
            raise r2_error(what, "The specified multipart upload does not exist.", 10024)
        return json.loads(row[0])

    def _parts(self, upload: Upload) -> dict[int, tuple[int, str, str]]:
        rows = self._store.database.execute(
            "SELECT number, size, etag, file FROM parts WHERE id = ?", (upload.id,)
        )
        return {number: (size, etag, file) for number, size, etag, file in rows}


def _append(target: Any, path: Path) -> bytes:
    """Copies a part behind what is there; returns its digest."""
    digest = hashlib.md5()
    with path.open("rb") as source:
        while piece := source.read(WRITE):
            digest.update(piece)
            target.write(piece)
    return digest.digest()
