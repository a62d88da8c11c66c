"""HTTP headers as JavaScript keeps them and as Python Workers see them."""

from __future__ import annotations

import http.client
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeAlias, cast

from emulator.errors import JsException

_NAME = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")


class HTTPMessageMapping(http.client.HTTPMessage, Mapping[str, str]):  # type: ignore[misc]
    """Headers as the SDK gives them: a case-insensitive mapping with `get`, `items` and `get_all`."""


class HeaderList:
    """Headers as JavaScript keeps them: lower-case names in order, one value a name, but for set-cookie."""

    def __init__(self, headers: HeadersLike = None) -> None:
        self._values: dict[str, str] = {}
        self.cookies: list[str] = []
        for name, value in _pairs(headers):
            self.append(name, value)

    def append(self, name: str, value: str) -> None:
        """Adds a header; a second value of a name is joined by a comma."""
        if not isinstance(cast(object, value), str):
            raise JsException("TypeError", f"header {name} has a value that is no text: {value!r}")
        if not _NAME.fullmatch(name):
            raise JsException("TypeError", f"Invalid header name: {name!r}")
        value = value.strip(" \t\r\n")
        if any(character in value for character in "\0\r\n") or not _is_bytes(value):
            raise JsException("TypeError", f"Invalid header value of {name}: {value!r}")
        name = name.lower()
        if name == "set-cookie":
            self.cookies.append(value)
        elif name in self._values:
            self._values[name] += f", {value}"
        else:
            self._values[name] = value

    def set(self, name: str, value: str) -> None:
        """Replaces a header."""
        self._values.pop(name.lower(), None)
        if name.lower() == "set-cookie":
            self.cookies.clear()
        self.append(name, value)

    def get(self, name: str) -> str | None:
        """A header's value, or None."""
        if name.lower() == "set-cookie":
            return ", ".join(self.cookies) or None
        return self._values.get(name.lower())

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and self.get(name) is not None

    def __iter__(self) -> Iterator[tuple[str, str]]:
        yield from sorted([*self._values.items(), *(("set-cookie", cookie) for cookie in self.cookies)])

    def message(self) -> HTTPMessageMapping:
        """The headers as Python code sees them."""
        message = HTTPMessageMapping()
        for name, value in self:
            message.add_header(name, value)
        return message


HeadersLike: TypeAlias = (
    "Mapping[str, str] | list[tuple[str, str]] | HeaderList | http.client.HTTPMessage | None"
)


def _pairs(headers: HeadersLike) -> Iterable[tuple[str, str]]:
    if headers is None:
        return ()
    if isinstance(headers, HeaderList):
        return headers
    if isinstance(headers, Mapping | http.client.HTTPMessage):
        return cast(Iterable[tuple[str, str]], headers.items())
    if isinstance(cast(Any, headers), list):
        return headers
    raise TypeError("Received unexpected type for headers argument")


def _is_bytes(value: str) -> bool:
    try:
        value.encode("latin-1")
    except UnicodeEncodeError:
        return False
    return True
