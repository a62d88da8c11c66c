"""The LayerWarden: who it is, what it keeps, and that it never gives another knot's bytes."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from core_support import grouped, header_of, knot_of, run
from fake_cluster import Background, FileBlobs

from durable_objects.budget import IsolateBudget
from durable_objects.layer_cache import LayerCache
from durable_objects.layer_warden_api import LayerWardenApi
from knot.bucket import BucketKnot
from protocol.bodies import BytesInflow
from protocol.calls import BYTES, Call, Reply, ShortBody, json_call
from protocol.identity import Identity
from protocol.ports import BlobChanged, BlobFailed
from protocol.settings import MIB

PATH = grouped()
HEADER = header_of(PATH)
NAME = "blk_1_ffn_up_weight"
UP, GATE = HEADER.tensor(NAME), HEADER.tensor("blk_1_ffn_gate_weight")


def payload(path: Path = PATH) -> bytes:
    return path.read_bytes()[header_of(path).payload_offset :]


class Warden:
    """A warden over a bucket with one knot."""

    def __init__(
        self, folder: Path = PATH.parent, budget: int = 8 * MIB, policy: str = "pinned-prefix"
    ) -> None:
        self.blobs = FileBlobs(folder)
        self.background = Background()
        self.held: list[int] = []
        self.budget = IsolateBudget(budget, lambda: 0.0, self.held.append)
        self.api = LayerWardenApi(
            LayerCache(policy, self.budget), lambda key: BucketKnot.open(self.blobs, key), self.background
        )

    async def ask(self, method: str, path: str, body: Any = None, who: Identity | None = None) -> Reply:
        headers = {} if who is None else who.headers()
        call = Call(method, path, headers=headers) if body is None else json_call(method, path, body, headers)
        reply = await self.api.answer(call)
        if isinstance(reply.body, bytes):
            return reply
        data = await reply.body.read(reply.body.length)  # type: ignore[union-attr]
        await reply.body.cancel()  # type: ignore[union-attr]
        return Reply(reply.status, data, reply.headers)

    async def tensors(self, *pieces: list[Any], who: Identity | None = None) -> Reply:
        return await self.ask("POST", "/tensors", {"tensors": list(pieces)}, who)

    def stats(self) -> dict[str, Any]:
        return self.api.stats()


def identity(path: Path = PATH, start: int = 0, end: int = 3) -> Identity:
    return Identity("layer", f"{path.name}@{header_of(path).fingerprint}", path.name, start, end)


def case(body: Callable[[Warden], Coroutine[Any, Any, None]], **more: Any) -> None:
    async def main() -> None:
        warden = Warden(**more)
        await body(warden)
        await warden.background.drain()
        assert warden.budget.used == warden.api.cache.size == sum(warden.held), "every byte is accounted for"

    run(main())


def test_a_tensor_comes_whole_and_the_second_time_from_memory() -> None:
    async def body(warden: Warden) -> None:
        for _ in range(2):
            reply = await warden.ask("GET", f"/tensor/{NAME}", who=identity())
            assert reply.status == 200
            assert reply.headers == {"content-type": BYTES, "content-length": str(UP.length)}
            assert reply.bytes() == payload()[UP.offset : UP.end]
        stats = warden.stats()
        assert (stats["hits"], stats["misses"], stats["admitted"], stats["tensors"]) == (1, 1, 1, 1)
        assert stats["bytes"] == UP.length
        reads = [length for _, _, length in warden.blobs.reads if length == UP.length]
        assert len(reads) == 1

    case(body)


def test_a_part_of_a_tensor_is_that_part_from_memory_and_from_the_bucket() -> None:
    async def body(warden: Warden) -> None:
        expected = payload()[UP.offset + 100 : UP.offset + 777]
        assert (await warden.tensors([NAME, 100, 777], who=identity())).bytes() == expected
        assert (await warden.tensors([NAME, 100, 777], who=identity())).bytes() == expected

    case(body)
    case(body, budget=0)


def test_several_pieces_come_one_after_the_other_wherever_they_lie() -> None:
    async def body(warden: Warden) -> None:
        await warden.ask("GET", f"/tensor/{GATE.name}", who=identity())
        warden.budget.limit = warden.budget.used  # nothing more fits
        reply = await warden.tensors([NAME, 5, 50], [GATE.name, 0, 40], [NAME, 50, 60])
        data = payload()
        assert reply.bytes() == (
            data[UP.offset + 5 : UP.offset + 50]
            + data[GATE.offset : GATE.offset + 40]
            + data[UP.offset + 50 : UP.offset + 60]
        )
        assert reply.headers["content-length"] == "95"

    case(body)


def test_neighbours_that_are_not_kept_come_in_one_read() -> None:
    async def body(warden: Warden) -> None:
        await warden.ask("POST", "/configure", _configure(identity()))
        warden.blobs.reads.clear()
        names = [f"blk_0_attn_{n}_weight" for n in ("q", "k", "v", "output")]
        infos = [HEADER.tensor(name) for name in names]
        reply = await warden.tensors(*([info.name, 0, info.length] for info in infos))
        assert reply.bytes() == payload()[infos[0].offset : infos[-1].end]
        offset = HEADER.file_offset(infos[0].offset)
        assert warden.blobs.reads == [(PATH.name, offset, sum(info.length for info in infos))]
        assert warden.stats()["passed_bytes"] == len(reply.bytes())

    case(body, budget=0)


def _configure(who: Identity, **changes: Any) -> dict[str, Any]:
    own = {"knot_id": who.knot_id, "knot_key": who.knot_key, "layer_start": who.start, "layer_end": who.end}
    return {**own, **changes}


def test_configuring_and_headers_say_the_same_and_saying_it_twice_does_no_harm() -> None:
    async def body(warden: Warden) -> None:
        for _ in range(2):
            reply = await warden.ask("POST", "/configure", _configure(identity()))
            assert reply.status == 200
            assert reply.json()["identity"]["knot_id"] == identity().knot_id
        assert (await warden.ask("GET", f"/tensor/{NAME}")).status == 200
        assert (await warden.ask("GET", f"/tensor/{NAME}", who=identity())).status == 200

    case(body)


@pytest.mark.parametrize(
    "other",
    [
        Identity("layer", identity().knot_id, PATH.name, 0, 2),
        Identity("layer", identity().knot_id, PATH.name, 1, 3),
        Identity("layer", f"{PATH.name}@{'0' * 64}", PATH.name, 0, 3),
        Identity("layer", identity().knot_id, "other.knot", 0, 3),
    ],
    ids=["end", "start", "fingerprint", "key"],
)
@pytest.mark.parametrize("way", ["headers", "configure"])
def test_a_warden_taken_for_another_one_says_409_with_both_names(other: Identity, way: str) -> None:
    async def body(warden: Warden) -> None:
        await warden.ask("GET", f"/tensor/{NAME}", who=identity())
        if way == "headers":
            reply = await warden.ask("GET", f"/tensor/{NAME}", who=other)
        else:
            reply = await warden.ask("POST", "/configure", _configure(other))
        assert reply.status == 409
        assert reply.json()["error"]["kind"] == "wrong_model"
        assert identity().object_name in reply.json()["error"]["detail"]
        assert other.object_name in reply.json()["error"]["detail"]
        assert (await warden.ask("GET", f"/tensor/{NAME}", who=identity())).status == 200

    case(body)


def test_a_first_identity_that_the_bucket_does_not_have_is_409_and_binds_nobody() -> None:
    async def body(warden: Warden) -> None:
        wrong = Identity("layer", f"{PATH.name}@{'0' * 64}", PATH.name, 0, 3)
        reply = await warden.ask("GET", f"/tensor/{NAME}", who=wrong)
        assert reply.status == 409
        assert "the knot was uploaded again" in reply.json()["error"]["detail"]
        assert (await warden.ask("GET", f"/tensor/{NAME}", who=identity())).status == 200

    case(body)


def two_knots(folder: Path) -> tuple[Identity, Identity, bytes, bytes]:
    """Two knots with the same shapes and other weights; the first lies in the bucket as model.knot."""
    first, second = knot_of(), knot_of(seed=2)
    shutil.copy(first, folder / "model.knot")
    shutil.copy(second, folder / "second.knot")
    ids = [
        Identity("layer", f"model.knot@{header_of(path).fingerprint}", "model.knot", 0, 3)
        for path in (first, second)
    ]
    return ids[0], ids[1], payload(first), payload(second)


def test_a_knot_uploaded_again_under_its_key_is_never_mixed_with_its_predecessor(tmp_path: Path) -> None:
    first, second, one, two = two_knots(tmp_path)
    assert one != two

    async def body(warden: Warden) -> None:
        info = header_of(knot_of()).tensor(NAME)
        assert (await warden.ask("GET", f"/tensor/{NAME}", who=first)).bytes() == one[info.offset : info.end]
        shutil.copy(tmp_path / "second.knot", tmp_path / "model.knot")
        # What it holds is the first knot's, and so is what it says; what it lacks it cannot give.
        assert (await warden.ask("GET", f"/tensor/{NAME}", who=first)).bytes() == one[info.offset : info.end]
        reply = await warden.ask("GET", "/tensor/blk_2_ffn_up_weight", who=first)
        assert (reply.status, reply.json()["error"]["kind"]) == (409, "wrong_model")
        reply = await warden.ask("GET", f"/tensor/{NAME}", who=second)
        assert reply.bytes() == two[info.offset : info.end]
        assert (await warden.ask("GET", f"/tensor/{NAME}", who=first)).status == 409

    case(body, folder=tmp_path)


def test_what_passes_through_breaks_off_when_another_knot_lies_under_the_key(tmp_path: Path) -> None:
    first, *_ = two_knots(tmp_path)

    async def body(warden: Warden) -> None:
        await warden.ask("POST", "/configure", _configure(first))
        shutil.copy(tmp_path / "second.knot", tmp_path / "model.knot")
        with pytest.raises(BlobChanged, match="uploaded again"):
            await warden.ask("GET", f"/tensor/{NAME}", who=first)

    case(body, folder=tmp_path, budget=0)


def test_two_callers_who_take_a_new_warden_for_different_ones_do_not_both_get_it(tmp_path: Path) -> None:
    first, _, one, _ = two_knots(tmp_path)
    second = Identity("layer", f"second.knot@{header_of(knot_of(seed=2)).fingerprint}", "second.knot", 0, 3)

    async def body(warden: Warden) -> None:
        original = warden.blobs.read

        async def slow(*arguments: Any) -> bytes:
            for _ in range(3):
                await asyncio.sleep(0)
            return await original(*arguments)

        warden.blobs.read = slow  # type: ignore[method-assign]
        replies = await asyncio.gather(
            warden.ask("GET", f"/tensor/{NAME}", who=first), warden.ask("GET", f"/tensor/{NAME}", who=second)
        )
        assert sorted(reply.status for reply in replies) == [200, 409]
        info = header_of(knot_of()).tensor(NAME)
        assert replies[0].bytes() == one[info.offset : info.end]
        assert (await warden.ask("GET", f"/tensor/{NAME}", who=first)).bytes() == replies[0].bytes()

    case(body, folder=tmp_path)


def test_a_tensor_still_on_its_way_when_the_warden_forgets_whose_it_is_is_not_kept(tmp_path: Path) -> None:
    first, second, one, two = two_knots(tmp_path)

    async def body(warden: Warden) -> None:
        await warden.ask("POST", "/configure", _configure(first))
        gate, original = asyncio.Event(), warden.blobs.read

        async def slow(*arguments: Any) -> bytes:
            data = await original(*arguments)
            await gate.wait()
            return data

        warden.blobs.read = slow  # type: ignore[method-assign]
        late = asyncio.ensure_future(warden.ask("GET", f"/tensor/{NAME}", who=first))
        await asyncio.sleep(0.001)
        warden.blobs.read = original  # type: ignore[method-assign]
        shutil.copy(tmp_path / "second.knot", tmp_path / "model.knot")
        assert (await warden.ask("GET", "/tensor/blk_0_ffn_up_weight", who=first)).status == 409
        assert (await warden.ask("POST", "/configure", _configure(second))).status == 200
        gate.set()
        info = header_of(knot_of()).tensor(NAME)
        assert (await late).bytes() == one[info.offset : info.end], "who asked for the first gets the first"
        assert (await warden.ask("GET", f"/tensor/{NAME}", who=second)).bytes() == two[info.offset : info.end]

    case(body, folder=tmp_path)


@pytest.mark.parametrize(
    ("pieces", "reason"),
    [
        ([["nothing", 0, 1]], "'nothing' is none of layers [1, 2)"),
        ([["blk_0_ffn_up_weight", 0, 1]], "none of layers [1, 2)"),
        ([["token_embd_weight", 0, 1]], "none of layers [1, 2)"),
        ([[NAME, -1, 1]], "bytes [-1, 1)"),
        ([[NAME, 5, 5]], "bytes [5, 5)"),
        ([[NAME, 0, UP.length + 1]], f"it has {UP.length}"),
        ([[NAME, 0]], "not [name, first byte, end byte]"),
        ([[NAME, "0", 5]], "not [name, first byte, end byte]"),
        ([[NAME, False, 5]], "not [name, first byte, end byte]"),
        ([NAME], "not [name, first byte, end byte]"),
        ([[NAME, 0, 1]] * 65, "at most 64"),
        (3, "expected a list"),
    ],
)
def test_pieces_that_do_not_exist_are_400_with_the_reason(pieces: Any, reason: str) -> None:
    async def body(warden: Warden) -> None:
        reply = await warden.ask("POST", "/tensors", {"tensors": pieces}, identity(start=1, end=2))
        assert reply.status == 400
        assert reason in reply.json()["error"]["detail"]

    case(body)


def test_a_warden_that_knows_no_knot_says_so() -> None:
    async def body(warden: Warden) -> None:
        for reply in (
            await warden.ask("GET", f"/tensor/{NAME}"),
            await warden.tensors([NAME, 0, 1]),
            await warden.tensors(),
        ):
            assert reply.status == 400
            assert "POST /configure or send X-Knot-Id first" in reply.json()["error"]["detail"]
        assert (await warden.ask("GET", "/stats")).json()["identity"] is None
        assert (await warden.ask("POST", "/invalidate/x")).json() == {"invalidated": False}

    case(body)


@pytest.mark.parametrize("body", [b"", b"[]", b'{"tensors": [], "more": 1}', b"\xff"])
def test_a_body_that_is_no_request_is_400(body: bytes) -> None:
    async def ask(warden: Warden) -> None:
        for path in ("/tensors", "/configure"):
            reply = await warden.api.answer(Call("POST", path, body, identity().headers()))
            assert reply.status == 400

    case(ask)


def test_a_knot_that_is_not_there_is_502_and_a_store_that_fails_is_503(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("knot.bucket.PAUSE_SECONDS", 0)

    async def body(warden: Warden) -> None:
        gone = Identity("layer", "gone.knot@abc", "gone.knot", 0, 3)
        assert (await warden.ask("GET", f"/tensor/{NAME}", who=gone)).status == 502

        async def fails(*arguments: Any) -> bytes:
            raise BlobFailed("no")

        await warden.ask("POST", "/configure", _configure(identity()))
        warden.blobs.read = fails  # type: ignore[method-assign]
        reply = await warden.ask("GET", f"/tensor/{NAME}", who=identity())
        assert (reply.status, reply.json()["error"]["kind"]) == (503, "unavailable")
        assert warden.budget.used == 0

    case(body)


class Slow(BytesInflow):
    """A body of which each piece comes when it is let through; `ends` breaks it off."""

    def __init__(self, data: bytes) -> None:
        super().__init__(data)
        self.through = asyncio.Semaphore(0)
        self.ends = False

    async def read(self, length: int) -> bytes:
        await self.through.acquire()
        if self.ends:
            raise ShortBody("it broke off")
        return await super().read(length)


async def slowly(warden: Warden) -> Slow:
    """The warden's next read from the bucket, a little at a time."""
    await warden.ask("POST", "/configure", _configure(identity()))
    inflow = Slow(payload()[UP.offset : UP.end])

    async def opened(*arguments: Any) -> Slow:
        return inflow

    warden.blobs.open = opened  # type: ignore[method-assign]
    return inflow


