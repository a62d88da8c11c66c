"""Workers KV: small values by name, with a time to live, that may be stale for a while.

On the platform a write may take a minute to be seen elsewhere. Here it is seen at once, unless faults say
otherwise.
"""

from __future__ import annotations

import json
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from emulator.context import current
from emulator.errors import JsException
from emulator.faults import Faults
from emulator.limits import Limits
from emulator.storage import connect
from emulator.streams import ReadableStream
from emulator.values import JsDict, options_of

_SCHEMA = """
CREATE TABLE IF NOT EXISTS entries (
    key BLOB PRIMARY KEY, value BLOB NOT NULL, expires INTEGER, metadata TEXT
) WITHOUT ROWID;
"""
_TYPES: Final = ("text", "json", "arrayBuffer", "stream")
_PREVIOUS: Final = 1000
_PAGE: Final = 1000


@dataclass(frozen=True, slots=True)
class Value:
    """A stored value; `expires` is in seconds since 1970."""

    data: bytes
    expires: int | None
    metadata: str | None


class KVStore:
    """One namespace, in one SQLite file."""

    def __init__(self, path: Path, keep_previous: bool = False) -> None:
        self._database = connect(path, _SCHEMA)
        # What a stale read sees; there are stale reads only where faults are injected.
        self._previous: OrderedDict[str, Value | None] | None = OrderedDict() if keep_previous else None

    def close(self) -> None:
        """Closes the file."""
        self._database.close()

    def get(self, key: str) -> Value | None:
        """A value that has not expired."""
        row = self._database.execute(
            "SELECT value, expires, metadata FROM entries WHERE key = ? AND (expires IS NULL OR expires > ?)",
            (key.encode(), time.time()),
        ).fetchone()
        return None if row is None else Value(*row)

    def previous(self, key: str) -> Value | None:
        """The value before the last write; the present one where there was no write."""
        if self._previous is not None and key in self._previous:
            return self._previous[key]
        return self.get(key)

    def put(self, key: str, value: Value) -> None:
        """Stores a value."""
        self._keep_previous(key)
        self._database.execute(
            "INSERT OR REPLACE INTO entries VALUES (?, ?, ?, ?)",
            (key.encode(), value.data, value.expires, value.metadata),
        )

    def delete(self, key: str) -> None:
        """Forgets a value."""
        self._keep_previous(key)
        self._database.execute("DELETE FROM entries WHERE key = ?", (key.encode(),))

    def list(self, prefix: bytes, after: bytes, limit: int) -> list[tuple[bytes, int | None, str | None]]:
        """Keys in their order, with expiration and metadata."""
        return self._database.execute(
            "SELECT key, expires, metadata FROM entries WHERE key > ? AND substr(key, 1, ?) = ? "
            "AND (expires IS NULL OR expires > ?) ORDER BY key LIMIT ?",
            (after, len(prefix), prefix, time.time(), limit),
        ).fetchall()

    def _keep_previous(self, key: str) -> None:
        if self._previous is not None:
            self._previous[key] = self.get(key)
            self._previous.move_to_end(key)
            if len(self._previous) > _PREVIOUS:
                self._previous.popitem(last=False)


