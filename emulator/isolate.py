"""An isolate: one Worker's module globals, its engine, its objects and the events that run in it."""

from __future__ import annotations

import asyncio
import json
import time
import traceback
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from emulator.config import WorkerConfig
from emulator.context import IoContext, Owner
from emulator.durable import LiveObject, ObjectId
from emulator.errors import DurableObjectAbort, WorkerFailed, WorkerLost
from emulator.handlers import answer_of, result_of
from emulator.limits import Limits, Spending
from emulator.loader import ModuleSpace
from emulator.meter import Meter
from emulator.sdk import make_module
from emulator.sdk.messages import Request, Response
from emulator.streams import ReadableStream

if TYPE_CHECKING:
    from emulator.cluster import Cluster

T = TypeVar("T")
BOUNDARY = Path(__file__).resolve().parent / "boundary.py"
# How long an isolate may take to end: an engine's call runs to its end.
ENDING_SECONDS = 60.0
LOG_LINES, LOG_SECONDS, LOG_CHARACTERS = 500, 10.0, 2000


class Host(Protocol):
    """An engine as both hosts in CPython offer it (see `engine.host.EngineHost`)."""

    def call(self, name: str, *args: int) -> int: ...  # noqa: D102
    async def compute(self, name: str, *args: int) -> int: ...  # noqa: D102
    def write(self, offset: int, data: bytes | bytearray | memoryview) -> None: ...  # noqa: D102
    def read(self, offset: int, length: int) -> bytes: ...  # noqa: D102
    def view(self, offset: int, length: int) -> memoryview: ...  # noqa: D102
    def memory_bytes(self) -> int: ...  # noqa: D102


class Env:
    """A Worker's bindings and variables, as attributes."""

    def __init__(self, values: dict[str, Any]) -> None:
        self.__dict__.update(values)


class EntrypointContext:
    """`ctx` of an entrypoint."""

    def __init__(self, event: IoContext) -> None:
        self._event = event
        self.props: dict[str, Any] = {}

    def waitUntil(self, work: Any) -> None:  # noqa: N802
        """Keeps the request alive until `work` is done, for a bounded time after the answer."""
        self._event.wait_until(work)

    def passThroughOnException(self) -> None:  # noqa: N802
        """There is no origin to pass to."""
        raise NotImplementedError("ctx.passThroughOnException is not emulated: there is no origin behind it")


