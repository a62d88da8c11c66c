"""The boundary to JavaScript on workerd: what its twin says, and what only the real one can get wrong."""

from __future__ import annotations

import asyncio
import hashlib
import json
import random
import sys
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from knot.topology import ObjectBinding, WorkerSpec
from knot.workerd import run_workers

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "scripts"))

import stage  # noqa: E402

pytestmark = [pytest.mark.workerd, pytest.mark.wasm]
ENTRIES = Path(__file__).parent / "workers_for_tests"
MIB = 1 << 20


class Probe:
    """One Worker with the boundary in it, and a bucket to put things into."""

    def __init__(self, data: Path) -> None:
        self._loop = asyncio.new_event_loop()
        self._stack = AsyncExitStack()
        self.log: list[str] = []
        spec = WorkerSpec(
            "probe",
            "",
            {"WORD": "said"},
            {"BUCKET": "bucket"},
            {"CACHE": "cache"},
            {"SELF": "probe"},
            {"KEEPER": ObjectBinding("Keeper")},
        )
        files = {
            **stage.bundle_files("workers/station"),
            "entry.py": ENTRIES / "hazards_entry.py",
            "boundary_entry.py": ENTRIES / "boundary_entry.py",
        }
        modules = {"probe": {name: str(path) for name, path in files.items()}}
        running = run_workers([spec], data, log=self.log.append, modules=modules)
        addresses, _ = self._loop.run_until_complete(self._stack.enter_async_context(running))
        self._url, self._door = addresses["probe"], addresses["door"]
        self._client = httpx.Client(timeout=60)

    def close(self) -> None:
        self._client.close()
        self._loop.run_until_complete(self._stack.aclose())
        self._loop.close()

    def put(self, key: str, data: bytes) -> str:
        """Puts a blob; its etag."""
        done = self._client.put(f"{self._door}/{key}", params={"bucket": "bucket"}, content=data)
        return done.raise_for_status().json()["etag"]

    def ask(self, path: str, method: str = "GET", body: bytes = b"", **headers: str) -> httpx.Response:
        return self._client.request(method, self._url + path, content=body or None, headers=headers)

    def leave(self, path: str) -> bytes:
        """Takes the first piece of an answer and goes away."""
        with self._client.stream("GET", self._url + path) as answer:
            return next(answer.iter_raw())


@pytest.fixture(scope="module")
def probe(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Probe]:
    found = Probe(tmp_path_factory.mktemp("boundary"))
    yield found
    found.close()


@pytest.fixture(scope="module")
def etag(probe: Probe) -> str:
    probe.put("long", bytes(range(256)) * 40)
    return probe.put("blob", b"0123456789")


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/variables?WORD,NOTHING,BUCKET", ["said", None, None]),
        ("/blob_head?blob", [10, "ETAG"]),
        ("/blob_read?blob,3,4,ETAG", "3456"),
        ("/blob_read?blob,3,0,", ""),
        ("/blob_read?blob,3,4,wrong", "BlobChanged"),
        ("/blob_read?other,3,4,", "BlobMissing"),
        ("/blob_read?blob,3,8,", "ShortBody"),
        # Miniflare does not say why it cannot give a range that begins past the end.
        ("/blob_read?blob,10,1,", "BlobFailed"),
        ("/blob_open?blob,3,4,wrong", "BlobChanged"),
        ("/blob_open?other,3,4,", "BlobMissing"),
        ("/inflow_read?blob,0,10", "0123456789"),
        ("/engine_order?long", [10240, True, "ShortBody", "ShortBody"]),
        ("/peer_call?echo", [200, "echo", "1"]),
        ("/peer_call?raises", "PeerLost"),
        ("/peer_call?breaks", "PeerLost"),
        ("/peer_open?sized", [200, 9, "one two 3"]),
        ("/peer_open?unsized", [200, -1, "one "]),
        ("/peer_open?breaks", "ShortBody"),
        ("/key_values", [None, "value", None]),
        ("/object/storage", [None, "two", ["p1", "p2"], None]),
        ("/object/request?x=1", ["GET", "/object/request", "x=1"]),
        ("/service/request?x=2", ["GET", "/service/request", "x=2"]),
    ],
)
def test_every_port_does_what_the_emulators_does(probe: Probe, etag: str, path: str, expected: Any) -> None:
    said = probe.ask(path.replace("ETAG", etag)).json()
    assert said == json.loads(json.dumps(expected).replace("ETAG", etag))


def test_a_call_has_everything_of_its_request(probe: Probe) -> None:
    said = probe.ask("/call/a%20b?q=1&r", "PUT", b"body", **{"X-A": "1"}).json()
    assert said == ["PUT", "/call/a%20b", "q=1&r", "body", "1"]


@pytest.mark.parametrize("path", ["/bytes", "/unsized", "/sized", "/joined"])
def test_a_reply_may_be_bytes_an_iterator_or_an_inflow(probe: Probe, path: str) -> None:
    assert probe.ask(path).content == b"one two 3"


@pytest.mark.parametrize("size", [1, 7, 4095, 65_537, 3 * MIB + 1])
def test_bytes_leave_as_they_are_from_the_first_to_the_last(probe: Probe, size: int) -> None:
    for _ in range(4):
        sent = random.Random(size).randbytes(size)
        assert probe.ask("/echo", "POST", sent, **{"X-A": "1"}).content == sent


def test_an_inflow_whose_client_leaves_is_cancelled_and_work_in_the_background_ends(probe: Probe) -> None:
    before = probe.ask("/object/notes").json()
    assert probe.leave("/object/watched")
    assert probe.ask("/object/background").json() == "answered"
    for _ in range(100):
        # Nobody polls in the Worker: each of these is a request of its own.
        notes = probe.ask("/object/notes").json()[len(before) :]
        if len(notes) == 3:
            break
        probe.ask("/object/pause")
    assert sorted(notes) == ["at last", "cancelled", "done"]


def test_a_wait_that_is_given_up_wedges_nobody(probe: Probe) -> None:
    for _ in range(3):
        assert probe.ask("/object/given_up").json() == "DeadlineExceeded"
    assert probe.ask("/bytes").content == b"one two 3"
    assert probe.ask("/peer_call?echo").json() == [200, "echo", "1"]


def test_weights_come_into_memory_in_one_copy_and_leave_no_garbage(probe: Probe) -> None:
    data = random.Random(5).randbytes(24 * MIB)
    probe.put("weights", data)
    before, after, digest = probe.ask("/engine_pour?weights,25165824").json()
    # The engine's memory has them and nothing else has grown: not Python's heap, and there is one buffer.
    assert digest == hashlib.md5(data).hexdigest()
    assert after["python_heap"] == before["python_heap"]
    assert after["buffers_peak"] - before["buffers_peak"] <= MIB // 4
    assert after["buffers"] <= MIB // 2


@pytest.mark.parametrize("breaks", [False, True], ids=["whole", "broken"])
def test_what_is_kept_is_given_away_while_it_arrives(probe: Probe, breaks: bool) -> None:
    probe.put("kept", random.Random(6).randbytes(4 * MIB))
    said = probe.ask(f"/object/hold?kept,{4 * MIB},{int(breaks)}").json()
    if breaks:
        assert said == ["ShortBody", "ShortBody", "ShortBody"]

    else:
        assert said == [True, True, "ShortBody"]
