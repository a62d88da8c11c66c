"""The ports over JavaScript: the one module of a Worker that touches it.

`boundary.js` beside it does what must not pass through Python objects. Nothing is imported from it at the top
level, where a Worker may neither wait nor make WebAssembly instances.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from typing import Any, NoReturn, cast

from pyodide.ffi import JsException, create_proxy, run_sync, to_js

from engine.errors import EngineError, EngineLost, raise_for
from engine.host import ABI_VERSION
from protocol.bodies import BytesInflow, JoinedInflow, hold_bytes
from protocol.calls import Call, Inflow, Reply, ShortBody
from protocol.ports import (
    Background,
    BlobChanged,
    BlobFailed,
    BlobInfo,
    BlobMissing,
    BlobSource,
    Held,
    KeyValue,
    Objects,
    Peer,
    PeerLost,
    Storage,
)
from workers import Request, Response, import_from_javascript

ORIGIN = "http://cluster.local"
PIECE = 256 * 1024
LENGTH_HEADER = "x-body-length"
NULL_BODY = (101, 204, 205, 304)
LOG_LINES, LOG_SECONDS, LOG_CHARACTERS = 500, 10.0, 2000

_modules: list[Any] = []
_engines: dict[int, WasmHost | RemoteHost] = {}
_working: set[asyncio.Future[Any]] = set()
_kept = [0]
_logged = [0.0, 0]
# Bytes of weights on their way now, and at most so far; bytes that are pinned.
_weights = [0, 0, 0]


def _js() -> Any:
    if not _modules:
        _modules.append(import_from_javascript("./boundary.js"))
    return _modules[0]


def variable(env: Any, name: str) -> str | None:
    """A variable or secret of the Worker; None when it is not set."""
    value = getattr(env, name, None)
    return value if isinstance(value, str) else None


async def call_of(request: Request) -> Call:
    """An SDK request as a call, with its whole body."""
    found = cast(Any, request).js_object
    method, path, query, headers = json.loads(_js().callHead(found))
    return Call(method, path, _taken(await _js().whole(found)), _headers(headers), query)


def response_of(reply: Reply) -> Response:
    """A reply as an SDK response. A body that streams is asked for pieces as the client takes them."""
    headers = {name: value for name, value in reply.headers.items() if name != "content-length"}
    body = reply.body
    if isinstance(body, bytes):
        # A copy of its own: a view of Python's memory may have changed before it is sent.
        sent = None if reply.status in NULL_BODY else to_js(body)
    elif isinstance(body, _StreamInflow):
        if body.length >= 0:
            headers[LENGTH_HEADER] = str(body.length)
        sent = body.hand_on()
    else:
        length = cast(Any, body).length if hasattr(body, "pour") else -1
        if length >= 0:
            headers[LENGTH_HEADER] = str(length)
        sent = _pumped(_parts(cast(Any, body)), length)
    return Response(_js().respond(reply.status, json.dumps(headers), sent))


def _parts(body: Any) -> AsyncIterator[Any]:
    if isinstance(body, JoinedInflow):
        return _joined(body)
    return _pieces(body) if hasattr(body, "pour") else body


async def _joined(body: JoinedInflow) -> AsyncIterator[Any]:
    """The bodies one after the other; those that are streams pass without being looked at."""
    for _, open_piece in body.take():
        inflow = await open_piece()
        if isinstance(inflow, _StreamInflow | _PartInflow):
            yield inflow.hand_on()
        else:
            async for piece in _pieces(inflow):
                yield piece


async def _pieces(inflow: Inflow) -> AsyncIterator[bytes]:
    left = inflow.length
    try:
        while left > 0:
            piece = await inflow.read(min(left, PIECE))
            left -= len(piece)
            yield piece
    finally:
        await inflow.cancel()


def _pumped(parts: AsyncIterator[Any], length: int) -> Any:
    """A JavaScript stream that asks `parts`; they are closed when it ends or nobody wants more."""
    proxies: list[Any] = []

    async def following() -> Any:
        try:
            piece = await anext(parts)
        except StopAsyncIteration:
            return None
        return to_js(piece) if isinstance(piece, bytes) else piece

    async def close() -> None:
        leave = getattr(parts, "aclose", None)
        if leave is not None:
            await leave()
        # Not while JavaScript is still in a call of one of them.
        asyncio.get_running_loop().call_later(0.05, lambda: [proxy.destroy() for proxy in proxies])

    proxies += [create_proxy(following), create_proxy(close)]
    return _js().pumped(proxies[0], proxies[1], length)


async def forward(request: Request, binding: Any, name: str | None = None) -> Response:
    """Hands a request on, untouched, to a service binding or to the object `name` of a namespace."""
    try:
        return Response(await _js().forward(cast(Any, request).js_object, _raw(binding), name))
    except JsException as error:
        raise OSError(_said(error)) from None


def blobs(binding: Any) -> BlobSource:
    """An R2 bucket."""
    return _Blobs(_raw(binding))


def hold(inflow: Inflow, length: int) -> tuple[Held, Awaitable[None]]:
    """Keeps the next `length` bytes of a body in an ArrayBuffer: Python's heap would never shrink again."""
    if not isinstance(inflow, _StreamInflow):
        return hold_bytes(inflow, length)
    held = _Held(_js().Held.new(length), length)
    return held, inflow.fill(held)


