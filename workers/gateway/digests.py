"""What tells pages of tokens apart: a digest of everything up to each page's end, and of the model."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence

from engine.values import KV_PAGE_TOKENS
from protocol.steps import DIGEST_BYTES


def page_digests(model: str, tokens: Sequence[int]) -> tuple[bytes, ...]:
    """A digest for every full page of `tokens`.

    Each is of the one before it and of its own tokens, so two agree only if everything before agrees as well
    (BLAKE2b, 128 bits).
    """
    found: list[bytes] = []
    last = hashlib.blake2b(model.encode(), digest_size=DIGEST_BYTES).digest()
    for start in range(0, len(tokens) - KV_PAGE_TOKENS + 1, KV_PAGE_TOKENS):
        page = struct.pack(f"<{KV_PAGE_TOKENS}i", *tokens[start : start + KV_PAGE_TOKENS])
        last = hashlib.blake2b(last + page, digest_size=DIGEST_BYTES).digest()
        found.append(last)
    return tuple(found)
