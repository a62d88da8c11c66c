"""Calls from outside of a cluster, as requests, and their answers as replies."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Final

from emulator.sdk.messages import Request, Response
from emulator.streams import PIECE, ReadableStream
from protocol.calls import Call, Reply

ORIGIN: Final = "http://cluster.local"


def request_of(call: Call) -> Request:
    """A call from outside as a request."""
    url = f"{ORIGIN}{call.path}" + (f"?{call.query}" if call.query else "")
    return Request(url, method=call.method, headers=dict(call.headers), body=call.body or None)


async def reply_of(response: Response) -> Reply:
    """A response for somebody outside."""
    headers = dict(response.headers.items())
    stream = response.take()
    if stream is None or stream.whole:
        return Reply(response.status, b"" if stream is None else await stream.read_all(), headers)
    return Reply(response.status, pieces_of(stream), headers)


async def pieces_of(stream: ReadableStream) -> AsyncIterator[bytes]:
    """A body's pieces; leaving off gives it up."""
    try:
        while piece := await stream.read(PIECE):
            yield piece
    finally:
        await stream.cancel()
