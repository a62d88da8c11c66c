"""The merge: partial embeddings put together, and one dead shard does not spoil what the others gave."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Sequence

import pytest
from core_support import run

from embedding import MAY_DEGRADE, Degradation, embed
from hops import Ticket
from protocol.steps import Choice, Refusal, RefusalKind, Slice

TICKET = Ticket("r", "s", 1, "m")


class FakeShard:
    """A shard whose row for a token is [token + 1, -token]; `fail` are the refusals of its next calls."""

    def __init__(self, start: int, end: int, fail: Sequence[Refusal | None] = ()) -> None:
        self.ids = (start, end)
        self.fail = list(fail)
        self.calls: list[tuple[str, tuple[int, ...]]] = []

    async def embed(self, ticket: Ticket, step: str, tokens: Sequence[int]) -> dict[int, bytes]:
        assert ticket is TICKET
        self.calls.append((step, tuple(tokens)))
        await asyncio.sleep(0)
        refusal = self.fail.pop(0) if self.fail else None
        if refusal is not None:
            raise refusal
        start, end = self.ids
        return {
            place: struct.pack("<2f", token + 1, -token)
            for place, token in enumerate(tokens)
            if start <= token < end
        }

    async def logits(self, ticket: Ticket, step: str, normed: bytes | None, choice: Choice) -> Slice:
        raise AssertionError


def dead(
    kind: RefusalKind = RefusalKind.LOST, times: int = 99, retry: int | None = None
) -> list[Refusal | None]:
    return [Refusal(kind, "no", retry) for _ in range(times)]


def merged(
    shards: Sequence[FakeShard], tokens: Sequence[int], degraded: Degradation | None = None, retries: int = 2
) -> list[tuple[float, float]]:
    data = run(embed(shards, TICKET, "e", tokens, 2, retries=retries, pause=0, degraded=degraded))
    return list(struct.iter_unpack("<2f", bytes(data)))


def rows(tokens: Sequence[int | None]) -> list[tuple[float, float]]:
    return [(0.0, 0.0) if token is None else (token + 1, -token) for token in tokens]


def test_rows_of_all_shards_come_to_their_places() -> None:
    shards = [FakeShard(0, 10), FakeShard(10, 20), FakeShard(20, 30)]
    tokens = [25, 3, 10, 3, 19, 0, 29]
    assert merged(shards, tokens) == rows(tokens)


def test_a_shard_that_owns_no_token_is_not_called() -> None:
    shards = [FakeShard(0, 10), FakeShard(10, 20, dead()), FakeShard(20, 30)]
    assert merged(shards, [3, 25]) == rows([3, 25])
    assert [len(shard.calls) for shard in shards] == [1, 0, 1]


def test_shards_are_asked_at_the_same_time() -> None:
    running = most = 0

    class Slow(FakeShard):
        async def embed(self, ticket: Ticket, step: str, tokens: Sequence[int]) -> dict[int, bytes]:
            nonlocal running, most
            running += 1
            most = max(most, running)
            found = await super().embed(ticket, step, tokens)
            running -= 1
            return found

    merged([Slow(0, 10), Slow(10, 20), Slow(20, 30)], [3, 13, 23])
    assert most == 3


@pytest.mark.parametrize("kind", sorted(MAY_DEGRADE))
def test_a_shard_that_fails_is_asked_again_and_the_others_are_not(kind: RefusalKind) -> None:
    shards = [FakeShard(0, 10), FakeShard(10, 20, dead(kind, 2))]
    degraded = Degradation()
    assert merged(shards, [3, 13], degraded) == rows([3, 13])
    assert not degraded
    assert [len(shard.calls) for shard in shards] == [1, 3]
    assert len(set(shards[1].calls)) == 1, "it is the same step"


def test_a_shard_that_stays_away_is_a_refusal_unless_degrading_is_allowed() -> None:
    shards = [FakeShard(0, 10), FakeShard(10, 20, dead())]
    with pytest.raises(Refusal) as caught:
        merged(shards, [3, 13])
    assert caught.value.kind is RefusalKind.LOST
    assert [len(shard.calls) for shard in shards] == [1, 3], "asked once and twice more"


def test_a_degraded_merge_has_zeros_for_the_lost_tokens_the_others_rows_and_says_so() -> None:
    shards = [FakeShard(0, 10), FakeShard(10, 20, dead()), FakeShard(20, 30, dead())]
    degraded = Degradation()
    tokens = [3, 13, 25, 13, 7]
    assert merged(shards, tokens, degraded) == rows([3, None, None, None, 7])
    assert degraded.shards == {"10-20": 2, "20-30": 1}
    assert degraded.tokens == 3
    merged([FakeShard(0, 10), FakeShard(10, 20, dead())], [13], degraded)
    assert degraded.shards == {"10-20": 3, "20-30": 1}, "one attempt's counts add up"


@pytest.mark.parametrize("kind", sorted(set(RefusalKind) - MAY_DEGRADE))
def test_a_disagreement_is_no_outage_and_is_neither_retried_nor_degraded(kind: RefusalKind) -> None:
    shards = [FakeShard(0, 10), FakeShard(10, 20, dead(kind))]
    with pytest.raises(Refusal) as caught:
        merged(shards, [3, 13], Degradation())
    assert caught.value.kind is kind
    assert len(shards[1].calls) == 1


def test_a_defect_is_never_a_degradation() -> None:
    class Broken(FakeShard):
        async def embed(self, ticket: Ticket, step: str, tokens: Sequence[int]) -> dict[int, bytes]:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        merged([FakeShard(0, 10), Broken(10, 20)], [3, 13], Degradation())


def test_attempts_at_the_same_tokens_count_them_once() -> None:
    first, second = Degradation({"0-10": 3, "10-20": 1}), Degradation({"0-10": 2, "20-30": 4})
    first.include(second)
    assert first.shards == {"0-10": 3, "10-20": 1, "20-30": 4}
    assert bool(first)
    assert not Degradation()
