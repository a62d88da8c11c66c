"""Where a station's weights come from: the LayerWarden near it, and R2 behind that.

The warden is asked first, for whole phases. What it cannot give, or gives wrong, comes from R2; and a warden
that gave wrong bytes is told to forget them, or it would give them to everyone who asks after us.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from engine.blocks import Block
from knot.bucket import BucketKnot
from protocol.calls import Call, Inflow, json_call
from protocol.deadlines import DeadlineExceeded, within
from protocol.identity import Identity
from protocol.ports import Background, Peer, PeerLost

# Seconds that a warden may take to begin its answer: longer than it takes to read a tensor from R2. One that
# takes longer is left alone for about as many reads as a forward pass has, since each would wait as long.
PATIENCE: Final = 10.0
LEFT_ALONE: Final = 64


@dataclass(slots=True)
class NearCounts:
    """Reads served by the warden, reads that went to R2, and tensors the warden was told to forget."""

    warden: int = 0
    bucket: int = 0
    invalidated: int = 0


class NearSource:
    """Blocks by way of the LayerWarden `warden` of this station's layers; straight from R2 without one."""

    def __init__(
        self,
        knot: BucketKnot,
        warden: Peer | None,
        layers: tuple[int, int],
        headers: dict[str, str],
        background: Background,
    ) -> None:
        self._knot = knot
        self._warden = warden
        self._headers = {**headers, **identity(knot, layers).headers()}
        self._background = background
        self._left_alone = 0
        self.counts = NearCounts()

    async def open(self, blocks: Sequence[Block]) -> Inflow:
        """Consecutive blocks as one body. Raises `BlobError`."""
        length = sum(block.length for block in blocks)
        if self._warden is not None:
            inflow = await self._ask_warden(self._warden, blocks, length)
            if inflow is not None:
                self.counts.warden += 1
                return inflow
        self.counts.bucket += 1
        return await self._knot.stream(blocks[0].offset, length)

    async def open_origin(self, block: Block) -> Inflow:
        """One block from R2; the warden is told to forget the tensor."""
        if self._warden is not None:
            self._background(self._invalidate(self._warden, block.tensor.name))
        self.counts.bucket += 1
        return await self._knot.stream(block.offset, block.length)

    async def _ask_warden(self, warden: Peer, blocks: Sequence[Block], length: int) -> Inflow | None:
        if self._left_alone > 0:
            self._left_alone -= 1
            return None
        call = json_call("POST", "/tensors", {"tensors": pieces(blocks)}, self._headers)
        try:
            reply, inflow = await within(PATIENCE, warden.open(call), "the warden", self._background)
        except PeerLost:
            return None
        except DeadlineExceeded:
            self._left_alone = LEFT_ALONE
            return None
        if reply.status == 200 and inflow.length == length:
            return inflow
        await inflow.cancel()
        if reply.status == 200:
            for tensor in {block.tensor.name: None for block in blocks}:
                self._background(self._invalidate(warden, tensor))
        return None

    async def _invalidate(self, warden: Peer, tensor: str) -> None:
        self.counts.invalidated += 1
        call = Call("POST", f"/invalidate/{tensor}", headers=self._headers)
        try:
            await within(PATIENCE, warden.call(call), "the warden", self._background)
        except (PeerLost, DeadlineExceeded):
            return  # a lost warden has forgotten everything anyway


def pieces(blocks: Sequence[Block]) -> list[list[str | int]]:
    """Blocks as the warden names them: [tensor, first byte, end byte), one entry a tensor."""
    found: list[list[str | int]] = []
    for block in blocks:
        start = block.offset - block.tensor.offset
        if found and found[-1][0] == block.tensor.name:
            found[-1][2] = start + block.length
        else:
            found.append([block.tensor.name, start, start + block.length])
    return found


def identity(knot: BucketKnot, layers: tuple[int, int]) -> Identity:
    """The LayerWarden for these layers of this knot."""
    return Identity("layer", knot.id, knot.key, *layers)
