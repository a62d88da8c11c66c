"""The Worker of the LayerWardens. Stations reach their warden by name; from outside there is only a door."""

import boundary
from durable_objects.front import hand_on
from durable_objects.layer_warden import LayerWarden
from protocol.calls import json_reply
from workers import Request, Response, WorkerEntrypoint

__all__ = ["Default", "LayerWarden"]


class Default(WorkerEntrypoint):
    """Lets the cluster's own parts in, to the warden that X-Knot-Id and its range name."""

    async def fetch(self, request: Request) -> Response:
        """Hands a request on to a warden."""
        headers = {key.lower(): value for key, value in request.headers.items()}
        parts = [headers.get(f"x-{name}") for name in ("knot-id", "layer-start", "layer-end")]
        if None in parts:
            detail = "send X-Knot-Id, X-Knot-Key, X-Layer-Start and X-Layer-End to say which warden is meant"
            return boundary.response_of(json_reply({"error": {"kind": "bad_frame", "detail": detail}}, 400))
        name = f"{parts[0]}|{parts[1]}-{parts[2]}"
        return await hand_on(request, self.env, self.env.LAYER_WARDEN, name)
