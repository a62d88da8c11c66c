"""Makes the tokenizer section of a knot from GGUF metadata, and refuses what contradicts itself.

The engine crate reads the vocabulary and the merges; `knot/tokenizer_layout.py` reads the rest.
"""

from __future__ import annotations

import json
import struct
from array import array
from collections.abc import Iterable, Mapping, Sequence
from operator import index
from typing import cast

from knot.tokenizer_layout import (
    ADD_BOS,
    ADD_EOS,
    CONTROL,
    HEADER,
    IGNORE_MERGES,
    MAGIC,
    MAX_INFO_BYTES,
    MAX_MERGES,
    MAX_TOKEN_BYTES,
    MAX_TOKENS,
    NO_ID,
    NORMAL,
    PRE_TOKENIZERS,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    VERSION,
    SpecialToken,
    TokenizerInfo,
    TokenizerSectionError,
    read_section_info,
    section_info_bytes,
)

__all__ = [
    "SpecialToken",
    "TokenizerInfo",
    "TokenizerSectionError",
    "build_section",
    "build_section_from_parts",
    "read_section_info",
    "section_info_bytes",
    "unused_ranges",
]

PRE_ALIASES = {
    "deepseek-r1-qwen": "qwen2",
    "llama3": "llama-bpe",
    "llama-v3": "llama-bpe",
}
NORMALIZERS = {"qwen2": "nfc", "deepseek-r1-qwen": "nfc"}

ID_KEYS = {
    "bos": "bos_token_id",
    "eos": "eos_token_id",
    "eot": "eot_token_id",
    "eom": "eom_token_id",
    "pad": "padding_token_id",
    "unk": "unknown_token_id",
}

# Tokens that end a turn or a text whatever the metadata's ids say: chat models stop at either.
END_TEXTS = ("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>")


def byte_alphabet() -> list[str]:
    """The character that stands for each byte in byte-level vocabularies (GPT-2's `bytes_to_unicode`)."""
    shown = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte) if byte in shown else chr(next(others)) for byte in range(256)]


def _byte_table() -> dict[int, str]:
    """`str.translate` table from the alphabet to Latin-1; characters outside it leave Latin-1."""
    alphabet = byte_alphabet()
    table = dict.fromkeys(range(256), "\uffff")
    table.update({ord(char): chr(byte) for byte, char in enumerate(alphabet)})
    return table


_TO_LATIN1 = _byte_table()

# Text without these is not text: a vocabulary that lacks one is damaged rather than sparse.
_REQUIRED_BYTES = frozenset((0x0A, *range(0x20, 0x7F)))


def unused_ranges(kv: Mapping[str, object]) -> list[tuple[int, int]]:
    """Id ranges `[start, end)` that no text has and no sampler may choose.

    Those of type UNUSED, and the padding that older converters mark otherwise but call `[PAD<id>]`.
    """
    listed = kv.get("tokenizer.ggml.token_type")
    if listed is None:
        return []
    tokens = _strings(kv.get("tokenizer.ggml.tokens"), "tokenizer.ggml.tokens")
    types = _integers(listed, "tokenizer.ggml.token_type")
    _check_counts(tokens, types, ())
    return _ranges(_types(tokens, types))


