"""The Worker of the LayerWardens. Stations reach their warden by name; from outside there is only a door."""

from durable_objects.front import hand_on_to_warden
from durable_objects.layer_warden import LayerWarden
from workers import Request, Response, WorkerEntrypoint

__all__ = ["Default", "LayerWarden"]


class Default(WorkerEntrypoint):
    """Lets the cluster's own parts in, to the warden that X-Knot-Id and its range name."""

    async def fetch(self, request: Request) -> Response:
        """Hands a request on to a warden."""
        return await hand_on_to_warden(request, self.env, self.env.LAYER_WARDEN, "layer")
