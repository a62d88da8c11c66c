"""Memory, limits, faults and the engine: what is counted, what is enforced, and what a seed repeats."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from emulator_support import body_of, get, run, running, settled, until, worker

from emulator import Cluster, Faults, Limits, ObjectBinding, WorkerConfig
from emulator.errors import LimitExceeded
from emulator.faults import KINDS
from emulator.limits import Spending
from emulator.meter import BASELINE_BYTES, Meter
from engine.threads import run_to_end
from protocol.calls import Call
from protocol.ports import PeerLost

pytestmark = pytest.mark.filterwarnings("error")
MB = 1_000_000


def part(name: str = "probe", other: str = "probe", objects: ObjectBinding | str = "Worker") -> WorkerConfig:
    return worker(
        name,
        "resources_entry",
        r2={"BUCKET": "bucket"},
        kv={"CACHE": "cache"},
        services={"OTHER": other},
        objects={"WORKER": objects},
    )


async def value(cluster: Cluster, path: str, name: str = "probe") -> Any:
    return json.loads(await body_of(await get(cluster, path, name)))


def test_an_isolate_that_keeps_too_much_is_ended_and_the_error_says_where_its_memory_is(
    tmp_path: Path,
) -> None:
    async def scenario() -> None:
        async with running(tmp_path, part()) as cluster:
            await value(cluster, f"/hold?{60 * MB}")
            with pytest.raises(PeerLost, match=r"128\.0 MB.*kept 70\.0 MB"):
                await value(cluster, f"/hold?{10 * MB}")
            assert await value(cluster, "/hold?1000") == "held"
            now, peak = cluster.memory()["probe"]
            assert now is not None
            assert (now.held, peak.held) == (1000, 70 * MB)

    run(scenario)


def test_without_enforcement_memory_is_counted_and_nothing_ends(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path, part(), enforce=False) as cluster:
            await value(cluster, f"/hold?{200 * MB}")
            await value(cluster, f"/hold?{-150 * MB}")
            now, peak = cluster.memory()["probe"]
            assert now is not None
            assert (now.held, peak.held) == (50 * MB, 200 * MB)
            assert peak.total == BASELINE_BYTES + 200 * MB + peak.bodies

    run(scenario)


def test_bodies_count_where_they_are_held_and_no_longer(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path, part("probe", "other"), part("other")) as cluster:
            assert await value(cluster, f"/send?{3 * MB}") == 3 * MB
            memory = cluster.memory()
            assert memory["other"][1].bodies >= 3 * MB
            assert memory["other"][0] is not None
            assert memory["other"][0].bodies == 0
            await get(cluster, f"/give?{5 * MB}", "other")
            assert cluster.memory()["other"][1].bodies >= 5 * MB

    run(scenario)


def test_a_body_too_large_for_an_isolate_ends_it(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path, part(), limits=Limits(memory_bytes=70 * MB)) as cluster:
            with pytest.raises(PeerLost, match=r"bodies 9\.0 MB"):
                await cluster.fetch("probe", Call("POST", "/take", bytes(9 * MB)))

    run(scenario)


def test_the_meter_tells_once_and_keeps_the_parts_of_its_peak() -> None:
    told: list[str] = []
    meter = Meter("it", 100 * MB, told.append)
    meter.of_engine(20 * MB)
    meter.in_bodies(30 * MB)
    meter.in_bodies(-30 * MB)
    meter.held(5 * MB)
    assert len(told) == 1
    assert (meter.peak.engine, meter.peak.bodies, meter.peak.held) == (20 * MB, 30 * MB, 0)
    assert (meter.use().engine, meter.use().bodies, meter.use().held) == (20 * MB, 0, 5 * MB)


@pytest.mark.parametrize("kind", ["native", pytest.param("wasm", marks=pytest.mark.wasm)])
def test_all_of_a_worker_share_one_engine_whose_errors_are_the_bundles_own(tmp_path: Path, kind: str) -> None:
    async def scenario() -> None:
        async with running(tmp_path, part("probe"), part("two"), engine=kind) as cluster:
            found = await value(cluster, f"/engine?{2 * MB},{MB}")
            assert found[:3] == ["abc", "abc", True]
            now, _ = cluster.memory()["probe"]
            assert now is not None
            assert now.engine == found[3] >= MB
            name, module, sentence = await value(cluster, f"/engine?{2 * MB},{3 * MB}")
            assert name == "OverBudget"
            assert module.startswith("isolate_")
            assert sentence
            found = await value(cluster, f"/engine?{MB},{MB}")
            assert found[0] == "ValueError"
            assert "2000000 bytes, another of 1000000" in found[1]
            assert (await value(cluster, f"/engine?{MB},1000", "two"))[0] == "abc"

    run(scenario)


class SlowHost:
    """An engine whose one call runs on a thread until it is let go."""

    def __init__(self) -> None:
        self.running = 0
        self.most = 0
        self.go = threading.Event()

    def memory_bytes(self) -> int:
        return 1000

    def call(self, name: str, *args: int) -> int:
        self.running += 1
        self.most = max(self.most, self.running)
        self.go.wait(10)
        time.sleep(0.01)
        self.running -= 1
        return 0

    async def compute(self, name: str, *args: int) -> int:
        return await run_to_end(self.call, name, *args)

    read = write = view = call


@pytest.mark.parametrize("end", ["restart", "evict"])
def test_an_engines_call_runs_to_its_end_before_anything_new_begins(
    tmp_path: Path, end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = SlowHost()

    async def scenario() -> None:
        async def make_engine(limit: int) -> SlowHost:
            return host

        async with running(tmp_path, part()) as cluster:
            monkeypatch.setattr(cluster, "make_engine", make_engine)
            computing = asyncio.ensure_future(value(cluster, "/through?compute"))
            await until(lambda: host.running, "the engine computes")
            stopping = asyncio.ensure_future(
                cluster.restart_object("probe", "Worker", "w") if end == "restart" else cluster.evict("probe")
            )
            await asyncio.sleep(0.01)
            again = asyncio.ensure_future(value(cluster, "/through?compute"))
            await asyncio.sleep(0.02)
            assert host.running == 1
            assert not stopping.done()
            host.go.set()
            await stopping
            with pytest.raises(PeerLost):
                await computing
            assert await again == "computed"
            assert host.most == 1

    run(scenario)


def test_a_request_makes_so_many_subrequests_and_no_more(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path, part(), limits=Limits(subrequests=5)) as cluster:
            assert await value(cluster, "/subrequests?5") == [5, ""]
            number, sentence = await value(cluster, "/subrequests?6")
            assert number == 5
            assert "Too many subrequests" in sentence

    run(scenario)


def test_each_event_of_an_object_has_its_own_subrequests(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path, part(), limits=Limits(subrequests=4)) as cluster:
            for _ in range(3):
                assert await value(cluster, "/through?many") == "done"

    run(scenario)


def test_the_default_is_ten_thousand_subrequests_and_worker_invocations_can_be_bounded() -> None:
    spending = Spending(Limits())
    for _ in range(10_000):
        spending.subrequest()
    with pytest.raises(LimitExceeded, match="10000"):
        spending.subrequest()
    few = Spending(Limits(worker_invocations=2))
    few.invocation()
    few.invocation()
    with pytest.raises(LimitExceeded, match="2, this was one more"):
        few.invocation()


def test_more_connections_than_six_wait_for_their_turn(tmp_path: Path) -> None:
    async def orders(connections: int) -> list[int]:
        faults = Faults(3, {"r2_slow": 1}, slow_seconds=0.04)
        folder = tmp_path / str(connections)
        async with running(folder, part(), limits=Limits(connections=connections), faults=faults) as cluster:
            return await value(cluster, "/gets?8")

    async def scenario() -> None:
        assert await orders(1) == list(range(8))
        assert (await orders(8)) != list(range(8))
        assert Limits().connections == 6

    run(scenario)


def test_a_lost_call_never_arrives_and_a_lost_answer_did(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path / "a", part(), faults=Faults(5, {"lost_call": 0.4})) as cluster:
            found = await value(cluster, "/counted?30")
            lost = found.count(None)
            assert 0 < lost < 30
            assert max(each[0] for each in found if each) == 30 - lost
        async with running(tmp_path / "b", part(), faults=Faults(5, {"lost_answer": 0.4})) as cluster:
            found = await value(cluster, "/counted?30")
            assert found.count(None)
            answered = [(number, each) for number, each in enumerate(found, 1) if each]
            assert all(each[0] == number for number, each in answered)

    run(scenario)


def test_a_doubled_call_is_carried_out_twice_and_its_second_answer_counts(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path, part(), faults=Faults(3, {"double_call": 0.4})) as cluster:
            found = await value(cluster, "/counted?20")
            struck = [fault.number for fault in cluster.faults.injected]  # type: ignore[union-attr]
            assert 0 < len(struck) < 20
            counts = [calls for calls, _ in found]
            steps = [after - before for before, after in pairwise([0, *counts])]
            assert steps == [2 if number in struck else 1 for number in range(20)]
            assert await value(cluster, "/send?10") == 10

    run(scenario)


@pytest.mark.parametrize("kind", ["restart", "evict"])
def test_restarts_and_evictions_take_attributes_and_leave_storage(tmp_path: Path, kind: str) -> None:
    async def scenario() -> None:
        faults = Faults(2, {kind: 0.3})
        caller = part("probe", "other", ObjectBinding("Worker", "other"))
        async with running(tmp_path, caller, part("other"), faults=faults) as cluster:
            found = await value(cluster, "/counted?20")
            struck = {fault.number for fault in faults.injected}
            assert 0 < len(struck) < 20
            for number, (calls, kept) in enumerate(found):
                assert kept == number + 1
                assert (calls == 1) == (number == 0 or number in struck)

    run(scenario)


def test_a_worker_whose_own_call_evicts_it_is_lost_and_comes_back(tmp_path: Path) -> None:
    async def scenario() -> None:
        faults = Faults(1, {"evict": 1})
        async with running(tmp_path, part(), faults=faults) as cluster:
            with pytest.raises(PeerLost, match="evicted"):
                await value(cluster, "/send?10")
            faults.rates.clear()
            assert await value(cluster, "/send?10") == 10

    run(scenario)


def test_stale_reads_see_the_value_before(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path, part(), faults=Faults(4, {"kv_stale": 0.5})) as cluster:
            found = await value(cluster, "/stale?20")
            stale = [number for number, each in enumerate(found) if each != number]
            assert 0 < len(stale) < 20
            assert all(found[number] == (number - 1 if number else None) for number in stale)

    run(scenario)


def test_a_seed_repeats_its_faults_and_another_seed_has_others(tmp_path: Path) -> None:
    rates = {"lost_call": 0.2, "lost_answer": 0.2, "restart": 0.2, "slow_call": 0.3}

    async def once(seed: int, folder: str) -> tuple[list[Any], list[Any]]:
        faults = Faults(seed, rates, slow_seconds=0.001)
        async with running(tmp_path / folder, part(), faults=faults) as cluster:
            return await value(cluster, "/counted?25"), list(faults.injected)

    async def scenario() -> None:
        first, second, other = await once(7, "a"), await once(7, "b"), await once(8, "c")
        assert first == second
        assert first != other
        assert len(first[1]) > 5

    run(scenario)


def test_what_strikes_one_site_does_not_depend_on_others() -> None:
    alone, mixed = Faults(1, {"lost_call": 0.5}), Faults(1, {"lost_call": 0.5})
    expected = [alone.strikes("lost_call", "a") for _ in range(100)]
    found = []
    for _ in range(100):
        mixed.strikes("lost_call", "b")
        found.append(mixed.strikes("lost_call", "a"))
    assert found == expected
    assert 20 < sum(expected) < 80


def test_a_plan_of_unknown_faults_is_refused() -> None:
    with pytest.raises(ValueError, match=f"known are {', '.join(list(KINDS)[:2])}"):
        Faults(1, {"earthquake": 0.1})
    with pytest.raises(ValueError, match="impossible"):
        Faults(1, {"lost_call": 1.5})


def test_nothing_is_left_when_faults_strike_everywhere(tmp_path: Path) -> None:
    rates = {kind: 0.2 for kind in KINDS if kind != "evict"}

    async def scenario() -> None:
        async with running(tmp_path, part(), faults=Faults(11, rates, slow_seconds=0.002)) as cluster:
            (tmp_path / "k").write_bytes(b"x")
            cluster.bucket("bucket").register("k", tmp_path / "k")
            paths = ("/counted?5", "/gets?5", "/stale?5", "/through?many")
            results = await asyncio.gather(
                *(get(cluster, path) for path in paths * 6), return_exceptions=True
            )
            assert all(isinstance(result, PeerLost) or result.status == 200 for result in results)  # type: ignore[union-attr]
            await settled(cluster)

    run(scenario)
