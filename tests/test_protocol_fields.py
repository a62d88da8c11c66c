"""Fields of JSON objects, taken once each and none left over."""

from __future__ import annotations

import pytest

from protocol.fields import BadField, Fields


def test_every_field_is_taken_once_and_what_is_left_is_an_error() -> None:
    fields = Fields({"a": 1, "b": "text", "c": [1, 2], "d": {"e": True}}, "the request")
    assert fields.integer("a", 0, 5) == 1
    assert fields.text("b") == "text"
    assert fields.integers("c", 5, 0, 9) == [1, 2]
    with pytest.raises(BadField, match="the request has the unknown field 'd'"):
        fields.end()
    inner = fields.object("d")
    fields.end()
    with pytest.raises(BadField, match=r"the request\.d has the unknown field 'e'"):
        inner.end()
    assert inner.flag("e") is True
    inner.end()


def test_null_counts_as_left_out() -> None:
    fields = Fields({"a": None, "b": None, "c": None, "d": None}, "the request")
    assert fields.integer("a", 0, 5, 3) == 3
    assert not fields.has("b")
    assert fields.raw("c", []) == []
    with pytest.raises(BadField, match="lacks the field 'd'"):
        fields.text("d")
    fields.end()


def test_one_and_true_are_not_the_same() -> None:
    for value in (True, False):
        with pytest.raises(BadField, match=f"the x.n is {str(value).lower()}, expected an integer"):
            Fields({"n": value}, "the x").integer("n", 0, 5)
        with pytest.raises(BadField, match="expected a number"):
            Fields({"n": value}, "the x").number("n", 0, 5)
        with pytest.raises(BadField, match="expected a list of integers"):
            Fields({"n": [value]}, "the x").integers("n", 5, 0, 5)
    for value in (0, 1, "true"):
        with pytest.raises(BadField, match="expected true or false"):
            Fields({"n": value}, "the x").flag("n")


def test_an_unknown_field_with_a_name_without_end_makes_a_short_error() -> None:
    with pytest.raises(BadField) as caught:
        Fields({"x" * 100_000: 1}, "the request").end()
    assert len(str(caught.value)) < 400


def test_what_was_taken_is_gone_and_the_callers_object_is_untouched() -> None:
    values = {"a": 1}
    fields = Fields(values, "the x")
    fields.integer("a", 0, 5)
    with pytest.raises(BadField, match="lacks the field 'a'"):
        fields.integer("a", 0, 5)
    assert values == {"a": 1}