def key_values(binding: Any) -> KeyValue:
    """A KV namespace."""
    return _KeyValues(_raw(binding))


def peer(binding: Any) -> Peer:
    """A Worker behind a service binding."""
    return _Peer(_raw(binding), None)


def objects(binding: Any) -> Objects:
    """A namespace of Durable Objects."""
    return _Objects(_raw(binding))


def storage(ctx: Any) -> Storage:
    """A Durable Object's storage."""
    return _Storage(_raw_context(ctx).storage)


def background(ctx: Any) -> Background:
    """`waitUntil` of an entrypoint or an object."""
    raw = _raw_context(ctx)

    def start(work: Coroutine[Any, Any, None]) -> None:
        # A promise that is JavaScript's own: a proxy of the coroutine could be destroyed before it ends.
        settle = _js().keepAlive(raw)
        task = asyncio.ensure_future(work)
        _working.add(task)

        def ended(task: asyncio.Future[None]) -> None:
            _working.discard(task)
            settle()
            if not task.cancelled() and task.exception() is not None:
                log("background work failed", error=repr(task.exception()))

        task.add_done_callback(ended)

    return start


def abort(ctx: Any, reason: str) -> NoReturn:
    """Resets a Durable Object."""
    ctx.abort(reason)
    raise AssertionError("an aborted object went on")


async def set_alarm(ctx: Any, seconds_from_now: float) -> None:
    """Sets a Durable Object's alarm."""
    await _raw_context(ctx).storage.setAlarm(int((time.time() + seconds_from_now) * 1000))


async def engine(limit: int) -> WasmHost | RemoteHost:
    """This isolate's engine, whose region has at most `limit` bytes; made at first use."""
    if limit not in _engines:
        if _engines:
            raise ValueError(f"this isolate has an engine of {next(iter(_engines))} bytes, not of {limit}")
        elsewhere = getattr(import_from_javascript("cloudflare:workers").env, "ENGINE", None)
        made = WasmHost(limit) if elsewhere is None else await RemoteHost.made(elsewhere, limit)
        _engines.setdefault(limit, made)
    return _engines[limit]


def clock() -> float:
    """Seconds since 1970."""
    return time.time()


def log(message: str, **fields: Any) -> None:
    """One line of JSON in the log; long values are cut and floods dropped."""
    now = time.time()
    if now - _logged[0] > LOG_SECONDS:
        _logged[:] = [now, 0]
    _logged[1] += 1
    if _logged[1] > LOG_LINES:
        return
    shown = {
        name: value if isinstance(value, int | float | None) else str(value)[:LOG_CHARACTERS]
        for name, value in fields.items()
    }
    print(json.dumps({"message": message[:LOG_CHARACTERS], **shown}))


def held(bytes_delta: int) -> None:
    """Tells the isolate's meter that Python objects keep more bytes, or fewer."""
    _kept[0] += bytes_delta


def moved(layer: int | None, phase: str, block: str, size: int, stays: bool) -> None:
    """Counts a block of weights that arrives (+bytes) or leaves (-bytes)."""
    _weights[2 if stays else 0] += size
    _weights[1] = max(_weights[0], _weights[1])


def memory() -> dict[str, int]:
    """What can be seen of the isolate's memory, in bytes."""
    from pyodide_js import _module  # pyright: ignore[reportPrivateUsage]

    now, peak = _js().buffers()
    return {
        "python_heap": int(_module.HEAP8.length),
        "wasm": sum(host.memory_bytes() for host in _engines.values()),
        "buffers": int(now),
        "buffers_peak": int(peak),
        "held": _kept[0],
        "weights_in_flight": _weights[0],
        "weights_in_flight_peak": _weights[1],
        "weights_pinned": _weights[2],
    }


