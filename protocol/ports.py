"""What the cores need from a platform, and nothing else. `boundary` provides them.

On Workers that is `workers/boundary.py`, the one module that touches JavaScript; in CPython it is
`emulator/boundary.py`. Tests pass fakes.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Protocol

from protocol.calls import Call, Inflow, Reply


@dataclass(frozen=True, slots=True)
class BlobInfo:
    """A blob's size in bytes and the etag of its present content."""

    size: int
    etag: str


class BlobError(Exception):
    """A blob could not be read."""


class BlobMissing(BlobError):
    """No blob has that key."""


class BlobChanged(BlobError):
    """The blob's content is no longer what the etag in the read's condition names."""


class BlobFailed(BlobError):
    """The store could not answer just now; the same read may succeed later."""


class PeerLost(Exception):
    """A peer could not be reached, or broke off before it answered."""


class BlobSource(Protocol):
    """Range reads of large immutable blobs (R2). A read is conditional on `etag` where one is given.

    Every method raises `BlobFailed` when the store itself fails.
    """

    async def head(self, key: str) -> BlobInfo:
        """Size and etag. Raises `BlobMissing`."""
        ...

    async def read(self, key: str, offset: int, length: int, etag: str | None = None) -> bytes:
        """A short range, whole. Raises `BlobMissing`, `BlobChanged`, `ShortBody`."""
        ...

    async def open(self, key: str, offset: int, length: int, etag: str | None = None) -> Inflow:
        """A long range as one read, to be drained. Raises `BlobMissing`, `BlobChanged`."""
        ...


class Held(Protocol):
    """Bytes that are kept for as long as somebody may want them, outside of a heap that never shrinks.

    They may still be on their way: a part gives each when it is there, and raises `ShortBody` when it will
    not come.
    """

    def __len__(self) -> int:
        """How many."""
        ...

    def part(self, start: int, end: int) -> Inflow:
        """Some of them as a body."""
        ...

    def drop(self) -> None:
        """Frees them; bodies that are on their way still get theirs."""
        ...


# Keeps the next so many bytes of a body, which arrive while the second is awaited; it raises `ShortBody`.
Hold = Callable[[Inflow, int], tuple[Held, Awaitable[None]]]


class KeyValue(Protocol):
    """Small values that may be stale for a while (Workers KV)."""

    async def get(self, key: str) -> bytes | None:
        """The value, or None."""
        ...

    async def put(self, key: str, value: bytes, ttl_seconds: int) -> None:
        """Stores a value for a time."""
        ...

    async def delete(self, key: str) -> None:
        """Forgets a value; a missing one is no error."""
        ...


class Peer(Protocol):
    """Another part of the cluster: a Worker by service binding or a Durable Object by name."""

    async def call(self, call: Call) -> Reply:
        """Asks and waits for the whole answer. Raises `PeerLost`."""
        ...

    async def open(self, call: Call) -> tuple[Reply, Inflow]:
        """Asks for a large body and returns it as it comes; the reply's own body is empty."""
        ...


class Objects(Protocol):
    """A namespace of Durable Objects."""

    def peer(self, name: str) -> Peer:
        """The object of that name."""
        ...


class Storage(Protocol):
    """A Durable Object's own durable values, each under 2 MB."""

    async def get(self, key: str) -> bytes | None:
        """The value, or None."""
        ...

    async def put(self, key: str, value: bytes) -> None:
        """Stores a value."""
        ...

    async def delete(self, key: str) -> None:
        """Forgets a value; a missing one is no error."""
        ...

    async def keys(self, prefix: str) -> list[str]:
        """The keys that begin with `prefix`, sorted."""
        ...


class Clock(Protocol):
    """Seconds since some fixed moment. On Workers it stands still while code computes."""

    def __call__(self) -> float:
        """Now."""
        ...


# Keeps a coroutine running after the answer has been given (`waitUntil`).
Background = Callable[[Coroutine[Any, Any, None]], None]
