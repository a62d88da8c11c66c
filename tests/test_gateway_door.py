"""The gateway's door as a Worker has it: who may knock, and what is said when nothing can be served."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from core_support import knot_of, run

from emulator.local import LocalCluster, local_cluster
from protocol.calls import Call, Reply, json_call

KEYS = {"API_KEYS": "a-key-of-a-client"}


def case(folder: Path, body: Callable[[LocalCluster], Coroutine[Any, Any, None]], **variables: str) -> None:
    async def main() -> None:
        async with local_cluster(
            knot_of(), folder, stations=1, shards=1, engine="native", variables={**KEYS, **variables}
        ) as local:
            await body(local)

    run(main(), 60)


async def ask(local: LocalCluster, path: str, key: str | None) -> Reply:
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    return await local.cluster.fetch("gateway", Call("GET", path, headers=headers))


def test_what_cannot_be_served_is_said_in_openais_shape_to_those_with_a_key_alone(tmp_path: Path) -> None:
    async def body(local: LocalCluster) -> None:
        for key in (None, "wrong"):
            reply = await ask(local, "/v1/models", key)
            assert (reply.status, reply.json()["error"]["code"]) == (401, "invalid_api_key")
        for key in ("a-key-of-a-client", local.secret):
            reply = await ask(local, "/v1/models", key)
            assert reply.status == 503
            assert int(reply.headers["retry-after"]) >= 1
            error = reply.json()["error"]
            assert set(error) == {"message", "type", "param", "code"}
            assert (error["type"], error["code"]) == ("server_error", "unavailable")
            assert "station 0" in error["message"]
            assert local.secret not in error["message"]

    # A station cannot start in so little memory.
    case(tmp_path, body, ISOLATE_BYTES="1048576")


def test_keys_of_clients_are_the_gateways_alone_and_open_no_part(tmp_path: Path) -> None:
    async def body(local: LocalCluster) -> None:
        assert (await ask(local, "/v1/models", "a-key-of-a-client")).status == 200
        workers = local.cluster.workers
        assert [name for name, worker in workers.items() if "API_KEYS" in worker.vars] == ["gateway"]
        parts = [name for name in workers if name.startswith(("station-", "shard-"))]
        assert len(parts) == 2
        for name in parts:
            headers = {"x-knot-secret": "a-key-of-a-client"}
            reply = await local.cluster.fetch(name, Call("GET", "/health", headers=headers))
            assert reply.status == 401

    case(tmp_path, body)


@pytest.mark.parametrize("stream", [False, True])
def test_a_chat_goes_through_a_worker_as_it_does_through_its_core(tmp_path: Path, stream: bool) -> None:
    """Jinja is in the bundle; nothing of the environment outside is."""

    async def body(local: LocalCluster) -> None:
        asked = {"messages": [{"role": "user", "content": "the fox"}], "max_tokens": 3, "stream": stream}
        bearer = {"authorization": "Bearer a-key-of-a-client"}
        reply = await local.cluster.fetch("gateway", json_call("POST", "/v1/chat/completions", asked, bearer))
        assert reply.status == 200
        if stream:
            said = b"".join([piece async for piece in reply.body])  # type: ignore[union-attr]
            assert said.endswith(b"data: [DONE]\n\n")
            assert b'"role":"assistant"' in said
        else:
            assert reply.json()["choices"][0]["message"]["role"] == "assistant"

    case(tmp_path, body)
