"""What entry files import as `boundary`: the one module between them and the platform.

On Workers that is `workers/boundary.py`, in CPython `emulator/boundary.py`. Both have exactly these
functions, as functions of the module. `env`, `ctx`, `request` and bindings are the platform's own objects:
entry files hand them over and look at nothing in them but what the `workers` module promises.
"""

from __future__ import annotations

from typing import Any, NoReturn, Protocol

from engine.host import EngineHost
from protocol.calls import Call, Reply
from protocol.ports import Background, BlobSource, KeyValue, Objects, Peer, Storage


class Boundary(Protocol):
    """The functions of a boundary module."""

    def variable(self, env: Any, name: str) -> str | None:
        """A variable or secret of the Worker; None when it is not set."""
        ...

    async def call_of(self, request: Any) -> Call:
        """A request of the platform with its whole body. Header names become lower-case."""
        ...

    def response_of(self, reply: Reply) -> Any:
        """A response of the platform.

        A body that is an async iterator is streamed, and its `aclose()` runs when it ends and when the
        client leaves. A body that is an `Inflow` is handed on; whatever becomes of it, it ends cancelled.
        """
        ...

    async def forward(self, request: Any, binding: Any, name: str | None = None) -> Any:
        """Hands a request on, untouched, to a service binding, or to the object `name` of a namespace.

        Returns the platform's response. Raises `PeerLost`.
        """
        ...

    def blobs(self, binding: Any) -> BlobSource:
        """An R2 bucket as a source of blobs. Its reads raise `BlobFailed` when the store itself fails."""
        ...

    def key_values(self, binding: Any) -> KeyValue:
        """A KV namespace."""
        ...

    def peer(self, binding: Any) -> Peer:
        """A Worker behind a service binding.

        The `Inflow` of an answer whose sender did not say its length has length -1.
        """
        ...

    def objects(self, binding: Any) -> Objects:
        """A namespace of Durable Objects."""
        ...

    def storage(self, ctx: Any) -> Storage:
        """The storage of the Durable Object that `ctx` belongs to."""
        ...

    def background(self, ctx: Any) -> Background:
        """`waitUntil`: what keeps a coroutine running after the answer has been given."""
        ...

    def abort(self, ctx: Any, reason: str) -> NoReturn:
        """Restarts this Durable Object: its requests fail, its attributes are gone, its storage stays."""
        ...

    async def set_alarm(self, ctx: Any, seconds_from_now: float) -> None:
        """Has the platform call this Durable Object's `alarm()`; replaces an alarm set before."""
        ...

    async def engine(self, limit: int) -> EngineHost:
        """This isolate's one engine, of at most `limit` bytes; made at first use, the same one afterwards.

        Raises `OverBudget` where the isolate cannot give that much, and `BadArgument` when another limit is
        asked for than the first time.
        """
        ...

    def clock(self) -> float:
        """Seconds since the epoch. On Workers it stands still while code computes."""
        ...

    def log(self, message: str, **fields: Any) -> None:
        """One line of JSON; what is too long is cut."""
        ...

    def held(self, bytes_delta: int) -> None:
        """Tells the isolate's meter of bytes that Python objects (caches) keep from now on, or no longer."""
        ...
