"""Sessions that outlive their object: pages of keys and values in the object's own storage.

A page is written when it is full, and one that is not when its session has been quiet for a while, so a long
answer costs one write in sixteen tokens. After a restart a session is read back when a step wants to continue
it. What is not there, or not what was written, is simply not restored: the step is refused as a cache miss
then, and replayed from token zero.
"""

from __future__ import annotations

import asyncio
import json
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from engine.client import KV_PAGE_TOKENS, StationEngine
from engine.errors import EngineError
from knot.strict_json import is_int
from protocol.ports import Background, Clock, Storage
from protocol.steps import ForwardStep
from sessions import Session, Sessions

# Values of an object's storage may have 2 MB; those under 1 MB are written and read fast.
PIECE_BYTES: Final = 960 * 1024
QUIET_SECONDS: Final = 2.0
RECORD: Final = "session/"
PAGE: Final = "page/"


@dataclass(slots=True)
class SavedCounts:
    """Pages written and their bytes; sessions read back, and such that could not be."""

    pages: int = 0
    bytes: int = 0
    restored: int = 0
    lost: int = 0
    failed: int = 0


@dataclass(frozen=True, slots=True)
class _Page:
    """A page as it was when it was read: which one, and what of a session it completes."""

    index: int
    data: bytes


class SavedSessions:
    """What a station keeps of its sessions in `storage`. `identity` says of which knot and layers.

    `budget` bounds the bytes that are written after one batch; what is left out has its turn later.
    """

    def __init__(
        self,
        sessions: Sessions,
        engine: StationEngine,
        storage: Storage,
        background: Background,
        clock: Clock,
        identity: str,
        budget: int,
    ) -> None:
        self._sessions = sessions
        self._engine = engine
        self._storage = storage
        self._background = background
        self._clock = clock
        self._identity = identity
        self._budget = budget
        self._page_bytes = engine.kv_page_bytes()
        self._writing: dict[str, asyncio.Lock] = {}
        self._watching = False
        self.counts = SavedCounts()
        sessions.on_close = self._forget

    async def clean(self) -> None:
        """Forgets what was saved of other knots and layers, and of sessions past their time to live."""
        for key in await self._storage.keys(RECORD):
            record = _read(await self._storage.get(key))
            if record is None or record["identity"] != self._identity or self._is_old(record):
                await self._delete(key.removeprefix(RECORD))

    async def restore(self, step: ForwardStep) -> None:
        """Reads the step's session back if it is not here, and was saved far enough."""
        if not self._sessions.is_missing(step):
            return
        name = _name(step.envelope.session, step.envelope.epoch)
        record = _read(await self._storage.get(RECORD + name))
        if record is None or record["identity"] != self._identity or record["length"] < step.cache_length:
            return
        if self._is_old(record) or len(record["checks"]) != _pages(record["length"]):
            return
        try:
            slot = self._engine.kv_open()
        except EngineError:
            return
        if await self._fill(slot, name, record) and self._sessions.is_missing(step):
            self._sessions.adopt(
                step.envelope.session, step.envelope.epoch, slot, record["length"], record["checks"]
            )
            self.counts.restored += 1
        else:
            self._engine.kv_close(slot)
            self.counts.lost += 1

    async def before_cut(self, step: ForwardStep) -> None:
        """Forgets what was saved of a session that the step will cut to less.

        After a restart it would come back as it was before it took another way.
        """
        session = self._sessions.to_be_cut(step)
        if session is not None and session.saved > step.cache_length:
            session.saved, session.checks = 0, []
            await self._delete(_name(session.id, session.epoch))

    def after_batch(self) -> None:
        """Writes pages that have become full, and sees to those that have not when it is quiet."""
        left = self._budget
        for session in self._sessions.idle():
            full = session.length // KV_PAGE_TOKENS * KV_PAGE_TOKENS
            if full > session.saved:
                left -= self._write(session, full, left)
        if not self._watching and any(self._unsaved()):
            self._watching = True
            self._background(self._watch())

    async def _watch(self) -> None:
        try:
            while any(self._unsaved()):
                await asyncio.sleep(QUIET_SECONDS / 2)
                left = self._budget
                for session in self._unsaved():
                    if not session.busy and self._clock() - session.used >= QUIET_SECONDS:
                        left -= self._write(session, session.length, left)
        finally:
            self._watching = False

    def _unsaved(self) -> Iterator[Session]:
        return (session for session in self._sessions.idle() if session.saved < session.length)

    def _write(self, session: Session, length: int, room: int) -> int:
        """Takes copies of a session's pages up to `length` and has them written; returns their bytes."""
        first, end = session.saved // KV_PAGE_TOKENS, _pages(length)
        end = min(end, first + room // self._page_bytes)
        if end <= first:
            return 0
        length = min(length, end * KV_PAGE_TOKENS)
        host = self._engine.host
        pages = [
            _Page(index, host.read(self._engine.kv_page_at(session.slot, index), self._page_bytes))
            for index in range(first, end)
        ]
        for page in pages:
            session.checks[page.index :] = [zlib.crc32(page.data)]
        session.saved = length
        record = {
            "identity": self._identity,
            "length": length,
            "checks": list(session.checks),
            "at": self._clock(),
        }
        self._background(self._put(session, session.checks, pages, record))
        return len(pages) * self._page_bytes

    async def _put(
        self, session: Session, checks: list[int], pages: Sequence[_Page], record: dict[str, Any]
    ) -> None:
        name = _name(session.id, session.epoch)
        # In order: a record never speaks of pages that come after it.
        async with self._writing.setdefault(name, asyncio.Lock()):
            if session.ended or session.checks is not checks:  # ended or cut meanwhile
                return
            try:
                for page in pages:
                    for place, at in enumerate(range(0, len(page.data), PIECE_BYTES)):
                        key = f"{PAGE}{name}/{page.index}/{place}"
                        await self._storage.put(key, page.data[at : at + PIECE_BYTES])
                await self._storage.put(RECORD + name, json.dumps(record).encode())
                self.counts.pages += len(pages)
                self.counts.bytes += sum(len(page.data) for page in pages)
            except Exception:  # storage is a convenience here: without it the session is replayed
                self.counts.failed += 1

    async def _fill(self, slot: int, name: str, record: dict[str, Any]) -> bool:
        """Puts saved pages into an empty session; False when they are not what was written."""
        try:
            self._engine.kv_restore(slot, record["length"])
        except EngineError:
            return False
        for index, check in enumerate(record["checks"]):
            data = b""
            for place in range(-(-self._page_bytes // PIECE_BYTES)):
                data += await self._storage.get(f"{PAGE}{name}/{index}/{place}") or b""
            if len(data) != self._page_bytes or zlib.crc32(data) != check:
                return False
            self._engine.host.write(self._engine.kv_page_at(slot, index), data)
        return True

    def _forget(self, session: Session) -> None:
        name = _name(session.id, session.epoch)
        if session.saved or name in self._writing:
            self._background(self._delete(name))

    async def _delete(self, name: str) -> None:
        async with self._writing.setdefault(name, asyncio.Lock()):
            try:
                # The record first: pages without one are nothing.
                await self._storage.delete(RECORD + name)
                for key in await self._storage.keys(f"{PAGE}{name}/"):
                    await self._storage.delete(key)
            except Exception:
                self.counts.failed += 1
        self._writing.pop(name, None)

    def _is_old(self, record: dict[str, Any]) -> bool:
        return self._clock() - record["at"] > self._sessions.ttl


def _pages(length: int) -> int:
    return -(-length // KV_PAGE_TOKENS)


def _name(session: str, epoch: int) -> str:
    return f"{session}/{epoch}"


def _read(data: bytes | None) -> dict[str, Any] | None:
    """A record, if it is one."""
    try:
        record = json.loads(data or b"")
        found = record["identity"], record["length"], record["checks"], record["at"]
    except (ValueError, TypeError, KeyError):
        return None
    return record if is_int(found[1]) and isinstance(found[2], list) else None
