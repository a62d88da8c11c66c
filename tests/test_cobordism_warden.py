"""The CobordismWarden: raw rows of one slice of one knot, least recently used going first, and no others."""

from __future__ import annotations

import asyncio
import shutil
import struct
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from core_support import header_of, knot_of, run
from reference import Model
from shard_support import row_warden

from protocol.calls import FRAME, Call, Reply, ShortBody, json_call
from protocol.frames import Kind, Part, Tensor, decode, encode
from protocol.identity import Identity
from protocol.ports import BlobFailed

PATH = knot_of()
TABLE = header_of(PATH).embedding_tensor()


def identity(path: Path = PATH, start: int = 0, end: int = 150, key: str | None = None) -> Identity:
    key = key or path.name
    return Identity("vocab", f"{key}@{header_of(path).fingerprint}", key, start, end)


def stored(path: Path = PATH) -> np.ndarray:
    """The table's raw rows as the GGUF has them."""
    return Model(path.with_suffix(".gguf")).stored("token_embd.weight")[1]


class Warden:
    def __init__(self, folder: Path = PATH.parent, budget: int = 1 << 20) -> None:
        self.held: list[int] = []
        self.api, self.peer, self.blobs = row_warden(folder, budget, self.held.append)

    async def ask(self, ids: Sequence[int], fill: bool = True, who: Identity | None = None) -> Reply:
        part = Part(
            {"fill": fill}, {"ids": Tensor("ids", "i32", (len(ids),), struct.pack(f"<{len(ids)}i", *ids))}
        )
        return await self.post(encode(Kind.ROWS, [part]), who or identity())

    async def post(self, body: bytes, who: Identity | None) -> Reply:
        headers = {"content-type": FRAME, **({} if who is None else who.headers())}
        return await self.api.answer(Call("POST", "/tensors", body, headers))

    async def rows(
        self, ids: Sequence[int], fill: bool = True, who: Identity | None = None
    ) -> dict[int, bytes]:
        reply = await self.ask(ids, fill, who)
        assert reply.status == 200, reply.bytes()
        frame = decode(reply.bytes())
        assert frame.answer
        part = frame.parts[0]
        rows = part.tensor("rows", "u8", 2)
        found = np.frombuffer(bytes(rows.data), np.uint8).reshape(rows.shape)
        names = np.frombuffer(bytes(part.tensor("ids", "i32", 1).data), "<i4")
        return {int(name): row.tobytes() for name, row in zip(names, found, strict=True)}


def case(body: Callable[[Warden], Coroutine[Any, Any, None]], **more: Any) -> None:
    async def main() -> None:
        warden = Warden(**more)
        await body(warden)
        assert sum(warden.held) == warden.api.cache.size == warden.api.stats()["bytes"]

    run(main())


def test_it_fills_what_it_lacks_with_the_knots_raw_rows_and_then_has_them() -> None:
    async def body(warden: Warden) -> None:
        ids, raw = [3, 0, 149, 77, 3], stored()
        assert await warden.rows(ids, fill=False) == {}
        assert await warden.rows(ids) == {i: raw[i].tobytes() for i in ids}
        reads = len(warden.blobs.reads)
        assert await warden.rows(ids, fill=False) == {i: raw[i].tobytes() for i in ids}
        assert len(warden.blobs.reads) == reads
        stats = warden.api.stats()
        assert (stats["rows"], stats["bytes"]) == (4, 4 * TABLE.row_bytes)
        assert stats["hits"] == 5

    case(body)


def test_neighbouring_rows_come_in_one_read_of_their_groups() -> None:
    async def body(warden: Warden) -> None:
        await warden.rows([0])
        warden.blobs.reads.clear()
        await warden.rows([17, 31, 32, 40, 100])
        group = 16 * TABLE.row_bytes
        at = header_of(PATH).file_offset(TABLE.offset)
        assert warden.blobs.reads == [
            (PATH.name, at + group, 2 * group),
            (PATH.name, at + 6 * group, group),
        ]

    case(body)


def test_the_rows_used_least_recently_go_first() -> None:
    async def body(warden: Warden) -> None:
        for row in (1, 2, 3):
            await warden.rows([row])
        await warden.rows([1], fill=False)
        await warden.rows([4])
        assert set(await warden.rows([1, 2, 3, 4], fill=False)) == {1, 3, 4}
        assert warden.api.stats()["evicted"] == 1
        assert warden.api.cache.size <= 3 * TABLE.row_bytes

    case(body, budget=3 * TABLE.row_bytes + 10)


