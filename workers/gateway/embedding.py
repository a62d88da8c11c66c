"""The merge: partial embeddings of all shards, added up.

Every id belongs to one shard, so in the sum over shards each row has one summand that is not zero, and
adding is putting rows in their places. One dead shard does not spoil what the others gave.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from hops import Ticket, VocabularyHop
from protocol.steps import Refusal, RefusalKind

F32 = 4


@dataclass(slots=True)
class Degradation:
    """Shards that could not be reached, by name of their ids, and how many tokens embed to zero for it."""

    shards: dict[str, int] = field(default_factory=dict[str, int])

    @property
    def tokens(self) -> int:
        """Tokens that were touched."""
        return sum(self.shards.values())

    def __bool__(self) -> bool:
        return bool(self.shards)

    def include(self, other: Degradation) -> None:
        """Takes note of another attempt at the same tokens: a token that was touched in both counts once."""
        for name, count in other.shards.items():
            self.shards[name] = max(count, self.shards.get(name, 0))


async def embed(
    shards: Sequence[VocabularyHop],
    ticket: Ticket,
    step: str,
    tokens: Sequence[int],
    hidden_size: int,
    *,
    retries: int,
    pause: float,
    degraded: Degradation | None,
) -> bytearray:
    """f32 [len(tokens), hidden_size]; only shards that own a token are called.

    A shard that fails is asked again `retries` times. If it still fails, its tokens embed to zero and
    `degraded` says so, when the caller allows that; otherwise its `Refusal` is raised.
    """
    merged = bytearray(len(tokens) * hidden_size * F32)
    owners = [shard for shard in shards if any(shard.ids[0] <= token < shard.ids[1] for token in tokens)]
    outcomes = await asyncio.gather(
        *(_partial(shard, ticket, step, tokens, retries, pause) for shard in owners), return_exceptions=True
    )
    row_bytes = hidden_size * F32
    for shard, outcome in zip(owners, outcomes, strict=True):
        if isinstance(outcome, Refusal) and degraded is not None and outcome.kind in MAY_DEGRADE:
            start, end = shard.ids
            name = f"{start}-{end}"
            count = sum(start <= token < end for token in tokens)
            degraded.shards[name] = degraded.shards.get(name, 0) + count
        elif isinstance(outcome, BaseException):
            raise outcome
        else:
            for position, row in outcome.items():
                merged[position * row_bytes : (position + 1) * row_bytes] = row
    return merged


# What a shard's outage looks like. A disagreement about model or range is none: that must be mended.
MAY_DEGRADE = frozenset(
    (
        RefusalKind.LOST,
        RefusalKind.UNAVAILABLE,
        RefusalKind.BUSY,
        RefusalKind.BAD_WEIGHTS,
        RefusalKind.INTERNAL,
    )
)


async def _partial(
    shard: VocabularyHop, ticket: Ticket, step: str, tokens: Sequence[int], retries: int, pause: float
) -> dict[int, bytes]:
    for attempt in range(retries + 1):
        try:
            return await shard.embed(ticket, step, tokens)
        except Refusal as refusal:
            if attempt == retries or refusal.kind not in MAY_DEGRADE:
                raise
            await asyncio.sleep((refusal.retry_after_ms or 0) / 1000 + pause * 2**attempt)
    raise AssertionError("unreachable: the last attempt returns or raises")
