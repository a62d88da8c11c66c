"""What of a Python value crosses to another isolate or into storage, and as what it arrives.

The SDK turns Python values into JavaScript ones and back: bytes arrive as a memoryview, whole floats as ints,
dictionary keys as text; tuples, bytearrays and anything without a JavaScript counterpart are refused.
"""

from __future__ import annotations

import base64
import inspect
import json
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Final, TypeVar, cast

from emulator.errors import LimitExceeded

_SAFE: Final = (1 << 53) - 1
# A memoryview that is sent on is walked byte by byte by the SDK; a small one goes unnoticed.
MAX_VIEW: Final = 64 << 10
# Objects of the SDK that cross as what they are.
_passing: list[type] = []


class JsDict(dict[str, Any]):
    """An object from JavaScript: a dictionary whose keys are attributes too."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value


K = TypeVar("K", bound=type)


def lets_pass(kind: K) -> K:
    """Marks a class whose objects cross as they are, such as Request and Response."""
    _passing.append(kind)
    return kind


def crossed(value: Any, most: int | None = None) -> Any:
    """`value` as it arrives on the other side.

    Raises `TypeError` for what cannot cross, and `LimitExceeded` for more than `most` bytes.
    """
    copier = _Copier()
    found = copier.copy(value)
    if most is not None and copier.size > most:
        raise LimitExceeded(
            f"Serialized RPC arguments or return values are limited to {most} bytes, found {copier.size}"
        )
    return found


class _Copier:
    def __init__(self) -> None:
        self.size = 0
        self._above: set[int] = set()

    def copy(self, value: Any) -> Any:
        match value:
            case None | bool():
                self.size += 1
                return value
            case str():
                self.size += len(value)
                return str(value)
            case int():
                self.size += 8
                return int(value)
            case float():
                self.size += 8
                # JavaScript has one kind of number, so a whole one comes back as an int.
                return int(value) if value.is_integer() and abs(value) <= _SAFE else value
            case bytes():
                self.size += len(value)
                return memoryview(value)
            case tuple() | bytearray():
                raise TypeError(f"{type(cast(object, value))} cannot be sent over RPC.")
            case memoryview():
                return self._view(cast("memoryview[int]", value))
            case _:
                return self._compound(value)

    def _view(self, view: memoryview[int]) -> memoryview[int]:
        if view.nbytes > MAX_VIEW:
            raise TypeError(
                f"a memoryview of {view.nbytes} bytes is refused: the SDK walks one byte by byte, almost "
                "four seconds for a megabyte; send bytes(view)"
            )
        self.size += view.nbytes
        return memoryview(bytes(view))

    def _compound(self, value: Any) -> Any:
        if isinstance(value, dict | list | set | frozenset):
            if id(cast(object, value)) in self._above:
                raise TypeError("a value that contains itself is not carried by the emulator")
            self._above.add(id(cast(object, value)))
            try:
                return self._container(cast(Any, value))
            finally:
                self._above.discard(id(cast(object, value)))
        if isinstance(value, datetime):
            self.size += 8
            return datetime.fromtimestamp(int(value.timestamp() * 1000) / 1000)
        if isinstance(value, Exception):
            self.size += len(str(value))
            return Exception(f"Error: {value}")
        if isinstance(value, tuple(_passing)):
            return value
        if inspect.isawaitable(value):
            raise TypeError(f"Awaitable {type(value)} cannot be sent over RPC.")
        if callable(value):
            raise NotImplementedError("functions as RPC values are not emulated")
        raise TypeError(f"{type(value)} cannot be sent over RPC: no JavaScript value is like it")

    def _container(self, value: Any) -> Any:
        self.size += 8
        if isinstance(value, dict):
            items = cast(dict[Any, Any], value).items()
            return JsDict({self._key(key): self.copy(item) for key, item in items})
        if isinstance(value, list):
            return [self.copy(item) for item in cast(list[Any], value)]
        return {self.copy(item) for item in cast(set[Any], value)}

    def _key(self, key: object) -> str:
        if isinstance(key, bool) or not isinstance(key, str | int):
            raise TypeError(f"a dictionary with the key {key!r} cannot be sent over RPC; keys are text")
        self.size += len(str(key))
        return str(key)


def dump(value: Any) -> bytes:
    """A crossed value as bytes for storage."""
    return json.dumps(_tagged(value), ensure_ascii=False, separators=(",", ":")).encode(
        "utf-8", "surrogatepass"
    )


def load(data: bytes) -> Any:
    """The value that `dump` wrote."""
    return _untagged(json.loads(data.decode("utf-8", "surrogatepass")))


def _tagged(value: Any) -> Any:
    match value:
        case memoryview():
            return {"bytes": base64.b64encode(cast("memoryview[int]", value)).decode("ascii")}
        case dict():
            return {"object": {key: _tagged(item) for key, item in cast(dict[str, Any], value).items()}}
        case list():
            return [_tagged(item) for item in cast(list[Any], value)]
        case set():
            return {"set": [_tagged(item) for item in cast(set[Any], value)]}
        case datetime():
            return {"date": value.timestamp()}
        case None | bool() | int() | float() | str():
            return value
        case _:
            raise TypeError(f"{type(cast(object, value))} cannot be stored")


def _untagged(value: Any) -> Any:
    if isinstance(value, list):
        return [_untagged(item) for item in cast(list[Any], value)]
    if not isinstance(value, dict):
        return value
    ((tag, content),) = cast(dict[str, Any], value).items()
    match tag:
        case "bytes":
            return memoryview(base64.b64decode(content))
        case "object":
            return JsDict({key: _untagged(item) for key, item in content.items()})
        case "set":
            return {_untagged(item) for item in content}
        case _:
            return datetime.fromtimestamp(content, UTC).astimezone().replace(tzinfo=None)


def options_of(args: tuple[Any, ...], kwargs: Mapping[str, Any], what: str) -> dict[str, Any]:
    """The options of a binding's method: a dictionary as last argument, or keyword arguments."""
    if len(args) > 1 or (args and args[0] is not None and not isinstance(args[0], dict)):
        raise TypeError(f"{what} takes one dictionary of options, found {args!r:.200}")
    return {**(args[0] if args and args[0] else {}), **kwargs}
