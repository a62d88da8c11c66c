"""The Worker of the CobordismWardens. Shards reach theirs by name; from outside there is only a door."""

import boundary
from durable_objects.cobordism_warden import CobordismWarden
from durable_objects.front import hand_on
from protocol.calls import json_reply
from workers import Request, Response, WorkerEntrypoint

__all__ = ["CobordismWarden", "Default"]


class Default(WorkerEntrypoint):
    """Lets the cluster's own parts in, to the warden that X-Knot-Id and its range name."""

    async def fetch(self, request: Request) -> Response:
        """Hands a request on to a warden."""
        headers = {key.lower(): value for key, value in request.headers.items()}
        parts = [headers.get(f"x-{name}") for name in ("knot-id", "vocab-start", "vocab-end")]
        if None in parts:
            detail = "send X-Knot-Id, X-Knot-Key, X-Vocab-Start and X-Vocab-End to say which warden is meant"
            return boundary.response_of(json_reply({"error": {"kind": "bad_frame", "detail": detail}}, 400))
        name = f"{parts[0]}|{parts[1]}-{parts[2]}"
        return await hand_on(request, self.env, self.env.COBORDISM_WARDEN, name)
