"""The ports over the emulated SDK: what `workers/boundary.py` is over JavaScript.

Each isolate loads a copy of its own, so that the classes here are those of its bundle.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any, NoReturn, cast
from urllib.parse import urlsplit

from emulator.context import current
from emulator.errors import JsException, StreamBroken
from emulator.r2 import R2ObjectBody
from emulator.sdk.messages import NULL_BODY, Request, Response
from emulator.streams import PIECE, PumpSource, ReadableStream
from protocol.bodies import HeldBytes, hold_bytes
from protocol.calls import Call, Inflow, Reply, ShortBody
from protocol.ports import (
    Background,
    BlobChanged,
    BlobFailed,
    BlobInfo,
    BlobMissing,
    BlobSource,
    KeyValue,
    Objects,
    Peer,
    PeerLost,
    Storage,
)

_ORIGIN = "http://cluster.local"
_UNSAID = -1


def variable(env: Any, name: str) -> str | None:
    """A variable or secret; None when it is not set."""
    value = getattr(env, name, None)
    return value if isinstance(value, str) else None


async def call_of(request: Request) -> Call:
    """An SDK request as a call, with its whole body."""
    url = urlsplit(request.url)
    headers = {name.lower(): value for name, value in request.headers.items()}
    return Call(str(request.method.value), url.path, await request.bytes(), headers, url.query)


def response_of(reply: Reply) -> Response:
    """A reply as an SDK response. A body that streams is asked for pieces as the client takes them."""
    headers = dict(reply.headers)
    body = reply.body
    if isinstance(body, bytes):
        return Response(
            body if body or reply.status not in NULL_BODY else None, reply.status, headers=headers
        )
    if isinstance(body, _StreamInflow):
        stream = body.hand_on()
    elif hasattr(body, "pour"):
        inflow = cast(Inflow, body)
        stream = _pumped(_pieces(inflow), inflow.length if inflow.length >= 0 else None)
    else:
        stream = _pumped(cast("AsyncIterator[bytes]", body), None)
    if stream.length is not None:
        headers.setdefault("content-length", str(stream.length))
    return Response(stream, reply.status, headers=headers)


def _pumped(pieces: AsyncIterator[bytes], length: int | None) -> ReadableStream:
    return ReadableStream(PumpSource(pieces, current().spawn), length)


async def _pieces(inflow: Inflow) -> AsyncIterator[bytes]:
    left = inflow.length
    try:
        while left > 0:
            piece = await inflow.read(min(left, PIECE))
            left -= len(piece)
            yield piece
    finally:
        await inflow.cancel()


async def forward(request: Request, binding: Any, name: str | None = None) -> Response:
    """Hands a request on, untouched, to a service binding or to the object `name` of a namespace."""
    target = binding if name is None else binding.getByName(name)
    return await target.fetch(request)


def blobs(binding: Any) -> BlobSource:
    """An R2 bucket."""
    return _Blobs(binding)


def hold(inflow: Inflow, length: int) -> tuple[HeldBytes, Awaitable[None]]:
    """Keeps the next `length` bytes of a body, which arrive while the second is awaited."""
    return hold_bytes(inflow, length)


def key_values(binding: Any) -> KeyValue:
    """A KV namespace."""
    return _KeyValues(binding)


def peer(binding: Any) -> Peer:
    """A Worker behind a service binding, or an object's stub."""
    return _Peer(binding)


def objects(binding: Any) -> Objects:
    """A namespace of Durable Objects."""
    return _Objects(binding)


def storage(ctx: Any) -> Storage:
    """A Durable Object's storage."""
    return _Storage(ctx.storage)


def background(ctx: Any) -> Background:
    """`waitUntil` of an entrypoint or an object."""

    def start(work: Coroutine[Any, Any, None]) -> None:
        ctx.waitUntil(work)

    return start


def abort(ctx: Any, reason: str) -> NoReturn:
    """Resets a Durable Object."""
    ctx.abort(reason)
    raise AssertionError("an aborted object went on")


async def set_alarm(ctx: Any, seconds_from_now: float) -> None:
    """Sets a Durable Object's alarm."""
    await ctx.storage.setAlarm(int((time.time() + seconds_from_now) * 1000))


