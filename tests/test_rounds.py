"""Sessions set out together, nobody is waited for in vain, and prompts beside writers keep their measure."""

from __future__ import annotations

import asyncio

import pytest
from core_support import run

import rounds as rounds_module
from protocol.pieces import TILE_ROWS
from rounds import FIRST_ROWS, Group, Rounds


class Machine:
    """A clock that only passes move: each costs `base` seconds, and `row` more for every row of a prompt."""

    def __init__(self, base: float, row: float, groups: int = 1, max_rows: int = 128, gap: float = 4) -> None:
        self.now = 100.0
        self.base, self.row = base, row
        self.rounds = Rounds(groups, max_rows, lambda: self.now, gap)
        self.passes: list[tuple[int, int]] = []  # (steps, rows beyond one for each)
        self._seen: set[Group] = set()

    async def step(self, name: str, rows: int = 1) -> None:
        async with self.rounds.seat(name, rows) as group:
            await group.together()
            if group not in self._seen:  # the first of them moves the clock for all
                self._seen.add(group)
                prompt = group.rows - group.size
                self.passes.append((group.size, prompt))
                self.now += self.base + self.row * prompt
            await asyncio.sleep(0)
            await asyncio.sleep(0)

    async def writer(self, name: str, steps: int) -> None:
        self.rounds.join(name)
        try:
            for _ in range(steps):
                await self.step(name)
        finally:
            self.rounds.leave(name)

    async def reader(self, name: str, rows: int, most: int = 128) -> list[int]:
        pieces: list[int] = []
        while rows:
            count = min(rows, self.rounds.piece_rows(most))
            pieces.append(count)
            if self.rounds.shared:
                await self.step(name, count)
            else:
                began = self.now
                self.now += self.base + self.row * count
                self.rounds.read(count, self.now - began)
            rows -= count
        return pieces


def test_all_writers_go_in_one_pass_for_each_token() -> None:
    async def main() -> None:
        machine = Machine(1, 0.1)
        await asyncio.gather(*(machine.writer(f"w{i}", 20) for i in range(8)))
        assert machine.passes.count((8, 0)) >= 19
        assert sum(size for size, _ in machine.passes) == 160
        assert machine.rounds.writers == 0
        assert machine.rounds.counts.steps_peak == 8

    run(main())


@pytest.mark.parametrize("gap", [2, 4, 10])
@pytest.mark.parametrize("row", [0.02, 0.1, 0.5])
def test_a_writers_step_takes_at_most_so_many_times_as_long_because_of_a_prompt(
    gap: float, row: float
) -> None:
    """Once a pass without and one with a prompt were measured, no pass takes longer than `gap` times one."""

    async def main() -> None:
        machine = Machine(1.0, row, gap=gap)
        writing = asyncio.ensure_future(machine.writer("a", 400))
        for _ in range(30):
            await asyncio.sleep(0)
        pieces = await machine.reader("z", 500)
        assert sum(pieces) == 500
        await writing
        beside = [rows for size, rows in machine.passes if size == 2]
        assert len(beside) == len(pieces)
        assert max(pieces[:1]) <= FIRST_ROWS
        for rows in beside[4:]:  # what is measured counts more and more
            assert machine.base + row * rows <= gap * machine.base * 1.25 or rows < TILE_ROWS
        if row < 0.5:
            assert max(beside[4:]) >= TILE_ROWS - 1, "and prompts do get on"
        # Between two steps of the writer there is never a pass that is not its own.
        assert all(size >= 1 for size, _ in machine.passes)
        assert len([1 for size, rows in machine.passes if rows and size == 1]) == 0

    run(main())


def test_a_prompt_has_whole_pieces_as_long_as_nobody_writes() -> None:
    async def main() -> None:
        machine = Machine(1.0, 0.1)
        assert await machine.reader("z", 500) == [128, 128, 128, 116]

    run(main())


def test_somebody_who_hangs_holds_the_others_up_only_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounds_module, "OVERDUE_SECONDS", 0.05)

    async def main() -> None:
        machine = Machine(0.01, 0.001)
        hanging = asyncio.Event()

        async def hangs() -> None:
            machine.rounds.join("hangs")
            try:
                async with machine.rounds.seat("hangs"):
                    await hanging.wait()
            finally:
                machine.rounds.leave("hangs")

        stuck = asyncio.ensure_future(hangs())
        await asyncio.sleep(0)  # it has set out alone, and nobody will come back who could be seen
        await asyncio.wait_for(asyncio.gather(machine.writer("a", 10), machine.writer("b", 10)), timeout=10)
        assert not stuck.done()
        hanging.set()
        await stuck
        assert machine.rounds.writers == 0

    run(main())


def test_one_who_leaves_while_waiting_or_under_way_is_not_waited_for() -> None:
    async def main() -> None:
        machine = Machine(1, 0.1)
        tasks = [asyncio.ensure_future(machine.writer(f"w{i}", 50)) for i in range(6)]
        for turns, task in ((7, tasks[0]), (1, tasks[1]), (12, tasks[2])):
            for _ in range(turns):
                await asyncio.sleep(0)
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert all(task.cancelled() or task.result() is None for task in tasks)
        assert machine.rounds.writers == 0
        assert machine.passes[-1] == (3, 0)

    run(main())


def test_where_weights_stay_there_are_as_many_groups_as_stations() -> None:
    async def main() -> None:
        machine = Machine(1, 0.1, groups=3)
        await asyncio.gather(*(machine.writer(f"w{i}", 30) for i in range(6)))
        sizes = [size for size, _ in machine.passes]
        assert sum(sizes) == 180
        assert sizes.count(2) > 50, "six writers are three groups of two"

    run(main())
