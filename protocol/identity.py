"""Who a warden is: a range of layers, or of vocabulary, of one upload of one knot."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from protocol.fields import BadField, Fields

MOST = 1 << 24
LONGEST = 1024 + 65  # a key of R2, and "@" and a fingerprint after it


class WrongIdentity(Exception):
    """A warden was taken for another one; the sentence names both."""


@dataclass(frozen=True, slots=True)
class Identity:
    """`what` is "layer" or "vocab"; `knot_id` the knot's key and the fingerprint of its content."""

    what: str
    knot_id: str
    knot_key: str
    start: int
    end: int

    @property
    def object_name(self) -> str:
        """The name of the warden's Durable Object."""
        return f"{self.knot_id}|{self.start}-{self.end}"

    def headers(self) -> dict[str, str]:
        """The headers by which a caller says whom it means."""
        return {
            "x-knot-id": self.knot_id,
            "x-knot-key": self.knot_key,
            f"x-{self.what}-start": str(self.start),
            f"x-{self.what}-end": str(self.end),
        }

    @classmethod
    def from_headers(cls, what: str, headers: Mapping[str, str]) -> Identity | None:
        """Whom a caller means; None when it does not say. Raises `BadField` when it says it by halves."""
        if "x-knot-id" not in headers:
            return None
        names = ("x-knot-id", "x-knot-key", f"x-{what}-start", f"x-{what}-end")
        for name in names:
            value = headers.get(name, "")
            number = value.isascii() and value.isdigit() and len(value) <= 8
            if not value or (name in names[2:] and not number):
                raise BadField(f"the headers {', '.join(names)} come together; {name} is {value[:40]!r}")
        knot_id, knot_key, start, end = (headers[name] for name in names)
        return cls._checked(what, knot_id, knot_key, int(start), int(end))

    @classmethod
    def from_fields(cls, what: str, fields: Fields) -> Identity:
        """The identity in the JSON of POST /configure. Raises `BadField`."""
        identity = cls._checked(
            what,
            fields.text("knot_id", longest=LONGEST),
            fields.text("knot_key", longest=LONGEST),
            fields.integer(f"{what}_start", 0, MOST),
            fields.integer(f"{what}_end", 1, MOST),
        )
        fields.end()
        return identity

    @classmethod
    def _checked(cls, what: str, knot_id: str, knot_key: str, start: int, end: int) -> Identity:
        if not 0 <= start < end <= MOST or max(len(knot_id), len(knot_key)) > LONGEST:
            raise BadField(
                f"[{start}, {end}) of {knot_key[:40]!r} is no warden's: the range is empty or too large"
            )
        return cls(what, knot_id, knot_key, start, end)

    def check_is(self, asked: Identity) -> None:
        """Raises `WrongIdentity` unless this warden is the one that is asked for."""
        if self != asked:
            raise WrongIdentity(
                f"this warden is {self.object_name}, it was taken for {asked.object_name}; use the object of "
                "that name"
            )

    def check_found(self, knot_id: str) -> None:
        """Raises `WrongIdentity` when the bucket has another upload than the one that is meant."""
        if knot_id != self.knot_id:
            raise WrongIdentity(
                f"the bucket has {knot_id} under {self.knot_key}, not {self.knot_id}: the knot was uploaded "
                "again; whoever asks must boot anew"
            )
