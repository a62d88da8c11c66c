"""What Durable Objects keep: one SQLite file for all objects of a class."""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, cast

from emulator.errors import JsException, LimitExceeded, WorkerLost
from emulator.limits import Limits
from emulator.values import JsDict, crossed, dump, load, options_of

_SCHEMA = """
CREATE TABLE IF NOT EXISTS alarms (
    id TEXT PRIMARY KEY, name TEXT, at_ms INTEGER NOT NULL, ringing INTEGER NOT NULL
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS entries (
    id TEXT NOT NULL, key BLOB NOT NULL, is_bytes INTEGER NOT NULL, value BLOB NOT NULL, PRIMARY KEY (id, key)
);
"""
MAX_KEYS = 128


def connect(path: Path, schema: str) -> sqlite3.Connection:
    """A database that survives the process, written ahead; one connection, on the loop's thread."""
    path.parent.mkdir(parents=True, exist_ok=True)
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = NORMAL")
    connection.executescript(schema)
    return connection


class ClassStore:
    """The database of one class. Writes of one turn of the event loop are one transaction."""

    def __init__(self, path: Path) -> None:
        self._database = connect(path, _SCHEMA)
        self._open = False

    def read(self, query: str, args: Sequence[Any] = ()) -> list[Any]:
        """The rows of a query."""
        return self._database.execute(query, args).fetchall()

    def write(self, query: str, args: Sequence[Any] = ()) -> int:
        """Changes rows; returns how many."""
        if not self._open:
            self._database.execute("BEGIN")
            self._open = True
            asyncio.get_running_loop().call_soon(self.commit)
        return self._database.execute(query, args).rowcount

    def commit(self) -> None:
        """Makes what was written durable."""
        if self._open:
            self._open = False
            self._database.execute("COMMIT")

    def close(self) -> None:
        """Commits and closes."""
        self.commit()
        self._database.close()

    def alarms(self) -> list[tuple[str, str | None, int]]:
        """Every alarm that is set: the object's id, its name, and when, in milliseconds."""
        return self.read("SELECT id, name, at_ms FROM alarms")

    def set_alarm(self, id: str, name: str | None, at_ms: int) -> None:
        """Sets an object's alarm."""
        self.write("INSERT OR REPLACE INTO alarms VALUES (?, ?, ?, 0)", (id, name, at_ms))

    def begin_alarm(self, id: str) -> None:
        """The alarm is ringing: objects see none, but it is not lost when the process ends."""
        self.write("UPDATE alarms SET ringing = 1 WHERE id = ?", (id,))

    def end_alarm(self, id: str) -> bool:
        """The alarm has rung; False when another was set meanwhile."""
        return self.write("DELETE FROM alarms WHERE id = ? AND ringing", (id,)) > 0


# Notices that an object's alarm was set or cleared.
Schedule = Callable[[int | None], None]


@dataclass(frozen=True, slots=True)
class StorageOwner:
    """Whose storage it is; `check` raises when the object is gone."""

    id: str
    name: str | None
    limits: Limits
    check: Callable[[], None]
    schedule: Schedule