def _raw(binding: Any) -> Any:
    """A binding without the SDK's wrapper, which would look through every value byte by byte."""
    return getattr(binding, "_binding", binding)


def _raw_context(ctx: Any) -> Any:
    return getattr(ctx, "_ctx", ctx)


def _taken(view: Any) -> bytes:
    """A JavaScript array as bytes; its memory is freed at once."""
    if view is None or not hasattr(view, "to_bytes"):
        return b""
    data = view.to_bytes()
    _js().free(view)
    return cast(bytes, data)


def _maybe(view: Any) -> bytes | None:
    return _taken(view) if hasattr(view, "to_bytes") else None


def _headers(pairs: list[list[str]]) -> dict[str, str]:
    return {name.lower(): value for name, value in pairs}


def _said(error: JsException) -> str:
    return str(getattr(error, "message", None) or error)


class WasmHost:
    """One WebAssembly instance with one engine in it."""

    def __init__(self, limit: int) -> None:
        self._wasm = _js().Wasm.new()
        self._functions: dict[str, Callable[..., int]] = {}
        version = self._function("engine_abi_version")()
        if version != ABI_VERSION:
            raise EngineError(f"pipeline.wasm speaks ABI {version}, expected {ABI_VERSION}: build it again")
        self._handle = self._function("engine_create")(limit)
        if self._handle < 0:
            raise_for(self._handle, f"an engine of {limit} bytes could not be made")
        self._base = 0
        self._look()

    def _function(self, name: str) -> Callable[..., int]:
        function = self._functions.get(name)
        if function is None:
            function = self._functions[name] = getattr(self._wasm.exports, name)
        return function

    def call(self, name: str, *args: int) -> int:
        """Calls a function of the ABI."""
        result = self._function(name)(self._handle, *args)
        if name in _MOVING:
            self._look()
        if result < 0:
            raise_for(result, self._error())
        return result

    async def compute(self, name: str, *args: int) -> int:
        """Runs a long call, at once: there are no threads here."""
        return self.call(name, *args)

    def write(self, offset: int, data: bytes | bytearray | memoryview) -> None:
        """Copies `data` into the region."""
        length = memoryview(data).nbytes
        if length:
            self._view(offset, length).assign(data)

    def read(self, offset: int, length: int) -> bytes:
        """Copies `length` bytes out of the region."""
        return cast(bytes, self._view(offset, length).to_bytes()) if length else b""

    def memory_bytes(self) -> int:
        """Bytes of linear memory."""
        return int(self._wasm.bytes())

    def region(self, offset: int, length: int) -> tuple[Any, int]:
        """The instance, and where `length` bytes at `offset` lie in its memory."""
        if offset < 0 or length < 0 or offset + length > self._size:
            raise EngineError(f"{length} bytes at offset {offset} leave the engine's region")
        return self._wasm, self._base + offset

    def _view(self, offset: int, length: int) -> Any:
        wasm, at = self.region(offset, length)
        return wasm.view(at, length)

    def _look(self) -> None:
        self._base = self._function("engine_base")(self._handle) & 0xFFFFFFFF
        self._size = self._function("engine_region_bytes")(self._handle)

    def _error(self) -> str:
        length = self._function("engine_error")(self._handle)
        return self.read(0, length).decode() if length > 0 else ""


