"""JSON from untrusted files: bounded depth and size, no duplicate keys, no NaN, no numbers without end.

Standard library only: it also runs in Workers.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any, NoReturn, cast

from knot.errors import HeaderError

MAX_DEPTH = 8
MAX_NESTS = 200_000
_MAX_DIGITS = 19

# Strings are matched whole, so that brackets inside them do not count; the closing quote is optional and
# the repeats possessive, so that no input makes the scan go over the same bytes twice.
_NESTING = re.compile(rb'"(?:[^"\\]++|\\.)*+"?|[\[\]{}]', re.DOTALL)


def parse_object(data: bytes, what: str) -> dict[str, Any]:
    """The JSON object in `data`; `what` names it in errors. Raises `HeaderError`.

    Refused: more than 8 levels, invalid UTF-8, lone surrogates, duplicate keys, NaN and infinities,
    numbers of more than 19 digits.
    """
    _check_nesting(data, what)
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise HeaderError(f"{what} is not UTF-8: byte {error.start} is 0x{data[error.start]:02x}") from None

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(items)
        if len(result) != len(items):
            seen: set[str] = set()
            twice = next(key for key, _ in items if key in seen or seen.add(key))
            raise HeaderError(f"{what} has the key {twice!r} twice")
        return result

    def constant(name: str) -> NoReturn:
        raise HeaderError(f"{what} has the number {name}, expected finite ones")

    def integer(digits: str) -> int:
        if len(digits) > _MAX_DIGITS:
            raise HeaderError(
                f"{what} has a number of {len(digits)} characters, expected at most {_MAX_DIGITS}"
            )
        return int(digits)

    def real(digits: str) -> float:
        value = float(digits) if len(digits) <= 64 else math.inf
        if not math.isfinite(value):
            raise HeaderError(f"{what} has the number {digits[:32]}, expected a finite one")
        return value

    try:
        value: object = json.loads(
            text, object_pairs_hook=pairs, parse_constant=constant, parse_int=integer, parse_float=real
        )
    except json.JSONDecodeError as error:
        raise HeaderError(f"{what} is not JSON: {error.msg} at character {error.pos}") from None
    if not isinstance(value, dict):
        raise HeaderError(f"{what} is {kind(value)}, expected an object")
    if "\\u" in text:
        _check_surrogates(cast(object, value), what)
    return cast(dict[str, Any], value)


def kind(value: object) -> str:
    """What a JSON value is, for messages: "a list", "true", "the number 3" …"""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return f"the number {value!r}"
    if isinstance(value, str):
        return f"the string {value[:40]!r}"
    return "a list" if isinstance(value, list) else "an object"


def is_int(value: object) -> bool:
    """Whether a JSON value is an integer; true and false are not."""
    return isinstance(value, int) and not isinstance(value, bool)


def _check_nesting(data: bytes, what: str) -> None:
    depth = nests = 0
    for match in _NESTING.finditer(data):
        first = data[match.start()]
        if first in b"[{":
            depth += 1
            nests += 1
            if depth > MAX_DEPTH:
                raise HeaderError(f"{what} is nested more than {MAX_DEPTH} deep")
            if nests > MAX_NESTS:
                raise HeaderError(f"{what} has more than {MAX_NESTS} lists and objects")
        elif first in b"]}":
            depth -= 1


def _check_surrogates(value: object, what: str) -> None:
    """A lone surrogate is a string that no file and no terminal can take."""
    if isinstance(value, str):
        if any("\ud800" <= char <= "\udfff" for char in value):
            raise HeaderError(f"{what} has a string with half a character (a lone surrogate)")
    elif isinstance(value, dict):
        for key, item in cast(dict[str, object], value).items():
            _check_surrogates(key, what)
            _check_surrogates(item, what)
    elif isinstance(value, list):
        for item in cast(list[object], value):
            _check_surrogates(item, what)