class DurableObjectStorage:
    """`ctx.storage` of one object."""

    def __init__(self, store: ClassStore, owner: StorageOwner) -> None:
        self._store = store
        self._owner = owner
        self._id = owner.id

    async def get(self, key: str | list[str], *args: Any, **kwargs: Any) -> Any:
        """A value, or None; for a list of keys, a dictionary of those that exist."""
        self._owner.check()
        options_of(args, kwargs, "storage.get")
        if isinstance(key, list):
            return JsDict({name: value for name in _keys(key) if (value := self._get(name)) is not None})
        return self._get(_key(key))

    def _get(self, key: str) -> Any:
        rows = self._store.read(
            "SELECT is_bytes, value FROM entries WHERE id = ? AND key = ?", (self._id, key.encode())
        )
        return _value(*rows[0]) if rows else None

    async def put(self, key: str | Mapping[str, Any], *args: Any, **kwargs: Any) -> None:
        """Stores a value, or every entry of a dictionary, each under the platform's cap."""
        self._owner.check()
        if isinstance(key, Mapping):
            options_of(args, kwargs, "storage.put")
            _keys(list(key))
            entries = dict(key)
        else:
            if not args:
                raise TypeError("storage.put takes a key and a value, or a dictionary")
            options_of(args[1:], kwargs, "storage.put")
            entries = {key: args[0]}
        encoded = [(_key(name), *self._encode(name, value)) for name, value in entries.items()]
        for name, is_bytes, data in encoded:
            self._store.write(
                "INSERT OR REPLACE INTO entries VALUES (?, ?, ?, ?)",
                (self._id, name.encode(), is_bytes, data),
            )

    def _encode(self, key: str, value: Any) -> tuple[bool, bytes]:
        if value is None:
            raise JsException("TypeError", "put() called with undefined value.")
        copy = crossed(value)
        is_bytes = isinstance(copy, memoryview)
        data = bytes(cast("memoryview[int]", copy)) if is_bytes else dump(copy)
        size, most = len(data) + len(key.encode()), self._owner.limits.object_value_bytes
        if size > most:
            raise LimitExceeded(
                f"the value of {key!r} has {size} bytes with its key; an object stores at most {most} in "
                "one value"
            )
        return is_bytes, data

    async def delete(self, key: str | list[str], *args: Any, **kwargs: Any) -> bool | int:
        """Forgets a value, and says whether it was there; for a list, how many were."""
        self._owner.check()
        options_of(args, kwargs, "storage.delete")
        keys = _keys(key) if isinstance(key, list) else [_key(key)]
        count = sum(
            self._store.write("DELETE FROM entries WHERE id = ? AND key = ?", (self._id, name.encode()))
            for name in keys
        )
        return count if isinstance(key, list) else count > 0

    async def deleteAll(self, *args: Any, **kwargs: Any) -> None:  # noqa: N802
        """Forgets everything but the alarm, as on the platform."""
        self._owner.check()
        options_of(args, kwargs, "storage.deleteAll")
        self._store.write("DELETE FROM entries WHERE id = ?", (self._id,))

    async def list(self, *args: Any, **kwargs: Any) -> JsDict:
        """Entries by key: `prefix`, `start`, `startAfter`, `end`, `limit`, `reverse`."""
        self._owner.check()
        options = options_of(args, kwargs, "storage.list")
        where, values = ["id = ?"], cast("list[Any]", [self._id])
        for name, test in (("start", ">="), ("startAfter", ">"), ("end", "<")):
            if options.get(name) is not None:
                where.append(f"key {test} ?")
                values.append(options[name].encode())
        if options.get("prefix"):
            prefix = options["prefix"].encode()
            where.append("substr(key, 1, ?) = ?")
            values += [len(prefix), prefix]
        order = "DESC" if options.get("reverse") else "ASC"
        limit = options.get("limit")
        if limit is not None and limit <= 0:
            raise JsException("TypeError", "List limit must be positive.")
        tests = " AND ".join(where)
        query = f"SELECT key, is_bytes, value FROM entries WHERE {tests} ORDER BY key {order} LIMIT ?"
        rows = self._store.read(query, [*values, -1 if limit is None else limit])
        return JsDict({key.decode(): _value(is_bytes, data) for key, is_bytes, data in rows})

    async def getAlarm(self, *args: Any, **kwargs: Any) -> int | None:  # noqa: N802
        """When the alarm is to ring, in milliseconds since 1970, or None."""
        self._owner.check()
        options_of(args, kwargs, "storage.getAlarm")
        rows = self._store.read("SELECT at_ms FROM alarms WHERE id = ? AND NOT ringing", (self._id,))
        return rows[0][0] if rows else None

    async def setAlarm(self, at: float | datetime, *args: Any, **kwargs: Any) -> None:  # noqa: N802
        """Sets the object's one alarm: milliseconds since 1970, or a time. The past means at once."""
        self._owner.check()
        options_of(args, kwargs, "storage.setAlarm")
        at_ms = int(at.timestamp() * 1000) if isinstance(at, datetime) else int(at)
        if at_ms <= 0:
            raise JsException("TypeError", "setAlarm() cannot be called with an alarm time <= 0")
        at_ms = max(at_ms, int(time.time() * 1000))
        self._store.set_alarm(self._id, self._owner.name, at_ms)
        self._owner.schedule(at_ms)

    async def deleteAlarm(self, *args: Any, **kwargs: Any) -> None:  # noqa: N802
        """Takes the alarm back."""
        self._owner.check()
        options_of(args, kwargs, "storage.deleteAlarm")
        self._store.write("DELETE FROM alarms WHERE id = ?", (self._id,))
        self._owner.schedule(None)

    async def sync(self) -> None:
        """Waits until what was written is durable."""
        self._owner.check()
        self._store.commit()

    async def transaction(self, closure: Callable[[Any], Awaitable[Any]]) -> Any:
        """Runs `closure` with a transaction: its writes happen together, or not when it raises.

        Unlike on the platform two transactions that overlap do not notice each other.
        """
        self._owner.check()
        return await Transaction(self).run(closure)

    def __getattr__(self, name: str) -> Any:
        if name in ("sql", "kv", "transactionSync", "getCurrentBookmark", "onNextSessionRestoreBookmark"):
            raise NotImplementedError(f"ctx.storage.{name} is not emulated")
        raise AttributeError(name)


class Transaction:
    """Writes that wait for the end of a transaction, and reads that see them."""

    def __init__(self, storage: DurableObjectStorage) -> None:
        self._storage = storage
        self._writes: dict[str, Any] = {}
        self._rolled_back = False

    async def run(self, closure: Callable[[Any], Awaitable[Any]]) -> Any:
        """Runs the closure and writes."""
        result = await closure(self)
        if not self._rolled_back:
            for key, value in self._writes.items():
                if value is None:
                    await self._storage.delete(key)
                else:
                    await self._storage.put(key, value)
        return result

    async def get(self, key: str) -> Any:
        """A value as this transaction sees it."""
        if key in self._writes:
            return None if self._writes[key] is None else crossed(self._writes[key])
        return await self._storage.get(key)

    async def put(self, key: str, value: Any) -> None:
        """Stores a value at the end."""
        if value is None:
            raise JsException("TypeError", "put() called with undefined value.")
        crossed(value)
        self._writes[key] = value

    async def delete(self, key: str) -> bool:
        """Forgets a value at the end."""
        existed = await self.get(key) is not None
        self._writes[key] = None
        return existed

    def rollback(self) -> None:
        """Nothing of this transaction is to be written."""
        self._rolled_back = True


def _key(key: object) -> str:
    if not isinstance(key, str):
        raise TypeError(f"a storage key is text, found {key!r:.80}")
    return key


def _keys(keys: list[str]) -> list[str]:
    if len(keys) > MAX_KEYS:
        raise JsException("RangeError", f"Maximum number of keys is {MAX_KEYS}.")
    return [_key(key) for key in keys]


def _value(is_bytes: int, data: bytes) -> Any:
    return memoryview(data) if is_bytes else load(data)


def lost(reason: str | None) -> None:
    """Raises when an object is gone."""
    if reason is not None:
        raise WorkerLost(reason)
