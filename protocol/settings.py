"""Settings from environment variables, read once and strictly: an error names the variable."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
Variables = Callable[[str], str | None]

MIB = 1 << 20


class SettingsError(ValueError):
    """A variable that is missing or wrong; the sentence names it, what was expected and what was found."""


class Settings:
    """Reads variables through `variables`, a function from name to text or None."""

    def __init__(self, variables: Variables) -> None:
        self._variables = variables

    def text(self, name: str, default: str | None = None) -> str:
        """Any text but the empty one."""
        value = self._variables(name)
        if value is None or value == "":
            if default is None:
                raise SettingsError(f"{name} is not set; set it in the Worker's variables")
            return default
        return value

    def choice(self, name: str, among: tuple[str, ...], default: str | None = None) -> str:
        """One of a few words."""
        value = self.text(name, default)
        if value not in among:
            raise SettingsError(f"{name} is {value!r}, expected one of {', '.join(among)}")
        return value

    def integer(self, name: str, low: int, high: int, default: int | None = None) -> int:
        """A whole number from `low` to `high`."""
        value = self.text(name, None if default is None else str(default))
        number = _whole(value.removeprefix("-"))
        if number is not None and value.startswith("-"):
            number = -number
        if number is None or not low <= number <= high:
            raise SettingsError(f"{name} is {value[:40]!r}, expected a whole number from {low} to {high}")
        return number

    def ranges(self, name: str) -> tuple[tuple[int, int], ...]:
        """Ranges such as `0-14,14-28`: they begin at 0, meet end to end, and none is empty."""
        value = self.text(name)
        ranges: list[tuple[int, int]] = []
        for piece in value.split(","):
            start, end = (_whole(edge) for edge in (*piece.strip().split("-", 1), "")[:2])
            last = ranges[-1][1] if ranges else 0
            if start != last or end is None or end <= last:
                raise SettingsError(
                    f"{name} is {value[:400]!r}: at {piece.strip()[:40]!r} a range that begins at {last} was "
                    f"expected, such as {last}-{last + 14}"
                )
            ranges.append((last, end))
        return tuple(ranges)

    def secret(self, name: str = "CLUSTER_SECRET") -> str:
        """The secret that the cluster's parts share. Without one nothing is served."""
        value = self._variables(name)
        if value is None or len(value) < 16:
            raise SettingsError(
                f"{name} is {'not set' if not value else 'shorter than 16 characters'}: nothing is served "
                f"openly; set it with `wrangler secret put {name}`"
            )
        return value


def _whole(digits: str) -> int | None:
    """A number of at most 18 plain digits; None for anything else."""
    return int(digits) if digits.isascii() and digits.isdigit() and len(digits) <= 18 else None