def test_without_room_it_gives_rows_and_keeps_none() -> None:
    async def body(warden: Warden) -> None:
        assert await warden.rows([1, 2]) == {i: stored()[i].tobytes() for i in (1, 2)}
        assert await warden.rows([1, 2], fill=False) == {}

    case(body, budget=10)


def test_a_row_that_is_told_to_be_forgotten_is_read_again() -> None:
    async def body(warden: Warden) -> None:
        await warden.rows([5, 6])
        for expected in (True, False):
            reply = await warden.api.answer(Call("POST", "/invalidate/5", headers=identity().headers()))
            assert reply.json() == {"invalidated": expected}
        assert set(await warden.rows([5, 6], fill=False)) == {6}
        assert warden.api.stats()["invalidated"] == 1
        for name in ("x", "-1", "", "5/6", "٣", "9" * 5000):
            reply = await warden.api.answer(Call("POST", f"/invalidate/{name}", headers=identity().headers()))
            assert reply.status == 400

    case(body)


@pytest.mark.parametrize(
    ("ids", "reason"),
    [
        ([150], "row 150 is none of [0, 150)"),
        ([-1], "row -1"),
        ([0] * 4097, "4097 rows in one call, at most 4096"),
    ],
)
def test_rows_that_are_not_its_own_are_refused(ids: list[int], reason: str) -> None:
    async def body(warden: Warden) -> None:
        reply = await warden.ask(ids)
        assert reply.status == 400
        assert reason in reply.json()["error"]["detail"]

    case(body)


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"", "prefix"),
        (encode(Kind.EMBED, [Part({})]), "frames of kind rows"),
        (encode(Kind.ROWS, []), "with one step"),
        (encode(Kind.ROWS, [Part({}), Part({})]), "with one step"),
        (encode(Kind.ROWS, [Part({})]), "no tensor 'ids'"),
        (encode(Kind.ROWS, [Part({"fil": True})]), "unknown field 'fil'"),
        (encode(Kind.ROWS, [Part({}, {"ids": Tensor("ids", "u8", (1,), b"\0")})]), "ids' is u8"),
    ],
)
def test_frames_that_ask_for_no_rows_are_400_with_the_reason(body: bytes, reason: str) -> None:
    async def ask(warden: Warden) -> None:
        reply = await warden.post(body, identity())
        assert reply.status == 400
        assert reason in reply.json()["error"]["detail"]

    case(ask)


def test_a_warden_that_knows_no_knot_says_so_and_learns_it_by_configure() -> None:
    async def body(warden: Warden) -> None:
        frame = encode(Kind.ROWS, [Part({}, {"ids": Tensor("ids", "i32", (0,), b"")})])
        assert (await warden.post(frame, None)).status == 400
        who = identity()
        values = {"knot_id": who.knot_id, "knot_key": who.knot_key, "vocab_start": 0, "vocab_end": 150}
        reply = await warden.api.answer(json_call("POST", "/configure", values))
        assert reply.json()["identity"]["end"] == 150
        assert (await warden.post(frame, None)).status == 200
        assert (await warden.api.answer(Call("GET", "/stats"))).json()["kind"] == "cobordism-warden"
        assert (await warden.api.answer(Call("GET", "/rows"))).status == 404

    case(body)


@pytest.mark.parametrize(
    "other",
    [
        identity(end=149),
        identity(start=1),
        identity(key="other.knot"),
        identity(knot_of(seed=2), key=PATH.name),
    ],
    ids=["end", "start", "key", "fingerprint"],
)
def test_a_warden_taken_for_another_one_says_409_with_both_names(other: Identity) -> None:
    async def body(warden: Warden) -> None:
        await warden.rows([1])
        reply = await warden.ask([1], who=other)
        assert reply.status == 409
        assert other.object_name in reply.json()["error"]["detail"]
        assert identity().object_name in reply.json()["error"]["detail"]

    case(body)


