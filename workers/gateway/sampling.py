"""One token from the slices of all shards, exactly as from one softmax over the whole vocabulary.

A shard's slice has its best ids and its log-sum-exp, so the merged distribution is known without the logits
of every id: p(id) = exp(adjusted - logsumexp of the shards' adjusted log-sum-exps). Temperature comes first,
then top_k, then top_p among what is left, then min_p relative to the best.

Without truncation a sample is the best id after Gumbel noise, which every shard adds by itself (Gumbel-max:
the argmax of logits plus Gumbel noise has the softmax distribution; Yellott 1977). With truncation it is
drawn from the candidates; where those do not show where the truncation ends, the shards are asked for more.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from protocol.steps import MAX_TOP_K, Choice, Ranked, Slice

FIRST_CANDIDATES = 64

# Sums of probabilities carry rounding errors that depend on how many shards took part. A nucleus is full when
# it is so but for this much, so that equal distributions are cut alike however they are spread.
SLACK = 1e-9


@dataclass(frozen=True, slots=True)
class Sampler:
    """How a token is chosen. `temperature` 0 is greedy whatever the rest says.

    `top_k` 0, `top_p` 1 and `min_p` 0 switch their truncation off. `seed` makes a generation repeatable: the
    choice at a position depends on seed, position and distribution alone.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0

    @property
    def greedy(self) -> bool:
        """Whether the best id is taken."""
        return self.temperature == 0 or self.top_k == 1

    @property
    def truncates(self) -> bool:
        """Whether only part of the distribution is sampled from."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0

    def first_choice(self, position: int) -> Choice:
        """What to ask the shards for at a position, at first."""
        if self.greedy:
            return Choice(top_k=1)
        if not self.truncates:
            return Choice(top_k=1, temperature=self.temperature, seed=noise_seed(self.seed, position))
        return Choice(top_k=self.top_k or FIRST_CANDIDATES, temperature=self.temperature)


@dataclass(frozen=True, slots=True)
class Sampled:
    """A chosen id and its natural log-probability, before and after temperature and adjustments."""

    id: int
    logprob: float
    adjusted_logprob: float


class NotEnough(Exception):
    """The candidates do not show where the truncation ends; ask every shard for `top_k`."""

    def __init__(self, top_k: int) -> None:
        self.top_k = top_k
        super().__init__(f"more candidates are needed: {top_k} of every shard")


def sample(
    sampler: Sampler, slices: Sequence[Slice], sizes: Sequence[int], asked: int, position: int
) -> Sampled:
    """Chooses from the shards' slices. Raises `NotEnough`.

    `sizes` says how many ids each shard owns, `asked` how many candidates each was asked for.
    """
    lse_raw = logsumexp(part.lse_raw for part in slices)
    lse_adjusted = logsumexp(part.lse_adjusted for part in slices)
    if lse_adjusted == -math.inf:
        raise ValueError("every id is banned; nothing can be sampled")
    if sampler.greedy or not sampler.truncates:
        # The shards have ranked by logit, or by logit plus noise; ties go to the lower id, as within a shard.
        best = min((part.candidates[0] for part in slices if part.candidates), key=lambda c: (-c.key, c.id))
        return Sampled(best.id, best.raw - lse_raw, best.adjusted - lse_adjusted)
    kept = truncate(sampler, slices, sizes, asked, lse_adjusted)
    total = logsumexp(candidate.adjusted for candidate in kept)
    left = uniform(sampler.seed, position)
    for candidate in kept:
        left -= math.exp(candidate.adjusted - total)
        if left < 0:
            break
    else:
        candidate = kept[0]  # rounding left a sliver behind the last one
    return Sampled(candidate.id, candidate.raw - lse_raw, candidate.adjusted - lse_adjusted)


def truncate(
    sampler: Sampler, slices: Sequence[Slice], sizes: Sequence[int], asked: int, lse: float
) -> list[Ranked]:
    """The candidates that top_k, top_p and min_p leave, best first. Raises `NotEnough`."""
    merged = sorted((candidate for part in slices for candidate in part.candidates), key=_rank)
    merged = [candidate for candidate in merged if candidate.adjusted > -math.inf]
    # Behind the last candidate of a shard that may have more, one of that shard may be missing. A shard with
    # fewer than it was asked for has no more: the rest of its ids are banned.
    lasts = [
        _rank(part.candidates[-1])
        for part, size in zip(slices, sizes, strict=True)
        if asked <= len(part.candidates) < size
    ]
    certain = min(lasts, default=(math.inf, 0))
    more = NotEnough(min(4 * asked, MAX_TOP_K))
    if 0 < sampler.top_k <= len(merged):
        merged = merged[: sampler.top_k]
    kept: list[Ranked] = []
    mass = 0.0
    # With top_k, top_p is a share of what top_k left.
    whole = logsumexp(candidate.adjusted for candidate in merged) if sampler.top_k else lse
    least = merged[0].adjusted + math.log(sampler.min_p) if sampler.min_p > 0 else -math.inf
    full = sampler.top_p - SLACK if sampler.top_p < 1 else math.inf
    for candidate in merged:
        if kept and (mass >= full or candidate.adjusted < least):
            return kept
        if not sampler.top_k and _rank(candidate) > certain:
            raise more
        kept.append(candidate)
        mass += math.exp(candidate.adjusted - whole)
    if not sampler.top_k and lasts and -certain[0] >= least and mass < full:
        raise more
    return kept


def _rank(candidate: Ranked) -> tuple[float, int]:
    """What candidates are ordered by: the best first, and of two as good the lower id."""
    return -candidate.adjusted, candidate.id


def logsumexp(values: Iterable[float]) -> float:
    """log(sum(exp(values))), in an order that does not depend on who came first."""
    listed = sorted(values)
    top = listed[-1] if listed else -math.inf
    return top if top == -math.inf else top + math.log(math.fsum(math.exp(value - top) for value in listed))


def noise_seed(seed: int, position: int) -> int:
    """The seed of the noise at a position: 63 bits."""
    return _hash(b"noise", seed, position) >> 1


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) that depends on seed and position alone."""
    return (_hash(b"draw", seed, position) >> 11) / (1 << 53)


def _hash(what: bytes, seed: int, position: int) -> int:
    data = what + (seed & (1 << 64) - 1).to_bytes(8, "little") + position.to_bytes(8, "little")
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")
