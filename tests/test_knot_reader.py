"""A header is read in two fetches at most, from files and from servers that may misbehave."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from synth import make_tiny_knot

from knot.errors import HeaderError, SourceError
from knot.reader import PROBE_BYTES, load_header, read_header
from knot.sources import FileSource, HttpSource


class Counted:
    """Bytes in memory that note what is read of them."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.reads: list[tuple[int, int]] = []

    async def read(self, offset: int, length: int) -> bytes:
        self.reads.append((offset, length))
        return self.data[offset : offset + length]

    async def size(self) -> int:
        return len(self.data)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_knot(tmp_path_factory.mktemp("knot") / "tiny.knot")


@pytest.fixture(scope="module")
def tall(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A knot whose header is longer than the probe."""
    return make_tiny_knot(
        tmp_path_factory.mktemp("tall") / "tall.knot",
        layers=60,
        hidden=32,
        heads=1,
        ffn=32,
        types="Q8_0",
    )


def test_a_short_header_takes_one_fetch(tiny: Path) -> None:
    source = Counted(tiny.read_bytes())
    assert asyncio.run(read_header(source)) == load_header(tiny)
    assert source.reads == [(0, PROBE_BYTES)]


def test_a_long_header_takes_two_and_no_byte_twice(tall: Path) -> None:
    source = Counted(tall.read_bytes())
    header = asyncio.run(read_header(source))
    assert header == load_header(tall)
    assert header.payload_offset > PROBE_BYTES
    assert source.reads == [(0, PROBE_BYTES), (PROBE_BYTES, header.payload_offset - PROBE_BYTES)]


def test_a_file_shorter_than_the_probe_is_asked_for_no_more_than_it_has(tmp_path: Path) -> None:
    source = Counted(b"KNOT\1\0")
    with pytest.raises(HeaderError, match="the file has 6"):
        asyncio.run(read_header(source))
    assert source.reads == [(0, 6)]


def test_a_source_that_gives_less_than_asked_is_an_error_with_both_numbers(tiny: Path) -> None:
    source = Counted(tiny.read_bytes())
    source.read = lambda offset, length: asyncio.sleep(0, b"short")  # type: ignore[method-assign]
    with pytest.raises(SourceError, match="but 5 came"):
        asyncio.run(read_header(source))


def test_a_file_is_a_source(tiny: Path, tmp_path: Path) -> None:
    source = FileSource(tiny)
    assert asyncio.run(read_header(source)) == load_header(tiny)
    assert asyncio.run(source.read(4, 2)) == b"\1\0"
    with pytest.raises(SourceError, match="but it ends at"):
        asyncio.run(source.read(tiny.stat().st_size - 1, 2))
    with pytest.raises(SourceError, match="No such file"):
        asyncio.run(FileSource(tmp_path / "none").size())
    with pytest.raises(SourceError, match="No such file"):
        asyncio.run(FileSource(tmp_path / "none").read(0, 1))


def server(
    data: bytes, change: Callable[[httpx.Request, httpx.Response], httpx.Response]
) -> httpx.AsyncClient:
    """A client of a server that serves ranges of `data`, each answer altered by `change`."""

    def answer(request: httpx.Request) -> httpx.Response:
        start, end = map(int, request.headers["range"].removeprefix("bytes=").split("-"))
        end = min(end, len(data) - 1)
        headers = {"content-range": f"bytes {start}-{end}/{len(data)}", "etag": '"one"'}
        return change(request, httpx.Response(206, headers=headers, content=data[start : end + 1]))

    return httpx.AsyncClient(transport=httpx.MockTransport(answer))


def test_a_url_is_a_source_and_reads_are_conditional_on_its_etag(tall: Path) -> None:
    seen: list[str | None] = []

    def note(request: httpx.Request, response: httpx.Response) -> httpx.Response:
        seen.append(request.headers.get("if-match"))
        return response

    source = HttpSource(server(tall.read_bytes(), note), "http://x/tall.knot")
    assert asyncio.run(read_header(source)) == load_header(tall)
    assert seen == [None, '"one"', '"one"']


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda _, r: httpx.Response(200, content=r.content),
            "answered 200, expected 206, so it does not serve ranges",
        ),
        (lambda _, r: httpx.Response(404), "answered 404"),
        (lambda _, r: httpx.Response(206, content=r.content), "with the range None"),
        (
            lambda _, r: httpx.Response(206, headers=r.headers, content=r.content + b"x"),
            "more than the 1 bytes",
        ),
        (lambda _, r: httpx.Response(206, headers=r.headers, content=b""), "sent 0 of the 1 bytes"),
    ],
)
def test_a_server_that_answers_with_anything_else_is_refused(
    tiny: Path, change: Callable[[httpx.Request, httpx.Response], httpx.Response], message: str
) -> None:
    def altered(request: httpx.Request, response: httpx.Response) -> httpx.Response:
        answer = change(request, response)
        if "content-length" in answer.headers:
            del answer.headers["content-length"]
        return answer

    source = HttpSource(server(tiny.read_bytes(), altered), "http://x/y")
    with pytest.raises(SourceError, match=message):
        asyncio.run(read_header(source))


def test_a_model_replaced_between_two_reads_is_an_error_not_a_mixture(tiny: Path) -> None:
    def refuse_later(request: httpx.Request, response: httpx.Response) -> httpx.Response:
        return httpx.Response(412) if "if-match" in request.headers else response

    source = HttpSource(server(tiny.read_bytes(), refuse_later), "http://x/y")
    with pytest.raises(SourceError, match="changed while it was read"):
        asyncio.run(read_header(source))

    sizes = iter((b"1", b"2"))

    def grow(request: httpx.Request, response: httpx.Response) -> httpx.Response:
        response.headers["content-range"] += next(sizes).decode()
        del response.headers["etag"]
        return response

    source = HttpSource(server(tiny.read_bytes(), grow), "http://x/y")
    with pytest.raises(SourceError, match="bytes and is"):
        asyncio.run(read_header(source))


def test_a_server_that_cannot_be_reached_is_named() -> None:
    def fail(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("nobody there")

    client = httpx.AsyncClient(transport=httpx.MockTransport(fail))
    with pytest.raises(SourceError, match="http://x/y cannot be read: nobody there"):
        asyncio.run(HttpSource(client, "http://x/y").size())