async def engine(limit: int) -> Any:
    """The isolate's engine of at most `limit` bytes; its errors are those of the bundle."""
    isolate = _isolate()
    return _Engine(await isolate.engine(limit), isolate.meter.of_engine)


def clock() -> float:
    """Seconds since 1970."""
    return time.time()


def log(message: str, **fields: Any) -> None:
    """One line of JSON in the log."""
    _isolate().log(message, fields)


def held(bytes_delta: int) -> None:
    """Tells the isolate's meter that Python objects keep more bytes, or fewer."""
    _isolate().meter.held(bytes_delta)


def moved(layer: int | None, phase: str, block: str, size: int, stays: bool) -> None:
    """Tells the cluster's recorder, if it has one, of a block of weights that arrives or leaves."""
    isolate = _isolate()
    if isolate.recorder is not None:
        isolate.recorder.moved(isolate.name)(layer, phase, block, size, stays)


def memory() -> dict[str, int]:
    """What the isolate's meter counts, in bytes."""
    use = _isolate().meter.use()
    return {"baseline": use.baseline, "wasm": use.engine, "buffers": use.bodies, "held": use.held}


def _isolate() -> Any:
    # Each isolate has a module `workers` of its own, which knows it.
    return __import__("workers")._isolate


class _StreamInflow:
    """A body that comes in; a file's bytes go straight into the engine."""

    def __init__(self, stream: ReadableStream, length: int) -> None:
        self._stream = stream
        self.length = length

    async def pour(self, host: Any, offset: int, length: int) -> None:
        """Moves the next bytes into an engine's region."""
        view = getattr(host, "view", None)
        try:
            if view is not None:
                count = await self._stream.read_into(view(offset, length))
            else:
                data = await self._exactly(length)
                host.write(offset, data)
                count = len(data)
        except StreamBroken as error:
            raise ShortBody(str(error)) from error
        self._check(length, count)

    async def read(self, length: int) -> bytes:
        """The next bytes."""
        try:
            data = await self._exactly(length)
        except StreamBroken as error:
            raise ShortBody(str(error)) from error
        self._check(length, len(data))
        return data

    async def _exactly(self, length: int) -> bytes:
        found = await self._stream.read(length) if length else b""
        while found and len(found) < length:
            more = await self._stream.read(length - len(found))
            if not more:
                break
            found += more
        return found

    def _check(self, wanted: int, found: int) -> None:
        if found < wanted:
            raise ShortBody(f"{wanted} bytes were asked for, {found} were left")

    async def cancel(self) -> None:
        """Gives up the rest."""
        await self._stream.cancel()

    def hand_on(self) -> ReadableStream:
        """The body itself, for somebody else to read."""
        return self._stream


