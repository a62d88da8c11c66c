"""What the tokenizer's tests share: small vocabularies, the library they are checked against, hosts."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from functools import cache

import pytest
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Reference

from engine.native import NativeEngine
from engine.wasm import WasmEngine
from knot.tokenizer import Tokenizer
from knot.tokenizer_section import build_section_from_parts

PRES = ("qwen2", "smollm", "llama-bpe")
CONTROL_TEXTS = ("<|im_start|>", "<|im_end|>", "<|im_end|>|")
USER_TEXTS = ("<tool_call>", "<tool_call>>")
HOSTS = ["native", pytest.param("wasm", marks=pytest.mark.wasm)]

_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def host(name: str = "native", limit: int = 64 << 20) -> NativeEngine | WasmEngine:
    return NativeEngine(limit) if name == "native" else WasmEngine(limit)


def pre_tokenizer(pre: str) -> pre_tokenizers.PreTokenizer:
    """The steps of the family's own tokenizer.json."""
    if pre == "smollm":
        return pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
            ]
        )
    split = Regex(_SPLIT % ("{1,3}" if pre == "llama-bpe" else ""))
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(split, "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def corpus() -> Iterator[str]:
    """Text with words, code, numbers and several scripts: enough for a thousand merges, always the same."""
    chance = random.Random(7)
    parts = [
        "th",
        "er",
        "in",
        "on",
        "re",
        "qu",
        "st",
        "ing",
        "é",
        "ü",
        "на",
        "ко",
        "的",
        "世界",
        "하",
        "🚀",
        "م",
    ]
    marks = [
        ". ",
        ", ",
        "\n",
        "\n\n",
        "  ",
        "    ",
        "'s ",
        "'ll ",
        "(x):\n",
        " -> ",
        "!!",
        "==",
        "\r\n",
        "\t",
        "«»",
    ]
    for _ in range(4000):
        words = ("".join(chance.choice(parts) for _ in range(chance.randint(1, 4))) for _ in range(6))
        yield "".join(f"{word}{chance.choice(marks)}{chance.choice(['', '', ' '])}" for word in words)
        yield f" {chance.randrange(10**6)} {'a' * chance.randint(1, 9)}"


@cache
def trained(pre: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Tokens in id order and merges in rank order of a small vocabulary of the family."""
    tokenizer = Reference(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizer(pre)
    trainer = trainers.BpeTrainer(
        vocab_size=1200, show_progress=False, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator(corpus(), trainer)
    model = json.loads(tokenizer.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    return tuple(tokens), tuple(merges)


def section(pre: str, **changes: object) -> bytes:
    """The small vocabulary's section, with special tokens behind it."""
    tokens, merges = trained(pre)
    special = [*CONTROL_TEXTS, *USER_TEXTS]
    parts: dict = {
        "pre": pre,
        "tokens": [*tokens, *special],
        "merges": merges,
        "token_types": [1] * len(tokens) + [3] * len(CONTROL_TEXTS) + [4] * len(USER_TEXTS),
        "ids": {"bos": len(tokens), "eos": len(tokens) + 1},
        "add_bos": False,
    }
    return build_section_from_parts(**{**parts, **changes})


@cache
def reference(pre: str, allow_special: bool, nfc: bool = False) -> Reference:
    """The library's tokenizer of the small vocabulary."""
    tokens, merges = trained(pre)
    library = reference_of(pre, [*tokens, *CONTROL_TEXTS, *USER_TEXTS], merges)
    if nfc:
        library.normalizer = normalizers.NFC()
    if allow_special:
        library.add_special_tokens(
            [AddedToken(text, special=True, normalized=False) for text in CONTROL_TEXTS]
        )
    library.add_tokens([AddedToken(text, special=False, normalized=False) for text in USER_TEXTS])
    return library


def reference_of(pre: str, tokens: Sequence[str], merges: Sequence[str]) -> Reference:
    """The library's tokenizer of a vocabulary in which nothing is special."""
    vocabulary = {token: number for number, token in enumerate(tokens)}
    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
    library = Reference(models.BPE(vocab=vocabulary, merges=pairs, ignore_merges=pre == "llama-bpe"))
    library.pre_tokenizer = pre_tokenizer(pre)
    return library


@cache
def tokenizer(pre: str, host_name: str = "native", normalize: bool = False) -> Tokenizer:
    return Tokenizer(host(host_name), section(pre), normalize=normalize)


CHARACTERS = st.characters(exclude_categories=["Cs"])
FRAGMENTS = st.sampled_from(
    [
        *CONTROL_TEXTS,
        *USER_TEXTS,
        *(
            "'s",
            "'LL",
            "'re",
            "'\u017f",
            "''",
            "<|",
            "\u0338",
            "e\u0301",
            "\u1100\u1161\u11a8",
            "\ud7ff",
            "\ue000",
        ),
        *("\r\n", "\n\r", "\n \n", " \t ", "\u00a0", "\u3000", "\u0085", "\u2028", "\u200b", "   ", "\ufeff"),
        *("12345", "½", "٣٤", "१२३", "Ⅷ", "\U00011de0", "\U00016ff4", "\U0001d7d8", "a1b2", " 1", "1 "),
        *(
            "the",
            " the",
            "THE",
            "世界",
            "歪",
            "🚀",
            "👩\u200d👩\u200d👧",
            "->",
            "(x):\n",
            "!!!",
            " ==",
            "naïve",
        ),
        *("\x00", "\x04", "\x7f", "\U0001f1eb\U0001f1f7", "\U0010ffff", "\U00040000", "ß", "İ", "ﬆ"),
    ]
)
RUNS = st.builds(lambda piece, count: piece * count, CHARACTERS | FRAGMENTS, st.integers(1, 60))
TEXTS = st.lists(CHARACTERS | FRAGMENTS | RUNS, max_size=24).map("".join)
