"""What tells pages of tokens apart: a digest of everything up to each page's end, and of the model."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from typing import Final

from protocol.steps import DIGEST_BYTES

PAGE: Final = 16


def page_digests(model: str, tokens: Sequence[int]) -> tuple[bytes, ...]:
    """A digest for every full page of `tokens`.

    Each is of the one before it and of its own tokens, so two agree only if everything before agrees as well
    (BLAKE2b, 128 bits).
    """
    found: list[bytes] = []
    last = hashlib.blake2b(model.encode(), digest_size=DIGEST_BYTES).digest()
    for start in range(0, len(tokens) - PAGE + 1, PAGE):
        page = struct.pack(f"<{PAGE}i", *tokens[start : start + PAGE])
        last = hashlib.blake2b(last + page, digest_size=DIGEST_BYTES).digest()
        found.append(last)
    return tuple(found)
