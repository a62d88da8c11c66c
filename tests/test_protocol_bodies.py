"""Bodies: bytes that are there already, and pieces opened when their turn comes."""

from __future__ import annotations

from itertools import pairwise

import pytest
from core_support import run
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.bodies import BytesInflow, JoinedInflow, Piece
from protocol.calls import Inflow, ShortBody


class Memory:
    """An engine's region."""

    def __init__(self, size: int = 64) -> None:
        self.region = bytearray(size)

    def write(self, offset: int, data: bytes | memoryview) -> None:
        self.region[offset : offset + len(data)] = data


class Counted(BytesInflow):
    """A body that counts how often it was cancelled."""

    def __init__(self, data: bytes) -> None:
        super().__init__(data)
        self.cancelled = 0

    async def cancel(self) -> None:
        self.cancelled += 1
        await super().cancel()


def piece(inflow: Inflow, opened: list[Inflow], length: int | None = None) -> Piece:
    async def open() -> Inflow:
        opened.append(inflow)
        return inflow

    return inflow.length if length is None else length, open


@settings(max_examples=80, deadline=None)
@given(st.lists(st.binary(max_size=9), max_size=5), st.data())
def test_several_bodies_read_as_one_however_they_are_cut(pieces: list[bytes], data: st.DataObject) -> None:
    whole = b"".join(pieces)
    cuts = sorted({0, len(whole), *data.draw(st.lists(st.integers(0, len(whole)), max_size=4))})
    pour = data.draw(st.booleans())

    async def body() -> None:
        opened: list[Inflow] = []
        joined = JoinedInflow([piece(Counted(part), opened) for part in pieces])
        assert joined.length == len(whole)
        memory, found = Memory(), b""
        for start, end in pairwise(cuts):
            if pour:
                await joined.pour(memory, start, end - start)
            else:
                found += await joined.read(end - start)
        assert (bytes(memory.region[: len(whole)]) if pour else found) == whole
        with pytest.raises(ShortBody):
            await joined.read(1)

    run(body())


def test_a_piece_is_opened_when_its_turn_comes_and_the_one_before_is_closed() -> None:
    async def body() -> None:
        opened: list[Inflow] = []
        first, second = Counted(b"abc"), Counted(b"def")
        joined = JoinedInflow([piece(first, opened), piece(second, opened)])
        assert opened == []
        assert await joined.read(3) == b"abc"
        assert opened == [first]
        assert await joined.read(1) == b"d"
        assert opened == [first, second]
        assert first.cancelled
        await joined.cancel()
        assert second.cancelled == 1
        await joined.cancel()
        assert second.cancelled == 1
        with pytest.raises(ShortBody):
            await joined.read(1)

    run(body())


def test_cancelling_early_opens_nothing_more() -> None:
    async def body() -> None:
        opened: list[Inflow] = []
        joined = JoinedInflow([piece(Counted(b"abc"), opened), piece(Counted(b"def"), opened)])
        await joined.cancel()
        assert opened == []
        with pytest.raises(ShortBody, match="3 bytes were asked for, none is left"):
            await joined.pour(Memory(), 0, 3)

    run(body())


def test_a_piece_shorter_than_promised_is_a_short_body() -> None:
    async def body() -> None:
        joined = JoinedInflow([piece(Counted(b"abc"), [], length=5), piece(Counted(b"xyz"), [])])
        with pytest.raises(ShortBody, match="5 bytes were asked for, 3 are left"):
            await joined.read(8)

    run(body())


def test_a_piece_longer_than_promised_gives_what_was_promised() -> None:
    async def body() -> None:
        long = Counted(b"abcdef")
        joined = JoinedInflow([piece(long, [], length=2), piece(Counted(b"xyz"), [])])
        assert await joined.read(5) == b"abxyz"
        assert long.cancelled == 1

    run(body())


def test_a_piece_that_cannot_be_opened_is_an_error_now_and_never_the_piece_before() -> None:
    async def body() -> None:
        async def broken() -> Inflow:
            raise LookupError("the bucket is gone")

        before = Counted(b"abcdefgh")
        joined = JoinedInflow([piece(before, [], length=3), (3, broken)])
        assert await joined.read(3) == b"abc"
        with pytest.raises(LookupError, match="the bucket is gone"):
            await joined.read(3)
        with pytest.raises(ShortBody):
            await joined.read(3)
        await joined.cancel()
        assert before.cancelled == 1

    run(body())


def test_bytes_are_poured_once_and_in_order() -> None:
    async def body() -> None:
        memory, inflow = Memory(), BytesInflow(memoryview(b"abcdef"))
        assert inflow.length == 6
        await inflow.pour(memory, 10, 4)
        assert await inflow.read(2) == b"ef"
        assert bytes(memory.region[10:14]) == b"abcd"
        with pytest.raises(ShortBody, match="1 bytes were asked for, 0 are left"):
            await inflow.pour(memory, 0, 1)
        await inflow.cancel()
        await inflow.cancel()

    run(body())


def test_after_cancelling_nothing_is_left() -> None:
    async def body() -> None:
        inflow = BytesInflow(b"abcdef")
        await inflow.cancel()
        with pytest.raises(ShortBody):
            await inflow.read(1)

    run(body())
