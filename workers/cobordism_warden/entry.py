"""The Worker of the CobordismWardens. Shards reach theirs by name; from outside there is only a door."""

from durable_objects.cobordism_warden import CobordismWarden
from durable_objects.front import hand_on_to_warden
from workers import Request, Response, WorkerEntrypoint

__all__ = ["CobordismWarden", "Default"]


class Default(WorkerEntrypoint):
    """Lets the cluster's own parts in, to the warden that X-Knot-Id and its range name."""

    async def fetch(self, request: Request) -> Response:
        """Hands a request on to a warden."""
        return await hand_on_to_warden(request, self.env, self.env.COBORDISM_WARDEN, "vocab")
