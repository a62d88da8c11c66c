"""Request and Response: what goes into a Worker and what comes out."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from http import HTTPMethod, HTTPStatus
from typing import Any, Never, TypeAlias, cast
from urllib.parse import urlsplit

from emulator.context import current_or_none
from emulator.errors import JsException
from emulator.headers import HeaderList, HeadersLike, HTTPMessageMapping
from emulator.streams import ReadableStream
from emulator.values import lets_pass

Headers: TypeAlias = HeadersLike
Body: TypeAlias = "str | bytes | ReadableStream | None"
NULL_BODY: frozenset[int] = frozenset((101, 204, 205, 304))
# Methods that the platform knows by other cases too.
_NORMALIZED = frozenset(("DELETE", "GET", "HEAD", "OPTIONS", "POST", "PUT"))


class _Message:
    """What a request and a response share: headers, and a body that is read once."""

    _headers: HeaderList
    _stream: ReadableStream | None
    _handed_on = False

    @property
    def headers(self) -> HTTPMessageMapping:
        """The headers, as a copy."""
        return self._headers.message()

    @property
    def body(self) -> ReadableStream | None:
        """The body as a stream; None when there is none."""
        return self._stream

    @property
    def body_used(self) -> bool:
        """Whether the body was read, or handed on."""
        return self._handed_on or (self._stream is not None and self._stream.used)

    async def bytes(self) -> bytes:
        """The body, whole."""
        stream = self.take()
        if stream is None:
            return b""
        data = await stream.read_all()
        return self._arrived(data)

    async def text(self) -> str:
        """The body as text."""
        return (await self.bytes()).decode("utf-8-sig", "replace")

    def take(self) -> ReadableStream | None:
        """The body, to be read or handed on. Raises `OSError` the second time."""
        self._check_unused()
        self._handed_on = self._stream is not None
        return self._stream

    def _arrived(self, data: bytes) -> bytes:
        return data

    def _check_unused(self) -> None:
        if self.body_used:
            raise OSError("Body already used")


@lets_pass
class Request(_Message):
    """A request, as the SDK's class of that name."""

    def __init__(self, input: Request | str, **options: Any) -> None:
        unknown = set(options) - {"method", "headers", "body", "redirect", "cf", "signal"}
        if unknown:
            raise NotImplementedError(f"Request does not emulate {', '.join(sorted(unknown))}")
        if isinstance(input, Request):
            self._url = input._url
            method: str = str(options.get("method") or input._method)
            self._headers = HeaderList(options.get("headers", input._headers))
            self._stream = stream_of(options["body"]) if options.get("body") is not None else input.take()
        elif isinstance(cast(object, input), str):
            if not urlsplit(input).scheme:
                raise JsException("TypeError", f"Invalid URL: {input}")
            self._url = input
            method = str(options.get("method") or "GET")
            self._headers = HeaderList(options.get("headers"))
            self._stream = stream_of(options.get("body"), self._headers)
        else:
            raise TypeError(f"a Request is made of a URL or of a Request, found {type(input).__name__}")
        if isinstance(options.get("method"), HTTPMethod):
            method = options["method"].value
        self._method = method.upper() if method.upper() in _NORMALIZED else method
        if self._stream is not None and self._method in ("GET", "HEAD"):
            raise JsException("TypeError", "Request with a GET or HEAD method cannot have a body.")

    def __repr__(self) -> str:
        return f"Request(method={self._method!r}, url={self._url!r})"

    @property
    def js_object(self) -> Any:
        """There is no JavaScript behind a request here."""
        raise NotImplementedError("Request.js_object is not emulated; `boundary` alone touches JavaScript")

    @property
    def method(self) -> HTTPMethod:
        """The method."""
        return HTTPMethod[self._method]

    @property
    def url(self) -> str:
        """The URL."""
        return self._url

    async def buffer(self) -> memoryview:
        """The body."""
        return memoryview(await self.bytes())

    async def json(self, **kwargs: Any) -> Any:
        """The body as JSON."""
        return json.loads(await self.text(), **kwargs)

    def clone(self) -> Request:
        """A second request with the same body."""
        self._check_unused()
        twin = Request(self._url, method=self._method, headers=self._headers)
        self._stream, twin._stream = tee(self._stream)
        return twin

    def arrived(self) -> Request:
        """The request as the other side gets it; this one's body is handed on."""
        twin = Request(self._url, method=self._method, headers=self._headers)
        twin._stream = self.take()
        return twin

    def _arrived(self, data: bytes) -> bytes:
        # A request's body is mostly kept while the request is handled.
        context = current_or_none()
        if context is not None:
            context.count(len(data))
        return data


