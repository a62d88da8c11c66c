"""Durable Objects: ids, namespaces, stubs, and the one live instance of an id."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import inspect
import secrets
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, NoReturn

from emulator.context import IoContext, Owner
from emulator.errors import DurableObjectAbort, JsException, WorkerFailed, WorkerLost
from emulator.handlers import answer_of, result_of
from emulator.limits import Spending
from emulator.sdk.messages import Request, Response
from emulator.services import Fetcher
from emulator.storage import ClassStore, DurableObjectStorage, StorageOwner, lost

if TYPE_CHECKING:
    from emulator.cluster import Cluster
    from emulator.isolate import Isolate

_ID_BYTES, _TAG_BYTES = 24, 8


class ObjectId:
    """An object's id: 64 hexadecimal digits, of which the last 16 say to which class it belongs."""

    def __init__(self, hex: str, name: str | None = None) -> None:
        self.hex = hex
        self.name = name

    def toString(self) -> str:  # noqa: N802
        """The id as text."""
        return self.hex

    def equals(self, other: ObjectId) -> bool:
        """Whether both mean the same object."""
        return self.hex == other.hex

    def __str__(self) -> str:
        return self.hex

    def __repr__(self) -> str:
        return f"ObjectId({self.hex[:8]}…, {self.name!r})"


class DurableObjectNamespace:
    """A class of objects as a binding."""

    def __init__(self, cluster: Cluster, script: str, class_name: str) -> None:
        self._cluster = cluster
        self._script = script
        self._class_name = class_name
        self._key = hashlib.sha256(f"{script}\0{class_name}".encode()).digest()

    def idFromName(self, name: str) -> ObjectId:  # noqa: N802
        """The id that belongs to a name, always the same."""
        return self._id(hmac.digest(self._key, name.encode(), "sha256")[:_ID_BYTES], name)

    def newUniqueId(self, *args: Any, **kwargs: Any) -> ObjectId:  # noqa: N802
        """An id that no other object has."""
        if args or kwargs:
            raise NotImplementedError("newUniqueId with a jurisdiction is not emulated")
        return self._id(secrets.token_bytes(_ID_BYTES), None)

    def idFromString(self, text: str) -> ObjectId:  # noqa: N802
        """The id that `toString` wrote. Raises for one that is not of this class."""
        try:
            body = bytes.fromhex(text)[:_ID_BYTES]
        except ValueError:
            body = b""
        if len(text) != 2 * (_ID_BYTES + _TAG_BYTES) or self._id(body, None).hex != text.lower():
            raise JsException("TypeError", "Invalid Durable Object ID: it is not of this namespace")
        return ObjectId(text.lower())

    def get(self, id: ObjectId, *args: Any, **kwargs: Any) -> DurableObjectStub:
        """A stub for an id; the object is made when it is first called."""
        return DurableObjectStub(
            self._cluster, ObjectTarget(self._cluster, self._script, self._class_name, id)
        )

    def getByName(self, name: str, *args: Any, **kwargs: Any) -> DurableObjectStub:  # noqa: N802
        """A stub for a name."""
        return self.get(self.idFromName(name))

    def jurisdiction(self, name: str) -> NoReturn:
        """Jurisdictions are not emulated."""
        raise NotImplementedError("DurableObjectNamespace.jurisdiction is not emulated")

    def _id(self, body: bytes, name: str | None) -> ObjectId:
        return ObjectId((body + hmac.digest(self._key, b"tag" + body, "sha256")[:_TAG_BYTES]).hex(), name)


class ObjectTarget:
    """One object, for calls."""

    def __init__(self, cluster: Cluster, script: str, class_name: str, id: ObjectId) -> None:
        self._cluster = cluster
        self.script = script
        self.class_name = class_name
        self.id = id

    @property
    def site(self) -> str:
        """The class and the object's name."""
        return f"{self.script}.{self.class_name}/{self.id.name or self.id.hex[:8]}"

    async def live(self) -> LiveObject:
        """The instance, made if there is none."""
        return (await self._cluster.isolate(self.script)).object(self.class_name, self.id)

    async def fetch(self, request: Request) -> Response:
        """Answers a request."""
        return await (await self.live()).fetch(request)

    async def call(self, method: str, args: list[Any]) -> Any:
        """Calls a method."""
        return await (await self.live()).call(method, args)

    async def disturb(self, kind: str) -> None:
        """The object is restarted, or its whole isolate evicted."""
        if kind == "evict":
            await self._cluster.evict(self.script)
        else:
            (await self.live()).stop("the object was restarted")