class RemoteHost:
    """An engine in a Worker of its own, by the binding ENGINE.

    Calls wait for its answer where they are, so other tasks may run meanwhile. What belongs together
    (arguments and their call) travels together.
    """

    def __init__(self, remote: Any, handle: int, size: int) -> None:
        self._remote = remote
        self._handle = handle
        self._size = size
        self._memory = 0

    @classmethod
    async def made(cls, namespace: Any, limit: int) -> RemoteHost:
        """Makes the engine there, or finds the one that is there."""
        remote = _js().Remote.new(namespace, limit)
        try:
            version, handle, size = await remote.make()
        except JsException as error:
            raise EngineLost(
                f"the Worker behind the binding ENGINE does not answer: {_said(error)}"
            ) from None
        if version != ABI_VERSION:
            raise EngineError(f"pipeline.wasm speaks ABI {version}, expected {ABI_VERSION}: build it again")
        if handle < 0:
            raise_for(handle, f"an engine of {limit} bytes could not be made")
        return cls(remote, handle, size)

    def call(self, name: str, *args: int) -> int:
        """Calls a function of the ABI."""
        value, sentence, self._memory, self._size = self._wait(self._remote.call(name, json.dumps(args)))
        if value < 0:
            raise_for(value, sentence)
        return cast(int, value)

    async def compute(self, name: str, *args: int) -> int:
        """Runs a long call; others may go on meanwhile."""
        try:
            value, sentence, self._memory, self._size = await self._remote.call(name, json.dumps(args))
        except JsException as error:
            raise _lost(error) from None
        if value < 0:
            raise_for(value, sentence)
        return cast(int, value)

    def write(self, offset: int, data: bytes | bytearray | memoryview) -> None:
        """Copies `data` into the region, before the next call."""
        self._check(offset, memoryview(data).nbytes)
        self._remote.write(offset, to_js(data))

    def read(self, offset: int, length: int) -> bytes:
        """Copies `length` bytes out of the region."""
        self._check(offset, length)
        return _taken(self._wait(self._remote.read(offset, length))) if length else b""

    def memory_bytes(self) -> int:
        """Bytes of linear memory there; none is here."""
        return self._memory

    async def pour(self, inflow: Any, offset: int, length: int) -> int:
        """Moves the next bytes of a body there; returns how many there were."""
        self._check(offset, length)
        return cast(int, await self._remote.pour(inflow, offset, length))

    def _check(self, offset: int, length: int) -> None:
        if offset < 0 or length < 0 or offset + length > self._size:
            raise EngineError(f"{length} bytes at offset {offset} leave the engine's region")

    def _wait(self, promise: Any) -> Any:
        try:
            return run_sync(promise)
        except JsException as error:
            raise _lost(error) from None


def _lost(error: JsException) -> Exception:
    """A call of a remote engine that failed: it is gone, or what it was given is wrong."""
    _engines.clear()
    return EngineLost(f"the engine in the Worker behind ENGINE: {_said(error)}")


_MOVING = frozenset(("engine_reserve_arena", "station_configure", "shard_configure"))


class _StreamInflow:
    """A body that comes in; its bytes go straight into the engine."""

    def __init__(self, stream: Any, length: int) -> None:
        self._inflow = _js().Inflow.new(stream, length)
        self.length = length

    async def pour(self, host: Any, offset: int, length: int) -> None:
        """Moves the next bytes into an engine's region."""
        try:
            if isinstance(host, RemoteHost):
                self._check(length, await host.pour(self._inflow, offset, length))
                return
            wasm, at = host.region(offset, length)
            self._check(length, await self._inflow.pour(wasm, at, length))
        except JsException as error:
            raise ShortBody(_said(error)) from None

    async def read(self, length: int) -> bytes:
        """The next bytes."""
        try:
            data = _taken(await self._inflow.read(length)) if length else b""
        except JsException as error:
            raise ShortBody(_said(error)) from None
        self._check(length, len(data))
        return data

    def _check(self, wanted: int, found: int) -> None:
        if found < wanted:
            raise ShortBody(f"{wanted} bytes were asked for, {found} were left")

    async def cancel(self) -> None:
        """Gives up the rest."""
        await self._inflow.cancel()

    def hand_on(self) -> Any:
        """The stream itself, for somebody else to read."""
        return self._inflow.handOn()

    async def fill(self, held: _Held) -> None:
        """Brings what `held` is to keep. Raises `ShortBody`."""
        try:
            self._check(len(held), await held.fill(self._inflow))
        except JsException as error:
            raise ShortBody(_said(error)) from None


class _Held:
    """Bytes in an ArrayBuffer."""

    def __init__(self, held: Any, length: int) -> None:
        self._held = held
        self._length = length

    def __len__(self) -> int:
        return self._length

    def fill(self, inflow: Any) -> Any:
        return self._held.fill(inflow)

    def part(self, start: int, end: int) -> Inflow:
        return _PartInflow(self._held.part(start, end), end - start)

    def drop(self) -> None:
        self._held.drop()


class _PartInflow:
    """A stretch of kept bytes as a body."""

    def __init__(self, part: Any, length: int) -> None:
        self._part = part
        self.length = length

    async def pour(self, host: Any, offset: int, length: int) -> None:
        host.write(offset, await self.read(length))

    async def read(self, length: int) -> bytes:
        try:
            data = _taken(await self._part.read(length))
        except JsException as error:
            raise ShortBody(_said(error)) from None
        if len(data) < length:
            raise ShortBody(f"{length} bytes were asked for, {len(data)} were left")
        return data

    async def cancel(self) -> None:
        self._part.close()

    def hand_on(self) -> Any:
        return self._part


