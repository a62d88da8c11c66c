"""Workers on local ports, for curl and any HTTP client. Loopback only.

Bodies stream both ways. A client that leaves cancels its request; stopping ends every connection at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Final, Self
from urllib.parse import quote

import uvicorn
from uvicorn._types import ASGIReceiveCallable, ASGISendCallable, HTTPScope, Scope

from emulator.cluster import Cluster
from emulator.errors import EmulatorError, StreamBroken, WorkerFailed, WorkerLost
from emulator.sdk.messages import Request, Response
from emulator.streams import ReadableStream

HOST: Final = "127.0.0.1"
# A body that its Worker does not read is kept, up to here; then the request is refused.
MAX_BODY: Final = 32 << 20


class BodyTooLarge(Exception):
    """A request's body is larger than the server takes."""


class HttpFront:
    """Serves Workers of a running cluster: `doors` maps names of Workers to ports, 0 for any free one.

    `addresses` maps the names to URLs. `max_body` bounds a request's body in bytes.
    """

    def __init__(self, cluster: Cluster, doors: Mapping[str, int], max_body: int = MAX_BODY) -> None:
        self._cluster = cluster
        self._doors = dict(doors)
        self._max_body = max_body
        self._workers: dict[int, str] = {}
        self._answering: set[asyncio.Task[Any]] = set()
        self._server: _Server | None = None
        self._serving: asyncio.Task[None] | None = None
        self.addresses: dict[str, str] = {}

    async def __aenter__(self) -> Self:
        """Listens. Raises `EmulatorError` when a port is taken."""
        unknown = self._doors.keys() - self._cluster.workers.keys()
        if unknown:
            raise EmulatorError(f"there is no Worker {', '.join(sorted(unknown))} to be served")
        sockets: list[socket.socket] = []
        try:
            for worker, port in self._doors.items():
                sockets.append(_listen(worker, port))
                bound = sockets[-1].getsockname()[1]
                self._workers[bound] = worker
                self.addresses[worker] = f"http://{HOST}:{bound}"
        except BaseException:
            for opened in sockets:
                opened.close()
            raise
        config = uvicorn.Config(
            self._answer, http="h11", ws="none", lifespan="off", interface="asgi3", log_config=None,
            log_level="critical", access_log=False, proxy_headers=False, server_header=False,
        )  # fmt: skip
        self._server = _Server(config)
        self._serving = asyncio.create_task(self._server.serve(sockets))
        await self._server.listening.wait()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Ends every connection and stops listening."""
        assert self._server is not None
        assert self._serving is not None
        for task in list(self._answering):
            task.cancel()
        if self._answering:
            await asyncio.wait(set(self._answering))
        self._server.stopping.set()
        await self._serving

    async def until_interrupted(self) -> None:
        """Waits for Ctrl-C or a termination signal."""
        with interruption() as interrupted:
            await interrupted.wait()

    async def _answer(self, scope: Scope, receive: ASGIReceiveCallable, send: ASGISendCallable) -> None:
        assert scope["type"] == "http"
        server = scope["server"]
        assert server is not None
        worker = self._workers[server[1] or 0]
        incoming = _Incoming(receive, self._max_body)
        listening = asyncio.create_task(incoming.listen())
        answering = asyncio.create_task(self._respond(worker, scope, incoming, send))
        self._answering.add(answering)
        answering.add_done_callback(self._answering.discard)
        try:
            await asyncio.wait({answering, listening}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            # Whoever ended first, the other has nothing to wait for.
            for task in (answering, listening):
                task.cancel()
            await asyncio.wait({answering, listening})
        if not answering.cancelled():
            answering.result()

    async def _respond(
        self, worker: str, scope: HTTPScope, incoming: _Incoming, send: ASGISendCallable
    ) -> None:
        try:
            incoming.check_length(_header(scope, b"content-length"))
            request = _request_of(scope, incoming)
            response = await self._cluster.send(worker, request)
        except BodyTooLarge as error:
            return await _plain(send, 413, str(error))
        except WorkerLost as error:
            return await _plain(send, 503, f"Worker {worker}: {error}")
        except WorkerFailed as error:
            status = 413 if incoming.too_large else 500
            return await _plain(send, status, str(incoming.too_large or error))
        return await _send_response(response, scope["method"] == "HEAD", send)


@contextmanager
def interruption() -> Generator[asyncio.Event, None, None]:
    """An event that Ctrl-C and a termination signal set, instead of what they do otherwise.

    Enter it before anybody is told that the server is ready, or a signal may come too early to be heard.
    """
    loop = asyncio.get_running_loop()
    interrupted = asyncio.Event()
    numbers = (signal.SIGINT, signal.SIGTERM)
    for number in numbers:
        loop.add_signal_handler(number, interrupted.set)
    try:
        yield interrupted
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)


class _Server(uvicorn.Server):
    """A server that leaves signals to whoever runs it, says when it listens, and stops at once."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listening = asyncio.Event()
        self.stopping = asyncio.Event()

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.listening.set()

    async def main_loop(self) -> None:
        while not self.stopping.is_set():
            await self.on_tick(0)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.stopping.wait(), 1)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for server in self.servers:
            server.close()
        for listener in sockets or []:
            listener.close()
        for connection in list(self.server_state.connections):
            connection.transport.abort()
        for server in self.servers:
            await server.wait_closed()


