"""What R2 and KV lie in: files that are registered where they are, and what is kept over restarts."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from emulator_support import run
from hypothesis import given
from hypothesis import strategies as st

from emulator.errors import JsException, StreamBroken
from emulator.kv import KVStore, Value
from emulator.limits import Limits
from emulator.r2 import Bucket, holds, span
from emulator.r2_store import R2Store
from emulator.streams import BytesSource, FileSource, PumpSource, ReadableStream
from emulator.values import crossed, dump, load

pytestmark = pytest.mark.filterwarnings("error")


@pytest.fixture
def bucket(tmp_path: Path) -> Iterator[R2Store]:
    store = R2Store(tmp_path / "bucket", Limits())
    yield store
    store.close()


def stream(bucket: R2Store, key: str, offset: int, length: int) -> ReadableStream:
    entry = bucket.entry(key)
    assert entry is not None
    return ReadableStream(bucket.open(entry, offset, length), length)


def put(bucket: R2Store, key: str, data: bytes) -> None:
    run(lambda: bucket.put(key, ReadableStream.of(data), {}, lambda: True))  # type: ignore[arg-type]


def test_a_registered_file_is_served_from_where_it_lies(bucket: R2Store, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"0123456789")
    entry = bucket.register("k", tmp_path / "file")
    assert (entry.size, len(entry.etag), entry.path) == (10, 32, (tmp_path / "file").resolve())
    assert list((bucket.folder / "blobs").iterdir()) == []

    async def scenario() -> None:
        assert await stream(bucket, "k", 2, 5).read_all() == b"23456"

    run(scenario)


def test_registering_an_unchanged_file_again_changes_nothing(bucket: R2Store, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x")
    assert bucket.register("k", tmp_path / "file") == bucket.register("k", tmp_path / "file")


def test_a_registered_file_that_changes_has_another_etag(bucket: R2Store, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"before")
    first = bucket.register("k", path).etag
    path.write_bytes(b"after!")
    entry = bucket.entry("k")
    assert entry is not None
    assert entry.etag != first
    path.unlink()
    assert bucket.entry("k") is None
    path.write_bytes(b"back!!")
    assert bucket.entry("k") is not None


def test_a_file_that_changes_while_it_is_read_breaks_the_body(bucket: R2Store, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(1000))
    bucket.register("k", path)

    async def scenario() -> None:
        body = stream(bucket, "k", 0, 1000)
        assert len(await body.read(100)) == 100
        await asyncio.sleep(0.02)
        path.write_bytes(bytes(1001))
        with pytest.raises(StreamBroken, match="changed while it was read"):
            await body.read(100)
        assert body.finished

    run(scenario)


def test_a_file_that_is_replaced_while_it_is_read_is_read_to_its_end(bucket: R2Store, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"old" * 1000)
    (tmp_path / "new").write_bytes(b"new" * 1000)
    bucket.register("k", tmp_path / "file")
    put(bucket, "own", b"old" * 1000)

    async def scenario() -> None:
        own = stream(bucket, "own", 0, 3000)
        await own.read(10)
        await bucket.put("own", ReadableStream.of(b"new"), {}, lambda: True)
        assert await own.read_all() == (b"old" * 1000)[10:]

    run(scenario)


def test_objects_and_their_metadata_are_there_after_a_restart(bucket: R2Store) -> None:
    async def scenario() -> None:
        options = {"customMetadata": {"a": "b"}, "httpMetadata": {"contentType": "x/y"}}
        await bucket.put("k", ReadableStream.of(b"data"), options, lambda: True)

    run(scenario)
    again = R2Store(bucket.folder, Limits())
    entry = again.entry("k")
    again.close()
    assert entry is not None
    assert (entry.custom_metadata, entry.http_metadata) == ({"a": "b"}, {"contentType": "x/y"})
    assert entry.path.read_bytes() == b"data"


def test_a_put_that_breaks_off_leaves_the_old_object_and_no_scraps(bucket: R2Store) -> None:
    put(bucket, "k", b"old")

    async def pieces():
        yield b"half"
        raise RuntimeError("gone")

    async def scenario() -> None:
        source = PumpSource(pieces(), lambda work, name: asyncio.ensure_future(work))
        with pytest.raises(StreamBroken, match="gone"):
            await bucket.put("k", ReadableStream(source, 8), {}, lambda: True)
        short = ReadableStream(BytesSource(b"1234"), 8)
        with pytest.raises(StreamBroken, match="8 bytes was promised, 4 came"):
            await bucket.put("k", short, {}, lambda: True)

    run(scenario)
    assert len(list((bucket.folder / "blobs").iterdir())) == 1
    entry = bucket.entry("k")
    assert entry is not None
    assert entry.path.read_bytes() == b"old"


def test_what_a_killed_process_left_is_swept_at_the_next_start(bucket: R2Store) -> None:
    put(bucket, "k", b"kept")
    (bucket.folder / "blobs" / "0123").write_bytes(b"scrap")
    Bucket(bucket.folder, Limits()).close()
    assert [path.read_bytes() for path in (bucket.folder / "blobs").iterdir()] == [b"kept"]


def test_replaced_and_deleted_objects_leave_no_files(bucket: R2Store, tmp_path: Path) -> None:
    put(bucket, "k", b"one")
    put(bucket, "k", b"two")
    assert len(list((bucket.folder / "blobs").iterdir())) == 1
    bucket.delete(["k"])
    assert list((bucket.folder / "blobs").iterdir()) == []
    (tmp_path / "file").write_bytes(b"x")
    bucket.register("r", tmp_path / "file")
    bucket.delete(["r"])
    assert (tmp_path / "file").exists()


@given(
    st.integers(0, 50),
    st.none() | st.integers(0, 60),
    st.none() | st.integers(0, 60),
    st.none() | st.integers(0, 60),
)
def test_a_range_is_within_its_object_or_refused(
    size: int, offset: int | None, length: int | None, suffix: int | None
) -> None:
    data = bytes(range(size))
    wanted = {"offset": offset, "length": length, "suffix": suffix}
    try:
        start, count = span({name: value for name, value in wanted.items() if value is not None}, size)
    except JsException:
        impossible = suffix is not None and (suffix == 0 or offset is not None or length is not None)
        assert impossible or length == 0 or (offset or 0) >= size
        return
    assert 0 <= start <= start + count <= size
    if suffix is not None:
        assert data[start : start + count] == data[max(0, size - suffix) :]
    else:
        end = size if length is None else (offset or 0) + length
        assert data[start : start + count] == data[offset or 0 : end]


def test_conditions_on_times_and_several_etags_hold_as_they_say(bucket: R2Store) -> None:
    put(bucket, "k", b"x")
    entry = bucket.entry("k")
    assert entry is not None
    from datetime import datetime

    now = time.time()
    before, after = datetime.fromtimestamp(now - 100), datetime.fromtimestamp(now + 100)
    assert holds({"uploadedAfter": before, "uploadedBefore": after}, entry)
    assert not holds({"uploadedAfter": after}, entry)
    assert not holds({"uploadedBefore": before}, entry)
    assert holds({"etagMatches": f"{'0' * 32}, {entry.etag}"}, entry)
    assert holds({"etagMatches": "*"}, entry)
    with pytest.raises(JsException, match="quotes"):
        holds({"etagMatches": f'"{entry.etag}"'}, entry)


def test_a_value_expires_and_is_there_after_a_restart(tmp_path: Path) -> None:
    store = KVStore(tmp_path / "kv.sqlite")
    now = int(time.time())
    store.put("kept", Value(b"1", now + 100, '{"a":1}'))
    store.put("gone", Value(b"2", now - 1, None))
    assert store.get("gone") is None
    assert [key for key, _, _ in store.list(b"", b"", 10)] == [b"kept"]
    store.close()
    again = KVStore(tmp_path / "kv.sqlite")
    assert again.get("kept") == Value(b"1", now + 100, '{"a":1}')
    assert again.previous("kept") == again.get("kept")
    again.close()


def test_a_stale_read_sees_the_value_before_the_last_write(tmp_path: Path) -> None:
    store = KVStore(tmp_path / "kv.sqlite", keep_previous=True)
    store.put("k", Value(b"1", None, None))
    assert store.previous("k") is None
    store.put("k", Value(b"2", None, None))
    assert store.previous("k") == Value(b"1", None, None)
    store.delete("k")
    assert store.previous("k") == Value(b"2", None, None)
    store.close()


@given(st.lists(st.binary(max_size=40), max_size=8), st.lists(st.integers(0, 30), max_size=20))
def test_a_pump_gives_its_pieces_in_order_however_it_is_read(made: list[bytes], reads: list[int]) -> None:
    async def pieces():
        for piece in made:
            yield piece

    async def scenario() -> None:
        body = ReadableStream(PumpSource(pieces(), lambda work, name: asyncio.ensure_future(work)))
        whole, found = b"".join(made), b""
        for number, most in enumerate(reads):
            if number % 2:
                view = memoryview(bytearray(most))
                count = await body.read_into(view)
                assert count == min(most, len(whole) - len(found))
                found += bytes(view[:count])
            else:
                found += await body.read(most)
        assert found + await body.read_all() == whole

    asyncio.run(scenario())


def test_a_closed_file_is_closed_once_and_a_forgotten_one_too(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(3 << 20))

    def opened() -> int:
        return len(list(Path("/dev/fd").iterdir()))

    async def scenario() -> None:
        before = opened()
        source = FileSource(os.open(tmp_path / "file", os.O_RDONLY), 0, 3 << 20, lambda descriptor: None)
        reading = asyncio.ensure_future(source.read_into(memoryview(bytearray(3 << 20))))
        await asyncio.sleep(0)
        await source.close()
        assert await reading == 3 << 20
        assert opened() == before
        forgotten = ReadableStream(
            FileSource(os.open(tmp_path / "file", os.O_RDONLY), 0, 10, lambda descriptor: None), 10
        )
        assert opened() == before + 1
        del forgotten
        await asyncio.sleep(0.01)
        assert opened() == before

    run(scenario)


plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.text(max_size=5) | st.binary(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=10,
)


@given(plain)
def test_what_is_stored_is_what_had_crossed(value: object) -> None:
    arrived = crossed(value)
    assert load(dump(arrived)) == arrived
    assert crossed(arrived) == arrived
