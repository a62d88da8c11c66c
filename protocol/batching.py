"""Steps of many sessions meet here, and go through the layers together: one pass over the weights for all.

Requests may only wait for each other inside a Durable Object, so that is where this runs. Decode steps go
first and prefill fills what is left of a batch, so that a long prompt never holds up those who are writing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

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


@dataclass(eq=False)
class _Queued(Generic[W, A]):
    work: W
    answer: asyncio.Future[A] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


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
        if len(self._queue) >= self._max_queue:
            raise Refusal(RefusalKind.BUSY, f"{len(self._queue)} steps are waiting; come back later", 500)
        queued: _Queued[W, A] = _Queued(work)
        self._queue.append(queued)
        self.load.queue_peak = max(self.load.queue_peak, len(self._queue))
        if not self._looping:
            self._looping = True
            self._background(self._loop())
        try:
            return await queued.answer
        finally:
            if queued in self._queue:
                self._queue.remove(queued)

    async def _loop(self) -> None:
        try:
            # Everybody who is ready in this turn of the event loop gets into the first batch.
            await asyncio.sleep(0)
            while batch := self._take():
                await self._serve(batch)
                await asyncio.sleep(0)
        finally:
            self._looping = False
            for queued in self._queue:
                queued.answer.cancel()

    def _take(self) -> list[_Queued[W, A]]:
        taken: list[_Queued[W, A]] = []
        sessions: set[str] = set()
        room = self._max_rows
        for queued in sorted(self._queue, key=lambda queued: not queued.work.urgent):
            if queued.work.rows <= room and queued.work.session not in sessions:
                taken.append(queued)
                sessions.add(queued.work.session)
                room -= queued.work.rows
        for queued in taken:
            self._queue.remove(queued)
        return taken

    async def _serve(self, batch: list[_Queued[W, A]]) -> None:
        self._count(batch)
        try:
            answers = await self._run([queued.work for queued in batch])
        except BaseException as error:
            for queued in batch:
                if not queued.answer.done():
                    queued.answer.set_exception(_for_caller(error))
                    queued.answer.exception()  # a caller that has left will not ask
            if not isinstance(error, Exception):
                raise
            return
        for queued, answer in zip(batch, answers, strict=True):
            if queued.answer.done():
                continue
            if isinstance(answer, Exception):
                queued.answer.set_exception(answer)
                queued.answer.exception()
            else:
                queued.answer.set_result(answer)

    def _count(self, batch: list[_Queued[W, A]]) -> None:
        rows = sum(queued.work.rows for queued in batch)
        load = self.load
        load.batches += 1
        load.rows += rows
        load.works += len(batch)
        load.rows_peak = max(load.rows_peak, rows)
        load.sessions_peak = max(load.sessions_peak, len(batch))


def _for_caller(error: BaseException) -> Exception:
    if isinstance(error, Exception):
        return error
    return Refusal(RefusalKind.LOST, "the station stopped while the step was running; replay from token zero")