class _Blobs:
    def __init__(self, bucket: Any) -> None:
        self._bucket = bucket

    async def head(self, key: str) -> BlobInfo:
        found = await self._ask(lambda: self._bucket.head(key))
        if found is None:
            raise BlobMissing(f"the bucket has no object {key!r}")
        return BlobInfo(found.size, found.etag)

    async def read(self, key: str, offset: int, length: int, etag: str | None = None) -> bytes:
        if not length:
            return b""
        found = await self._get(key, offset, length, etag)
        try:
            return bytes(await found.arrayBuffer())
        except StreamBroken as error:
            raise ShortBody(f"{key}: {error}") from error

    async def open(self, key: str, offset: int, length: int, etag: str | None = None) -> Inflow:
        if not length:
            return _StreamInflow(ReadableStream.of(b""), 0)
        return _StreamInflow((await self._get(key, offset, length, etag)).body, length)

    async def _get(self, key: str, offset: int, length: int, etag: str | None) -> R2ObjectBody:
        options: dict[str, Any] = {"range": {"offset": offset, "length": length}}
        if etag is not None:
            options["onlyIf"] = {"etagMatches": etag}
        found = await self._ask(lambda: self._bucket.get(key, options))
        if found is None:
            raise BlobMissing(f"the bucket has no object {key!r}")
        if not isinstance(found, R2ObjectBody):
            raise BlobChanged(f"{key}: its etag is {found.etag}, expected {etag}: it was uploaded anew")
        if found.range["length"] < length:
            await found.body.cancel()
            raise ShortBody(f"{key}: {length} bytes from {offset} were asked for, it has {found.size}")
        return found

    async def _ask(self, operation: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
        try:
            return await operation()
        except JsException as error:
            if "(10039)" in error.message:
                raise ShortBody(error.message) from error
            raise BlobFailed(f"R2: {error.message}") from error


class _KeyValues:
    def __init__(self, namespace: Any) -> None:
        self._namespace = namespace

    async def get(self, key: str) -> bytes | None:
        found = await self._namespace.get(key, "arrayBuffer")
        return None if found is None else bytes(found)

    async def put(self, key: str, value: bytes, ttl_seconds: int) -> None:
        await self._namespace.put(key, value, {"expirationTtl": ttl_seconds})

    async def delete(self, key: str) -> None:
        await self._namespace.delete(key)


class _Peer:
    def __init__(self, fetcher: Any) -> None:
        self._fetcher = fetcher

    async def call(self, call: Call) -> Reply:
        response = await self._fetch(call)
        try:
            body = await response.bytes()
        except (StreamBroken, OSError) as error:
            raise PeerLost(f"{call.method} {call.path}: the answer broke off: {error}") from error
        return Reply(response.status, body, _headers(response))

    async def open(self, call: Call) -> tuple[Reply, Inflow]:
        response = await self._fetch(call)
        headers = _headers(response)
        stream = response.take() or ReadableStream.of(b"")
        said = headers.get("content-length", "")
        length = int(said) if said.isdigit() else _UNSAID if stream.length is None else stream.length
        return Reply(response.status, b"", headers), _StreamInflow(stream, length)

    async def _fetch(self, call: Call) -> Response:
        url = f"{_ORIGIN}{call.path}" + (f"?{call.query}" if call.query else "")
        try:
            return await self._fetcher.fetch(
                url, method=call.method, headers=dict(call.headers), body=call.body or None
            )
        except OSError as error:
            raise PeerLost(f"{call.method} {call.path}: {error}") from error


def _headers(response: Response) -> dict[str, str]:
    return {name.lower(): value for name, value in response.headers.items()}


class _Objects:
    def __init__(self, namespace: Any) -> None:
        self._namespace = namespace

    def peer(self, name: str) -> Peer:
        return _Peer(self._namespace.getByName(name))


class _Storage:
    def __init__(self, kept: Any) -> None:
        self._kept = kept

    async def get(self, key: str) -> bytes | None:
        found = await self._kept.get(key)
        return None if found is None else bytes(found)

    async def put(self, key: str, value: bytes) -> None:
        await self._kept.put(key, value)

    async def delete(self, key: str) -> None:
        await self._kept.delete(key)

    async def keys(self, prefix: str) -> list[str]:
        return sorted(await self._kept.list({"prefix": prefix}))


class _Engine:
    """An engine whose errors are of the bundle's classes, and whose memory the isolate's meter knows."""

    def __init__(self, host: Any, metered: Callable[[int], None]) -> None:
        self._host = host
        self._metered = metered
        self.write = host.write
        self.read = host.read
        self.view = host.view
        self.memory_bytes = host.memory_bytes

    def call(self, name: str, *args: int) -> int:
        try:
            result: int = self._host.call(name, *args)
        except Exception as error:
            raise _own(error) from error
        self._metered(self._host.memory_bytes())
        return result

    async def compute(self, name: str, *args: int) -> int:
        try:
            result: int = await self._host.compute(name, *args)
        except Exception as error:
            raise _own(error) from error
        self._metered(self._host.memory_bytes())
        return result


def _own(error: Exception) -> Exception:
    """The bundle's own class of an engine's error; other errors as they are."""
    status = getattr(type(error), "status", None)
    if not isinstance(status, int):
        return error
    from engine.errors import BY_STATUS, EngineError

    return BY_STATUS.get(status, EngineError)(str(error))
