"""Asking a gateway of the tests as clients do."""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine
from typing import Any

from core_support import grouped, run
from fake_cluster import SECRET, FakeCluster, _gather, fake_cluster
from station_support import inline

from protocol.calls import Call, Reply

PATH = grouped()


def case(body: Callable[[FakeCluster], Coroutine[Any, Any, None]], path: Any = PATH, **more: Any) -> None:
    """Runs a test on a cluster that must be at rest afterwards."""

    async def main() -> None:
        async with fake_cluster(path, host=inline, wardens=False, **more) as cluster:
            await body(cluster)
            await cluster.background.drain()
            cluster.at_rest()

    run(main())


async def ask(cluster: FakeCluster, method: str, path: str, body: bytes = b"", key: str = SECRET) -> Reply:
    """Any call, with a key."""
    return await cluster.gateway.answer(Call(method, path, body, {"authorization": f"Bearer {key}"}))


async def post(cluster: FakeCluster, path: str, **body: Any) -> tuple[int, Any]:
    """POSTs JSON; the status, and the answer's JSON or the events of its stream."""
    reply = await ask(cluster, "POST", path, json.dumps(body).encode())
    data = reply.body if isinstance(reply.body, bytes) else await _gather(reply.body)
    await cluster.background.drain()
    if reply.headers["content-type"].startswith("text/event-stream"):
        return reply.status, events(data)
    return reply.status, json.loads(data)


async def complete(cluster: FakeCluster, **body: Any) -> Any:
    """A completion, greedy and with details unless something else is said; it must succeed."""
    status, answer = await post(cluster, "/v1/completions", **{"temperature": 0, "details": True, **body})
    assert status == 200, answer
    return answer


async def chat(cluster: FakeCluster, *messages: Any, **body: Any) -> Any:
    """A chat likewise; a text is a user's message."""
    said = [{"role": "user", "content": one} if isinstance(one, str) else one for one in messages]
    asked = {"temperature": 0, "details": True, "messages": said, **body}
    status, answer = await post(cluster, "/v1/chat/completions", **asked)
    assert status == 200, answer
    return answer


async def refused(cluster: FakeCluster, path: str, **body: Any) -> tuple[int, dict[str, Any]]:
    """A request that is refused: the status and the error."""
    status, answer = await post(cluster, path, **body)
    assert status >= 400
    assert set(answer) == {"error"}
    assert set(answer["error"]) == {"message", "type", "param", "code"}
    return status, answer["error"]


def events(data: bytes) -> list[Any]:
    """The events of a stream; [DONE] is the word."""
    *lines, rest = data.decode().split("\n\n")
    assert rest == ""
    assert all(line.startswith("data: ") and "\n" not in line for line in lines)
    return [line[6:] if line == "data: [DONE]" else json.loads(line[6:]) for line in lines]
