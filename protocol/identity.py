"""Who a warden is: a range of layers, or of vocabulary, of one upload of one knot."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from protocol.fields import BadField, Fields

MOST = 1 << 24


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
        try:
            return cls(
                what,
                headers["x-knot-id"],
                headers["x-knot-key"],
                int(headers[f"x-{what}-start"]),
                int(headers[f"x-{what}-end"]),
            )
        except (KeyError, ValueError) as error:
            raise BadField(
                f"X-Knot-Id, X-Knot-Key, X-{what}-start and X-{what}-end come together; wrong is {error}"
            ) from None

    @classmethod
    def from_fields(cls, what: str, fields: Fields) -> Identity:
        """The identity in the JSON of POST /configure. Raises `BadField`."""
        identity = cls(
            what,
            fields.text("knot_id"),
            fields.text("knot_key"),
            fields.integer(f"{what}_start", 0, MOST),
            fields.integer(f"{what}_end", 1, MOST),
        )
        fields.end()
        return identity

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
