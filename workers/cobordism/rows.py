"""A shard's embedding rows, through three tiers: the warden's memory, Workers KV, and R2.

The warden holds raw rows as the knot has them; KV holds rows already dequantised, f32 [hidden_size]. A row
goes to KV when it is seen for the second time, since a write costs more than ten reads from R2. What KV
returns with another length is poison from some other version: it is deleted and counts as missing.
"""

from __future__ import annotations

import asyncio
import struct
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from engine.rows import RowReader, RowsUnavailable
from knot.bucket import BucketKnot
from protocol.calls import FRAME, Call
from protocol.deadlines import DeadlineExceeded, within
from protocol.frames import BadFrame, Kind, Part, Tensor, decode, encode
from protocol.identity import Identity
from protocol.ports import Background, KeyValue, Peer, PeerLost
from slice_settings import ShardSettings

SEEN_TOKENS: Final = 65_536
MOST_AT_ONCE: Final = 4096  # rows that a warden gives in one answer

# Seconds that a warden may take, and how many calls it is spared after it took longer: R2 has the rows too.
PATIENCE: Final = 5.0
LEFT_ALONE: Final = 32


@dataclass(slots=True)
class RowCounts:
    """Rows by where they came from, and what was done to KV."""

    warden: int = 0
    kv: int = 0
    filled: int = 0
    kv_written: int = 0
    kv_poisoned: int = 0
    kv_failed: int = 0


class EmbeddingRows:
    """Looks up rows of the embedding table as f32."""

    def __init__(
        self,
        settings: ShardSettings,
        knot: BucketKnot,
        reader: RowReader,
        warden: Peer | None,
        kv: KeyValue | None,
        headers: dict[str, str],
        background: Background,
    ) -> None:
        self._settings = settings
        self._knot = knot
        self._reader = reader
        self._warden = warden
        self._kv = kv if settings.use_kv else None
        self._headers = {**headers, "content-type": FRAME, **identity(knot, settings.slice).headers()}
        self._background = background
        self._left_alone = 0
        self._seen: OrderedDict[int, int] = OrderedDict()
        self.counts = RowCounts()

    async def fetch(self, tokens: Sequence[int]) -> dict[int, bytes]:
        """Rows by id, each f32 [hidden_size]. Raises `RowsUnavailable` and `BlobError`."""
        found: dict[int, bytes] = {}
        kept: dict[int, bytes] = {}
        missing = sorted(set(tokens))
        if self._warden is not None and missing:
            raw = await self._ask_warden(self._warden, missing, fill=False)
            self.counts.warden += len(raw)
            found.update(await self._reader.dequantise(raw))
            missing = [token for token in missing if token not in found]
        if self._kv is not None and missing:
            kept = await self._from_kv(self._kv, missing)
            self.counts.kv += len(kept)
            found.update(kept)
            missing = [token for token in missing if token not in found]
        if missing:
            raw = await self._fill(missing)
            self.counts.filled += len(raw)
            found.update(await self._reader.dequantise(raw))
            missing = [token for token in missing if token not in found]
        if missing:
            raise RowsUnavailable(f"knot {self._knot.key}: rows {missing[:8]} could not be had")
        if self._kv is not None:
            self._remember(self._kv, {token: row for token, row in found.items() if token not in kept})
        return found

    def kv_key(self, token: int) -> str:
        """The key of a row in KV."""
        return f"{self._knot.id}/{token}"

    async def _fill(self, tokens: Sequence[int]) -> dict[int, bytes]:
        """Raw rows that are in no cache: by way of the warden, which keeps them, or straight from R2."""
        raw: dict[int, bytes] = {}
        if self._warden is not None:
            raw = await self._ask_warden(self._warden, tokens, fill=True)
        rest = [token for token in tokens if token not in raw]
        if rest:
            raw.update(await self._reader.read(rest))
        return raw

    async def _ask_warden(self, warden: Peer, tokens: Sequence[int], fill: bool) -> dict[int, bytes]:
        found: dict[int, bytes] = {}
        for first in range(0, len(tokens), MOST_AT_ONCE):
            found.update(await self._some_from_warden(warden, tokens[first : first + MOST_AT_ONCE], fill))
        return found

    async def _some_from_warden(self, warden: Peer, tokens: Sequence[int], fill: bool) -> dict[int, bytes]:
        if self._left_alone > 0:
            self._left_alone -= 1
            return {}
        data = struct.pack(f"<{len(tokens)}i", *tokens)
        part = Part({"fill": fill}, {"ids": Tensor("ids", "i32", (len(tokens),), data)})
        call = Call("POST", "/tensors", encode(Kind.ROWS, [part]), self._headers)
        try:
            reply = await within(PATIENCE, warden.call(call), "the warden", self._background)
            if reply.status != 200:
                return {}
            return self._rows_of(decode(reply.bytes()).parts[0], set(tokens))
        except DeadlineExceeded:
            self._left_alone = LEFT_ALONE
            return {}
        except (PeerLost, BadFrame, IndexError):
            return {}  # the next tier has them too

    def _rows_of(self, part: Part, wanted: set[int]) -> dict[int, bytes]:
        ids, rows = part.tensor("ids", "i32", 1), part.tensor("rows", "u8", 2)
        size = self._reader.table.row_bytes
        if rows.shape != (ids.shape[0], size):
            return {}
        names = struct.unpack(f"<{ids.shape[0]}i", ids.data)
        return {
            token: bytes(rows.data[i * size : (i + 1) * size])
            for i, token in enumerate(names)
            if token in wanted
        }

    async def _from_kv(self, kv: KeyValue, tokens: Sequence[int]) -> dict[int, bytes]:
        found: dict[int, bytes] = {}
        values = await asyncio.gather(*(self._kv_get(kv, token) for token in tokens))
        for token, value in zip(tokens, values, strict=True):
            if value is None:
                continue
            if len(value) != self._reader.f32_bytes:
                self.counts.kv_poisoned += 1
                self._background(self._kv_delete(kv, token))
                continue
            found[token] = value
        return found

    async def _kv_get(self, kv: KeyValue, token: int) -> bytes | None:
        try:
            return await kv.get(self.kv_key(token))
        except Exception:  # KV is a cache: whatever is wrong with it, R2 has the row
            self.counts.kv_failed += 1
            return None

    async def _kv_delete(self, kv: KeyValue, token: int) -> None:
        try:
            await kv.delete(self.kv_key(token))
        except Exception:
            self.counts.kv_failed += 1

    async def _kv_put(self, kv: KeyValue, token: int, row: bytes) -> None:
        try:
            await kv.put(self.kv_key(token), row, self._settings.kv_ttl)
            self.counts.kv_written += 1
        except Exception:
            self.counts.kv_failed += 1

    def _remember(self, kv: KeyValue, rows: dict[int, bytes]) -> None:
        for token, row in rows.items():
            count = self._seen.pop(token, 0) + 1
            self._seen[token] = count
            if count == 2:
                self._background(self._kv_put(kv, token, row))
        while len(self._seen) > SEEN_TOKENS:
            self._seen.popitem(last=False)


def identity(knot: BucketKnot, ids: tuple[int, int]) -> Identity:
    """The CobordismWarden for this slice of this knot."""
    return Identity("vocab", knot.id, knot.key, *ids)
