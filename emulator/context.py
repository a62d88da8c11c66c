"""One event in an isolate: a request, a call or an alarm, with everything that it started.

Whoever runs code of a Worker runs it inside a context; bindings ask `current` whom to charge.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import weakref
from collections.abc import Awaitable, Callable, Coroutine
from typing import TYPE_CHECKING, Any, TypeVar

from emulator.errors import DurableObjectAbort, WorkerLost
from emulator.limits import Spending
from emulator.loader import loading
from emulator.streams import PIECE, ReadableStream

if TYPE_CHECKING:
    from emulator.isolate import Isolate

T = TypeVar("T")
_current: contextvars.ContextVar[IoContext | None] = contextvars.ContextVar("emulator_io", default=None)


class Owner:
    """Tasks and received bodies that end together: with a request, or with a Durable Object.

    `active` counts the events that are going on; `on_activity` is told when it changes.
    """

    def __init__(self) -> None:
        self.lost: str | None = None
        self.active = 0
        self.on_activity: Callable[[], None] | None = None
        self.tasks: set[asyncio.Task[Any]] = set()
        self.streams: weakref.WeakSet[ReadableStream] = weakref.WeakSet()

    def lose(self, reason: str, spared: asyncio.Task[Any] | None = None) -> None:
        """Stops every task but `spared`; whatever is still called raises `WorkerLost`."""
        self.lost = self.lost or reason
        for task in list(self.tasks):
            if task is not spared:
                task.cancel(reason)

    async def ended(self, seconds: float) -> bool:
        """Waits until every task has ended; False when some will not."""
        here = _task_here()
        tasks = {task for task in self.tasks if task is not here}
        if tasks:
            await asyncio.wait(tasks, timeout=seconds)
        return all(task.done() for task in tasks)


class IoContext:
    """What one event may use and has started.

    It ends when its handler is done, its answer's body has been read and its `waitUntil` work is finished.
    Whatever else a request started is stopped then, as on Workers; with an object it goes on.
    """

    def __init__(self, isolate: Isolate, label: str, spending: Spending, owner: Owner | None = None) -> None:
        self.isolate = isolate
        self.label = label
        self.spending = spending
        self.owner = owner or Owner()
        self.background: set[asyncio.Future[Any]] = set()
        self._of_object = owner is not None
        self._holds = 0
        self._counted = 0
        self._expiry: asyncio.TimerHandle | None = None
        self._variables = contextvars.Context()
        self._variables.run(_current.set, self)

    def spawn(self, coroutine: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]:
        """Starts a task that belongs to this event."""
        if self.owner.lost is not None:
            coroutine.close()
            raise WorkerLost(self.owner.lost)
        loop = asyncio.get_running_loop()
        return loop.create_task(coroutine, name=f"{self.label}: {name}", context=self._variables.copy())

    def run_sync(self, function: Callable[..., T], *args: Any) -> T:
        """Runs a function as this event."""
        return self._variables.copy().run(function, *args)

    def wait_until(self, work: Awaitable[Any]) -> None:
        """Keeps the event alive until `work` is done."""
        if inspect.iscoroutine(work):
            task: asyncio.Future[Any] = self.spawn(work, "waitUntil")
        elif inspect.isawaitable(work):
            task = asyncio.ensure_future(work)
        else:
            raise TypeError(f"waitUntil takes something to be awaited, found {type(work).__name__}")
        self.hold()
        self.background.add(task)
        task.add_done_callback(self._background_done)

    def _background_done(self, task: asyncio.Future[Any]) -> None:
        self.background.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, DurableObjectAbort):
            self.isolate.report(f"{self.label}: waitUntil work failed", error)
        self.release()

    def hold(self) -> None:
        """Keeps the event from ending."""
        self._holds += 1
        if self._holds == 1:
            self.isolate.contexts.add(self)
            self._activity(1)

    def release(self) -> None:
        """Gives one `hold` back."""
        self._holds -= 1
        if self._holds == 0:
            self._end()
        elif self._expiry is None and self._holds == len(self.background) and not self._of_object:
            # The answer is out; what is left are promises to `waitUntil`, which get some time and no more.
            seconds = self.isolate.limits.wait_until_seconds
            self._expiry = asyncio.get_running_loop().call_later(seconds, self._expire)

    def _activity(self, change: int) -> None:
        self.owner.active += change
        if self.owner.on_activity is not None:
            self.owner.on_activity()

    def adopt(self, stream: ReadableStream) -> None:
        """Takes over a body from elsewhere: given up with its owner, if nobody reads it to its end."""
        if not stream.finished and stream not in self.owner.streams:
            self.owner.streams.add(stream)
            if not stream.whole:
                # What of it passes through at a time.
                self.count(PIECE)
                stream.on_end(lambda: self.uncount(PIECE))

    def disown(self, stream: ReadableStream) -> None:
        """Hands a body on."""
        self.owner.streams.discard(stream)

    def count(self, size: int) -> None:
        """Counts bytes of bodies that this event holds, until it ends."""
        self._counted += size
        self.isolate.meter.in_bodies(size)

    def uncount(self, size: int) -> None:
        """Takes back what `count` counted."""
        size = min(size, self._counted)
        self._counted -= size
        self.isolate.meter.in_bodies(-size)

    def _expire(self) -> None:
        seconds = self.isolate.limits.wait_until_seconds
        self.isolate.report(f"{self.label}: waitUntil work was stopped {seconds:g} s after the answer")
        for task in list(self.background):
            task.cancel()

    def _end(self) -> None:
        if self._expiry is not None:
            self._expiry.cancel()
        self.uncount(self._counted)
        self.isolate.contexts.discard(self)
        self._activity(-1)
        if self._of_object:
            return
        here = _task_here()
        for task in list(self.owner.tasks):
            if not task.done() and task is not here:
                task.cancel()
                self.isolate.report(
                    f"{task.get_name()} was stopped with its request; work that goes on needs waitUntil"
                )
        for stream in list(self.owner.streams):
            self.isolate.give_up(stream)


def current() -> IoContext:
    """The event that is running. Raises where there is none, as Workers do at top level."""
    context = _current.get()
    if context is None or loading() is not None:
        raise RuntimeError(
            "Disallowed operation called within global scope: fetch, bindings, timers and entropy work "
            "only while a request is handled"
        )
    if context.owner.lost is not None:
        raise WorkerLost(context.owner.lost)
    return context


def current_or_none() -> IoContext | None:
    """The event that is running, or None outside of any."""
    return _current.get()


def _task_here() -> asyncio.Task[Any] | None:
    try:
        return asyncio.current_task()
    except RuntimeError:
        return None


_installed: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, int] = weakref.WeakKeyDictionary()


def track_tasks(loop: asyncio.AbstractEventLoop) -> None:
    """Makes every task of a loop known to the event that starts it. Undone by `untrack_tasks`."""
    _installed[loop] = _installed.get(loop, 0) + 1
    if _installed[loop] == 1:
        loop.set_task_factory(_task_of_event)


def untrack_tasks(loop: asyncio.AbstractEventLoop) -> None:
    """Takes back one `track_tasks`."""
    _installed[loop] -= 1
    if not _installed[loop]:
        del _installed[loop]
        loop.set_task_factory(None)


def _task_of_event(loop: asyncio.AbstractEventLoop, coro: Any, **options: Any) -> asyncio.Task[Any]:
    task: asyncio.Task[Any] = asyncio.Task(coro, loop=loop, **options)
    variables: contextvars.Context | None = options.get("context")
    event = _current.get() if variables is None else variables.get(_current)
    if event is not None:
        event.owner.tasks.add(task)
        task.add_done_callback(event.owner.tasks.discard)
    return task
