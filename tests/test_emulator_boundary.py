"""The boundary: the same functions everywhere, and ports that fail by the bundle's own classes."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import pytest
from emulator_support import body_of, get, run, running, worker

import emulator.boundary
from emulator import Cluster, Faults, WorkerConfig
from protocol.boundary import Boundary

pytestmark = pytest.mark.filterwarnings("error")


def part(**bindings: Any) -> WorkerConfig:
    return worker(
        "probe",
        "boundary_entry",
        r2={"BUCKET": "bucket"},
        kv={"CACHE": "cache"},
        objects={"KEEPER": "Keeper"},
        services={"SELF": "probe"},
        **{"vars": {"WORD": "said", "NUMBER": 7}, **bindings},
    )


async def value(cluster: Cluster, path: str) -> Any:
    return json.loads(await body_of(await get(cluster, path)))


def with_blob(cluster: Cluster, folder: Path, data: bytes) -> str:
    (folder / "blob").write_bytes(data)
    return cluster.bucket("bucket").register("blob", folder / "blob").etag


def test_the_boundary_has_exactly_the_functions_that_are_written_down() -> None:
    own = {
        name: function
        for name, function in vars(emulator.boundary).items()
        if inspect.isfunction(function)
        and not name.startswith("_")
        and function.__module__ == "emulator.boundary"
    }
    written = {name: found for name, found in vars(Boundary).items() if isinstance(found, staticmethod)}
    assert own.keys() == written.keys()
    for name, function in own.items():
        expected = inspect.signature(written[name].__func__)
        found = inspect.signature(function)
        assert [p.replace(annotation=None) for p in found.parameters.values()] == [
            p.replace(annotation=None) for p in expected.parameters.values()
        ], name
        assert inspect.iscoroutinefunction(function) == inspect.iscoroutinefunction(written[name].__func__), (
            name
        )


def test_a_variable_that_is_not_set_or_no_text_is_none(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path, part()) as cluster:
            assert await value(cluster, "/variables?WORD,NUMBER,NOTHING,BUCKET") == ["said", None, None, None]

    run(scenario)


def test_a_call_has_everything_of_its_request(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path, part()) as cluster:
            reply = await cluster.fetch(
                "probe", emulator.boundary.Call("PUT", "/call/a%20b", b"body", {"X-A": "1"}, "q=1&r")
            )
            found = reply.json()
            assert found == ["PUT", "/call/a%20b", "q=1&r", "body", "1"]

    run(scenario)


def test_blobs_are_read_in_ranges_and_say_what_is_wrong(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path, part()) as cluster:
            etag = with_blob(cluster, tmp_path, b"0123456789")
            assert await value(cluster, "/blob_head?blob") == [10, etag]
            assert await value(cluster, f"/blob_read?blob,3,4,{etag}") == "3456"
            assert await value(cluster, "/blob_read?blob,3,0,") == ""
            assert await value(cluster, "/blob_read?blob,3,4,wrong") == "BlobChanged"
            assert await value(cluster, "/blob_read?other,3,4,") == "BlobMissing"
            assert await value(cluster, "/blob_read?blob,3,8,") == "ShortBody"
            assert await value(cluster, "/blob_read?blob,10,1,") == "ShortBody"
            assert await value(cluster, "/blob_open?blob,3,4,wrong") == "BlobChanged"
            assert await value(cluster, "/blob_open?other,3,4,") == "BlobMissing"

    run(scenario)


def test_a_store_that_fails_is_told_from_a_blob_that_is_missing(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path, part(), faults=Faults(1, {"r2_error": 1})) as cluster:
            with_blob(cluster, tmp_path, b"0123456789")
            assert await value(cluster, "/blob_read?blob,3,4,") == "BlobFailed"

    run(scenario)


def test_a_torn_read_is_a_short_body(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path, part(), faults=Faults(1, {"r2_torn": 1})) as cluster:
            with_blob(cluster, tmp_path, b"0123456789")
            assert await value(cluster, "/blob_read?blob,0,10,") == "ShortBody"
            assert await value(cluster, "/inflow_read?blob,0,10") == "ShortBody"
            assert await value(cluster, "/inflow_pour?blob,0,10") == "ShortBody"

    run(scenario)


def test_an_inflow_is_read_in_order_and_no_further_than_its_end(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path, part()) as cluster:
            with_blob(cluster, tmp_path, bytes(range(256)) * 40)
            assert await value(cluster, "/inflow_order?blob") == [10240, True, "ShortBody", "ShortBody"]

    run(scenario)


def test_an_inflow_pours_into_a_view_of_memory_and_into_a_host_without_one(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path, part()) as cluster:
            with_blob(cluster, tmp_path, b"0123456789" * 100)
            for host in ("View", "Plain"):
                assert await value(cluster, f"/inflow_into?blob,{host}") == "..3456789012.."

    run(scenario)


def test_a_peers_answer_is_whole_or_the_peer_is_lost(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path, part()) as cluster:
            assert await value(cluster, "/peer_call?echo") == [200, "echo", "1"]
            assert await value(cluster, "/peer_call?raises") == "PeerLost"
            assert await value(cluster, "/peer_call?breaks") == "PeerLost"

    run(scenario)


def test_an_opened_answer_says_its_length_where_it_has_one(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path, part()) as cluster:
            assert await value(cluster, "/peer_open?sized") == [200, 9, "one two 3"]
            assert await value(cluster, "/peer_open?unsized") == [200, -1, "one "]
            assert await value(cluster, "/peer_open?empty") == [204, 0, ""]
            assert await value(cluster, "/peer_open?breaks") == "ShortBody"

    run(scenario)


def test_a_reply_may_be_bytes_an_iterator_or_an_inflow(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path, part()) as cluster:
            for path, length in (("/bytes", None), ("/unsized", None), ("/sized", "9"), ("/joined", "9")):
                reply = await get(cluster, path)
                assert await body_of(reply) == b"one two 3", path
                assert reply.headers.get("content-length") == length, path

    run(scenario)


def test_an_inflow_whose_client_leaves_is_cancelled(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path, part()) as cluster:
            reply = await get(cluster, "/watched")
            async for _ in reply.body:  # type: ignore[union-attr]
                break
            await reply.body.aclose()  # type: ignore[union-attr]
            assert await value(cluster, "/cancelled") == ["cancelled"]

    run(scenario)


def test_key_values_and_storage_keep_bytes(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path, part()) as cluster:
            assert await value(cluster, "/key_values") == [None, "value", None]
            assert await value(cluster, "/object/storage") == [None, "two", ["p1", "p2"], None]

    run(scenario)


def test_a_request_is_forwarded_untouched_to_a_worker_or_an_object(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path, part()) as cluster:
            assert await value(cluster, "/object/request?x=1") == ["GET", "/object/request", "x=1"]
            assert await value(cluster, "/service/request?x=2") == ["GET", "/service/request", "x=2"]

    run(scenario)


def test_the_clock_goes_forward(tmp_path: Path) -> None:
    first = emulator.boundary.clock()
    assert emulator.boundary.clock() >= first > 1_700_000_000
