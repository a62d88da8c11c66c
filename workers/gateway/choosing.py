"""The next token of a session: every shard's slice of a row's logits, merged; and log-probabilities.

A shard is sent a row once. Whatever else is wanted of it (more candidates where a nucleus needs them, the
best ids before noise and penalties) it answers from the slice that it has kept, without reading weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from hops import Ticket, VocabularyHop
from patience import Patience
from protocol.deadlines import together
from protocol.steps import Choice, Ranked, Refusal, RefusalKind, Slice
from sampling import NotEnough, Sampled, Sampler, logsumexp, sample
from shaping import Shaper

# Rows of a prompt that are scored at the same time.
SCORED_TOGETHER: Final = 32


@dataclass(frozen=True, slots=True)
class Scored:
    """An id with its natural log-probability, and the best ids with theirs, best first.

    They are the model's own: before temperature, bias, penalties and truncation.
    """

    id: int
    logprob: float
    best: tuple[tuple[int, float], ...] = ()


class Chooser:
    """Chooses one session's tokens. `best` says how many of the best ids each comes with."""

    def __init__(
        self,
        shards: Sequence[VocabularyHop],
        sampler: Sampler,
        shaper: Shaper,
        patience: Patience,
        best: int = 0,
    ) -> None:
        self._shards = shards
        self._sampler = sampler
        self._shaper = shaper
        self._patience = patience
        self._best = best

    async def choose(self, ticket: Ticket, normed: bytes, position: int) -> Scored:
        """The token at `position`, after the row f32 [hidden_size]. Raises `Refusal`."""
        adjustments = self._shaper.adjustments()
        choice = replace(self._sampler.first_choice(position), adjustments=adjustments)
        plain = choice.seed is None and not adjustments
        if plain:
            choice = replace(choice, top_k=max(choice.top_k, self._best))
        step = f"logits-{position}"
        sampled, slices = await self._sampled(ticket, step, normed, choice, position)
        if self._best and not plain:
            slices = await self._slices(ticket, step, None, normed, Choice(top_k=self._best))
        self._shaper.wrote(sampled.id)
        return Scored(sampled.id, sampled.logprob, self._ranked(slices))

    async def score(
        self, ticket: Ticket, position: int, rows: Sequence[bytes], ids: Sequence[int]
    ) -> list[Scored]:
        """What the model made of `ids`, each after its row; the first of them stands at `position`."""

        async def one(index: int) -> Scored:
            choice = Choice(top_k=max(1, self._best), wanted=(ids[index],))
            step = f"score-{position + index}"
            slices = await self._slices(ticket, step, rows[index], rows[index], choice)
            [wanted] = (entry for part in slices for entry in part.wanted)
            lse = logsumexp(part.lse_raw for part in slices)
            return Scored(ids[index], wanted.raw - lse, self._ranked(slices))

        found: list[Scored] = []
        for start in range(0, len(ids), SCORED_TOGETHER):
            end = min(start + SCORED_TOGETHER, len(ids))
            found += await together(one(index) for index in range(start, end))
        return found

    def _ranked(self, slices: Sequence[Slice]) -> tuple[tuple[int, float], ...]:
        if not self._best:
            return ()
        lse = logsumexp(part.lse_raw for part in slices)
        entries: list[Ranked] = [entry for part in slices for entry in part.candidates]
        entries.sort(key=lambda entry: (-entry.raw, entry.id))
        return tuple((entry.id, entry.raw - lse) for entry in entries[: self._best])

    async def _sampled(
        self, ticket: Ticket, step: str, normed: bytes, choice: Choice, position: int
    ) -> tuple[Sampled, list[Slice]]:
        sizes = [end - start for start, end in (shard.ids for shard in self._shards)]
        row: bytes | None = normed
        while True:
            slices = await self._slices(ticket, step, row, normed, choice)
            try:
                return sample(self._sampler, slices, sizes, choice.top_k, position), slices
            except NotEnough as more:
                if more.top_k <= choice.top_k:
                    raise Refusal(RefusalKind.OVER_BUDGET, f"{more}, which is more than is given") from more
                row = None
                choice = replace(choice, top_k=more.top_k)

    async def _slices(
        self, ticket: Ticket, step: str, row: bytes | None, normed: bytes, choice: Choice
    ) -> list[Slice]:
        """Every shard's slice of the logits of a row; of the one it knows by `step` when `row` is None."""

        async def one(shard: VocabularyHop) -> Slice:
            try:
                return await self._patience(lambda: shard.logits(ticket, step, row, choice))
            except Refusal as refusal:
                if row is not None or refusal.kind is not RefusalKind.CACHE_MISS:
                    raise
            # The shard has forgotten the row in between: it gets it once more.
            return await self._patience(lambda: shard.logits(ticket, step, normed, choice))

        # A missing slice is an error: there is no distribution without it.
        return await together(one(shard) for shard in self._shards)
