"""The classes that a Worker's own classes derive from."""

from __future__ import annotations

from typing import Any


class WorkerEntrypoint:
    """A Worker's door: `fetch` and any method that others may call. Made anew for every request."""

    def __init__(self, ctx: Any, env: Any) -> None:
        self.ctx = ctx
        self.env = env


class DurableObject:
    """Base of Durable Objects: one instance an id, with storage of its own."""

    def __init__(self, ctx: Any, env: Any) -> None:
        self.ctx = ctx
        self.env = env
