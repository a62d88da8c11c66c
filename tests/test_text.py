"""Ids to text as they come: whole characters only, and nothing of a stop string."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from core_support import knot_of, tokenizer_of
from hypothesis import given, settings
from hypothesis import strategies as st

from knot.tokenizer import Tokenizer
from text import TextStream


class Pieces:
    """A decoder for which the n-th id is the n-th piece of text; the last piece comes at the end."""

    def __init__(self, pieces: Sequence[str], held: str = "") -> None:
        self.pieces = pieces
        self.held = held

    def push(self, token_id: int) -> str:
        return self.pieces[token_id]

    def finish(self) -> str:
        return self.held


def deltas(pieces: Sequence[str], stops: Sequence[str], held: str = "") -> tuple[list[str], bool]:
    """What a client sees piece by piece, and whether a stop string ended it."""
    stream, seen = TextStream(Pieces(pieces, held), stops), list[str]()
    for number in range(len(pieces)):
        seen.append(stream.push(number))
        if stream.stopped:
            break
    seen.append(stream.finish())
    return seen, stream.stopped


def test_a_stop_string_over_several_tokens_is_cut_and_nothing_of_it_leaks() -> None:
    seen, stopped = deltas(["ABC", "DE", "FG", "HI", "JKL", "MNO"], ["DEFGHIJ"])
    assert stopped
    assert seen == ["ABC", "", "", "", "", ""]
    seen, stopped = deltas(["ABCDE", "FGHIJK"], ["DEFGHIJ"])
    assert (seen, stopped) == (["ABC", "", ""], True)


def test_what_only_began_like_a_stop_string_comes_out_once_that_is_known() -> None:
    seen, stopped = deltas(["AB", "CDE", "FGHI", "X", "DEF"], ["DEFGHIJ"])
    assert not stopped
    assert seen == ["AB", "C", "", "DEFGHIX", "", "DEF"]


@pytest.mark.parametrize(
    ("pieces", "stops", "text"),
    [
        (["abab", "abac"], ["abac"], "abab"),
        (["a", "a", "a", "b"], ["aab"], "a"),
        (["xxstop", "yy"], ["stop", "op"], "xx"),
        (["one two"], ["two", "one"], ""),
        (["abc"], ["bc", "abcd"], "a"),
        (["stop"], ["stop"], ""),
        (["no", "thing"], [], "nothing"),
        (["no", "thing"], [""], "nothing"),
        (["Grüß", "e Öl"], ["ße"], "Grü"),
    ],
)
def test_the_text_ends_before_the_first_stop_string(pieces: list[str], stops: list[str], text: str) -> None:
    seen, _ = deltas(pieces, stops)
    assert "".join(seen) == text


def test_a_stop_string_that_is_complete_only_with_what_was_held_back_still_cuts() -> None:
    seen, stopped = deltas(["ab", "c"], ["cd"], held="de")
    assert (seen, stopped) == (["ab", "", ""], True)
    seen, stopped = deltas(["ab", "c"], ["cd"], held="\ufffd")
    assert (seen, stopped) == (["ab", "", "c\ufffd"], False)


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.text("ab", max_size=4), max_size=8),
    st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
    st.text("ab", max_size=2),
)
def test_however_text_is_cut_into_tokens_it_is_cut_at_the_stop_and_never_taken_back(
    pieces: list[str], stops: list[str], held: str
) -> None:
    seen, stopped = deltas(pieces, stops, held)
    expected, ended, so_far = "", False, ""
    for piece in [*pieces, held]:
        so_far += piece
        found = [so_far.find(stop) for stop in stops if stop in so_far]
        if found:
            expected, ended = so_far[: min(found)], True
            break
    else:
        expected = so_far
    assert ("".join(seen), stopped) == (expected, ended)


def settled(pieces: Sequence[str], stops: Sequence[str], held: str = "") -> tuple[list[int], list[int]]:
    """How many ids are settled after each piece and at the end; and where each begins."""
    stream, seen = TextStream(Pieces(pieces, held), stops), list[int]()
    for number in range(len(pieces)):
        stream.push(number)
        seen.append(stream.settled)
        if stream.stopped:
            break
    stream.finish()
    return [*seen, stream.settled], stream.starts


def test_an_id_is_settled_with_the_last_of_its_text() -> None:
    assert settled(["ab", "c", "de"], []) == ([1, 2, 3, 3], [0, 2, 3])
    assert settled(["ab", "c", "dx"], ["cdy"]) == ([1, 1, 3, 3], [0, 2, 3])
    assert settled(["ab", "c", "d"], ["cdy"]) == ([1, 1, 1, 3], [0, 2, 3])


def test_an_id_that_reaches_into_the_stop_string_never_is() -> None:
    assert settled(["ABC", "DE", "FG", "HI", "JKL"], ["DEFGHIJ"])[0] == [1, 1, 1, 1, 1, 1]
    assert settled(["ABCDE", "FGHIJK"], ["DEFGHIJ"])[0] == [0, 0, 0]
    assert settled(["ab", "c"], ["cd"], held="de")[0] == [1, 1, 1]


def test_an_id_without_text_is_settled_with_the_text_after_it_or_at_the_end() -> None:
    assert settled(["a", "", "b"], [])[0] == [1, 1, 3, 3]
    assert settled(["a", ""], [])[0] == [1, 1, 2]
    assert settled(["a", "", "\u6b6a"], ["\u6b6a"])[0] == [1, 1, 1, 1], "it may be half of the stop string"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return tokenizer_of(knot_of())


def test_half_a_character_is_held_back_until_it_is_whole(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("aé歪😀b")
    assert len(ids) == 11, "this vocabulary has a token for every byte of them"
    stream = TextStream(tokenizer.stream(), [])
    seen = [stream.push(token) for token in ids]
    assert "".join(seen) == "aé歪😀b"
    assert "\ufffd" not in "".join(seen)
    assert [delta for delta in seen if delta] == ["a", "é", "歪", "😀", "b"]
    assert stream.finish() == ""


def test_a_character_that_never_becomes_whole_is_said_once_at_the_end(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("x😀")[:-1]
    stream = TextStream(tokenizer.stream(), [])
    assert "".join(stream.push(token) for token in ids) == "x"
    assert stream.finish() == "\ufffd"


def test_a_stop_string_of_split_characters_is_found(tokenizer: Tokenizer) -> None:
    stream = TextStream(tokenizer.stream(), ["歪😀"])
    seen = ""
    for token in tokenizer.encode("ab歪😀cd"):
        seen += stream.push(token)
        if stream.stopped:
            break
    assert seen + stream.finish() == "ab"
