"""Where steps of many sessions meet: who goes first, who goes together, and that everybody gets an answer."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from core_support import run
from fake_cluster import Background
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.batching import PATIENCE, BatchLoop
from protocol.steps import Refusal, RefusalKind


@dataclass(frozen=True)
class Step:
    """A piece of work for the tests; `name` tells it from others."""

    name: str
    rows: int = 1
    session: str = ""
    urgent: bool = False


def step(name: str, rows: int = 1, session: str | None = None, urgent: bool = False) -> Step:
    return Step(name, rows, name if session is None else session, urgent)


Answers = Sequence[str | Exception]
Run = Callable[[Sequence[Step]], Awaitable[Answers]]


class Runner:
    """Runs batches when the gate is open, and keeps them: `batches` lists the names."""

    def __init__(self) -> None:
        self.batches: list[list[str]] = []
        self.started, self.gate = asyncio.Event(), asyncio.Event()
        self.gate.set()
        self.answers: Callable[[Sequence[Step]], Answers] = lambda batch: [f"done {s.name}" for s in batch]

    async def __call__(self, batch: Sequence[Step]) -> Answers:
        self.batches.append([s.name for s in batch])
        self.started.set()
        await self.gate.wait()
        return self.answers(batch)


def loop_of(
    runner: Run, rows: int = 8, queue: int = 100, background: Any = None
) -> tuple[BatchLoop[Step, str], Background]:
    back = background or Background()
    return BatchLoop(runner, rows, queue, back), back


async def busy(loop: BatchLoop[Step, str], runner: Runner) -> asyncio.Task[str]:
    """Keeps the loop busy with one piece of work until the gate opens, so that others queue up behind."""
    runner.gate.clear()
    first = asyncio.ensure_future(loop.submit(step("first")))
    await runner.started.wait()
    return first


def case(body: Callable[[], Coroutine[Any, Any, None]]) -> None:
    run(body(), 10)


def test_everybody_who_is_ready_goes_together_and_gets_the_answer_to_their_own_step() -> None:
    async def body() -> None:
        runner = Runner()
        loop, back = loop_of(runner)
        answers = await asyncio.gather(*(loop.submit(step(name)) for name in "abc"))
        assert answers == ["done a", "done b", "done c"]
        assert runner.batches == [["a", "b", "c"]]
        assert (loop.load.batches, loop.load.rows, loop.load.works) == (1, 3, 3)
        assert (loop.load.rows_peak, loop.load.sessions_peak, loop.load.queue_peak) == (3, 3, 3)
        await back.drain()

    case(body)


def test_steps_that_come_while_a_batch_runs_go_together_in_the_next_one() -> None:
    async def body() -> None:
        runner = Runner()
        loop, back = loop_of(runner)
        first = await busy(loop, runner)
        others = [asyncio.ensure_future(loop.submit(step(name))) for name in "abc"]
        await asyncio.sleep(0)
        assert len(loop) == 3
        runner.gate.set()
        await asyncio.gather(first, *others)
        assert runner.batches == [["first"], ["a", "b", "c"]]
        await back.drain()

    case(body)


def test_whoever_waits_for_a_token_goes_before_prompts_which_fill_what_is_left() -> None:
    async def body() -> None:
        runner = Runner()
        loop, back = loop_of(runner, rows=8)
        first = await busy(loop, runner)
        works = [
            step("prompt", 6),
            step("wide prompt", 7),
            step("token", urgent=True),
            step("other", 1, urgent=True),
        ]
        others = [asyncio.ensure_future(loop.submit(work)) for work in works]
        await asyncio.sleep(0)
        runner.gate.set()
        await asyncio.gather(first, *others)
        assert runner.batches[1:] == [["token", "other", "prompt"], ["wide prompt"]]
        await back.drain()

    case(body)


def test_a_prompt_as_wide_as_a_batch_is_not_held_up_for_ever_by_those_who_write() -> None:
    async def body() -> None:
        runner = Runner()
        loop, back = loop_of(runner, rows=4)
        writing = True

        async def write(name: str) -> None:
            while writing:
                await loop.submit(step(name, urgent=True))

        # Two writers: while one's token is made, the other's next step is already waiting.
        writers = [asyncio.ensure_future(write(name)) for name in ("w1", "w2")]
        await asyncio.sleep(0)
        answer = await asyncio.wait_for(loop.submit(step("prompt", 4)), 5)
        writing = False
        await asyncio.gather(*writers)
        assert answer == "done prompt"
        before = next(i for i, batch in enumerate(runner.batches) if "prompt" in batch)
        assert runner.batches[before] == ["prompt"]
        assert PATIENCE <= before <= PATIENCE + 2
        await back.drain()

    case(body)


def test_a_session_has_one_piece_in_a_batch_and_its_pieces_keep_their_order() -> None:
    async def body() -> None:
        runner = Runner()
        loop, back = loop_of(runner, rows=8)
        first = await busy(loop, runner)
        works = [step(f"a{i}", 2, "a") for i in range(3)] + [step("b0", 2, "b"), step("b1", 2, "b")]
        others = [asyncio.ensure_future(loop.submit(work)) for work in works]
        await asyncio.sleep(0)
        runner.gate.set()
        await asyncio.gather(first, *others)
        assert runner.batches[1:] == [["a0", "b0"], ["a1", "b1"], ["a2"]]
        await back.drain()

    case(body)


def test_a_small_later_piece_of_a_session_does_not_overtake_a_large_one_that_does_not_fit_yet() -> None:
    async def body() -> None:
        runner = Runner()
        loop, back = loop_of(runner, rows=8)
        first = await busy(loop, runner)
        works = [step("other", 4), step("large", 8, "a"), step("small", 1, "a")]
        others = [asyncio.ensure_future(loop.submit(work)) for work in works]
        await asyncio.sleep(0)
        runner.gate.set()
        await asyncio.gather(first, *others)
        assert runner.batches[1:] == [["other"], ["large"], ["small"]]
        await back.drain()

    case(body)


def test_a_full_queue_refuses_at_once_and_says_when_to_come_back() -> None:
    async def body() -> None:
        runner = Runner()
        loop, back = loop_of(runner, queue=2)
        first = await busy(loop, runner)
        others = [asyncio.ensure_future(loop.submit(step(name))) for name in "ab"]
        await asyncio.sleep(0)
        with pytest.raises(Refusal) as caught:
            await loop.submit(step("c"))
        assert caught.value.kind is RefusalKind.BUSY
        assert caught.value.retry_after_ms
        assert "2 steps are waiting" in caught.value.detail
        runner.gate.set()
        assert await asyncio.gather(first, *others) == ["done first", "done a", "done b"]
        assert await loop.submit(step("c")) == "done c", "there is room again"
        await back.drain()

    case(body)


def test_a_step_wider_than_a_batch_is_refused_with_both_numbers() -> None:
    async def body() -> None:
        loop, _ = loop_of(Runner(), rows=8)
        with pytest.raises(Refusal, match="has 9 rows, a batch here holds 8") as caught:
            await loop.submit(step("a", 9))
        assert caught.value.kind is RefusalKind.OVER_BUDGET
        assert len(loop) == 0

    case(body)


def test_a_caller_that_leaves_while_waiting_takes_its_step_along() -> None:
    async def body() -> None:
        runner = Runner()
        loop, back = loop_of(runner)
        first = await busy(loop, runner)
        a, b = (asyncio.ensure_future(loop.submit(step(name))) for name in "ab")
        await asyncio.sleep(0)
        a.cancel()
        runner.gate.set()
        assert await asyncio.gather(first, b) == ["done first", "done b"]
        assert a.cancelled()
        assert runner.batches == [["first"], ["b"]]
        assert len(loop) == 0
        await back.drain()

    case(body)


def test_a_caller_that_leaves_while_its_step_runs_hurts_nobody() -> None:
    async def body() -> None:
        runner = Runner()
        loop, back = loop_of(runner)
        runner.gate.clear()
        a, b = (asyncio.ensure_future(loop.submit(step(name))) for name in "ab")
        await runner.started.wait()
        a.cancel()
        await asyncio.sleep(0)
        runner.gate.set()
        assert await b == "done b"
        assert runner.batches == [["a", "b"]]
        await back.drain()

    case(body)


def test_one_refused_step_does_not_sink_the_rest_of_its_batch() -> None:
    async def body() -> None:
        runner = Runner()
        refusal = Refusal(RefusalKind.CACHE_MISS, "not here")
        runner.answers = lambda batch: [refusal if s.name == "b" else f"done {s.name}" for s in batch]
        loop, back = loop_of(runner)
        a, b, c = await asyncio.gather(*(loop.submit(step(n)) for n in "abc"), return_exceptions=True)
        assert (a, b, c) == ("done a", refusal, "done c")
        await back.drain()

    case(body)


def test_a_run_that_raises_fails_its_batch_alone_and_the_loop_goes_on() -> None:
    async def body() -> None:
        runner = Runner()
        loop, back = loop_of(runner, rows=1)

        def answers(batch: Sequence[Step]) -> Answers:
            if batch[0].name == "b":
                raise RuntimeError("the engine broke")
            return [f"done {s.name}" for s in batch]

        runner.answers = answers
        a, b, c = await asyncio.gather(*(loop.submit(step(n)) for n in "abc"), return_exceptions=True)
        assert (a, c) == ("done a", "done c")
        assert isinstance(b, RuntimeError)
        assert await loop.submit(step("d")) == "done d"
        await back.drain()

    case(body)


@pytest.mark.parametrize("count", [0, 1, 3])
def test_a_run_that_answers_too_few_or_too_many_fails_its_batch_and_leaves_nobody_waiting(count: int) -> None:
    async def body() -> None:
        runner = Runner()
        runner.answers = lambda batch: ["done"] * count if len(batch) == 2 else ["done"]
        loop, back = loop_of(runner)
        found = await asyncio.gather(loop.submit(step("a")), loop.submit(step("b")), return_exceptions=True)
        assert all(isinstance(answer, RuntimeError) for answer in found)
        assert await loop.submit(step("c")) == "done"
        await back.drain()

    case(body)


def test_a_loop_that_is_cancelled_refuses_those_who_run_and_those_who_wait_and_starts_again() -> None:
    async def body() -> None:
        runner = Runner()
        loop, back = loop_of(runner, rows=1)
        first = await busy(loop, runner)
        waiting = [asyncio.ensure_future(loop.submit(step(name))) for name in "ab"]
        await asyncio.sleep(0)
        [task] = back.tasks
        task.cancel()
        found = await asyncio.gather(first, *waiting, return_exceptions=True)
        # A refusal and no CancelledError: nobody has cancelled these callers.
        assert [getattr(answer, "kind", answer) for answer in found] == [RefusalKind.LOST] * 3
        assert len(loop) == 0
        runner.gate.set()
        assert await loop.submit(step("c")) == "done c"
        assert runner.batches == [["first"], ["c"]], "what was refused is not run afterwards"
        await asyncio.wait([task])
        await back.drain()

    case(body)


def test_a_step_that_comes_the_moment_a_loop_dies_is_answered_by_the_next_loop() -> None:
    async def body() -> None:
        runner = Runner()
        loop, back = loop_of(runner, rows=1)
        first = await busy(loop, runner)
        waiting = asyncio.ensure_future(loop.submit(step("a")))
        await asyncio.sleep(0)
        [task] = back.tasks
        late: list[asyncio.Task[str]] = []
        task.add_done_callback(lambda _: late.append(asyncio.ensure_future(loop.submit(step("late")))))
        task.cancel()
        await asyncio.gather(first, waiting, return_exceptions=True)
        runner.gate.set()
        assert await late[0] == "done late"
        assert runner.batches == [["first"], ["late"]]
        await back.drain()

    case(body)


def test_a_background_that_cannot_start_the_loop_fails_the_call_and_not_the_ones_after() -> None:
    async def body() -> None:
        runner, back, broken = Runner(), Background(), [True]

        def background(coroutine: Coroutine[Any, Any, None]) -> None:
            if broken:
                broken.clear()
                coroutine.close()
                raise RuntimeError("the isolate is going away")
            back(coroutine)

        loop, _ = loop_of(runner, background=background)
        with pytest.raises(RuntimeError, match="going away"):
            await loop.submit(step("a"))
        assert len(loop) == 0
        assert await loop.submit(step("b")) == "done b"
        assert runner.batches == [["b"]]
        await back.drain()

    case(body)


works = st.builds(Step, st.uuids().map(str), st.integers(1, 8), st.sampled_from("abcde"), st.booleans())


@settings(max_examples=60, deadline=None)
@given(st.lists(works, max_size=30), st.lists(st.integers(0, 29), max_size=6))
def test_no_work_is_lost_doubled_or_too_wide_whatever_comes_and_whoever_leaves(
    pieces: list[Step], leave: list[int]
) -> None:
    async def body() -> None:
        runner = Runner()
        loop, back = loop_of(runner, rows=8)
        rows = {piece.name: piece.rows for piece in pieces}
        whose = {piece.name: piece.session for piece in pieces}
        tasks = [asyncio.ensure_future(loop.submit(piece)) for piece in pieces]
        await asyncio.sleep(0)
        left = {index for index in leave if index < len(tasks)}
        for index in left:
            tasks[index].cancel()
        found = await asyncio.gather(*tasks, return_exceptions=True)
        for index, (piece, answer) in enumerate(zip(pieces, found, strict=True)):
            if index not in left:
                assert answer == f"done {piece.name}"
        ran = [name for batch in runner.batches for name in batch]
        assert sorted(ran) == sorted(p.name for i, p in enumerate(pieces) if i not in left)
        for batch in runner.batches:
            assert sum(rows[name] for name in batch) <= 8
            assert len({whose[name] for name in batch}) == len(batch)
        for session in "abcde":
            order = [p.name for i, p in enumerate(pieces) if p.session == session and i not in left]
            assert [name for name in ran if whose[name] == session] == order
        assert len(loop) == 0
        await back.drain()

    case(body)


def test_a_loop_that_is_closed_finishes_its_batch_and_refuses_the_rest() -> None:
    async def body() -> None:
        runner = Runner()
        loop, back = loop_of(runner)
        first = await busy(loop, runner)
        waiting = asyncio.ensure_future(loop.submit(step("waiting")))
        await asyncio.sleep(0)
        closing = asyncio.ensure_future(loop.close())
        with pytest.raises(Refusal, match="lost"):
            await waiting
        assert not closing.done()
        runner.gate.set()
        assert await first == "done first"
        await closing
        with pytest.raises(Refusal, match="lost"):
            await loop.submit(step("late"))
        assert runner.batches == [["first"]]
        await back.drain()

    case(body)