def build_section(kv: Mapping[str, object]) -> bytes:
    """Makes the section from GGUF metadata (`tokenizer.*` keys; other keys are ignored).

    Raises `TokenizerSectionError` for a tokenizer the engine does not have or data that contradicts itself.
    """
    model = _text(kv, "tokenizer.ggml.model")
    if model != "gpt2":
        raise TokenizerSectionError(
            f"tokenizer.ggml.model is {model!r}: only byte-level BPE ('gpt2') is supported"
        )
    pre = _text(kv, "tokenizer.ggml.pre")
    for key in ("tokens", "merges"):
        if f"tokenizer.ggml.{key}" not in kv:
            raise TokenizerSectionError(f"tokenizer.ggml.{key} is missing from the model file")
    types = kv.get("tokenizer.ggml.token_type")
    template = kv.get("tokenizer.chat_template")
    if template is not None and not isinstance(template, str):
        raise TokenizerSectionError(
            f"tokenizer.chat_template is a {type(template).__name__}, expected a string"
        )
    return build_section_from_parts(
        pre=pre,
        tokens=_strings(kv["tokenizer.ggml.tokens"], "tokenizer.ggml.tokens"),
        token_types=None if types is None else _integers(types, "tokenizer.ggml.token_type"),
        merges=_strings(kv["tokenizer.ggml.merges"], "tokenizer.ggml.merges"),
        ids={role: _id(kv, key) for role, key in ID_KEYS.items()},
        add_bos=_flag(kv, "tokenizer.ggml.add_bos_token"),
        add_eos=_flag(kv, "tokenizer.ggml.add_eos_token"),
        chat_template=template,
    )


def build_section_from_parts(
    *,
    pre: str,
    tokens: Sequence[str],
    merges: Sequence[str],
    token_types: Sequence[int] | None = None,
    ids: Mapping[str, int | None] | None = None,
    add_bos: bool | None = None,
    add_eos: bool | None = None,
    chat_template: str | None = None,
) -> bytes:
    """Makes the section from its parts.

    `tokens` in id order, normal ones in the byte-level alphabet, others as their text; `merges` as
    `"left right"` in rank order; `ids` by role (`bos`, `eos`, `eot`, `eom`, `pad`, `unk`).
    `add_bos` left out means what the pre-tokenizer's family does: `llama-bpe` adds it, the others do not.
    """
    name = PRE_ALIASES.get(pre, pre)
    if name not in PRE_TOKENIZERS:
        raise TokenizerSectionError(
            f"the pre-tokenizer {pre!r} is not supported; supported: {', '.join(PRE_TOKENIZERS)} "
            f"(and {', '.join(PRE_ALIASES)}, which are the same)"
        )
    _check_counts(tokens, token_types, merges)
    types = _types(tokens, token_types)
    id_of = _index(tokens)
    raw = _raw_tokens(tokens, types)
    roles = {role: None if ids is None else ids.get(role) for role in ID_KEYS}
    for role, token_id in roles.items():
        if token_id is not None and not 0 <= token_id < len(tokens):
            raise TokenizerSectionError(
                f"tokenizer.ggml.{ID_KEYS[role]} is {token_id}, outside the {len(tokens)} tokens"
            )
    with_bos = name == "llama-bpe" if add_bos is None else add_bos
    for role, wanted in (("bos", with_bos), ("eos", bool(add_eos))):
        if wanted and roles[role] is None:
            raise TokenizerSectionError(
                f"{role} is to be added to every text, but tokenizer.ggml.{ID_KEYS[role]} is missing"
            )
    info = {
        "model": "byte-level-bpe",
        "normalizer": NORMALIZERS.get(pre),
        "ids": {role: token_id for role, token_id in roles.items() if role not in ("bos", "eos")},
        "end_ids": _end_ids(id_of, types, roles),
        "chat_template": chat_template,
        "unused": _ranges(types),
        "special_tokens": [
            [token_id, tokens[token_id], kind != USER_DEFINED]
            for token_id, kind in enumerate(types)
            if kind in (UNKNOWN, CONTROL, USER_DEFINED)
        ],
        "missing_bytes": _missing_bytes(id_of, types),
    }
    return _pack(
        pre=PRE_TOKENIZERS[name],
        flags=(IGNORE_MERGES if name == "llama-bpe" else 0)
        | (ADD_BOS if with_bos else 0)
        | (ADD_EOS if add_eos else 0),
        bos=roles["bos"],
        eos=roles["eos"],
        info=info,
        raw=raw,
        types=types,
        triples=_merge_triples(merges, id_of),
    )