class FetchResponse(_Message):
    """What `fetch` answers; `Response` is made by hand and has the same methods."""

    def __init__(self) -> None:
        raise TypeError("a FetchResponse comes from fetch; make a Response")

    _status: int
    _status_text: str
    _url: str

    @property
    def status(self) -> int:
        """The status."""
        return self._status

    @property
    def status_text(self) -> str:
        """The reason phrase."""
        return self._status_text

    @property
    def ok(self) -> bool:
        """Whether the status is 2xx."""
        return 200 <= self._status < 300

    @property
    def redirected(self) -> bool:
        """Redirects are not followed between Workers."""
        return False

    @property
    def url(self) -> str:
        """Where it came from."""
        return self._url

    @property
    def type(self) -> str:
        """The kind of response."""
        return "default"

    @property
    def js_object(self) -> Any:
        """There is no JavaScript behind a response here."""
        raise NotImplementedError("Response.js_object is not emulated; `boundary` alone touches JavaScript")

    def raise_for_status(self) -> None:
        """Raises `OSError` for 4xx and 5xx."""
        if 400 <= self._status < 600:
            raise OSError(f"{self._status} {self._status_text} for url: {self._url}")

    async def buffer(self) -> memoryview:
        """The body."""
        return memoryview(await self.bytes())

    async def memoryview(self) -> memoryview:
        """The body."""
        return memoryview(await self.bytes())

    async def string(self) -> str:
        """The body as text."""
        return await self.text()

    def json(self, *args: Any, **kwargs: Any) -> Any:
        """The body as JSON (a coroutine); called on the class with data, `from_json`."""
        if isinstance(cast(object, self), FetchResponse):
            return self._json(**kwargs)
        return Response.from_json(cast(Any, self), *args, **kwargs)

    async def _json(self, **kwargs: Any) -> Any:
        return json.loads(await self.text(), **kwargs)

    def replace_body(self, body: Body) -> Response:
        """The same response with another body."""
        response = Response(body, self._status, self._status_text, self._headers)
        response._url = self._url
        return response

    def clone(self) -> Response:
        """A second response with the same body."""
        self._check_unused()
        twin = Response(None, self._status, self._status_text, self._headers)
        self._stream, twin._stream = tee(self._stream)
        return twin

    @staticmethod
    def redirect(url: str, status: HTTPStatus | int = HTTPStatus.FOUND) -> Response:
        """A redirect."""
        if int(status) not in (301, 302, 303, 307, 308):
            raise ValueError(f"{int(status)} is not a redirect status code.")
        return Response(None, int(status), headers={"location": url})

    @staticmethod
    def from_json(
        data: Any,
        status: HTTPStatus | int = HTTPStatus.OK,
        status_text: str = "",
        headers: Headers = None,
    ) -> Response:
        """A response that says `data` in JSON."""
        listed = HeaderList(headers)
        if "content-type" not in listed:
            listed.set("content-type", "application/json")
        return Response(json.dumps(data), status, status_text, listed)

    async def form_data(self) -> Never:
        """Forms are not emulated."""
        raise NotImplementedError("Response.form_data is not emulated")

    async def blob(self) -> Never:
        """Blobs are not emulated."""
        raise NotImplementedError("Response.blob is not emulated")

    def _arrived(self, data: bytes) -> bytes:
        # For a moment it is there twice: as it came, and as Python's bytes.
        context = current_or_none()
        if context is not None:
            context.count(len(data))
            context.uncount(len(data))
        return data


@lets_pass
class Response(FetchResponse):
    """A response, as the SDK's class of that name."""

    def __init__(
        self,
        body: Body | FetchResponse = None,
        status: HTTPStatus | int | None = None,
        status_text: str = "",
        headers: Headers = None,
        web_socket: None = None,
    ) -> None:
        if web_socket is not None:
            raise NotImplementedError("WebSockets are not emulated")
        self._url = ""
        if isinstance(body, FetchResponse):
            if status is not None or status_text or headers is not None:
                raise ValueError("Expected no options when constructing Response from a js.Response")
            self._status, self._status_text = body._status, body._status_text
            self._headers, self._stream = body._headers, body.take()
            return
        if body is not None and not isinstance(cast(object, body), str | bytes | ReadableStream):
            raise TypeError(f"Unsupported type in Response: {type(body).__name__}")
        self._status = int(status) if status else 200
        self._status_text = status_text
        self._headers = HeaderList(headers)
        if not 200 <= self._status <= 599 and self._status != 101:
            raise JsException(
                "RangeError", f"Responses may have a status from 200 to 599, not {self._status}"
            )
        if body is not None and self._status in NULL_BODY:
            raise JsException(
                "TypeError", f"Response with null body status {self._status} cannot have a body."
            )
        self._stream = stream_of(body, self._headers)

    def __repr__(self) -> str:
        return f"Response(status={self._status})"

    def arrived(self, url: str) -> Response:
        """The response as the caller gets it."""
        twin = Response(None, self._status, self._status_text, self._headers)
        twin._url = url
        twin._stream = self.take()
        return twin


def stream_of(body: object, headers: HeaderList | None = None) -> ReadableStream | None:
    """A body as a stream; text says its type in the headers."""
    match body:
        case None:
            return None
        case str():
            if headers is not None and "content-type" not in headers:
                headers.set("content-type", "text/plain;charset=UTF-8")
            return ReadableStream.of(body.encode("utf-8", "replace"))
        case bytes():
            return ReadableStream.of(body)
        case memoryview() | bytearray():
            return ReadableStream.of(bytes(cast(Any, body)))
        case ReadableStream():
            if body.used:
                raise JsException(
                    "TypeError", "This ReadableStream is disturbed (has already been read from)."
                )
            return body
        case _:
            raise TypeError(f"{type(body).__name__} is no body that is emulated")


def tee(stream: ReadableStream | None) -> tuple[ReadableStream | None, ReadableStream | None]:
    """Two bodies of one, which must be there already."""
    if stream is None:
        return None, None
    if not stream.whole:
        raise NotImplementedError("clone of a body that is still streaming is not emulated")
    data = cast(Any, stream.source).rest()
    return ReadableStream.of(data), ReadableStream.of(data)


Fetcher: TypeAlias = Callable[[Request], Awaitable[Response]]


async def fetch(resource: str | Request, **options: Any) -> Response:
    """Asks a binding (`fetcher`). The open network is not there: nothing emulated may depend on it."""
    fetcher: Fetcher | None = options.pop("fetcher", None)
    # The SDK hands a Request on as it is and the options beside it.
    request = Request(resource, **options) if options or isinstance(resource, str) else resource
    if fetcher is None:
        raise NotImplementedError(f"fetch of {request.url}: the emulator reaches no network; bind a Worker")
    return await fetcher(request)
