"""Reads the fields of a JSON object strictly: each is taken once, checked, and none is left over."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, TypeVar, cast

from knot.errors import HeaderError
from knot.strict_json import is_int, kind, parse_object

T = TypeVar("T")
MAX_TEXT = 256


class BadField(ValueError):
    """A field that is missing, unknown, or not what was expected; the sentence names it, and `name` does."""

    def __init__(self, sentence: str, name: str | None = None) -> None:
        self.name = name
        super().__init__(sentence)


class MissingField(BadField):
    """A field that must be there and is not."""


class UnknownField(BadField):
    """A field that nobody would have honoured."""


def json_fields(data: bytes, what: str) -> Fields:
    """The fields of the JSON object in `data`. Raises `BadField` for anything else."""
    try:
        return Fields(parse_object(data, what), what)
    except HeaderError as error:
        raise BadField(str(error)) from None


class Fields:
    """The fields of one object; `what` names it in errors."""

    def __init__(self, values: Mapping[str, Any], what: str) -> None:
        self._left = dict(values)
        self._what = what

    def text(self, name: str, default: str | None = None, *, longest: int = MAX_TEXT) -> str:
        """A string of 1 to `longest` characters."""
        value = self._take(name, default)
        if not isinstance(value, str) or not 1 <= len(value) <= longest:
            raise self._wrong(name, value, f"a string of 1 to {longest} characters")
        return value

    def choice(self, name: str, among: Mapping[str, T], default: str | None = None) -> T:
        """One of the words in `among`; returns what it stands for."""
        value = self._take(name, default)
        if not isinstance(value, str) or value not in among:
            raise self._wrong(name, value, "one of " + ", ".join(map(repr, among)))
        return among[value]

    def integer(self, name: str, low: int, high: int, default: int | None = None) -> int:
        """An integer from `low` to `high`; true and false are none."""
        value = self._take(name, default)
        if not is_int(value) or not low <= value <= high:
            raise self._wrong(name, value, f"an integer from {low} to {high}")
        return int(value)

    def number(self, name: str, low: float, high: float, default: float | None = None) -> float:
        """A finite number from `low` to `high`."""
        value = self._take(name, default)
        real = isinstance(value, float) or is_int(value)
        if not real or not math.isfinite(value) or not low <= value <= high:
            raise self._wrong(name, value, f"a number from {low:g} to {high:g}")
        return float(value)

    def flag(self, name: str, default: bool | None = None) -> bool:
        """True or false."""
        value = self._take(name, default)
        if not isinstance(value, bool):
            raise self._wrong(name, value, "true or false")
        return value

    def array(self, name: str, longest: int, default: list[Any] | None = None) -> list[Any]:
        """A list of at most `longest` values."""
        value = self._take(name, default)
        if not isinstance(value, list) or len(cast(list[Any], value)) > longest:
            raise self._wrong(name, cast(object, value), f"a list of at most {longest} values")
        return cast(list[Any], value)

    def integers(
        self, name: str, longest: int, low: int, high: int, default: list[int] | None = None
    ) -> list[int]:
        """A list of at most `longest` integers from `low` to `high`."""
        values = self.array(name, longest, default)
        for value in values:
            if not is_int(value) or not low <= value <= high:
                raise self._wrong(name, value, f"a list of integers from {low} to {high}")
        return values

    def object(self, name: str) -> Fields:
        """The fields of an object inside this one."""
        value = self._take(name, None)
        if not isinstance(value, dict):
            raise self._wrong(name, value, "an object")
        return Fields(cast(dict[str, Any], value), f"{self._what}.{name}")

    def raw(self, name: str, default: Any = None) -> Any:
        """Whatever the field is; `default` when it is missing or null."""
        value = self._left.pop(name, None)
        return default if value is None else value

    def has(self, name: str) -> bool:
        """Whether the field is there and is not null; one that is null counts as left out from now on."""
        if self._left.get(name) is None:
            self._left.pop(name, None)
        return name in self._left

    def end(self) -> None:
        """Raises `UnknownField` when a field was not taken: nobody would have honoured it."""
        if self._left:
            name = min(self._left)[:MAX_TEXT]
            raise UnknownField(f"{self._what} has the unknown field {name!r}; leave it out", name)

    def _take(self, name: str, default: Any) -> Any:
        value = self._left.pop(name, None)
        if value is None:
            value = default
        if value is None:
            raise MissingField(f"{self._what} lacks the field {name!r}", name)
        return value

    def _wrong(self, name: str, value: object, expected: str) -> BadField:
        return BadField(f"{self._what}.{name} is {kind(value)}, expected {expected}", name)
