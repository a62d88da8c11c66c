"""A cluster of Workers in this process."""

from __future__ import annotations

import asyncio
import contextvars
import sys
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

from emulator.config import WorkerConfig
from emulator.context import Owner, track_tasks, untrack_tasks
from emulator.durable import AlarmClock, DurableObjectNamespace, ObjectId, ObjectTarget
from emulator.errors import EmulatorError, LimitExceeded, StreamBroken, WorkerFailed, WorkerLost
from emulator.faults import Faults
from emulator.isolate import Host, Isolate
from emulator.kv import KVNamespace, KVStore
from emulator.limits import Limits
from emulator.meter import MemoryUse
from emulator.outside import reply_of, request_of
from emulator.r2 import Bucket, R2Bucket
from emulator.sdk.messages import Request, Response
from emulator.services import Fetcher, ServiceTarget, Target
from emulator.stores import Stores
from emulator.streams import ReadableStream
from engine.threads import run_to_end
from protocol.calls import Call, Reply
from protocol.ports import PeerLost
from protocol.recorder import Recorder

EngineKind = Literal["wasm", "native"]
STOPPING = "the cluster is stopping"


@dataclass(frozen=True, slots=True)
class Pending:
    """What has not ended: requests being handled, `waitUntil` work, and bodies that are open."""

    requests: int
    background: int
    bodies: int

    def __bool__(self) -> bool:
        return bool(self.requests or self.background or self.bodies)


