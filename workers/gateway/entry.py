"""The Worker that the world talks to: every request gets an object of its own to be answered in."""

from uuid import uuid4

import boundary
from durable_objects.session_object import SessionObject
from workers import Request, Response, WorkerEntrypoint

__all__ = ["Default", "SessionObject"]


class Default(WorkerEntrypoint):
    """Hands requests on. Keys are checked where the request is answered."""

    async def fetch(self, request: Request) -> Response:
        """Gives a request an object to live in."""
        return await boundary.forward(request, self.env.SESSIONS, str(uuid4()))
