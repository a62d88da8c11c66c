"""The tokenizer section of a knot as bytes: its layout, and what can be read without the vocabulary.

`docs/tokenizer.md` has the layout in words. Standard library only: it also runs in Workers.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from typing import Any, cast

MAGIC = b"KTOK"
VERSION = 1
HEADER = struct.Struct("<4sHBBIIIIII")
NO_ID = 0xFFFFFFFF

MAX_TOKENS = 1 << 21
MAX_MERGES = (1 << 22) - 1
MAX_TOKEN_BYTES = 16_384
MAX_INFO_BYTES = 4 << 20

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED = 1, 2, 3, 4, 5

IGNORE_MERGES, ADD_BOS, ADD_EOS = 1, 2, 4

PRE_TOKENIZERS = {"qwen2": 1, "smollm": 2, "llama-bpe": 3}


class TokenizerSectionError(ValueError):
    """Tokenizer data that cannot be used; the sentence says what was expected and what was found."""


@dataclass(frozen=True)
class SpecialToken:
    """A token matched as a whole in the text: `control` ones only where the caller allows them."""

    id: int
    text: str
    control: bool


@dataclass(frozen=True)
class TokenizerInfo:
    """What a section says besides vocabulary and merges.

    `unused` and `end_ids`: id ranges `[start, end)` that are never sampled, and ids that end a generation.
    `missing_bytes`: bytes no token stands for; the encoder drops them, as the vocabulary's own library does.
    """

    model: str
    pre: str
    normalizer: str | None
    n_tokens: int
    n_merges: int
    bos_id: int | None
    eos_id: int | None
    eot_id: int | None
    eom_id: int | None
    pad_id: int | None
    unk_id: int | None
    end_ids: tuple[int, ...]
    add_bos: bool
    add_eos: bool
    ignore_merges: bool
    chat_template: str | None
    unused: tuple[tuple[int, int], ...]
    special_tokens: tuple[SpecialToken, ...]
    missing_bytes: tuple[int, ...]

    def is_unused(self, token_id: int) -> bool:
        """Whether the tokenizer marks `token_id` as never used."""
        return any(start <= token_id < end for start, end in self.unused)


def section_info_bytes(head: bytes | bytearray | memoryview) -> int:
    """Bytes from a section's start that `read_section_info` needs, told by its first 32 bytes."""
    return HEADER.size + _header(head)[4]


def read_section_info(section: bytes | bytearray | memoryview) -> TokenizerInfo:
    """Reads what a section says besides vocabulary and merges; its first `section_info_bytes` suffice."""
    _, _, pre, flags, length, n_tokens, n_merges, _, bos, eos = _header(section)
    body = bytes(section[HEADER.size : HEADER.size + length])
    if len(body) != length:
        raise TokenizerSectionError(f"the tokenizer section's JSON has {len(body)} bytes, expected {length}")
    names = {number: name for name, number in PRE_TOKENIZERS.items()}
    if pre not in names:
        raise TokenizerSectionError(
            f"the tokenizer section names pre-tokenizer {pre}, expected one of {sorted(names)}"
        )
    try:
        info = cast(dict[str, Any], json.loads(body))
        ids = info["ids"]
        return TokenizerInfo(
            model=info["model"],
            pre=names[pre],
            normalizer=info["normalizer"],
            n_tokens=n_tokens,
            n_merges=n_merges,
            bos_id=None if bos == NO_ID else bos,
            eos_id=None if eos == NO_ID else eos,
            eot_id=ids["eot"],
            eom_id=ids["eom"],
            pad_id=ids["pad"],
            unk_id=ids["unk"],
            end_ids=tuple(info["end_ids"]),
            add_bos=bool(flags & ADD_BOS),
            add_eos=bool(flags & ADD_EOS),
            ignore_merges=bool(flags & IGNORE_MERGES),
            chat_template=info["chat_template"],
            unused=tuple((start, end) for start, end in info["unused"]),
            special_tokens=tuple(
                SpecialToken(number, text, control) for number, text, control in info["special_tokens"]
            ),
            missing_bytes=tuple(info["missing_bytes"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise TokenizerSectionError(f"the tokenizer section's JSON cannot be used: {error!r}") from error


def _header(
    head: bytes | bytearray | memoryview,
) -> tuple[bytes, int, int, int, int, int, int, int, int, int]:
    if len(head) < HEADER.size:
        raise TokenizerSectionError(f"a tokenizer section starts with {HEADER.size} bytes, got {len(head)}")
    fields = HEADER.unpack_from(head)
    if fields[0] != MAGIC or fields[1] != VERSION:
        raise TokenizerSectionError(
            f"a tokenizer section starts with {MAGIC!r} and version {VERSION}, "
            f"found {fields[0]!r} and {fields[1]}"
        )
    if fields[4] > MAX_INFO_BYTES:
        raise TokenizerSectionError(
            f"the tokenizer section's JSON is {fields[4]} bytes, more than {MAX_INFO_BYTES}"
        )
    return fields
