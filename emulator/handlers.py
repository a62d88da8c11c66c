"""How a class of a Worker is asked, and how its answer leaves the isolate."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any, cast

from emulator.sdk.messages import Request, Response
from emulator.values import crossed

if TYPE_CHECKING:
    from emulator.context import IoContext

# Names that are the runtime's, or that a promise would be asked for.
RESERVED = frozenset(("alarm", "connect", "constructor", "dup", "fetch", "then", "webSocketMessage"))


async def answer_of(door: Any, request: Request, event: IoContext) -> Response:
    """What a class's `fetch` answers, as it leaves the isolate."""
    event.isolate.cluster.count_request(1)
    try:
        handler = getattr(door, "fetch", None)
        if handler is None:
            raise TypeError(f"{type(door).__name__} has no fetch handler")
        if request.body is not None:
            event.adopt(request.body)
        answer = await handler(request)
        if not isinstance(answer, Response):
            raise TypeError(
                f"{type(door).__name__}.fetch returned {type(answer).__name__}, expected a Response"
            )
        return leaving(answer, event)
    finally:
        event.isolate.cluster.count_request(-1)


async def result_of(door: Any, method: str, args: list[Any], event: IoContext) -> Any:
    """What a method returns, as it leaves the isolate."""
    event.isolate.cluster.count_request(1)
    try:
        hidden = method in RESERVED or method.startswith("_")
        found: object = None if hidden else getattr(cast(Any, type(door)), method, None)
        if not callable(found):
            raise TypeError(f'The RPC receiver does not implement the method "{method}".')
        result = getattr(door, method)(*args)
        if inspect.isawaitable(result):
            result = await result
        if isinstance(result, Response):
            return leaving(result, event)
        return crossed(result, event.isolate.limits.rpc_value_bytes)
    finally:
        event.isolate.cluster.count_request(-1)


def leaving(answer: Response, event: IoContext) -> Response:
    """A response on its way out: the event lives until its body has been read or given up."""
    left = answer.arrived("")
    stream = left.body
    if stream is not None and not stream.finished:
        event.disown(stream)
        size = (stream.length or 0) if stream.whole else 0
        event.hold()
        event.count(size)
        event.isolate.cluster.opened(stream)

        def ended() -> None:
            event.uncount(size)
            event.release()

        stream.on_end(ended)
    return left