def test_a_knot_uploaded_again_under_its_key_is_never_mixed_with_its_predecessor(tmp_path: Path) -> None:
    first, second = knot_of(), knot_of(seed=2)
    shutil.copy(first, tmp_path / "model.knot")
    old, new = (identity(path, key="model.knot") for path in (first, second))

    async def body(warden: Warden) -> None:
        assert await warden.rows([1], who=old) == {1: stored(first)[1].tobytes()}
        shutil.copy(second, tmp_path / "model.knot")
        assert await warden.rows([1], who=old) == {1: stored(first)[1].tobytes()}
        assert (await warden.ask([2], who=old)).status == 409
        assert await warden.rows([1, 2], who=new) == {i: stored(second)[i].tobytes() for i in (1, 2)}
        assert (await warden.ask([1], who=old)).status == 409

    case(body, folder=tmp_path)


def test_rows_still_on_their_way_when_the_warden_forgets_whose_they_are_are_not_kept(tmp_path: Path) -> None:
    first, second = knot_of(), knot_of(seed=2)
    shutil.copy(first, tmp_path / "model.knot")
    old, new = (identity(path, key="model.knot") for path in (first, second))

    async def body(warden: Warden) -> None:
        await warden.rows([100], who=old)
        gate, original = asyncio.Event(), warden.blobs.read

        async def slow(*arguments: Any) -> bytes:
            data = await original(*arguments)
            await gate.wait()
            return data

        warden.blobs.read = slow  # type: ignore[method-assign]
        late = asyncio.ensure_future(warden.rows([1], who=old))
        await asyncio.sleep(0.001)
        warden.blobs.read = original  # type: ignore[method-assign]
        shutil.copy(second, tmp_path / "model.knot")
        assert (await warden.ask([40], who=old)).status == 409
        await warden.rows([100], who=new)
        gate.set()
        assert await late == {1: stored(first)[1].tobytes()}, "who asked for the first gets the first"
        assert await warden.rows([1], who=new) == {1: stored(second)[1].tobytes()}

    case(body, folder=tmp_path)


def test_two_callers_who_take_a_new_warden_for_different_ones_do_not_both_get_it() -> None:
    async def body(warden: Warden) -> None:
        original = warden.blobs.read

        async def slow(*arguments: Any) -> bytes:
            for _ in range(3):
                await asyncio.sleep(0)
            return await original(*arguments)

        warden.blobs.read = slow  # type: ignore[method-assign]
        replies = await asyncio.gather(warden.ask([1]), warden.ask([1], who=identity(start=1)))
        assert sorted(reply.status for reply in replies) == [200, 409]

    case(body)


def test_a_row_whose_group_does_not_match_its_digest_is_502_with_its_rows_and_not_kept() -> None:
    async def body(warden: Warden) -> None:
        bad = header_of(PATH).file_offset(TABLE.offset + 20 * TABLE.row_bytes + 3)

        def spoil(offset: int, data: bytes) -> bytes:
            if not offset <= bad < offset + len(data):
                return data
            changed = bytearray(data)
            changed[bad - offset] ^= 4
            return bytes(changed)

        warden.blobs.spoil = spoil
        assert set(await warden.rows([3])) == {3}
        reply = await warden.ask([18])
        assert reply.status == 502
        detail = reply.json()["error"]["detail"]
        assert f"knot {PATH.name}, tensor token_embd_weight, rows [16, 32): the digest is wrong" in detail
        assert await warden.rows([18], fill=False) == {}
        warden.blobs.spoil = lambda offset, data: data
        assert await warden.rows([18]) == {18: stored()[18].tobytes()}

    case(body)


def test_a_knot_that_is_gone_is_502_and_a_store_that_fails_is_503(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("knot.bucket.PAUSE_SECONDS", 0)

    async def body(warden: Warden) -> None:
        gone = Identity("vocab", "gone.knot@abc", "gone.knot", 0, 150)
        assert (await warden.ask([1], who=gone)).status == 502
        await warden.rows([1])
        for error in (BlobFailed, ShortBody):

            async def fails(*arguments: Any, error: type[Exception] = error) -> bytes:
                raise error("no")

            warden.blobs.read = fails  # type: ignore[method-assign]
            reply = await warden.ask([1, 50])
            assert (reply.status, reply.json()["error"]["kind"]) == (503, "unavailable")
            assert set(await warden.rows([1, 50], fill=False)) == {1}, "what it has it gives"

    case(body)
