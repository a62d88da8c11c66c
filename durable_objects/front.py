"""What stands before every object: the door that only the cluster's own parts pass."""

from __future__ import annotations

from typing import Any

import boundary
from protocol import access
from protocol.calls import Reply, json_reply
from protocol.settings import Settings, SettingsError
from workers import Request, Response


async def hand_on(request: Request, env: Any, objects: Any, name: str) -> Response:
    """Hands a request on, untouched, to the object `name`, if whoever sent it knows the cluster's secret."""
    try:
        secret = Settings(lambda key: boundary.variable(env, key)).secret()
    except SettingsError as error:
        return boundary.response_of(unavailable(error))
    stranger = access.refusal(secret, {key.lower(): value for key, value in request.headers.items()})
    if stranger is not None:
        return boundary.response_of(stranger)
    return await boundary.forward(request, objects, name)


def unavailable(error: Exception) -> Reply:
    """The answer of a part that could not start: what is wrong with its settings, its knot or its memory."""
    return json_reply({"error": {"kind": "unavailable", "detail": f"{type(error).__name__}: {error}"}}, 503)


def optional_binding(env: Any, name: str) -> Any:
    """A binding that a deployment may leave out; None when it does."""
    return getattr(env, name, None)