def test_a_tensor_is_given_away_while_it_arrives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("protocol.bodies.PIECE", 1000)

    async def body(warden: Warden) -> None:
        inflow = await slowly(warden)
        call = Call("GET", f"/tensor/{NAME}", headers=identity().headers())
        answers = [(await warden.api.answer(call)).body for _ in range(2)]
        assert inflow.through.locked(), "nothing has arrived, and both have their answers"
        inflow.through.release()
        for answer in answers:
            assert await answer.read(1000) == payload()[UP.offset : UP.offset + 1000]  # type: ignore[union-attr]
        late = asyncio.ensure_future(answers[1].read(UP.length - 1000))  # type: ignore[union-attr]
        await answers[0].cancel()  # type: ignore[union-attr]
        await asyncio.sleep(0)
        assert not late.done()
        for _ in range(UP.length // 1000):
            inflow.through.release()
        assert await late == payload()[UP.offset + 1000 : UP.end], "though the first one has left"
        stats = warden.stats()
        assert (stats["admitted"], stats["hits"], stats["bytes"]) == (1, 1, UP.length)

    case(body)


def test_a_tensor_that_breaks_off_on_its_way_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("protocol.bodies.PIECE", 1000)

    async def body(warden: Warden) -> None:
        inflow = await slowly(warden)
        answer = await warden.api.answer(Call("GET", f"/tensor/{NAME}", headers=identity().headers()))
        inflow.through.release()
        assert len(await answer.body.read(1000)) == 1000  # type: ignore[union-attr]
        inflow.ends = True
        inflow.through.release()
        with pytest.raises(ShortBody, match="did not come: it broke off"):
            await answer.body.read(1000)  # type: ignore[union-attr]
        assert warden.budget.used == 0
        assert warden.stats()["tensors"] == 0

    case(body)


def test_what_is_forgotten_is_read_again_and_counted() -> None:
    async def body(warden: Warden) -> None:
        await warden.ask("GET", f"/tensor/{NAME}", who=identity())
        assert (await warden.ask("POST", f"/invalidate/{NAME}", who=identity())).json() == {
            "invalidated": True
        }
        assert warden.budget.used == 0
        assert (await warden.ask("POST", f"/invalidate/{NAME}", who=identity())).json() == {
            "invalidated": False
        }
        await warden.ask("GET", f"/tensor/{NAME}", who=identity())
        stats = warden.stats()
        assert (stats["invalidated"], stats["admitted"], stats["misses"]) == (1, 2, 2)

    case(body)


def test_the_same_tensor_asked_for_twice_at_once_is_accounted_for_once() -> None:
    async def body(warden: Warden) -> None:
        replies = await asyncio.gather(
            *(warden.ask("GET", f"/tensor/{NAME}", who=identity()) for _ in range(3))
        )
        assert len({reply.bytes() for reply in replies}) == 1
        assert warden.budget.used == UP.length

    case(body)


def test_other_paths_are_404_with_those_there_are() -> None:
    async def body(warden: Warden) -> None:
        reply = await warden.ask("GET", "/tensors")
        assert reply.status == 404
        assert "GET /tensor/<name> and /stats" in json.loads(reply.bytes())["error"]["detail"]

    case(body)