class _Blobs:
    def __init__(self, bucket: Any) -> None:
        self._bucket = bucket

    async def head(self, key: str) -> BlobInfo:
        found = await self._ask(_js().head(self._bucket, key))
        if not isinstance(found, str):
            raise BlobMissing(f"the bucket has no object {key!r}")
        size, etag = json.loads(found)
        return BlobInfo(size, etag)

    async def read(self, key: str, offset: int, length: int, etag: str | None = None) -> bytes:
        if not length:
            return b""
        return await (await self.open(key, offset, length, etag)).read(length)

    async def open(self, key: str, offset: int, length: int, etag: str | None = None) -> Inflow:
        if not length:
            return BytesInflow(b"")
        state, found, stream, size = await self._ask(_js().range(self._bucket, key, offset, length, etag))
        if state == "missing":
            raise BlobMissing(f"the bucket has no object {key!r}")
        if state == "changed":
            raise BlobChanged(f"{key}: its etag is {found}, expected {etag}: it was uploaded anew")
        inflow = _StreamInflow(stream, length)
        if size < length:
            await inflow.cancel()
            raise ShortBody(f"{key}: {length} bytes from {offset} were asked for, {size} are there")
        return inflow

    async def _ask(self, promise: Any) -> Any:
        try:
            return await promise
        except JsException as error:
            if "(10039)" in _said(error):
                raise ShortBody(_said(error)) from None
            raise BlobFailed(f"R2: {_said(error)}") from None


class _KeyValues:
    def __init__(self, namespace: Any) -> None:
        self._namespace = namespace

    async def get(self, key: str) -> bytes | None:
        return _maybe(await _js().kvGet(self._namespace, key))

    async def put(self, key: str, value: bytes, ttl_seconds: int) -> None:
        await _js().kvPut(self._namespace, key, to_js(value), ttl_seconds)

    async def delete(self, key: str) -> None:
        await self._namespace.delete(key)


class _Peer:
    """A Worker, or with `name` an object of a namespace."""

    def __init__(self, target: Any, name: str | None) -> None:
        self._target = target
        self._name = name

    async def call(self, call: Call) -> Reply:
        asking, response = await self._fetch(call)
        try:
            body = _taken(await _js().whole(response))
        except JsException as error:
            raise PeerLost(f"{call.method} {call.path}: the answer broke off: {_said(error)}") from None
        except asyncio.CancelledError:
            asking.giveUp()
            raise
        status, headers = json.loads(_js().replyHead(response))
        return Reply(status, body, _headers(headers))

    async def open(self, call: Call) -> tuple[Reply, Inflow]:
        _, response = await self._fetch(call)
        status, pairs = json.loads(_js().replyHead(response))
        headers = _headers(pairs)
        said = headers.get(LENGTH_HEADER) or headers.get("content-length", "")
        length = int(said) if said.isdigit() else -1
        return Reply(status, b"", headers), _StreamInflow(response.body, length)

    async def _fetch(self, call: Call) -> tuple[Any, Any]:
        url = f"{ORIGIN}{call.path}" + (f"?{call.query}" if call.query else "")
        body = to_js(call.body) if call.body else None
        asking = None
        try:
            asking = _js().Asking.new(self._target, self._name, url, call.method, _json(call.headers), body)
            return asking, await asking.response
        except JsException as error:
            raise PeerLost(f"{call.method} {call.path}: {_said(error)}") from None
        except asyncio.CancelledError:
            if asking is not None:
                asking.giveUp()
            raise


def _json(headers: Mapping[str, str]) -> str:
    return json.dumps(dict(headers))


class _Objects:
    def __init__(self, namespace: Any) -> None:
        self._namespace = namespace

    def peer(self, name: str) -> Peer:
        return _Peer(self._namespace, name)


class _Storage:
    def __init__(self, kept: Any) -> None:
        self._kept = kept

    async def get(self, key: str) -> bytes | None:
        return _maybe(await _js().storageGet(self._kept, key))

    async def put(self, key: str, value: bytes) -> None:
        await self._kept.put(key, to_js(value))

    async def delete(self, key: str) -> None:
        await self._kept.delete(key)

    async def keys(self, prefix: str) -> list[str]:
        return sorted(json.loads(await _js().storageKeys(self._kept, prefix)))
