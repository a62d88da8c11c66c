"""What entry files need from the platform, as functions of a module `boundary`.

On Workers that module is the only one that touches JavaScript; in CPython it stands over the emulator. Both
have exactly the functions of `Boundary`, and entry files use nothing else of a platform but the classes of
`workers`.
"""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Any, NoReturn, Protocol

from engine.host import EngineHost
from protocol.calls import Call, Inflow, Reply
from protocol.ports import Background, BlobSource, Held, KeyValue, Objects, Peer, Storage


class Boundary(Protocol):
    """The module `boundary`. `env`, `ctx`, requests, responses and bindings are the SDK's own objects."""

    @staticmethod
    def variable(env: Any, name: str) -> str | None:
        """A variable or secret of the Worker; None when it is not set."""
        ...

    @staticmethod
    async def call_of(request: Any) -> Call:
        """An SDK request as a call, with its whole body. The path and query stay percent-encoded."""
        ...

    @staticmethod
    def response_of(reply: Reply) -> Any:
        """A reply as an SDK response.

        A body that is an async iterator or an `Inflow` is asked for pieces as the client takes them; when the
        client leaves, its `aclose()` or `cancel()` runs. An `Inflow` of known length gets a content-length.
        """
        ...

    @staticmethod
    async def forward(request: Any, binding: Any, name: str | None = None) -> Any:
        """Hands an SDK request on, untouched, and returns the SDK response.

        `binding` is a service binding, or with `name` a namespace of objects. Raises `OSError` when it fails.
        """
        ...

    @staticmethod
    def blobs(binding: Any) -> BlobSource:
        """An R2 bucket."""
        ...

    @staticmethod
    def hold(inflow: Inflow, length: int) -> tuple[Held, Awaitable[None]]:
        """Keeps the next `length` bytes of a body, without Python objects where that can be.

        They arrive while the second is awaited, and are given away as they arrive.
        """
        ...

    @staticmethod
    def key_values(binding: Any) -> KeyValue:
        """A KV namespace."""
        ...

    @staticmethod
    def peer(binding: Any) -> Peer:
        """A Worker behind a service binding.

        The `Inflow` of `open` has length -1 where the answer does not say it.
        """
        ...

    @staticmethod
    def objects(binding: Any) -> Objects:
        """A namespace of Durable Objects."""
        ...

    @staticmethod
    def storage(ctx: Any) -> Storage:
        """The storage of a Durable Object."""
        ...

    @staticmethod
    def background(ctx: Any) -> Background:
        """`waitUntil` of an entrypoint or a Durable Object."""
        ...

    @staticmethod
    def abort(ctx: Any, reason: str) -> NoReturn:
        """Resets a Durable Object: its calls fail, its attributes are gone, its storage stays."""
        ...

    @staticmethod
    async def set_alarm(ctx: Any, seconds_from_now: float) -> None:
        """Lets a Durable Object's `alarm` be called then; one alarm an object, the last one set."""
        ...

    @staticmethod
    async def engine(limit: int) -> EngineHost:
        """This isolate's engine, whose region has at most `limit` bytes; made at first use.

        The same one afterwards. Raises `ValueError` when another limit is asked for, and `EngineError`.
        """
        ...

    @staticmethod
    def clock() -> float:
        """Seconds since 1970. It stands still while code computes."""
        ...

    @staticmethod
    def log(message: str, **fields: Any) -> None:
        """One line of JSON in the log; long values are cut and floods dropped."""
        ...

    @staticmethod
    def held(bytes_delta: int) -> None:
        """Tells the isolate's meter that Python objects now keep that many bytes more, or fewer."""
        ...

    @staticmethod
    def moved(layer: int | None, phase: str, block: str, size: int, stays: bool) -> None:
        """Tells of a block of weights that arrives in the engine's arena (+bytes) or leaves it (-bytes).

        A block that `stays` is pinned. `layer` is None for the head.
        """
        ...

    @staticmethod
    def memory() -> dict[str, int]:
        """What can be seen of the isolate's memory, in bytes by what it is used for."""
        ...
