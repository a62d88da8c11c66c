"""The Worker of a vocabulary shard: the door of the object that is the shard."""

from durable_objects.front import hand_on
from durable_objects.shard_object import ShardObject
from workers import Request, Response, WorkerEntrypoint

__all__ = ["Default", "ShardObject"]


class Default(WorkerEntrypoint):
    """Lets the cluster's own parts in."""

    async def fetch(self, request: Request) -> Response:
        """Hands a request on to the shard."""
        return await hand_on(request, self.env, self.env.SHARD, "shard")