def _types(tokens: Sequence[str], types: Sequence[int] | None) -> Sequence[int]:
    """The tokens' types, with padding as UNUSED whatever the converter called it."""
    if types is None:
        return [NORMAL] * len(tokens)
    padding = [
        number
        for number, token in enumerate(tokens)
        if token.startswith("[PAD") and token == f"[PAD{number}]"
    ]
    if not padding:
        return types
    mended = list(types)
    for number in padding:
        mended[number] = UNUSED
    return mended


def _check_counts(tokens: Sequence[str], types: Sequence[int] | None, merges: Sequence[str]) -> None:
    if not tokens:
        raise TokenizerSectionError("the vocabulary is empty")
    if types is not None and len(types) != len(tokens):
        raise TokenizerSectionError(
            f"{len(tokens)} tokens but {len(types)} token types: the lists must be of one length"
        )
    if len(tokens) > MAX_TOKENS or len(merges) > MAX_MERGES:
        raise TokenizerSectionError(
            f"{len(tokens)} tokens and {len(merges)} merges, more than {MAX_TOKENS} and {MAX_MERGES}"
        )


def _index(tokens: Sequence[str]) -> dict[str, int]:
    id_of = {token: number for number, token in enumerate(tokens)}
    if len(id_of) != len(tokens):
        # The dictionary kept the last of each: the first that it contradicts is the earlier twin.
        first = next(number for number, token in enumerate(tokens) if id_of[token] != number)
        raise TokenizerSectionError(f"tokens {first} and {id_of[tokens[first]]} are both {tokens[first]!r}")
    if "" in id_of:
        raise TokenizerSectionError(f"token {id_of['']} is empty")
    return id_of


def _raw_tokens(tokens: Sequence[str], types: Sequence[int]) -> list[bytes]:
    raw: list[bytes] = []
    for number, (token, kind) in enumerate(zip(tokens, types, strict=True)):
        if kind == NORMAL:
            try:
                data = token.translate(_TO_LATIN1).encode("latin-1")
            except UnicodeEncodeError:
                raise TokenizerSectionError(
                    f"token {number}, {token!r}, has characters outside the byte-level alphabet"
                ) from None
        elif kind in (UNKNOWN, CONTROL, USER_DEFINED, UNUSED):
            data = token.encode("utf-8", "replace")
        else:
            raise TokenizerSectionError(f"token {number}, {token!r}, has type {kind}, expected one of 1 to 5")
        if len(data) > MAX_TOKEN_BYTES:
            raise TokenizerSectionError(f"token {number} has {len(data)} bytes, more than {MAX_TOKEN_BYTES}")
        raw.append(data)
    return raw


def _missing_bytes(id_of: Mapping[str, int], types: Sequence[int]) -> list[int]:
    missing = [
        byte for byte, char in enumerate(byte_alphabet()) if char not in id_of or types[id_of[char]] != NORMAL
    ]
    needed = [byte for byte in missing if byte in _REQUIRED_BYTES]
    if needed:
        raise TokenizerSectionError(
            f"the vocabulary has no token for {len(needed)} byte(s) of plain text, the first of them "
            f"0x{needed[0]:02x} ({chr(needed[0])!r})"
        )
    return missing


def _merge_triples(merges: Sequence[str], id_of: Mapping[str, int]) -> array[int]:
    triples = array("I" if array("I").itemsize == 4 else "L")
    seen: set[str] = set()
    for rank, merge in enumerate(merges):
        left, space, right = merge.partition(" ")
        if not space or not left or not right or " " in right:
            raise TokenizerSectionError(
                f"merge {rank} is {merge!r}, expected two tokens with one space between"
            )
        try:
            triples.extend((id_of[left], id_of[right], id_of[left + right]))
        except KeyError as unknown:
            raise TokenizerSectionError(
                f"merge {rank}, {merge!r}, names {unknown.args[0]!r}, which is no token"
            ) from None
        if merge in seen:
            raise TokenizerSectionError(f"merge {rank}, {merge!r}, is a duplicate")
        seen.add(merge)
    return triples