class DurableObjectStub(Fetcher):
    """What calls an object: `fetch` and any of its methods."""

    def __init__(self, cluster: Cluster, target: ObjectTarget) -> None:
        super().__init__(cluster, target)
        self.id = target.id
        self.name = target.id.name


class DurableObjectState:
    """`ctx` of a Durable Object."""

    def __init__(self, live: LiveObject, storage: DurableObjectStorage) -> None:
        self._live = live
        self.id = live.id
        self.storage = storage
        self.props: dict[str, Any] = {}

    def waitUntil(self, work: Any) -> None:  # noqa: N802
        """Does what awaiting in the background does; an object lives on anyway."""
        self._live.event.wait_until(work)

    def blockConcurrencyWhile(self, work: Callable[[], Awaitable[Any]]) -> Awaitable[Any]:  # noqa: N802
        """Lets nothing else into the object until `work()` is done. When it raises, the object is reset."""
        return self._live.block(work)

    def abort(self, reason: str | None = None) -> NoReturn:
        """Resets the object at once: its calls fail, its attributes are gone, its storage stays."""
        reason = reason or "Durable Object abort requested"
        self._live.stop(reason, spared=asyncio.current_task())
        raise DurableObjectAbort(reason)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        raise NotImplementedError(f"ctx.{name} is not emulated")


class LiveObject:
    """The instance of one id. Its events interleave where they wait; its constructor runs before them."""

    def __init__(self, isolate: Isolate, class_name: str, id: ObjectId, before: Owner | None) -> None:
        self.isolate = isolate
        self.class_name = class_name
        self.id = id
        self.owner = Owner()
        self.owner.on_activity = self._watch_idleness
        self._idle: asyncio.TimerHandle | None = None
        self._before = before
        self._store: ClassStore = isolate.cluster.stores.of_class(isolate.name, class_name)
        self._spending = Spending(isolate.limits)
        self._instance: Any = None
        self._starting = asyncio.Lock()
        self._blocks = 0
        self._open = asyncio.Event()
        self._open.set()
        # Work that belongs to the object and to no request.
        self.event = isolate.event(self._label("object"), self._spending, self.owner)

    def _label(self, what: str) -> str:
        return f"{self.isolate.name} {self.class_name}/{self.id.name or self.id.hex[:8]} {what}"

    async def fetch(self, request: Request) -> Response:
        """Answers a request. A caller that leaves does not stop it."""
        event = self._event(f"{request.method} {request.url}")

        async def handle() -> Response:
            return await answer_of(await self._ready(), request, event)

        return await self.isolate.run(event, handle, survives=True)

    async def call(self, method: str, args: list[Any]) -> Any:
        """Calls a method."""
        event = self._event(f"{method}()")

        async def handle() -> Any:
            return await result_of(await self._ready(), method, args, event)

        return await self.isolate.run(event, handle, survives=True)

    async def alarm(self, retry: int) -> None:
        """Rings the alarm. Raises when the handler does."""
        event = self._event("alarm()")

        async def handle() -> None:
            self.isolate.cluster.count_request(1)
            try:
                await self._ring(retry)
            finally:
                self.isolate.cluster.count_request(-1)

        await self.isolate.run(event, handle, survives=True)

    async def _ring(self, retry: int) -> None:
        handler = getattr(await self._ready(), "alarm", None)
        if handler is None:
            raise TypeError(f"{self.class_name} has no alarm handler")
        info = [{"isRetry": retry > 0, "retryCount": retry}]
        await handler(*(info if inspect.signature(handler).parameters else []))

    def _event(self, what: str) -> IoContext:
        self._spending.reset()
        return self.isolate.event(self._label(what), self._spending, self.owner)

    async def _ready(self) -> Any:
        async with self._starting:
            if self._instance is None:
                await self._start()
        while not self._open.is_set():
            await self._open.wait()
        return self._instance

    async def _start(self) -> None:
        if self._before is not None:
            # Two instances of one object never run at the same time.
            await self._before.ended(self.isolate.limits.block_concurrency_seconds)
            self._before = None
        owner = StorageOwner(
            self.id.hex, self.id.name, self.isolate.limits, lambda: lost(self.owner.lost), self._schedule
        )
        state = DurableObjectState(self, DurableObjectStorage(self._store, owner))
        kind = self.isolate.entry_class(self.class_name)
        try:
            self._instance = self.event.run_sync(kind, state, self.isolate.env)
        except Exception as error:
            self.isolate.report(f"{self.event.label}: its constructor failed", error)
            self._reset(f"the object's constructor raised {type(error).__name__}: {error}")
            raise

    def _schedule(self, at_ms: int | None) -> None:
        self.isolate.cluster.alarms.set(self.isolate.name, self.class_name, self.id, at_ms)

    def block(self, work: Callable[[], Awaitable[Any]]) -> Awaitable[Any]:
        """See `DurableObjectState.blockConcurrencyWhile`."""
        self._blocks += 1
        self._open.clear()
        task = self.event.spawn(self._blocked(work), "blockConcurrencyWhile")
        # The object is reset when it fails, whether or not the object's code waits for it.
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
        return task

    async def _blocked(self, work: Callable[[], Awaitable[Any]]) -> Any:
        seconds = self.isolate.limits.block_concurrency_seconds
        try:
            async with asyncio.timeout(seconds):
                return await work()
        except TimeoutError:
            self._reset(f"a call to blockConcurrencyWhile() waited for longer than {seconds:g} s")
            raise
        except Exception as error:
            self.isolate.report(f"{self.event.label}: blockConcurrencyWhile failed", error)
            self._reset(f"blockConcurrencyWhile raised {type(error).__name__}: {error}")
            raise
        finally:
            self._blocks -= 1
            if not self._blocks:
                self._open.set()

    def _reset(self, reason: str) -> None:
        self.stop(reason, spared=asyncio.current_task())

    def stop(self, reason: str, spared: asyncio.Task[Any] | None = None) -> None:
        """Ends the instance: what runs in it, but for `spared`, is lost. The next call makes another."""
        key = (self.class_name, self.id.hex)
        if self.isolate.objects.get(key) is self:
            del self.isolate.objects[key]
            self.isolate.cluster.is_ending(self.isolate.name, *key, self.owner)
        self.forget_idleness()
        self.owner.lose(reason, spared)
        for stream in list(self.owner.streams):
            self.isolate.give_up(stream)

    def _watch_idleness(self) -> None:
        self.forget_idleness()
        if not self.owner.active and self.owner.lost is None:
            seconds = self.isolate.limits.object_idle_seconds
            self._idle = asyncio.get_running_loop().call_later(seconds, self._evict_idle)

    def forget_idleness(self) -> None:
        """Something happens, or the object is gone."""
        if self._idle is not None:
            self._idle.cancel()
            self._idle = None

    def _evict_idle(self) -> None:
        if self.owner.tasks:
            self._watch_idleness()
        else:
            self.stop("the object was idle")


