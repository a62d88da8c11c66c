"""Who a warden is, said by headers or by a body, and never by halves."""

from __future__ import annotations

from typing import Any

import pytest

from protocol.fields import BadField, Fields
from protocol.identity import Identity, WrongIdentity

IDENTITY = Identity("layer", "m.knot@abc", "m.knot", 0, 14)


@pytest.mark.parametrize("what", ["layer", "vocab"])
def test_an_identity_is_the_same_by_headers_and_by_fields(what: str) -> None:
    identity = Identity(what, "m.knot@abc", "m.knot", 3, 14)
    assert Identity.from_headers(what, identity.headers()) == identity
    body = {"knot_id": "m.knot@abc", "knot_key": "m.knot", f"{what}_start": 3, f"{what}_end": 14}
    assert Identity.from_fields(what, Fields(body, "the request")) == identity
    assert identity.object_name == "m.knot@abc|3-14"


def test_headers_that_say_nothing_of_a_knot_say_nobody() -> None:
    assert Identity.from_headers("layer", {"x-layer-start": "0"}) is None


@pytest.mark.parametrize("name", ["x-knot-key", "x-layer-start", "x-layer-end"])
def test_headers_come_together(name: str) -> None:
    left = {key: value for key, value in IDENTITY.headers().items() if key != name}
    with pytest.raises(BadField, match=f"come together; {name} is ''"):
        Identity.from_headers("layer", left)


@pytest.mark.parametrize("value", ["", "-1", "1.5", " 3", "+3", "1_0", "٣", "9" * 5000, "99999999"])
@pytest.mark.parametrize("name", ["x-layer-start", "x-layer-end"])
def test_a_range_in_headers_is_plain_digits_and_exists(name: str, value: str) -> None:
    with pytest.raises(BadField) as caught:
        Identity.from_headers("layer", {**IDENTITY.headers(), name: value})
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    "changes",
    [
        {"layer_start": 14}, {"layer_start": 20}, {"layer_start": -1}, {"layer_end": 0}, {"layer_end": "14"},
        {"layer_end": 1 << 25}, {"knot_id": ""}, {"knot_id": 3}, {"knot_key": "k" * 2000}, {"more": 1},
    ],
)  # fmt: skip
def test_a_body_that_says_nonsense_is_refused(changes: dict[str, Any]) -> None:
    body = {"knot_id": "m.knot@abc", "knot_key": "m.knot", "layer_start": 0, "layer_end": 14}
    Identity.from_fields("layer", Fields(body, "the request"))
    with pytest.raises(BadField):
        Identity.from_fields("layer", Fields({**body, **changes}, "the request"))


def test_another_name_for_a_warden_is_refused_with_both_names() -> None:
    IDENTITY.check_is(IDENTITY)
    with pytest.raises(WrongIdentity, match=r"is m\.knot@abc\|0-14, it was taken for m\.knot@abd\|0-14"):
        IDENTITY.check_is(Identity("layer", "m.knot@abd", "m.knot", 0, 14))
    with pytest.raises(WrongIdentity):
        IDENTITY.check_is(Identity("layer", "m.knot@abc", "m.knot", 0, 13))


def test_another_upload_under_the_key_is_noticed() -> None:
    IDENTITY.check_found("m.knot@abc")
    with pytest.raises(WrongIdentity, match=r"the bucket has m\.knot@xyz under m\.knot, not m\.knot@abc"):
        IDENTITY.check_found("m.knot@xyz")
