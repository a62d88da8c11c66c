"""What stands before every object: the door that only the cluster's own parts pass."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Final

import boundary
from protocol import access
from protocol.calls import Call, Reply, ShortBody, json_reply
from protocol.ports import BlobChanged, BlobFailed, PeerLost
from protocol.settings import Settings, SettingsError
from workers import Request, Response

# What may have gone away when the part is asked again.
PASSING: Final = (BlobFailed, BlobChanged, ShortBody, PeerLost)


async def hand_on(request: Request, env: Any, objects: Any, name: str) -> Response:
    """Hands a request on, untouched, to the object `name`, if whoever sent it knows the cluster's secret."""
    refused = _refusal(request, env)
    return boundary.response_of(refused) if refused else await boundary.forward(request, objects, name)


async def hand_on_to_warden(request: Request, env: Any, objects: Any, range_of: str) -> Response:
    """Hands a request on to the warden that X-Knot-Id and X-`range_of`-Start and -End name.

    GET /memory needs no name: all wardens of a Worker live in this one isolate.
    """
    refused = _refusal(request, env)
    if refused is None and request.url.partition("?")[0].endswith("/memory"):
        refused = json_reply({"isolate": boundary.memory()})
    headers = _headers(request)
    wanted = ("x-knot-id", f"x-{range_of}-start", f"x-{range_of}-end")
    if refused is None and not headers.keys() >= set(wanted):
        names = ", ".join(name.title() for name in ("x-knot-key", *wanted))
        detail = f"send {names} to say which warden is meant"
        refused = json_reply({"error": {"kind": "bad_frame", "detail": detail}}, 400)
    if refused is not None:
        return boundary.response_of(refused)
    knot, start, end = (headers[name] for name in wanted)
    return await boundary.forward(request, objects, f"{knot}|{start}-{end}")


async def warden_answer(
    request: Request, ctx: Any, secret: str, answer: Callable[[Call], Awaitable[Reply]]
) -> Response:
    """What a warden says to whoever knows the cluster's secret; POST /restart resets the object."""
    call = await boundary.call_of(request)
    refused = access.refusal(secret, call.headers)
    if refused is None and (call.method, call.path) == ("POST", "/restart"):
        boundary.abort(ctx, "a restart was asked for")
    return boundary.response_of(refused or await answer(call))


def _refusal(request: Request, env: Any) -> Reply | None:
    try:
        secret = Settings(lambda key: boundary.variable(env, key)).secret()
    except SettingsError as error:
        return unavailable(error)
    return access.refusal(secret, _headers(request))


def _headers(request: Request) -> dict[str, str]:
    return {key.lower(): value for key, value in request.headers.items()}


def unavailable(error: Exception, passing: tuple[type[Exception], ...] = PASSING) -> Reply:
    """The answer of a part that could not start: what is wrong, and whether asking again may help.

    Wrong settings, a knot that is not there or not fit, and too little memory stay as they are until somebody
    mends them: whoever asks is told so at once.
    """
    kind, status = ("unavailable", 503) if isinstance(error, passing) else ("cannot_start", 500)
    return json_reply({"error": {"kind": kind, "detail": f"{type(error).__name__}: {error}"}}, status)


def optional_binding(env: Any, name: str) -> Any:
    """A binding that a deployment may leave out; None when it does."""
    return getattr(env, name, None)
