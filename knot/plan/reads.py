"""How often a part reads for a pass over its weights, and how many bytes: as the part itself is about to."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from engine.blocks import Arena, Unit, total_bytes
from knot.header import DIGEST_BYTES, KnotHeader, TensorInfo
from knot.reader import PROBE_BYTES


@dataclass(frozen=True, slots=True)
class Reads:
    """Reads: operations, and the bytes of them all."""

    operations: int = 0
    bytes: int = 0

    def __add__(self, other: Reads) -> Reads:
        return Reads(self.operations + other.operations, self.bytes + other.bytes)

    def __mul__(self, times: int) -> Reads:
        return Reads(self.operations * times, self.bytes * times)

    @staticmethod
    def sum(reads: Iterable[Reads]) -> Reads:
        """All of them together."""
        total = Reads()
        for one in reads:
            total += one
        return total


@dataclass(frozen=True, slots=True)
class PassReads:
    """What one pass over the weights reads: the first one (`cold`), and every one after it (`warm`)."""

    cold: Reads
    warm: Reads

    def over(self, passes: int) -> Reads:
        """What so many passes read, from the first one on."""
        return self.cold + self.warm * (passes - 1) if passes else Reads()


def pass_reads(units: Sequence[Unit], arena: Arena) -> PassReads:
    """One read a unit, of the blocks that are not pinned; the first pass reads those that will be, too."""
    warm = Reads()
    for blocks, places in zip(units, arena.places, strict=True):
        left = sum(block.length for block, place in zip(blocks, places, strict=True) if place is None)
        warm += Reads(1 if left else 0, left)
    return PassReads(Reads(len(units), total_bytes(units)), warm)


def header_reads(header: KnotHeader) -> Reads:
    """Opening a knot: its head, and its header in one read or two."""
    probe = min(PROBE_BYTES, header.file_size)
    rest = max(0, header.payload_offset - probe)
    return Reads(2 + (1 if rest else 0), probe + rest)


def station_boot(header: KnotHeader, layers: range, units: Sequence[Unit]) -> Reads:
    """What a station reads before its first pass: the header, its vectors, and its tensors' digests."""
    span = header.vector_range(layers.start, layers.stop)
    found = header_reads(header) + Reads(1, span.length) + _digests(span.tensors)
    freqs = header.rope_freqs()
    if freqs is not None:
        found += _digests([freqs]) + Reads(1, freqs.length)
    return found + _digests([block.tensor for unit in units for block in unit])


def shard_boot(header: KnotHeader) -> Reads:
    """What a shard reads before its first pass: the header and the digests of the head."""
    return header_reads(header) + _digests([header.head_tensor()])


def _digests(tensors: Sequence[TensorInfo]) -> Reads:
    first = min(tensor.first_digest for tensor in tensors)
    end = max(tensor.first_digest + tensor.group_count for tensor in tensors)
    return Reads(1, (end - first) * DIGEST_BYTES)


def warden_reads(stations: Sequence[tuple[Sequence[Unit], Arena]], room: int) -> list[PassReads]:
    """What the LayerWardens read for their stations' passes, of which the first ones come in order.

    All wardens live in one isolate that keeps tensors while there is room, in the order in which it is asked
    for them. A tensor that is kept is read whole, once; neighbours that are not come in one read.
    """
    kept: set[str] = set()
    colds: list[Reads] = []
    for units, _ in stations:
        cold = Reads()
        for unit in units:
            passing: list[TensorInfo] = []
            for tensor in dict.fromkeys(block.tensor for block in unit):
                if tensor.length <= room:
                    room -= tensor.length
                    kept.add(tensor.name)
                    cold += Reads(1, tensor.length)
                else:
                    passing.append(tensor)
            cold += _runs([(tensor.offset, tensor.end) for tensor in passing])
        colds.append(cold)
    return [
        PassReads(cold, Reads.sum(_passing(units, arena, kept)))
        for cold, (units, arena) in zip(colds, stations, strict=True)
    ]


def _passing(units: Sequence[Unit], arena: Arena, kept: set[str]) -> Iterable[Reads]:
    for blocks, places in zip(units, arena.places, strict=True):
        yield _runs(
            [
                (block.offset, block.offset + block.length)
                for block, place in zip(blocks, places, strict=True)
                if place is None and block.tensor.name not in kept
            ]
        )


def _runs(ranges: Sequence[tuple[int, int]]) -> Reads:
    """Ranges in order, where those that touch are read together."""
    operations, end = 0, -1
    for start, stop in ranges:
        operations += start != end
        end = stop
    return Reads(operations, sum(stop - start for start, stop in ranges))
