"""A request and its answer as the cores see them, whatever carries them."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

JSON = "application/json"
FRAME = "application/x-awfr"
BYTES = "application/octet-stream"


class Inflow(Protocol):
    """A body on its way in: read once, in order, from one long range read or one answer."""

    @property
    def length(self) -> int:
        """Bytes that the body was said to have."""
        ...

    async def pour(self, host: Any, offset: int, length: int) -> None:
        """Moves the next `length` bytes into an `EngineHost`'s region at `offset`, in one copy.

        Raises `ShortBody` when the body ends before that.
        """
        ...

    async def read(self, length: int) -> bytes:
        """The next `length` bytes; for small things only. Raises `ShortBody` likewise."""
        ...

    async def cancel(self) -> None:
        """Gives up the rest of the body. Calling it twice, or after the end, does nothing."""
        ...


class ShortBody(Exception):
    """A body ended before its promised length."""


# What an answer may carry: bytes, bytes as they come, or a body handed on without being looked at.
Body = bytes | AsyncIterator[bytes] | Inflow


@dataclass(frozen=True, slots=True)
class Call:
    """A request. Header names are lower-case."""

    method: str
    path: str
    body: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict[str, str])
    query: str = ""


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer."""

    status: int
    body: Body = b""
    headers: Mapping[str, str] = field(default_factory=dict[str, str])

    def bytes(self) -> bytes:
        """The body, when it is one piece."""
        if not isinstance(self.body, bytes):
            raise TypeError(f"the body of this {self.status} answer is a stream")
        return self.body

    def json(self) -> Any:
        """The body as JSON."""
        return json.loads(self.bytes())

    @property
    def ok(self) -> bool:
        """Whether the status is 2xx."""
        return 200 <= self.status < 300


def brief(error: BaseException) -> str:
    """An error's last line: one that crossed from another part may bring its whole traceback."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[-1].strip()[:500] if lines else type(error).__name__


def json_reply(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Reply:
    """An answer that says `value` in JSON."""
    body = json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()
    return Reply(status, body, {"content-type": JSON, **(headers or {})})


def json_call(method: str, path: str, value: Any, headers: Mapping[str, str] | None = None) -> Call:
    """A request that says `value` in JSON."""
    body = json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()
    return Call(method, path, body, {"content-type": JSON, **(headers or {})})
