from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from core_support import knot_of, run
from station_support import OneStation, station_on

from saved import QUIET_SECONDS, SavedSessions

RNG = np.random.default_rng(7)
ROWS = RNG.standard_normal((40, 96)).astype("<f4")


class Memory:
    """A Durable Object's storage, in a dictionary."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.writes = 0

    async def get(self, key: str) -> bytes | None:
        return self.values.get(key)

    async def put(self, key: str, value: bytes) -> None:
        assert len(value) < 1_000_000
        await asyncio.sleep(0)
        self.writes += 1
        self.values[key] = value

    async def delete(self, key: str) -> None:
        self.values.pop(key, None)

    async def keys(self, prefix: str) -> list[str]:
        return sorted(key for key in self.values if key.startswith(prefix))


_stations: list[OneStation] = []


def to_end(work: Coroutine[Any, Any, None]) -> None:
    """Runs a test, and ends what would wait for its sessions to be quiet."""

    async def main() -> None:
        try:
            await work
        finally:
            for one in _stations:
                for task in list(one.background.tasks):
                    task.cancel()
                await one.background.drain()
            _stations.clear()

    run(main())


async def restarted(path: Path, storage: Memory, **variables: str) -> OneStation:
    one = await station_on(path, **variables)
    await one.station.keep_sessions_in(storage, one.background, one.clock)
    _stations.append(one)
    return one


def saved(one: OneStation) -> SavedSessions:
    assert one.station.saved is not None
    return one.station.saved


async def settle() -> None:
    for _ in range(200):
        await asyncio.sleep(0)


@pytest.fixture(scope="module")
def path() -> Path:
    return knot_of("qwen2")


def test_full_pages_come_back_after_a_restart_and_go_on_to_the_bit(path: Path) -> None:
    async def main() -> None:
        storage = Memory()
        before = await restarted(path, storage)
        await before.forward("s", 0, ROWS[:32])
        await settle()
        expected = await before.forward("s", 32, ROWS[32:34])
        after = await restarted(path, storage)
        found = await after.forward("s", 32, ROWS[32:34])
        assert found.tobytes() == expected.tobytes()
        assert saved(after).counts.restored == 1

    to_end(main())


def test_a_page_that_is_not_full_is_written_once_its_session_is_quiet(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        storage = Memory()
        before = await restarted(path, storage)
        naps: list[float] = []
        real = asyncio.sleep

        async def nap(seconds: float) -> None:
            if seconds > 0:
                naps.append(seconds)
                before.clock.now += seconds
            await real(0)

        monkeypatch.setattr(asyncio, "sleep", nap)
        await before.forward("s", 0, ROWS[:5])
        for _ in range(50):
            await real(0)
        assert sum(naps) >= QUIET_SECONDS
        expected = await before.forward("s", 5, ROWS[5:6])
        after = await restarted(path, storage)
        assert (await after.forward("s", 5, ROWS[5:6])).tobytes() == expected.tobytes()

    to_end(main())


def test_a_session_that_was_saved_less_far_than_a_step_expects_is_a_cache_miss(path: Path) -> None:
    async def main() -> None:
        storage = Memory()
        before = await restarted(path, storage)
        await before.forward("s", 0, ROWS[:20])
        await settle()
        after = await restarted(path, storage)
        assert await after.status("s", 20, ROWS[20:21]) == "cache_miss"
        # What is there can be continued from the end of its last full page, or from anywhere before.
        assert await after.status("s", 16, ROWS[16:17]) == "ok"

    to_end(main())


@pytest.mark.parametrize("spoil", ["flip", "cut", "drop", "record"])
def test_pages_that_are_not_what_was_written_are_never_used(path: Path, spoil: str) -> None:
    async def main() -> None:
        storage = Memory()
        before = await restarted(path, storage)
        await before.forward("s", 0, ROWS[:32])
        await settle()
        page = next(key for key in storage.values if key.startswith("page/"))
        data = storage.values[page]
        if spoil == "flip":
            storage.values[page] = bytes([data[0] ^ 1]) + data[1:]
        elif spoil == "cut":
            storage.values[page] = data[:-4]
        elif spoil == "drop":
            del storage.values[page]
        else:
            storage.values[next(key for key in storage.values if key.startswith("session/"))] = b"{}"
        after = await restarted(path, storage)
        free = after.free_pages
        assert await after.status("s", 32, ROWS[32:33]) == "cache_miss"
        assert after.free_pages == free

    to_end(main())


def test_an_ended_session_leaves_nothing_in_storage_and_does_not_come_back(path: Path) -> None:
    async def main() -> None:
        storage = Memory()
        before = await restarted(path, storage)
        await before.forward("s", 0, ROWS[:32])
        await settle()
        assert storage.values
        assert await before.status("s", 0) == "ok"
        await settle()
        assert storage.values == {}
        assert await before.status("s", 32, ROWS[32:33]) != "ok"

    to_end(main())


def test_a_session_cut_and_written_anew_comes_back_as_it_was_last(path: Path) -> None:
    async def main() -> None:
        storage = Memory()
        before = await restarted(path, storage)
        await before.forward("s", 0, ROWS[:32])
        await settle()
        await before.forward("s", 8, ROWS[20:40])
        await before.forward("s", 28, ROWS[:4], step="fill")
        await settle()
        expected = await before.forward("s", 32, ROWS[4:5])
        after = await restarted(path, storage)
        assert (await after.forward("s", 32, ROWS[4:5])).tobytes() == expected.tobytes()

    to_end(main())


def test_a_session_cut_and_lost_before_it_was_written_anew_does_not_come_back_as_it_was_before(
    path: Path,
) -> None:
    async def main() -> None:
        storage = Memory()
        before = await restarted(path, storage)
        await before.forward("s", 0, ROWS[:16])
        await settle()
        # Cut to 8 and continued otherwise, to a page that is not full: nothing of this is written yet.
        await before.forward("s", 8, ROWS[20:24], step="another way")
        await settle()
        expected = await before.forward("s", 12, ROWS[24:25])
        after = await restarted(path, storage)
        [answer] = await after.send(after.step("s", 12, ROWS[24:25]))
        assert answer.envelope["status"] == "cache_miss", "what was saved is of the way not taken"
        # Replayed, it is what it would have been, and it comes back again.
        await after.forward("s", 0, np.concatenate([ROWS[:8], ROWS[20:24]]), epoch=1)
        assert (await after.forward("s", 12, ROWS[24:25], epoch=1)).tobytes() == expected.tobytes()

    to_end(main())


def test_a_late_duplicate_does_not_cost_what_was_saved(path: Path) -> None:
    async def main() -> None:
        storage = Memory()
        before = await restarted(path, storage, ANSWER_BYTES="0")
        await before.forward("s", 0, ROWS[:16])
        await before.forward("s", 16, ROWS[16:32])
        await settle()
        writes = storage.writes
        await before.forward("s", 0, ROWS[:16])
        await settle()
        assert storage.writes == writes
        after = await restarted(path, storage)
        await after.forward("s", 32, ROWS[32:33])
        assert saved(after).counts.restored == 1

    to_end(main())


def test_a_session_that_is_ended_while_it_is_read_back_stays_ended(path: Path) -> None:
    async def main() -> None:
        storage = Memory()
        before = await restarted(path, storage)
        await before.forward("s", 0, ROWS[:16])
        await settle()
        after = await restarted(path, storage)
        pages, original = after.free_pages, storage.get

        async def get(key: str) -> bytes | None:
            if key.startswith("page/"):
                await after.send(after.step("s", 0))
            return await original(key)

        storage.get = get  # type: ignore[method-assign]
        [answer] = await after.send(after.step("s", 16, ROWS[16:17]))
        assert answer.envelope["status"] == "cancelled"
        assert after.free_pages == pages
        assert len(after.station.sessions) == 0

    to_end(main())


def test_what_another_knot_or_an_old_session_left_is_cleaned_at_the_start(path: Path) -> None:
    async def main() -> None:
        storage = Memory()
        before = await restarted(path, storage)
        await before.forward("s", 0, ROWS[:32])
        await settle()
        after = await station_on(path)
        after.clock.now = before.clock.now + 10_000
        await after.station.keep_sessions_in(storage, after.background, after.clock)
        assert storage.values == {}

    to_end(main())


def test_nothing_is_written_where_the_budget_is_zero(path: Path) -> None:
    async def main() -> None:
        storage = Memory()
        one = await restarted(path, storage, SAVE_BYTES="0")
        await one.forward("s", 0, ROWS[:32])
        await settle()
        assert storage.writes == 0
        assert one.station.saved is None

    to_end(main())


def test_storage_that_fails_costs_a_replay_and_nothing_else(path: Path) -> None:
    class Broken(Memory):
        async def put(self, key: str, value: bytes) -> None:
            raise RuntimeError("storage is full")

    async def main() -> None:
        one = await restarted(path, Broken())
        await one.forward("s", 0, ROWS[:32])
        await settle()
        assert await one.status("s", 32, ROWS[32:33]) == "ok"
        assert saved(one).counts.failed > 0

    to_end(main())
