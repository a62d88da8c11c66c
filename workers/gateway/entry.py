"""The Worker that the world talks to: the door of the object that has all sessions."""

import boundary
from durable_objects.session_object import SessionObject
from workers import Request, Response, WorkerEntrypoint

__all__ = ["Default", "SessionObject"]


class Default(WorkerEntrypoint):
    """Hands requests on. Keys are checked where the request is answered."""

    async def fetch(self, request: Request) -> Response:
        """Hands a request on to the sessions."""
        return await boundary.forward(request, self.env.SESSIONS, "sessions")
