"""Isolates, objects and requests: what they share, what ends them, and that nothing is left behind."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sqlite3
from pathlib import Path

import pytest
from emulator_support import body_of, get, run, running, settled, until, worker

from emulator import Cluster, EmulatorError, Limits, WorkerConfig
from protocol.calls import Reply
from protocol.ports import PeerLost

pytestmark = pytest.mark.filterwarnings("error")


def part(name: str = "probe", **bindings: object) -> WorkerConfig:
    bindings.setdefault("objects", {"MEETING": "Meeting"})
    return worker(name, "lifecycle_entry", "shared", r2={"BUCKET": "bucket"}, **bindings)


async def value(cluster: Cluster, path: str, name: str = "probe") -> object:
    return json.loads(await body_of(await get(cluster, path, name)))


async def handling(cluster: Cluster, count: int) -> None:
    await until(lambda: cluster.pending().requests == count, f"{count} requests are being handled")


async def eventually(cluster: Cluster, path: str, expected: object) -> None:
    for _ in range(400):
        if await value(cluster, path) == expected:
            return
        await asyncio.sleep(0.005)
    assert await value(cluster, path) == expected


def test_two_workers_share_no_globals_though_they_run_the_same_files(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path, part("one"), part("two")) as cluster:
            first = await value(cluster, "/note?a", "one")
            second = await value(cluster, "/note?b", "two")
            assert isinstance(first, dict)
            assert isinstance(second, dict)
            assert (first["seen"], first["shared"]) == (["a"], ["a"])
            assert (second["seen"], second["shared"]) == (["b"], ["b"])
            assert first["module"] != second["module"]

    run(scenario)


def test_an_entrypoint_and_all_objects_of_a_worker_share_its_globals(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path, part()) as cluster:
            await value(cluster, "/note?a")
            await value(cluster, "/object/x/note?b")
            found = await value(cluster, "/object/y/note?c")
            assert found == {"seen": ["a", "b", "c"], "shared": ["a", "b", "c"], "constructed": 2}

    run(scenario)


def test_an_objects_constructor_ends_before_its_first_request_begins(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path, part()) as cluster:
            found = await asyncio.gather(*(value(cluster, "/object/x/order_of") for _ in range(3)))
            assert found[-1] == ["prepared", "called", "called", "called"]

    run(scenario)


def test_an_object_that_does_not_start_fails_its_callers_with_the_reason_and_is_tried_again(
    tmp_path: Path,
) -> None:
    async def scenario() -> None:
        for breaks in ("constructor", "preparation"):
            config = part(vars={"BREAKS": breaks}, objects={"BROKEN": "Broken"})
            async with running(tmp_path / breaks, config) as cluster:
                found = await value(cluster, "/broken")
                assert isinstance(found, list)
                if breaks == "constructor":
                    assert all("RuntimeError: no start" in each for each in found)
                else:
                    assert "RuntimeError: no preparation" in found[0]
                    assert found[1] == 2

    run(scenario)


def test_requests_of_one_object_interleave_where_they_wait_and_may_wait_for_each_other(
    tmp_path: Path,
) -> None:
    async def scenario() -> None:
        async with running(tmp_path, part()) as cluster:
            waiting = [asyncio.ensure_future(value(cluster, "/object/x/wait")) for _ in range(3)]
            await handling(cluster, 6)
            await value(cluster, "/object/x/open_gate")
            assert await asyncio.gather(*waiting) == ["went on"] * 3

    run(scenario)


def test_a_lock_in_an_object_serves_in_order(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path, part()) as cluster:
            found = await asyncio.gather(*(value(cluster, f"/object/x/locked?{i}") for i in range(3)))
            assert found[-1] == ["prepared", "in 0", "out 0", "in 1", "out 1", "in 2", "out 2"]

    run(scenario)


def test_a_caller_that_leaves_does_not_stop_an_objects_work(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path, part()) as cluster:
            asking = asyncio.ensure_future(value(cluster, "/object/x/survive"))
            await handling(cluster, 2)
            asking.cancel()
            await asyncio.wait({asking})
            await handling(cluster, 1)
            await value(cluster, "/object/x/open_gate")
            await settled(cluster)
            assert await value(cluster, "/object/x/seen") == ["survived"]

    run(scenario)


def test_a_caller_that_leaves_cancels_a_plain_request(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path, part()) as cluster:
            asking = asyncio.ensure_future(get(cluster, "/slow"))
            await handling(cluster, 1)
            asking.cancel()
            await asyncio.wait({asking})
            await settled(cluster)
            assert await value(cluster, "/seen") == ["ended"]

    run(scenario)


def test_a_client_that_leaves_a_stream_closes_its_maker_two_workers_away(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path, part()) as cluster:
            reply = await get(cluster, "/object/x/stream?far")
            assert isinstance(reply, Reply)
            async for piece in reply.body:  # type: ignore[union-attr]
                assert piece == b"piece"
                break
            assert cluster.pending().bodies == 1
            await reply.body.aclose()  # type: ignore[union-attr]
            await settled(cluster)
            assert await value(cluster, "/seen") == ["closed far"]

    run(scenario)


def test_a_stream_that_is_dropped_unread_is_closed_when_it_is_collected(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path, part()) as cluster:
            reply = await get(cluster, "/object/x/stream?dropped")
            async for _ in reply.body:  # type: ignore[union-attr]
                break
            del reply
            await settled(cluster)
            assert await value(cluster, "/seen") == ["closed dropped"]

    run(scenario)


def test_bodies_that_a_request_leaves_unread_end_with_it(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path, part()) as cluster:
            (tmp_path / "file").write_bytes(bytes(1 << 20))
            cluster.bucket("bucket").register("k", tmp_path / "file")
            await get(cluster, "/ignores_bodies")
            await settled(cluster)
            assert await value(cluster, "/seen") == ["closed ignored"] * 3

    run(scenario)


def test_a_stream_that_breaks_says_so_to_its_reader(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path, part()) as cluster:
            reply = await get(cluster, "/object/x/broken")
            with pytest.raises(Exception, match="ValueError: no more"):
                await body_of(reply)

    run(scenario)


def test_background_work_goes_on_after_the_answer(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path, part()) as cluster:
            assert (await get(cluster, "/background?0.02")).bytes() == b"started"
            assert cluster.pending().background == 1
            await settled(cluster)
            assert await value(cluster, "/seen") == ["later"]

    run(scenario)


def test_background_work_of_a_plain_worker_ends_some_time_after_the_answer(tmp_path: Path) -> None:
    async def scenario() -> None:
        lines: list[str] = []
        limits = Limits(wait_until_seconds=0.02)
        async with running(tmp_path, part(), limits=limits, log=lines.append) as cluster:
            await get(cluster, "/background?30")
            await settled(cluster)
            assert await value(cluster, "/seen") == ["stopped"]
            assert "waitUntil work was stopped" in "".join(lines)

    run(scenario)


def test_a_task_that_nothing_waits_for_is_stopped_with_its_request_and_reported(tmp_path: Path) -> None:
    async def scenario() -> None:
        lines: list[str] = []
        async with running(tmp_path, part(), log=lines.append) as cluster:
            await get(cluster, "/stray")
            await until(lambda: lines, "a report")
            assert await value(cluster, "/seen") == ["stopped"]
            assert "needs waitUntil" in lines[0]

    run(scenario)


def test_stopping_drains_short_background_work_and_cancels_long_work(tmp_path: Path) -> None:
    async def scenario() -> None:
        cluster = Cluster([part()], tmp_path / "data", log=lambda line: None, drain_seconds=0.1)
        await cluster.start()
        await get(cluster, "/object/x/background?0.02")
        await get(cluster, "/background?60")
        await cluster.stop()
        assert not cluster.pending()

    run(scenario)


def test_stopping_ends_requests_that_are_running(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path, part()) as cluster:
            asking = asyncio.ensure_future(value(cluster, "/object/x/wait"))
            await handling(cluster, 2)
            await cluster.stop()
            with pytest.raises(PeerLost, match="stopping"):
                await asking

    run(scenario)


def test_an_aborted_object_loses_its_attributes_and_nothing_else(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path, part()) as cluster:
            assert await value(cluster, "/object/x/count") == 1
            with pytest.raises(PeerLost, match="asked for it"):
                await value(cluster, "/object/x/reset")
            assert await value(cluster, "/object/x/order_of") == ["prepared", "called"]
            assert await value(cluster, "/object/x/count") == 2

    run(scenario)


def test_a_restarted_object_fails_the_calls_that_wait_in_it(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path, part()) as cluster:
            waiting = asyncio.ensure_future(value(cluster, "/object/x/wait"))
            await handling(cluster, 2)
            await cluster.restart_object("probe", "Meeting", "x")
            with pytest.raises(PeerLost, match="restarted"):
                await waiting
            assert await value(cluster, "/object/x/order_of") == ["prepared", "called"]

    run(scenario)


def test_an_object_in_which_nothing_happens_is_evicted(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path, part(), limits=Limits(object_idle_seconds=0.03)) as cluster:
            await value(cluster, "/object/x/note?a")
            isolate = await cluster.isolate("probe")
            await until(lambda: not isolate.objects, "the object is evicted")
            found = await value(cluster, "/object/x/note?b")
            assert isinstance(found, dict)
            assert (found["constructed"], found["seen"]) == (2, ["a", "b"])

    run(scenario)


def test_an_object_that_still_works_is_not_idle(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path, part(), limits=Limits(object_idle_seconds=0.02)) as cluster:
            await value(cluster, "/object/x/background?0.1")
            await value(cluster, "/object/y/stray?0.1")
            await eventually(cluster, "/seen", ["later", "later"])

    run(scenario)


def test_an_evicted_worker_begins_anew_with_its_storage(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path, part()) as cluster:
            await value(cluster, "/note?a")
            await value(cluster, "/object/x/count")
            await cluster.evict("probe")
            assert await value(cluster, "/seen") == []
            assert await value(cluster, "/object/x/count") == 2

    run(scenario)


def test_a_killed_worker_is_lost_to_its_callers_until_it_is_revived(tmp_path: Path) -> None:
    async def scenario() -> None:
        caller = part("probe", services={"OTHER": "other"})
        async with running(tmp_path, caller, part("other")) as cluster:
            assert await value(cluster, "/calls?OTHER") == {"status": 200}
            waiting = asyncio.ensure_future(get(cluster, "/slow", "other"))
            await handling(cluster, 1)
            await cluster.kill("other")
            with pytest.raises(PeerLost, match="evicted"):
                await waiting
            found = await value(cluster, "/calls?OTHER")
            assert isinstance(found, dict)
            assert found["error"] == "PeerLost"
            with pytest.raises(PeerLost, match="down"):
                await get(cluster, "/seen", "other")
            cluster.revive("other")
            assert await value(cluster, "/calls?OTHER") == {"status": 200}

    run(scenario)


def test_a_worker_that_raises_is_lost_to_its_caller_with_its_sentence(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path, part()) as cluster:
            with pytest.raises(PeerLost, match="a sentence of its own"):
                await get(cluster, "/fails")

    run(scenario)


def test_a_stopped_cluster_starts_again_where_it_was(tmp_path: Path) -> None:
    async def scenario() -> None:
        for expected in (1, 2, 3):
            async with running(tmp_path, part()) as cluster:
                assert await value(cluster, "/object/x/count") == expected

    run(scenario)


def test_what_an_object_stored_is_in_the_file_once_its_answer_is_out(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path, part()) as cluster:
            await value(cluster, "/object/x/count")
            with contextlib.closing(sqlite3.connect(tmp_path / "data/objects/probe.Meeting.sqlite")) as other:
                assert other.execute("SELECT value FROM entries").fetchall() == [(b"1",)]

    run(scenario)


def test_an_alarm_rings_by_itself_and_its_number_is_kept(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path, part()) as cluster:
            await value(cluster, "/object/x/ring?0.01")
            await eventually(cluster, "/seen", ["alarm 0"])
            await eventually(cluster, "/object/x/rang", 1)

    run(scenario)


def test_an_alarm_that_fails_rings_again_and_then_no_more(tmp_path: Path) -> None:
    async def scenario() -> None:
        limits = Limits(alarm_retries=2, alarm_retry_seconds=0.01)
        async with running(tmp_path, part(vars={"ALARM": "fails"}), limits=limits) as cluster:
            await value(cluster, "/object/x/ring?0")
            await eventually(cluster, "/seen", ["alarm 0", "alarm 1", "alarm 2"])
            await asyncio.sleep(0.1)
            assert await value(cluster, "/seen") == ["alarm 0", "alarm 1", "alarm 2"]

    run(scenario)


def test_an_alarm_that_was_set_before_a_restart_rings_after_it(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path, part()) as cluster:
            await value(cluster, "/object/x/ring?0.3")
        async with running(tmp_path, part()) as cluster:
            await eventually(cluster, "/seen", ["alarm 0"])

    run(scenario)


def test_two_clusters_do_not_share_a_data_folder(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path, part()):
            with pytest.raises(EmulatorError, match="in use"):
                await Cluster([part()], tmp_path / "data").start()

    run(scenario)


def test_bindings_that_lead_nowhere_are_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(EmulatorError, match="'nobody', which is not in the cluster"):
        Cluster([part(services={"OTHER": "nobody"})], tmp_path)
    with pytest.raises(EmulatorError, match="same name"):
        Cluster([part(), part()], tmp_path)
    with pytest.raises(EmulatorError, match="MEETING is both in vars and in objects"):
        part(vars={"MEETING": "x"})


def test_log_lines_are_json_cut_to_size_and_floods_are_dropped(tmp_path: Path) -> None:
    async def scenario() -> None:
        lines: list[str] = []
        async with running(tmp_path, part(), log=lines.append) as cluster:
            await get(cluster, "/logs?700")
            assert len(lines) == 500
            assert max(map(len, lines)) < 5000
            line = json.loads(lines[0])
            assert (line["worker"], line["number"], line["none"]) == ("probe", 0, None)

    run(scenario)


def test_a_large_file_streams_out_of_a_bucket_without_being_gathered(tmp_path: Path) -> None:
    size = 40 << 20
    (tmp_path / "file").write_bytes(bytes(size))

    async def scenario() -> None:
        async with running(tmp_path, part()) as cluster:
            cluster.bucket("bucket").register("k", tmp_path / "file")
            reply = await get(cluster, f"/copies?{size}")
            assert reply.headers["content-length"] == str(size)
            found = 0
            async for piece in reply.body:  # type: ignore[union-attr]
                assert len(piece) <= 1 << 20
                found += len(piece)
            assert found == size
            assert cluster.memory()["probe"][1].bodies < 4 << 20

    run(scenario)
