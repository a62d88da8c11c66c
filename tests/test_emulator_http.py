"""Workers on local ports: bodies stream both ways, clients may leave, and Ctrl-C ends everything."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import httpx
import pytest
from emulator_support import ROOT, WORKERS, get, run, running, until, worker

from emulator import Cluster, EmulatorError
from emulator.http import HttpFront

pytestmark = pytest.mark.filterwarnings("error")

Scenario = Callable[[httpx.AsyncClient, Cluster], Awaitable[None]]


def served(tmp_path: Path, scenario: Scenario, max_body: int = 1 << 20) -> None:
    async def whole() -> None:
        async with (
            running(tmp_path, worker("probe", "http_entry")) as cluster,
            HttpFront(cluster, {"probe": 0}, max_body) as front,
            httpx.AsyncClient(base_url=front.addresses["probe"], trust_env=False) as client,
        ):
            await scenario(client, cluster)

    run(whole)


async def seen_by(cluster: Cluster) -> list[str]:
    return json.loads((await get(cluster, "/seen")).bytes())


def test_a_request_arrives_as_it_was_sent_and_its_answer_comes_back(tmp_path: Path) -> None:
    async def scenario(client: httpx.AsyncClient, cluster: Cluster) -> None:
        answer = await client.put("/echo/a%20b?q=1", content=b"\x00\xffbody", headers={"X-Sent": "yes"})
        assert answer.status_code == 201
        assert answer.content == b"\x00\xffbody"
        found = {name: answer.headers[name] for name in ("x-method", "x-path", "x-query", "x-got")}
        assert found == {"x-method": "PUT", "x-path": "/echo/a%20b", "x-query": "q=1", "x-got": "yes"}
        assert answer.headers["content-length"] == "6"

    served(tmp_path, scenario)


def test_an_answer_without_body_and_one_to_head_have_none(tmp_path: Path) -> None:
    async def scenario(client: httpx.AsyncClient, cluster: Cluster) -> None:
        assert (await client.get("/empty")).status_code == 204
        head = await client.head("/cookies")
        assert (head.content, head.headers["content-length"]) == (b"", "1")
        # The connection is still good for another.
        assert (await client.get("/cookies")).text == "x"

    served(tmp_path, scenario)


def test_cookies_stay_apart_and_other_headers_are_joined(tmp_path: Path) -> None:
    async def scenario(client: httpx.AsyncClient, cluster: Cluster) -> None:
        answer = await client.get("/cookies")
        assert answer.headers.get_list("set-cookie") == ["a=1", "b=2"]
        assert answer.headers["x-two"] == "1, 2"

    served(tmp_path, scenario)


def test_bodies_stream_both_ways_at_once(tmp_path: Path) -> None:
    async def scenario(client: httpx.AsyncClient, cluster: Cluster) -> None:
        came: asyncio.Queue[bytes] = asyncio.Queue()

        async def pieces() -> AsyncIterator[bytes]:
            for number in range(5):
                yield b"piece %d" % number
                # The next is sent only when the last has come back.
                assert await asyncio.wait_for(came.get(), 5) == b"piece %d" % number

        reader, writer = await asyncio.open_connection("127.0.0.1", client.base_url.port)
        writer.write(b"POST /passes HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
        sent = pieces()
        async for piece in sent:
            writer.write(b"%x\r\n%s\r\n" % (len(piece), piece))
            while True:
                line = await asyncio.wait_for(reader.readline(), 5)
                if line.strip() == b"%x" % len(piece):
                    break
            came.put_nowait((await reader.readexactly(len(piece) + 2))[:-2])
        writer.write(b"0\r\n\r\n")
        assert (await asyncio.wait_for(reader.readline(), 5)).strip() == b"0"
        writer.close()
        await writer.wait_closed()

    served(tmp_path, scenario)


def test_a_client_that_leaves_a_stream_closes_it(tmp_path: Path) -> None:
    async def scenario(client: httpx.AsyncClient, cluster: Cluster) -> None:
        async with client.stream("GET", "/events") as answer:
            assert answer.headers["content-type"] == "text/event-stream"
            async for line in answer.aiter_lines():
                if line == "data: 3":
                    break
        await until(lambda: not cluster.pending(), "the stream has ended")
        assert await seen_by(cluster) == ["left"]

    served(tmp_path, scenario)


def test_a_client_that_leaves_cancels_a_request_that_has_not_answered(tmp_path: Path) -> None:
    async def scenario(client: httpx.AsyncClient, cluster: Cluster) -> None:
        for method, body in (("GET", None), ("POST", b"a body that nobody reads")):
            asking = asyncio.ensure_future(client.request(method, "/slow", content=body))
            await until(lambda: cluster.pending().requests, "the request is handled")
            asking.cancel()
            await asyncio.wait({asking})
            await until(lambda: not cluster.pending(), "the request has ended")
        assert await seen_by(cluster) == ["cancelled", "cancelled"]

    served(tmp_path, scenario)


def test_a_body_that_is_too_large_is_refused_whether_it_says_so_or_not(tmp_path: Path) -> None:
    async def scenario(client: httpx.AsyncClient, cluster: Cluster) -> None:
        async def pieces() -> AsyncIterator[bytes]:
            for _ in range(30):
                yield bytes(100)

        said = await client.post("/echo", content=bytes(1001))
        unsaid = await client.post("/echo", content=pieces())
        assert (said.status_code, unsaid.status_code) == (413, 413)
        assert "1001 bytes, at most 1000" in said.text
        assert (await client.post("/echo", content=bytes(1000))).status_code == 201
        assert (await client.post("/ignores", content=bytes(1000))).text == "ignored"

    served(tmp_path, scenario, max_body=1000)


def test_a_worker_that_raises_answers_500_and_a_lost_one_503(tmp_path: Path) -> None:
    async def scenario(client: httpx.AsyncClient, cluster: Cluster) -> None:
        answer = await client.get("/raises")
        assert (answer.status_code, answer.text) == (500, "Worker probe raised RuntimeError: on purpose\n")
        await cluster.kill("probe")
        answer = await client.get("/echo")
        assert (answer.status_code, answer.text) == (503, "Worker probe: Worker probe is down\n")
        cluster.revive("probe")
        assert (await client.get("/ignores")).status_code == 200

    served(tmp_path, scenario)


def test_a_body_that_breaks_off_is_not_passed_off_as_whole(tmp_path: Path) -> None:
    async def scenario(client: httpx.AsyncClient, cluster: Cluster) -> None:
        with pytest.raises(httpx.RemoteProtocolError):
            await client.get("/breaks")

    served(tmp_path, scenario)


def test_a_port_that_is_taken_is_named(tmp_path: Path) -> None:
    async def scenario(client: httpx.AsyncClient, cluster: Cluster) -> None:
        port = client.base_url.port
        assert port is not None
        with pytest.raises(EmulatorError, match=f"cannot listen on port {port}"):
            async with HttpFront(cluster, {"probe": port}):
                raise AssertionError("it listens")
        with pytest.raises(EmulatorError, match="no Worker nobody"):
            async with HttpFront(cluster, {"nobody": 0}):
                raise AssertionError("it serves")

    served(tmp_path, scenario)


def test_stopping_ends_what_is_being_answered(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path, worker("probe", "http_entry")) as cluster:
            front = HttpFront(cluster, {"probe": 0})
            await front.__aenter__()
            async with httpx.AsyncClient(base_url=front.addresses["probe"], trust_env=False) as client:
                asking = asyncio.ensure_future(client.get("/slow"))
                await until(lambda: cluster.pending().requests, "the request is handled")
                async with client.stream("GET", "/events") as answer:
                    lines = answer.aiter_lines()
                    await lines.__anext__()
                    await front.__aexit__(None, None, None)
                    with pytest.raises(httpx.HTTPError):
                        assert not [line async for line in lines]
                (outcome,) = await asyncio.gather(asking, return_exceptions=True)
                assert isinstance(outcome, httpx.HTTPError) or outcome.status_code == 500  # type: ignore[union-attr]

    run(scenario)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("busy", [False, True])
def test_an_interrupted_server_stops_at_once_and_cleanly(tmp_path: Path, number: int, busy: bool) -> None:
    server = subprocess.Popen(
        [sys.executable, "-W", "error", str(WORKERS / "http_server.py"), str(tmp_path / "data")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (WORKERS.parent, ROOT)))},
        text=True,
    )
    try:
        assert server.stdout is not None
        address = server.stdout.readline().strip()
        connection = None
        if busy:
            port = int(address.rpartition(":")[2])
            connection = socket.create_connection(("127.0.0.1", port))
            connection.sendall(b"GET /events HTTP/1.1\r\nHost: x\r\n\r\n")
            assert connection.recv(1000)
        server.send_signal(number)
        out, errors = server.communicate(timeout=20)
        if connection is not None:
            connection.close()
    finally:
        server.kill()
        server.wait()
    assert (server.returncode, out, errors) == (0, "stopped\n", "")
