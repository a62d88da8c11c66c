"""The tokenizer against the library that vocabularies are trained with, on any text."""

from __future__ import annotations

import unicodedata
from functools import cache
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizer_support import (
    PRES,
    TEXTS,
    host,
    reference,
    reference_of,
    tokenizer,
    trained,
)

from knot.tokenizer import Tokenizer
from knot.tokenizer_section import build_section_from_parts
from scripts import make_unicode_tables

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize("pre", PRES)
@given(text=TEXTS, allow_special=st.booleans())
@settings(deadline=None, max_examples=400)
def test_ids_equal_the_librarys_for_any_text(pre, text, allow_special):
    expected = reference(pre, allow_special).encode(text, add_special_tokens=False).ids
    assert tokenizer(pre).encode(text, allow_special) == expected


@pytest.mark.wasm
@pytest.mark.parametrize("pre", PRES)
@given(text=TEXTS, allow_special=st.booleans())
@settings(deadline=None, max_examples=200)
def test_ids_in_wasm_equal_the_librarys_for_any_text(pre, text, allow_special):
    expected = reference(pre, allow_special).encode(text, add_special_tokens=False).ids
    assert tokenizer(pre, "wasm").encode(text, allow_special) == expected


@given(text=TEXTS, allow_special=st.booleans())
@settings(deadline=None, max_examples=400)
def test_text_is_normalised_as_the_librarys_own_nfc_does(text, allow_special):
    # A character newer than this Python's Unicode is composed by the library alone.
    text = "".join(char for char in text if unicodedata.category(char) != "Cn")
    expected = reference("qwen2", allow_special, nfc=True).encode(text, add_special_tokens=False).ids
    assert tokenizer("qwen2", normalize=True).encode(text, allow_special) == expected


@pytest.mark.parametrize("pre", PRES)
@given(text=TEXTS)
@settings(deadline=None, max_examples=200)
def test_text_comes_back_from_its_ids_whole_and_streamed(pre, text):
    subject = tokenizer(pre)
    ids = subject.encode(text, allow_special=True)
    assert subject.decode(ids) == text
    stream = subject.stream()
    deltas = [stream.push(token) for token in ids]
    assert stream.finish() == ""
    assert "".join(deltas) == text


@pytest.mark.parametrize("pre", PRES)
def test_this_projects_own_texts_are_cut_as_the_library_cuts_them(pre):
    files = sorted([*ROOT.glob("*.toml"), *ROOT.glob("knot/*.py"), *ROOT.glob("rust/*/src/tokenizer/*.rs")])
    assert files
    for file in files:
        text = file.read_text()
        expected = reference(pre, False).encode(text, add_special_tokens=False).ids
        assert tokenizer(pre).encode(text) == expected, file.name


@pytest.mark.parametrize("pre", PRES)
def test_long_runs_are_cut_as_the_library_cuts_them(pre):
    for piece in ("a", " ", "\n", "!", "é", "世", "1", "\t ", "'s", "\r\n", "🚀"):
        text = piece * 5000
        expected = reference(pre, False).encode(text, add_special_tokens=False).ids
        assert tokenizer(pre).encode(text) == expected, piece


@pytest.mark.parametrize("pre", PRES)
@given(text=TEXTS)
@example(text="a!\x04!")
@settings(deadline=None, max_examples=100)
def test_bytes_without_a_token_are_dropped_as_the_library_drops_them(pre, text):
    subject, library = without_bytes(pre)
    assert subject.encode(text) == library.encode(text, add_special_tokens=False).ids


@cache
def without_bytes(pre):
    """The small vocabulary without the tokens of four bytes, and the library's of the same."""
    left_out = set("\u0104ñòÿ")  # 0x04, 0xf1, 0xf2 and 0xff in the byte-level alphabet
    tokens, merges = trained(pre)
    kept = [token for token in tokens if not left_out & set(token)]
    merges = [merge for merge in merges if not left_out & set(merge)]
    small = build_section_from_parts(pre=pre, tokens=kept, merges=merges, add_bos=False)
    return Tokenizer(host(), small, normalize=False), reference_of(pre, kept, merges)


def test_the_unicode_tables_are_the_librarys_for_every_code_point():
    assert make_unicode_tables.rust() == make_unicode_tables.TABLES.read_text()
    assert make_unicode_tables.version() == "16.0"
