"""The tokenizer section: what GGUF metadata becomes, and what is refused."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizer_support import host

from knot.tokenizer import Tokenizer
from knot.tokenizer_layout import HEADER, SpecialToken, read_section_info, section_info_bytes
from knot.tokenizer_section import (
    TokenizerSectionError,
    build_section,
    build_section_from_parts,
    byte_alphabet,
    unused_ranges,
)

ALPHABET = byte_alphabet()


def metadata(**changes: object) -> dict[str, object]:
    """GGUF metadata of 256 byte tokens, one merge, two special tokens and two unused ones."""
    kv: dict[str, object] = {
        "general.architecture": "qwen2",
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": [*ALPHABET, "ab", "<|im_end|>", "<tool_call>", "[PAD259]", "[PAD260]"],
        "tokenizer.ggml.token_type": [1] * 257 + [3, 4, 4, 5],
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.bos_token_id": 257,
        "tokenizer.ggml.eos_token_id": 257,
        "tokenizer.ggml.padding_token_id": 0xFFFFFFFF,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": "{{ messages }} \ud83d",
    }
    for key, value in changes.items():
        name = f"tokenizer.{key}" if key == "chat_template" else f"tokenizer.ggml.{key}"
        kv[name] = value
        if value is None:
            del kv[name]
    return kv


def test_everything_but_the_vocabulary_is_read_from_the_sections_head():
    section = build_section(metadata())
    info = read_section_info(section[: section_info_bytes(section[: HEADER.size])])
    assert (info.model, info.pre, info.normalizer) == ("byte-level-bpe", "qwen2", "nfc")
    assert (info.n_tokens, info.n_merges) == (261, 1)
    assert (info.bos_id, info.eos_id, info.pad_id, info.eot_id) == (257, 257, None, None)
    assert (info.add_bos, info.add_eos, info.ignore_merges) == (False, False, False)
    assert info.chat_template == "{{ messages }} \ud83d"
    assert info.special_tokens == (
        SpecialToken(257, "<|im_end|>", True),
        SpecialToken(258, "<tool_call>", False),
    )
    assert info.end_ids == (257,)
    assert info.missing_bytes == ()


def test_padding_is_unused_whatever_the_converter_called_it():
    info = read_section_info(build_section(metadata()))
    assert info.unused == ((259, 261),)
    assert unused_ranges(metadata()) == [(259, 261)]
    assert [info.is_unused(token) for token in (258, 259, 260, 261)] == [False, True, True, False]
    assert unused_ranges(metadata(token_type=None)) == []
    spread = [1, 5, 5, 1, 5]
    kv = {"tokenizer.ggml.tokens": list("abcde"), "tokenizer.ggml.token_type": spread}
    assert unused_ranges(kv) == [(1, 3), (4, 5)]


@pytest.mark.parametrize(
    ("given", "stored", "normalizer", "add_bos", "ignore_merges"),
    [
        ("qwen2", "qwen2", "nfc", False, False),
        ("deepseek-r1-qwen", "qwen2", "nfc", False, False),
        ("smollm", "smollm", None, False, False),
        ("llama-bpe", "llama-bpe", None, True, True),
        ("llama3", "llama-bpe", None, True, True),
        ("llama-v3", "llama-bpe", None, True, True),
    ],
)
def test_each_family_has_its_own_defaults(given, stored, normalizer, add_bos, ignore_merges):
    info = read_section_info(build_section(metadata(pre=given, add_bos_token=None)))
    assert (info.pre, info.normalizer) == (stored, normalizer)
    assert (info.add_bos, info.ignore_merges) == (add_bos, ignore_merges)


def test_ids_that_end_a_generation_are_those_named_and_those_known():
    tokens = [*ALPHABET, "<|im_end|>", "<|endoftext|>", "<done>", "<|eot_id|>"]
    info = read_section_info(
        build_section_from_parts(
            pre="qwen2",
            tokens=tokens,
            merges=[],
            token_types=[1] * 256 + [3, 3, 3, 1],
            ids={"eos": 256, "eot": 258},
        )
    )
    # "<|eot_id|>" is no control token here: ordinary text may hold it.
    assert info.end_ids == (256, 257, 258)


def test_bytes_that_text_can_do_without_may_be_missing():
    tokens = [token for byte, token in enumerate(ALPHABET) if byte not in (0x04, 0xF1, 0xFF)]
    info = read_section_info(build_section_from_parts(pre="smollm", tokens=tokens, merges=[]))
    assert info.missing_bytes == (0x04, 0xF1, 0xFF)


TOKENS = [*ALPHABET, "ab", "<|im_end|>", "<tool_call>", "[PAD259]", "[PAD260]"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model": "llama"}, "'llama': only byte-level BPE"),
        ({"model": None}, "tokenizer.ggml.model is missing"),
        ({"model": 3}, "tokenizer.ggml.model is a int"),
        ({"pre": "gpt-2"}, "'gpt-2' is not supported; supported: qwen2, smollm, llama-bpe"),
        ({"pre": None}, "tokenizer.ggml.pre is missing"),
        ({"tokens": None}, "tokenizer.ggml.tokens is missing"),
        ({"merges": None}, "tokenizer.ggml.merges is missing"),
        ({"tokens": []}, "the vocabulary is empty"),
        ({"tokens": 5}, "tokenizer.ggml.tokens is a int"),
        ({"tokens": [*TOKENS[:-1], b"x"]}, r"tokens\[260\] is b'x'"),
        ({"tokens": [*TOKENS[:-1], "ab"]}, "tokens 256 and 260 are both 'ab'"),
        ({"tokens": [*TOKENS[:-1], ""]}, "token 260 is empty"),
        ({"tokens": [*TOKENS[:256], "中", *TOKENS[257:]]}, "token 256, '中', has characters outside"),
        ({"tokens": [*TOKENS[:256], "a b", *TOKENS[257:]]}, "token 256, 'a b', has characters outside"),
        ({"tokens": [token + "." * (token == "A") for token in TOKENS]}, r"1 byte.* 0x41 \('A'\)"),
        ({"tokens": ["x" * 20_000, *TOKENS[1:]]}, "token 0 has 20000 bytes"),
        ({"token_type": [1] * 260}, "261 tokens but 260 token types"),
        ({"token_type": [6] + [1] * 260}, "token 0, .*, has type 6"),
        ({"token_type": ["1"] * 261}, "no integer"),
        ({"merges": ["ab"]}, "merge 0 is 'ab', expected two tokens"),
        ({"merges": ["a b c"]}, "merge 0 is 'a b c'"),
        ({"merges": ["a b", "b a"]}, "merge 1, 'b a', names 'ba'"),
        ({"merges": ["a b", "a zz"]}, "names 'zz'"),
        ({"merges": ["a b", "a b"]}, "merge 1, 'a b', is a duplicate"),
        ({"eos_token_id": 261}, "eos_token_id is 261, outside the 261 tokens"),
        ({"eos_token_id": "1"}, "expected a token id"),
        ({"bos_token_id": None, "add_bos_token": True}, "bos is to be added"),
        ({"eos_token_id": -1, "add_eos_token": True}, "eos is to be added"),
        ({"add_bos_token": 1}, "expected a boolean"),
        ({"chat_template": 7}, "chat_template is a int"),
    ],
)
def test_metadata_that_cannot_be_a_tokenizer_is_refused_by_name(changes, words):
    with pytest.raises(TokenizerSectionError, match=words):
        build_section(metadata(**changes))


def test_unused_ranges_of_unequal_lists_are_refused():
    with pytest.raises(TokenizerSectionError, match="2 tokens but 1 token types"):
        unused_ranges({"tokenizer.ggml.tokens": ["a", "b"], "tokenizer.ggml.token_type": [5]})


def test_a_head_cut_anywhere_is_refused():
    section = build_section(metadata())
    for length in range(section_info_bytes(section)):
        with pytest.raises(TokenizerSectionError):
            read_section_info(section[:length])


@pytest.mark.parametrize(
    ("at", "byte", "words"),
    [
        (0, 0, "starts with"),
        (4, 2, "version"),
        (6, 9, "pre-tokenizer 9"),
        (11, 9, "more than"),
        (33, 0, "JSON"),
    ],
)
def test_a_head_that_was_changed_is_refused(at, byte, words):
    section = bytearray(build_section(metadata()))
    section[at] = byte
    with pytest.raises(TokenizerSectionError, match=words):
        read_section_info(section)


@given(
    words=st.lists(st.binary(min_size=2, max_size=9), unique=True, max_size=20),
    special=st.lists(
        st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=9), unique=True, max_size=9
    ),
)
@settings(deadline=None, max_examples=60)
def test_every_token_comes_back_from_the_engine_as_it_went_in(words, special):
    normal = [*ALPHABET, *("".join(ALPHABET[byte] for byte in word) for word in words)]
    special = [text for text in special if text not in normal]
    section = build_section_from_parts(
        pre="qwen2", tokens=[*normal, *special], merges=[], token_types=[1] * len(normal) + [3] * len(special)
    )
    subject = Tokenizer(host(), section)
    raw = [*(bytes([byte]) for byte in range(256)), *words, *(text.encode() for text in special)]
    assert [subject.token_bytes(token) for token in range(len(raw))] == raw
    assert subject.decode_bytes(range(len(raw))) == b"".join(raw)