class _Incoming:
    """A request's body as the client sends it, and the news that the client has left."""

    def __init__(self, receive: ASGIReceiveCallable, most: int) -> None:
        self._receive = receive
        self._most = most
        self._size = 0
        self._pieces = bytearray()
        self._ended = False
        self._gone = False
        self._given_up = False
        self._news = asyncio.Event()
        self.too_large: BodyTooLarge | None = None

    def check_length(self, said: str | None) -> None:
        """Raises `BodyTooLarge` for a body that says so itself."""
        if said is not None and said.isdigit() and int(said) > self._most:
            raise BodyTooLarge(f"the body has {said} bytes, at most {self._most} are taken")

    async def listen(self) -> None:
        """Collects what comes; returns when the client has left."""
        while not self._gone:
            message = await self._receive()
            if message["type"] == "http.request":
                piece = message.get("body", b"")
                self._size += len(piece)
                if self._size > self._most:
                    self.too_large = BodyTooLarge(
                        f"the body has more than the {self._most} bytes that are taken"
                    )
                elif not self._given_up:
                    self._pieces += piece
                self._ended = not message.get("more_body", False) or self.too_large is not None
            else:
                self._gone = True
            self._news.set()

    async def read(self, most: int) -> bytes:
        """The next bytes."""
        while not (self._pieces or self._ended or self._gone):
            self._news.clear()
            await self._news.wait()
        if self.too_large is not None:
            raise StreamBroken(str(self.too_large))
        if self._gone and not self._ended:
            raise StreamBroken("the client left before its body had come")
        found = bytes(self._pieces[:most])
        del self._pieces[:most]
        return found

    async def read_into(self, view: memoryview) -> int:
        """Fills `view` with the next bytes."""
        done = 0
        while done < len(view) and (found := await self.read(len(view) - done)):
            view[done : done + len(found)] = found
            done += len(found)
        return done

    async def close(self) -> None:
        """Nobody reads the rest; it is still taken in, or a client's leaving would go unnoticed."""
        self._given_up = True
        self._pieces.clear()


def _request_of(scope: HTTPScope, incoming: _Incoming) -> Request:
    host = _header(scope, b"host") or HOST
    query = scope["query_string"].decode("latin-1")
    path = scope.get("raw_path") or quote(scope["path"]).encode()
    url = f"http://{host}{path.decode('latin-1')}" + (f"?{query}" if query else "")
    headers = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in scope["headers"]]
    length = _header(scope, b"content-length")
    body = None
    said = length not in (None, "0") or _header(scope, b"transfer-encoding") is not None
    if said and scope["method"] not in ("GET", "HEAD"):
        body = ReadableStream(incoming, int(length) if length and length.isdigit() else None)
    return Request(url, method=scope["method"], headers=headers, body=body)


def _header(scope: HTTPScope, wanted: bytes) -> str | None:
    for name, value in scope["headers"]:
        if name == wanted:
            return value.decode("latin-1")
    return None


async def _send_response(response: Response, head: bool, send: ASGISendCallable) -> None:
    stream = response.take()
    names = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in response.headers.items()]
    known = {name for name, _ in names}
    if stream is not None and stream.length is not None and b"content-length" not in known:
        names.append((b"content-length", str(stream.length).encode()))
    elif stream is None and b"content-length" not in known and response.status not in (101, 204, 304):
        names.append((b"content-length", b"0"))
    try:
        await send(
            {"type": "http.response.start", "status": response.status, "headers": names, "trailers": False}
        )
        if stream is not None and not head:
            try:
                while piece := await stream.read():
                    await send({"type": "http.response.body", "body": piece, "more_body": True})
            except StreamBroken:
                # The status is out: all that can be said is that the body is not whole.
                return
        await send({"type": "http.response.body", "body": b"", "more_body": False})
    finally:
        if stream is not None:
            await stream.cancel()


async def _plain(send: ASGISendCallable, status: int, sentence: str) -> None:
    body = f"{sentence}\n".encode()
    headers = [(b"content-type", b"text/plain; charset=utf-8"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers, "trailers": False})
    await send({"type": "http.response.body", "body": body, "more_body": False})


def _listen(worker: str, port: int) -> socket.socket:
    opened = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        opened.bind((HOST, port))
        opened.listen(128)
        opened.setblocking(False)
    except OSError as error:
        opened.close()
        raise EmulatorError(
            f"Worker {worker} cannot listen on port {port}: {error.strerror}; take another port, or 0 for a "
            "free one"
        ) from error
    return opened