class KVNamespace:
    """A namespace as a binding. `site` is its name for faults."""

    def __init__(self, store: Callable[[], KVStore], faults: Faults | None, site: str) -> None:
        self._open = store
        self._faults = faults
        self._site = site

    @property
    def _store(self) -> KVStore:
        return self._open()

    @property
    def _limits(self) -> Limits:
        return current().isolate.limits

    async def get(self, key: str | list[str], *args: Any, **kwargs: Any) -> Any:
        """A value as `text`, `json`, `arrayBuffer` or `stream`, or None; a dictionary for a list of keys."""
        kind = _kind(args, kwargs)
        if isinstance(key, list):
            return JsDict({name: _read(value, kind) for name, value in (await self._many(key, kind)).items()})
        return _read(await self._look_up(key), kind)

    async def getWithMetadata(self, key: str | list[str], *args: Any, **kwargs: Any) -> Any:  # noqa: N802
        """A value with its metadata: `{value, metadata, cacheStatus}`."""
        kind = _kind(args, kwargs)
        if isinstance(key, list):
            found = await self._many(key, kind)
            return JsDict({name: _with_metadata(value, kind) for name, value in found.items()})
        return _with_metadata(await self._look_up(key), kind)

    async def put(self, key: str, value: Any, *args: Any, **kwargs: Any) -> None:
        """Stores a value: `expirationTtl` seconds (at least 60), or until `expiration`, with `metadata`."""
        options = options_of(args, kwargs, "KV put")
        self._check_key(key, "PUT")
        async with self._connection():
            expires = self._expires(options)
            metadata = None if options.get("metadata") is None else json.dumps(options["metadata"])
            if metadata is not None:
                _check_length("Metadata", len(metadata.encode()), self._limits.kv_metadata_bytes)
            data = await _bytes_of(value)
            _check_length("Value", len(data), self._limits.kv_value_bytes)
            self._store.put(key, Value(data, expires, metadata))

    async def delete(self, key: str) -> None:
        """Forgets a value; a missing one is no error."""
        self._check_key(key, "DELETE")
        async with self._connection():
            self._store.delete(key)

    async def list(self, *args: Any, **kwargs: Any) -> JsDict:
        """Keys in their order: `prefix`, `limit` (at most 1,000), `cursor`."""
        options = options_of(args, kwargs, "KV list")
        limit = _PAGE if options.get("limit") is None else options["limit"]
        if not isinstance(limit, int) or limit < 1:
            raise _failed(
                "GET",
                400,
                f"Invalid key_count_limit of {limit}. Please specify an integer greater than 0.",
            )
        if limit > _PAGE:
            raise _failed(
                "GET",
                400,
                f"Invalid key_count_limit of {limit}. Please specify an integer less than {_PAGE}.",
            )
        prefix = (options.get("prefix") or "").encode()
        after = bytes.fromhex(options.get("cursor") or "")
        async with self._connection():
            rows = self._store.list(prefix, after, limit + 1)
        keys: list[JsDict] = []
        for key, expires, metadata in rows[:limit]:
            entry = JsDict(name=key.decode())
            if expires is not None:
                entry["expiration"] = expires
            if metadata is not None:
                entry["metadata"] = json.loads(metadata, object_hook=JsDict)
            keys.append(entry)
        found = JsDict(keys=keys, list_complete=len(rows) <= limit, cacheStatus=None)
        if len(rows) > limit:
            found["cursor"] = rows[limit - 1][0].hex()
        return found

    async def _many(self, keys: list[str], kind: str) -> dict[str, Value | None]:
        if kind not in ("text", "json"):
            raise JsException("TypeError", f'"{kind}" is not a valid type. Use "json" or "text"')
        if not 1 <= len(keys) <= 100:
            raise _failed("GET_BULK", 400, "You can request a maximum of 100 keys, and at least one")
        return {key: await self._look_up(key) for key in keys}

    async def _look_up(self, key: str) -> Value | None:
        self._check_key(key, "GET")
        async with self._connection():
            if self._faults is not None and self._faults.strikes("kv_stale", self._site):
                return self._store.previous(key)
            return self._store.get(key)

    def _connection(self) -> Any:
        spending = current().spending
        spending.subrequest()
        return spending.connecting

    def _check_key(self, key: object, method: str) -> None:
        if not isinstance(key, str):
            raise TypeError(f"a KV key is text, found {key!r:.80}")
        if key == "":
            raise JsException("TypeError", "Key name cannot be empty.")
        if key in (".", ".."):
            raise JsException("TypeError", f'"{key}" is not allowed as a key name.')
        size, most = len(key.encode()), self._limits.kv_key_bytes
        if size > most:
            raise _failed(method, 414, f"UTF-8 encoded length of {size} exceeds key length limit of {most}.")

    def _expires(self, options: dict[str, Any]) -> int | None:
        now, least = time.time(), self._limits.kv_ttl_seconds
        ttl, expiration = options.get("expirationTtl"), options.get("expiration")
        if ttl is not None:
            if ttl < least:
                raise _failed(
                    "PUT", 400, f"Invalid expiration_ttl of {ttl}. Expiration TTL must be at least {least}."
                )
            return int(now + ttl)
        if expiration is not None:
            if expiration < now + least:
                raise _failed(
                    "PUT",
                    400,
                    f"Invalid expiration of {expiration}. Expiration times must be at least {least} seconds "
                    "in the future.",
                )
            return int(expiration)
        return None


def _failed(method: str, status: int, sentence: str) -> JsException:
    return JsException("Error", f"KV {method} failed: {status} {sentence}")


def _check_length(what: str, length: int, most: int) -> None:
    if length > most:
        raise _failed("PUT", 413, f"{what} length of {length} exceeds limit of {most}.")


def _kind(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    if args and isinstance(args[0], str):
        kind: Any = args[0]
    else:
        kind = options_of(args, kwargs, "KV get").get("type", "text")
    if kind not in _TYPES:
        raise JsException("TypeError", f"Unknown response type. Possible types are {', '.join(_TYPES)}.")
    return kind


def _read(value: Value | None, kind: str) -> Any:
    if value is None:
        return None
    match kind:
        case "text":
            return value.data.decode("utf-8-sig", "replace")
        case "json":
            return json.loads(value.data, object_hook=JsDict)
        case "stream":
            return ReadableStream.of(value.data)
        case _:
            return memoryview(value.data)


def _with_metadata(value: Value | None, kind: str) -> JsDict:
    metadata = (
        None if value is None or value.metadata is None else json.loads(value.metadata, object_hook=JsDict)
    )
    return JsDict(value=_read(value, kind), metadata=metadata, cacheStatus=None)


async def _bytes_of(value: Any) -> bytes:
    match value:
        case str():
            return value.encode()
        case bytes():
            return value
        case ReadableStream():
            return await value.read_all()
        case _:
            raise JsException(
                "TypeError",
                "KV put() accepts only strings, ArrayBuffers, ArrayBufferViews, and ReadableStreams "
                "as values.",
            )