class AlarmClock:
    """Rings the alarms of all objects of a cluster, and again when a handler fails."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._timers: dict[tuple[str, str, str], asyncio.TimerHandle] = {}
        self._ringing: set[asyncio.Task[None]] = set()

    def set(self, script: str, class_name: str, id: ObjectId, at_ms: int | None, retry: int = 0) -> None:
        """Sets or clears an object's alarm."""
        key = (script, class_name, id.hex)
        timer = self._timers.pop(key, None)
        if timer is not None:
            timer.cancel()
        if at_ms is not None:
            loop = asyncio.get_running_loop()
            delay = max(0.0, at_ms / 1000 - time.time())
            self._timers[key] = loop.call_later(delay, self._ring, script, class_name, id, at_ms, retry)

    def stop(self) -> None:
        """Rings no more; what is set stays in the database."""
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()

    async def ended(self) -> None:
        """Waits for the alarms that are ringing."""
        while self._ringing:
            await asyncio.wait(set(self._ringing))

    def _ring(self, script: str, class_name: str, id: ObjectId, at_ms: int, retry: int) -> None:
        self._timers.pop((script, class_name, id.hex), None)
        task = asyncio.get_running_loop().create_task(self._run(script, class_name, id, at_ms, retry))
        self._ringing.add(task)
        task.add_done_callback(self._ringing.discard)

    async def _run(self, script: str, class_name: str, id: ObjectId, at_ms: int, retry: int) -> None:
        """An alarm rings at least once: until its handler is through, it stays in the database."""
        store = self._cluster.stores.of_class(script, class_name)
        store.begin_alarm(id.hex)
        limits = self._cluster.limits
        tried = retry
        try:
            live = await ObjectTarget(self._cluster, script, class_name, id).live()
            await live.alarm(retry)
        except WorkerLost:
            pass  # what was lost on its way is not counted as tried
        except WorkerFailed:
            tried = retry + 1
        else:
            store.end_alarm(id.hex)
            return
        if not self._cluster.running:
            return
        if store.end_alarm(id.hex) and tried <= limits.alarm_retries:
            again = int((time.time() + limits.alarm_retry_seconds * 2**retry) * 1000)
            store.set_alarm(id.hex, id.name, again)
            self.set(script, class_name, id, again, tried)