class Isolate:
    """One Worker while it runs. Everything in it ends together."""

    def __init__(self, cluster: Cluster, config: WorkerConfig, env: dict[str, Any]) -> None:
        self.cluster = cluster
        self.config = config
        self.name = config.name
        self.limits: Limits = cluster.limits
        self.contexts: set[IoContext] = set()
        self.objects: dict[tuple[str, str], LiveObject] = {}
        self.lost: str | None = None
        self.env = Env(env)
        limit = self.limits.memory_bytes if cluster.enforce else None
        self.recorder = cluster.recorder
        self.meter = Meter(self.name, limit, self._over_memory, self.recorder)
        self._engine: Host | None = None
        self._engine_limit = 0
        self._making_engine = asyncio.Lock()
        self._cleaning: set[asyncio.Task[None]] = set()
        self._log_window, self._log_count = 0.0, 0
        self.modules = ModuleSpace(
            f"Worker {self.name}", config.modules, {"workers": make_module(self.env)}, {"boundary": BOUNDARY}
        )
        # The boundary asks the module `workers` for the isolate that it belongs to.
        self.modules.given("workers").__dict__["_isolate"] = self

    async def fetch(self, request: Request, entrypoint: str = "Default") -> Response:
        """Answers a request. Raises `WorkerLost` and `WorkerFailed`."""
        event = self.event(f"{self.name} {request.method} {request.url}")

        async def handle() -> Response:
            return await answer_of(self._door(event, entrypoint), request, event)

        return await self.run(event, handle)

    async def call(self, method: str, args: list[Any], entrypoint: str = "Default") -> Any:
        """Calls a method of an entrypoint."""
        event = self.event(f"{self.name} {method}()")

        async def handle() -> Any:
            return await result_of(self._door(event, entrypoint), method, args, event)

        return await self.run(event, handle)

    def _door(self, event: IoContext, entrypoint: str) -> Any:
        return self.entry_class(entrypoint)(EntrypointContext(event), self.env)

    def entry_class(self, name: str) -> Any:
        """A class of the entry module. The first call runs the bundle's top level."""
        module = self.modules.load(self.config.entry)
        found = getattr(module, name, None)
        if not isinstance(found, type):
            raise AttributeError(f"Worker {self.name}: {self.config.entry}.py has no class {name}")
        return found

    def object(self, class_name: str, id: ObjectId) -> LiveObject:
        """The live object of that id, made if there is none."""
        if self.lost is not None:
            raise WorkerLost(self.lost)
        key = (class_name, id.hex)
        found = self.objects.get(key)
        if found is None:
            before = self.cluster.ending(self.name, *key)
            found = self.objects[key] = LiveObject(self, class_name, id, before)
        return found

    def event(self, label: str, spending: Spending | None = None, owner: Owner | None = None) -> IoContext:
        """A new event in this isolate."""
        if self.lost is not None:
            raise WorkerLost(self.lost)
        return IoContext(self, label, spending or Spending(self.limits), owner)

    async def run(
        self, event: IoContext, handle: Callable[[], Coroutine[Any, Any, T]], survives: bool = False
    ) -> T:
        """Runs a handler as a task of its own; its caller may leave.

        Then a request is cancelled; a call of an object (`survives`) goes on, and its answer is dropped.
        """
        event.hold()
        try:
            task = event.spawn(handle(), "handler")
        except WorkerLost:
            event.release()
            raise
        task.add_done_callback(lambda _: event.release())
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError:
            task.add_done_callback(self._drop)
            if not survives:
                task.cancel()
            raise
        return self._outcome(event, task)

    def _outcome(self, event: IoContext, task: asyncio.Task[T]) -> T:
        if task.cancelled():
            raise WorkerLost(event.owner.lost or f"{event.label} was cancelled")
        error = task.exception()
        if error is None:
            return task.result()
        if isinstance(error, DurableObjectAbort):
            raise WorkerLost(str(error))
        if event.owner.lost is not None:
            raise WorkerLost(event.owner.lost)
        if isinstance(error, WorkerLost):
            raise error
        if isinstance(error, Exception):
            self.report(f"{event.label} failed", error)
            raise WorkerFailed(f"Worker {self.name}", error) from None
        raise error

    def _drop(self, task: asyncio.Task[Any]) -> None:
        """Takes the answer that nobody waits for any more."""
        if task.cancelled() or task.exception() is not None:
            return
        answer = task.result()
        if isinstance(answer, Response) and answer.body is not None:
            self.give_up(answer.body)

    def give_up(self, stream: ReadableStream) -> None:
        """Cancels a body, without waiting for it."""
        if not stream.finished:
            cleaning = asyncio.get_running_loop().create_task(stream.cancel())
            self._cleaning.add(cleaning)
            cleaning.add_done_callback(self._cleaned)

    def _cleaned(self, task: asyncio.Task[None]) -> None:
        self._cleaning.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.report("a body could not be closed", error)

    async def engine(self, limit: int) -> Host:
        """The isolate's engine, made when it is first asked for."""
        async with self._making_engine:
            if self._engine is None:
                self._engine = await self.cluster.make_engine(limit)
                self._engine_limit = limit
                self.meter.of_engine(self._engine.memory_bytes())
            if self._engine_limit != limit:
                raise ValueError(
                    f"Worker {self.name} has an engine of {self._engine_limit} bytes, another of {limit} was "
                    "asked for: all objects of a Worker share one"
                )
            return self._engine

    def lose(self, reason: str) -> None:
        """Ends everything in the isolate. What still waits for it sees `WorkerLost`."""
        if self.lost is not None:
            return
        self.lost = reason
        for live in self.objects.values():
            live.forget_idleness()
        for owner in self._owners():
            owner.lose(reason)
        for stream in [stream for owner in self._owners() for stream in owner.streams]:
            self.give_up(stream)

    async def ended(self) -> None:
        """Waits until nothing runs here any more, and forgets the modules."""
        for owner in self._owners():
            if not await owner.ended(ENDING_SECONDS):
                self.report(f"Worker {self.name}: a task does not end though it was cancelled")
        while self._cleaning:
            await asyncio.wait(set(self._cleaning))
        self._engine = None
        self.modules.close()

    def _owners(self) -> list[Owner]:
        return list(
            {*(event.owner for event in self.contexts), *(live.owner for live in self.objects.values())}
        )

    def tasks(self) -> int:
        """Tasks that run here."""
        return sum(len(owner.tasks) for owner in self._owners())

    def _over_memory(self, sentence: str) -> None:
        self.report(sentence)
        self.cluster.condemn(self, sentence)
        raise WorkerLost(sentence)

    def report(self, message: str, error: BaseException | None = None) -> None:
        """One line in the log for what nobody else would hear of."""
        if error is None:
            self.log(message, {})
        else:
            self.log(message, {"error": "".join(traceback.format_exception(error))})

    def log(self, message: str, fields: dict[str, Any]) -> None:
        """One line of JSON. Long values are cut, and a flood of lines is dropped but for their number."""
        now = time.monotonic()
        if now - self._log_window > LOG_SECONDS:
            dropped = self._log_count - LOG_LINES
            self._log_window, self._log_count = now, 0
            if dropped > 0:
                self._write("lines were dropped", {"dropped": dropped})
        self._log_count += 1
        if self._log_count <= LOG_LINES:
            self._write(message, fields)

    def _write(self, message: str, fields: dict[str, Any]) -> None:
        line = {"time": round(time.time(), 3), "worker": self.name, "message": _short(message)}
        line |= {name: _short(value) for name, value in fields.items()}
        self.cluster.log(json.dumps(line, ensure_ascii=False, default=str))


def _short(value: Any) -> Any:
    if isinstance(value, bool | int | float | None):
        return value
    text = value if isinstance(value, str) else repr(value)
    if len(text) <= LOG_CHARACTERS:
        return text
    # The end of a traceback says what happened.
    half = LOG_CHARACTERS // 2
    return f"{text[:half]} … {text[-half:]}"
