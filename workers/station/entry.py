"""The Worker of a layer station: the door of the object that is the station."""

from durable_objects.front import hand_on
from durable_objects.station_object import StationObject
from workers import Request, Response, WorkerEntrypoint

__all__ = ["Default", "StationObject"]


class Default(WorkerEntrypoint):
    """Lets the cluster's own parts in."""

    async def fetch(self, request: Request) -> Response:
        """Hands a request on to the station."""
        return await hand_on(request, self.env, self.env.STATION, "station")
