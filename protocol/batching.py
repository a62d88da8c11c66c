"""Steps of many sessions meet here, and go through the layers together: one pass over the weights for all.

Requests may only wait for each other inside a Durable Object, so that is where this runs. Decode steps go
first and prefill fills what is left of a batch, so that a long prompt never holds up those who are writing;
nor do they hold it up for ever, since what was passed over a few times goes first.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Generic, Protocol, TypeVar

from protocol.ports import Background
from protocol.steps import Refusal, RefusalKind


class Work(Protocol):
    """Something that takes rows of a batch."""

    @property
    def rows(self) -> int:
        """Rows of the batch that it takes."""
        ...

    @property
    def session(self) -> str:
        """Whose it is: a session has one piece of work in a batch."""
        ...

    @property
    def urgent(self) -> bool:
        """Whether it goes before others: somebody waits for its token."""
        ...


W = TypeVar("W", bound=Work)
A = TypeVar("A")


# How often work may be passed over before it goes first: a piece of a prompt as wide as a whole batch would
# never fit beside the steps of those who are writing.
PATIENCE: Final = 4


@dataclass(eq=False)
class _Queued(Generic[W, A]):
    work: W
    answer: asyncio.Future[A] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    passed_over: int = 0

    @property
    def turn(self) -> int:
        """What goes first: work that has waited long enough, then the urgent."""
        return 0 if self.passed_over >= PATIENCE else 1 if self.work.urgent else 2


@dataclass(slots=True)
class Load:
    """What the loop has done: batches, rows in them, most rows and sessions at once, most work waiting."""

    batches: int = 0
    rows: int = 0
    works: int = 0
    rows_peak: int = 0
    sessions_peak: int = 0
    queue_peak: int = 0


class BatchLoop(Generic[W, A]):
    """Collects work and runs it in batches of at most `max_rows` rows, through `run`, one batch at a time.

    `run` answers every piece of work with a value or an exception. A caller that leaves takes its work along,
    unless it is running already.
    """

    def __init__(
        self,
        run: Callable[[Sequence[W]], Awaitable[Sequence[A | Exception]]],
        max_rows: int,
        max_queue: int,
        background: Background,
    ) -> None:
        self._run = run
        self._max_rows = max_rows
        self._max_queue = max_queue
        self._background = background
        self._queue: list[_Queued[W, A]] = []
        self._looping = False
        self._closed = False
        self._idle = asyncio.Event()
        self._idle.set()
        self.load = Load()

    def __len__(self) -> int:
        return len(self._queue)

    async def submit(self, work: W) -> A:
        """Waits for the work's turn; returns its answer. Raises `Refusal` at once when the queue is full."""
        if work.rows > self._max_rows:
            raise Refusal(
                RefusalKind.OVER_BUDGET,
                f"the step has {work.rows} rows, a batch here holds {self._max_rows}; cut it (see /health)",
            )
        if self._closed:
            raise _stopped()
        if len(self._queue) >= self._max_queue:
            raise Refusal(RefusalKind.BUSY, f"{len(self._queue)} steps are waiting; come back later", 500)
        queued: _Queued[W, A] = _Queued(work)
        self._queue.append(queued)
        self.load.queue_peak = max(self.load.queue_peak, len(self._queue))
        try:
            if not self._looping:
                self._background(self._loop())
                self._looping = True
                self._idle.clear()
            return await queued.answer
        finally:
            if queued in self._queue:
                self._queue.remove(queued)

    async def close(self) -> None:
        """Refuses what waits and what comes, and waits for the batch that is running.

        Nobody else may use what the batch uses before this returns.
        """
        self._closed = True
        left, self._queue = self._queue, []
        for queued in left:
            _fail(queued, _stopped())
        await self._idle.wait()

    async def _loop(self) -> None:
        try:
            # Everybody who is ready in this turn of the event loop gets into the first batch.
            await asyncio.sleep(0)
            while batch := self._take():
                await self._serve(batch)
                await asyncio.sleep(0)
        finally:
            self._looping = False
            self._idle.set()
            left, self._queue = self._queue, []
            for queued in left:
                _fail(queued, _stopped())

    def _take(self) -> list[_Queued[W, A]]:
        """The next batch: of every session at most the piece that came first, as far as there is room."""
        first: dict[str, _Queued[W, A]] = {}
        for queued in self._queue:
            if not queued.answer.done():  # a caller that has just left takes its work along
                first.setdefault(queued.work.session, queued)
        taken: list[_Queued[W, A]] = []
        room = self._max_rows
        for queued in sorted(first.values(), key=lambda queued: queued.turn):
            if queued.work.rows <= room:
                taken.append(queued)
                room -= queued.work.rows
            else:
                queued.passed_over += 1
        self._queue = [queued for queued in self._queue if queued not in taken]
        return taken

    async def _serve(self, batch: list[_Queued[W, A]]) -> None:
        self._count(batch)
        try:
            answers = await self._run([queued.work for queued in batch])
            if len(answers) != len(batch):
                raise RuntimeError(f"{len(batch)} pieces of work got {len(answers)} answers")
        except BaseException as error:
            for queued in batch:
                _fail(queued, error if isinstance(error, Exception) else _stopped())
            if not isinstance(error, Exception):
                raise
            return
        for queued, answer in zip(batch, answers, strict=True):
            if isinstance(answer, Exception):
                _fail(queued, answer)
            elif not queued.answer.done():
                queued.answer.set_result(answer)

    def _count(self, batch: list[_Queued[W, A]]) -> None:
        rows = sum(queued.work.rows for queued in batch)
        load = self.load
        load.batches += 1
        load.rows += rows
        load.works += len(batch)
        load.rows_peak = max(load.rows_peak, rows)
        load.sessions_peak = max(load.sessions_peak, len(batch))


def _fail(queued: _Queued[Any, Any], error: Exception) -> None:
    if not queued.answer.done():
        queued.answer.set_exception(error)
        queued.answer.exception()  # a caller that has left will not ask


def _stopped() -> Refusal:
    return Refusal(RefusalKind.LOST, "the part stopped before the step was done; send it again, or replay")