class Cluster:
    """Workers that call each other by their bindings; everything durable lies under `data_folder`.

    `engine` says which host runs the crate. With `enforce`, an isolate over its memory limit is ended.
    `faults` injects what goes wrong on a network. `log` gets the Workers' log lines; by default they go to
    stderr. `recorder` takes down the isolates' memory and their reads from buckets.
    """

    def __init__(
        self,
        workers: Sequence[WorkerConfig],
        data_folder: Path,
        engine: EngineKind = "wasm",
        *,
        enforce: bool = True,
        limits: Limits | None = None,
        faults: Faults | None = None,
        log: Callable[[str], None] | None = None,
        drain_seconds: float = 2.0,
        recorder: Recorder | None = None,
    ) -> None:
        self.workers = {worker.name: worker for worker in workers}
        if len(self.workers) != len(workers):
            raise EmulatorError("two Workers of a cluster have the same name")
        self.data_folder = data_folder
        self.enforce = enforce
        self.limits = limits or Limits()
        self.faults = faults
        self.recorder = recorder
        self.log = log or _to_stderr
        self.running = False
        self.alarms = AlarmClock(self)
        self._engine_kind = engine
        self._drain_seconds = drain_seconds
        self._isolates: dict[str, Isolate] = {}
        self._ending: dict[str, asyncio.Task[None]] = {}
        self._ending_objects: weakref.WeakValueDictionary[tuple[str, str, str], Owner]
        self._ending_objects = weakref.WeakValueDictionary()
        self._dead: set[str] = set()
        self._peaks: dict[str, MemoryUse] = {}
        self._requests = 0
        self._bodies: weakref.WeakSet[ReadableStream] = weakref.WeakSet()
        self._accepting = False
        self._stores: Stores | None = None
        self._check_bindings()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    async def start(self) -> None:
        """Opens the data folder and sets the alarms that were pending. Workers start when they are called."""
        if self._stores is not None:
            raise EmulatorError("the cluster is running already")
        self._stores = Stores(self.data_folder, self.limits, keep_previous=self.faults is not None)
        track_tasks(asyncio.get_running_loop())
        self.running = self._accepting = True
        for script, class_name in sorted(self._object_classes()):
            if self._stores.has_class(script, class_name):
                for id, name, at_ms in self._stores.of_class(script, class_name).alarms():
                    self.alarms.set(script, class_name, ObjectId(id, name), at_ms)

    async def stop(self) -> None:
        """Lets `waitUntil` work finish for a bounded time, cancels the rest, and closes the stores."""
        if not self._accepting:
            return
        self._accepting = False
        self.alarms.stop()
        try:
            await self._drain()
        finally:
            self.running = False
            for isolate in list(self._isolates.values()):
                self._end(isolate, STOPPING)
            while self._ending:
                await asyncio.wait(set(self._ending.values()))
            await self.alarms.ended()
            untrack_tasks(asyncio.get_running_loop())
            self.stores.close()
            self._stores = None

    async def fetch(self, worker: str, call: Call, entrypoint: str = "Default") -> Reply:
        """Asks a Worker from outside. A body that is there comes as bytes, another as an iterator.

        Raises `PeerLost` when the Worker raises, is lost, or is not in the cluster.
        """
        return await self._ask(ServiceTarget(self, worker, entrypoint), call)

    async def _ask(self, target: Target, call: Call) -> Reply:
        try:
            return await reply_of(await self._reach(target, request_of(call)))
        except (WorkerLost, LimitExceeded, StreamBroken) as error:
            raise PeerLost(f"{target.site}: {error}") from None
        except WorkerFailed as error:
            raise PeerLost(f"{error}\n{error.trace}") from None

    async def _reach(self, target: Target, request: Request) -> Response:
        if not self._accepting:
            raise WorkerLost(STOPPING)
        return await target.fetch(request)

    async def send(self, worker: str, request: Request, entrypoint: str = "Default") -> Response:
        """Asks a Worker by a request of its own kind, for whoever stands between it and a network.

        Raises `WorkerLost` and `WorkerFailed`. The answer's body is to be read or cancelled.
        """
        return await self._reach(ServiceTarget(self, worker, entrypoint), request)

    async def fetch_object(self, worker: str, class_name: str, name: str, call: Call) -> Reply:
        """Asks an object of a Worker from outside, as `fetch` does a Worker."""
        target = ObjectTarget(self, worker, class_name, self.namespace(worker, class_name).idFromName(name))
        return await self._ask(target, call)

    def namespace(self, worker: str, class_name: str) -> DurableObjectNamespace:
        """The ids of a class of objects."""
        return DurableObjectNamespace(self, worker, class_name)

    async def restart_object(self, worker: str, class_name: str, name: str) -> None:
        """Resets an object as the platform may at any time: its calls fail, its storage stays."""
        isolate = self._isolates.get(worker)
        id = self.namespace(worker, class_name).idFromName(name)
        live = isolate and isolate.objects.get((class_name, id.hex))
        if live:
            live.stop("the object was restarted")
            await live.owner.ended(60)

    async def evict(self, worker: str) -> None:
        """Ends a Worker's isolate as the platform may at any time; the next call makes another."""
        isolate = self._isolates.get(worker)
        if isolate is not None:
            self._end(isolate, "the isolate was evicted")
        ending = self._ending.get(worker)
        if ending is not None:
            await asyncio.wait({ending})

    async def kill(self, worker: str) -> None:
        """Ends a Worker's isolate; calls of it fail until `revive`."""
        self._config(worker)
        self._dead.add(worker)
        await self.evict(worker)

    def revive(self, worker: str) -> None:
        """Lets a killed Worker run again."""
        self._dead.discard(worker)

    def pending(self) -> Pending:
        """What has not ended."""
        contexts = [event for isolate in self._isolates.values() for event in isolate.contexts]
        background = sum(len(event.background) for event in contexts)
        bodies = sum(1 for stream in list(self._bodies) if not stream.finished)
        return Pending(self._requests, background, bodies)

    def memory(self) -> dict[str, tuple[MemoryUse | None, MemoryUse]]:
        """Each Worker's memory now (None when it is not running) and at its peak."""
        found: dict[str, tuple[MemoryUse | None, MemoryUse]] = {
            name: (None, peak) for name, peak in self._peaks.items()
        }
        for name, isolate in self._isolates.items():
            found[name] = (isolate.meter.use(), self._peak(isolate))
        return found

    def bucket(self, name: str) -> Bucket:
        """An R2 bucket of the cluster."""
        return self.stores.bucket(name)

    def key_values(self, name: str) -> KVStore:
        """A KV namespace of the cluster."""
        return self.stores.key_values(name)

    @property
    def stores(self) -> Stores:
        """What the cluster keeps."""
        if self._stores is None:
            raise EmulatorError("the cluster is not running, so nothing of what it keeps is open")
        return self._stores

    async def isolate(self, worker: str) -> Isolate:
        """A Worker's isolate, made if it is not running. Raises `WorkerLost`."""
        config = self._config(worker)
        while True:
            if not self.running:
                raise WorkerLost(STOPPING)
            if worker in self._dead:
                raise WorkerLost(f"Worker {worker} is down")
            found = self._isolates.get(worker)
            if found is not None:
                return found
            ending = self._ending.get(worker)
            if ending is None:
                break
            # Objects of the old isolate must have ended before new ones of the same ids begin.
            await asyncio.wait({ending})
        found = self._isolates[worker] = Isolate(self, config, self._env(config))
        return found

    async def make_engine(self, limit: int) -> Host:
        """A new engine whose region has at most `limit` bytes."""
        return await run_to_end(_make_engine, self._engine_kind, limit)

    def condemn(self, isolate: Isolate, reason: str) -> None:
        """Ends an isolate that broke a rule."""
        if self._isolates.get(isolate.name) is isolate:
            self._end(isolate, reason)

    def _end(self, isolate: Isolate, reason: str) -> None:
        del self._isolates[isolate.name]
        if self.recorder is not None:
            self.recorder.ended(isolate.name)
        self._peak(isolate)
        isolate.lose(reason)

        async def end() -> None:
            try:
                await isolate.ended()
            finally:
                self._ending.pop(isolate.name, None)

        # Outside of any event: what ends an isolate is not part of it.
        self._ending[isolate.name] = asyncio.get_running_loop().create_task(
            end(), context=contextvars.Context()
        )

    def _peak(self, isolate: Isolate) -> MemoryUse:
        peak = max(
            isolate.meter.peak, self._peaks.get(isolate.name, isolate.meter.peak), key=lambda use: use.total
        )
        self._peaks[isolate.name] = peak
        return peak

    def is_ending(self, worker: str, class_name: str, id: str, owner: Owner) -> None:
        """Notes that an object's last instance has not ended yet."""
        self._ending_objects[worker, class_name, id] = owner

    def ending(self, worker: str, class_name: str, id: str) -> Owner | None:
        """The object's last instance, if it may still be ending."""
        return self._ending_objects.get((worker, class_name, id))

    def count_request(self, change: int) -> None:
        """Counts requests that are being handled."""
        self._requests += change

    def opened(self, stream: ReadableStream) -> None:
        """Counts a body as open until it ends."""
        self._bodies.add(stream)

    async def _drain(self) -> None:
        deadline = asyncio.get_running_loop().time() + self._drain_seconds
        while (left := deadline - asyncio.get_running_loop().time()) > 0:
            contexts = [event for isolate in self._isolates.values() for event in isolate.contexts]
            background = {task for event in contexts for task in event.background}
            if not background:
                return
            await asyncio.wait(background, timeout=left)

    def _config(self, worker: str) -> WorkerConfig:
        config = self.workers.get(worker)
        if config is None:
            raise EmulatorError(
                f"the cluster has no Worker {worker!r}; it has {', '.join(sorted(self.workers))}"
            )
        return config

    def _env(self, config: WorkerConfig) -> dict[str, Any]:
        env: dict[str, Any] = dict(config.vars)
        site = config.name
        for name, bucket in config.r2.items():
            env[name] = R2Bucket(partial(self.bucket, bucket), self.faults, f"{site}>{bucket}")
        for name, namespace in config.kv.items():
            env[name] = KVNamespace(partial(self.key_values, namespace), self.faults, f"{site}>{namespace}")
        for name in config.services:
            service = config.service(name)
            env[name] = Fetcher(self, ServiceTarget(self, service.worker, service.entrypoint))
        for name in config.objects:
            env[name] = DurableObjectNamespace(self, *config.object_class(name))
        return env

    def _object_classes(self) -> set[tuple[str, str]]:
        return {config.object_class(name) for config in self.workers.values() for name in config.objects}

    def _check_bindings(self) -> None:
        for config in self.workers.values():
            others = {name: config.service(name).worker for name in config.services}
            others |= {name: config.object_class(name)[0] for name in config.objects}
            for binding, worker in others.items():
                if worker not in self.workers:
                    raise EmulatorError(
                        f"Worker {config.name}: binding {binding} means Worker {worker!r}, which is not in "
                        "the cluster"
                    )


def _make_engine(kind: EngineKind, limit: int) -> Host:
    if kind == "wasm":
        from engine.wasm import WasmEngine

        return WasmEngine(limit)
    from engine.native import NativeEngine

    return NativeEngine(limit)


def _to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
