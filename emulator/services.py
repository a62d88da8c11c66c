"""Calls between Workers: service bindings, and what they share with the stubs of Durable Objects."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Protocol

from emulator.context import IoContext, current
from emulator.errors import (
    LOST,
    LimitExceeded,
    StreamBroken,
    WorkerFailed,
    WorkerLost,
    as_seen_by_fetch,
    as_seen_by_rpc,
)
from emulator.handlers import RESERVED
from emulator.sdk.messages import Request, Response, fetch
from emulator.values import crossed

if TYPE_CHECKING:
    from emulator.cluster import Cluster

FAILURES = (WorkerLost, WorkerFailed, LimitExceeded, StreamBroken)


Call = Callable[[], Awaitable[Any]]


class Target(Protocol):
    """Somebody who can be called."""

    @property
    def site(self) -> str:
        """Its name, for faults and reports."""
        ...

    async def fetch(self, request: Request) -> Response:
        """Answers a request. Raises `WorkerLost`, `WorkerFailed`, `LimitExceeded`."""
        ...

    async def call(self, method: str, args: list[Any]) -> Any:
        """Calls a method; raises likewise."""
        ...

    async def disturb(self, kind: str) -> None:
        """Suffers a fault that hits the callee: `restart` or `evict`."""
        ...


class Fetcher:
    """A binding through which a Worker calls another Worker or an object."""

    def __init__(self, cluster: Cluster, target: Target) -> None:
        self._cluster = cluster
        self._target = target

    def fetch(self, resource: str | Request, **options: Any) -> Awaitable[Response]:
        """Sends a request there. Raises `OSError` when it fails."""
        return fetch(resource, fetcher=self._send, **options)

    def __getattr__(self, name: str) -> Callable[..., Awaitable[Any]]:
        if name.startswith("_") or name in RESERVED:
            raise AttributeError(name)

        async def call(*args: Any, **kwargs: Any) -> Any:
            return await self._call(name, [*args, *([dict(kwargs)] if kwargs else [])])

        return call

    async def _send(self, request: Request) -> Response:
        context = current()
        try:
            context.spending.invocation()
            sent = request.arrived()
            twin = self._twin(sent)
            response = await self._faulty(
                context,
                lambda: self._target.fetch(sent),
                None if twin is None else lambda: self._target.fetch(twin),
            )
        except FAILURES as error:
            raise as_seen_by_fetch(error) from None
        if response.body is not None:
            context.adopt(response.body)
        return response.arrived(request.url)

    async def _call(self, method: str, args: list[Any]) -> Any:
        context = current()
        most = self._cluster.limits.rpc_value_bytes
        try:
            context.spending.invocation()
            sent = [crossed(arg, most) for arg in args]
            result = await self._faulty(
                context,
                lambda: self._target.call(method, sent),
                lambda: self._target.call(method, [crossed(arg) for arg in args]),
            )
            return crossed_back(result, context)
        except FAILURES as error:
            raise as_seen_by_rpc(error) from None

    def _twin(self, request: Request) -> Request | None:
        """A copy of a request whose body is there, where calls may be carried out twice."""
        faults = self._cluster.faults
        if faults is None or "double_call" not in faults.rates:
            return None
        return request.clone() if request.body is None or request.body.whole else None

    async def _faulty(self, context: IoContext, call: Call, again: Call | None) -> Any:
        """A call, or what faults make of it; `again` is a second one like it."""
        faults = self._cluster.faults
        if faults is None:
            return await call()
        site = f"{context.isolate.name}>{self._target.site}"
        for kind in ("restart", "evict"):
            if faults.strikes(kind, site):
                await self._target.disturb(kind)
        if faults.strikes("slow_call", site):
            await asyncio.sleep(faults.delay(site))
        if faults.strikes("lost_call", site):
            raise WorkerLost(LOST)
        answer = await call()
        if again is not None and faults.strikes("double_call", site):
            await _drop(answer)
            answer = await again()
        if faults.strikes("lost_answer", site):
            await _drop(answer)
            raise WorkerLost(LOST)
        return answer


async def _drop(answer: Any) -> None:
    if isinstance(answer, Response) and answer.body is not None:
        await answer.body.cancel()


def crossed_back(value: Any, context: IoContext) -> Any:
    """A method's result as it arrived, with a body, if it is one, taken over."""
    if isinstance(value, Response) and value.body is not None:
        context.adopt(value.body)
    return value


class ServiceTarget:
    """An entrypoint of a Worker."""

    def __init__(self, cluster: Cluster, worker: str, entrypoint: str) -> None:
        self._cluster = cluster
        self._worker = worker
        self._entrypoint = entrypoint

    @property
    def site(self) -> str:
        """The Worker and its entrypoint."""
        return f"{self._worker}.{self._entrypoint}"

    async def fetch(self, request: Request) -> Response:
        """Answers a request."""
        return await (await self._cluster.isolate(self._worker)).fetch(request, self._entrypoint)

    async def call(self, method: str, args: list[Any]) -> Any:
        """Calls a method of the entrypoint."""
        return await (await self._cluster.isolate(self._worker)).call(method, args, self._entrypoint)

    async def disturb(self, kind: str) -> None:
        """The Worker's isolate is evicted; an entrypoint has nothing to restart."""
        if kind == "evict":
            await self._cluster.evict(self._worker)