def _end_ids(id_of: Mapping[str, int], types: Sequence[int], roles: Mapping[str, int | None]) -> list[int]:
    known = {token_id for role in ("eos", "eot", "eom") if (token_id := roles[role]) is not None}
    for text in END_TEXTS:
        token_id = id_of.get(text)
        if token_id is not None and types[token_id] == CONTROL:
            known.add(token_id)
    return sorted(known)


def _pack(
    *,
    pre: int,
    flags: int,
    bos: int | None,
    eos: int | None,
    info: Mapping[str, object],
    raw: Sequence[bytes],
    types: Sequence[int],
    triples: array[int],
) -> bytes:
    body = json.dumps(info, separators=(",", ":")).encode()
    body += b" " * (-len(body) % 4)
    if len(body) > MAX_INFO_BYTES:
        raise TokenizerSectionError(f"the tokenizer's JSON is {len(body)} bytes, more than {MAX_INFO_BYTES}")
    offsets = array(triples.typecode, [0])
    end = 0
    for token in raw:
        end += len(token)
        offsets.append(end)
    if struct.pack("=I", 1) != struct.pack("<I", 1):
        offsets.byteswap()
        triples.byteswap()
    n_merges = len(triples) // 3
    head = HEADER.pack(
        MAGIC,
        VERSION,
        pre,
        flags,
        len(body),
        len(raw),
        n_merges,
        end,
        NO_ID if bos is None else bos,
        NO_ID if eos is None else eos,
    )
    return b"".join((head, body, offsets.tobytes(), triples.tobytes(), bytes(types), *raw))


def _ranges(types: Iterable[int]) -> list[tuple[int, int]]:
    ranges: list[tuple[int, int]] = []
    for number, kind in enumerate(types):
        if kind != UNUSED:
            continue
        if ranges and ranges[-1][1] == number:
            ranges[-1] = (ranges[-1][0], number + 1)
        else:
            ranges.append((number, number + 1))
    return ranges


def _text(kv: Mapping[str, object], key: str) -> str:
    value = kv.get(key)
    if not isinstance(value, str):
        found = "missing" if value is None else f"a {type(value).__name__}"
        raise TokenizerSectionError(f"{key} is {found}, expected a string")
    return value


def _flag(kv: Mapping[str, object], key: str) -> bool | None:
    value = kv.get(key)
    if value is not None and not isinstance(value, bool):
        raise TokenizerSectionError(f"{key} is {value!r}, expected a boolean")
    return value


def _id(kv: Mapping[str, object], key: str) -> int | None:
    key = f"tokenizer.ggml.{key}"
    value = kv.get(key)
    if value is None:
        return None
    try:
        number = index(cast(int, value))
    except TypeError:
        raise TokenizerSectionError(f"{key} is {value!r}, expected a token id") from None
    # Some converters write "none" as -1.
    return None if number in (-1, NO_ID) else number


def _strings(value: object, key: str) -> list[str]:
    if not isinstance(value, Iterable) or isinstance(value, (str, bytes)):
        raise TokenizerSectionError(f"{key} is a {type(value).__name__}, expected a list of strings")
    items = list(cast(Iterable[object], value))
    for number, item in enumerate(items):
        if not isinstance(item, str):
            raise TokenizerSectionError(f"{key}[{number}] is {item!r}, expected a string of valid UTF-8")
    return cast(list[str], items)


def _integers(value: object, key: str) -> list[int]:
    if not isinstance(value, Iterable) or isinstance(value, (str, bytes)):
        raise TokenizerSectionError(f"{key} is a {type(value).__name__}, expected a list of integers")
    try:
        return [index(cast(int, item)) for item in cast(Iterable[object], value)]
    except TypeError as error:
        raise TokenizerSectionError(f"{key} has an entry that is no integer: {error}") from None
