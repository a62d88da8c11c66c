"""XXH3-64 of a tensor's row groups, made or checked as the bytes stream by."""

from __future__ import annotations

import struct
from collections.abc import Iterable

from xxhash import xxh3_64

from knot.errors import DigestError
from knot.header import TensorInfo

_U64 = struct.Struct("<Q")


class GroupDigests:
    """The digests of one tensor, of which the bytes are fed in order, in pieces of any size.

    Given what they should be, it raises `DigestError` at the first group that differs.
    """

    def __init__(self, info: TensorInfo, expected: bytes | memoryview | None = None) -> None:
        self._info = info
        self._expected = expected
        self._lengths = iter(info.group_lengths())
        self._left = next(self._lengths)
        self._hash = xxh3_64()
        self.made = bytearray()

    def feed(self, data: memoryview) -> None:
        """Takes the next bytes. Raises `DigestError`."""
        while len(data):
            piece, data = data[: self._left], data[self._left :]
            self._hash.update(piece)
            self._left -= len(piece)
            if not self._left:
                self._finish_group()

    def _finish_group(self) -> None:
        digest = _U64.pack(self._hash.intdigest())
        at = len(self.made)
        self.made += digest
        if self._expected is not None and self._expected[at : at + 8] != digest:
            info, group = self._info, at // 8
            start = group * info.group_rows
            end = min(start + info.group_rows, info.rows)
            raise DigestError(
                info.name,
                (start, end),
                f"tensor {info.name}, rows [{start}, {end}): the digest is {digest[::-1].hex()}, expected "
                f"{bytes(self._expected[at : at + 8])[::-1].hex()}; fetch or convert the model again",
            )
        self._hash.reset()
        self._left = next(self._lengths, 0)


def digest(pieces: Iterable[bytes | bytearray | memoryview]) -> str:
    """XXH3-64 of bytes in pieces, as sections state it: 16 hexadecimal digits."""
    state = xxh3_64()
    for piece in pieces:
        state.update(piece)
    return state.hexdigest()
