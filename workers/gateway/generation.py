"""A generation: from the ids of a prompt to one id after another, over a route of hops.

An *attempt* is one pass of prefill and decode under one epoch. When a hop is lost, or has lost its cache, the
attempt ends, everything it held anywhere is released, and a new one replays prompt and generated ids from
token zero on a fresh epoch. Results do not depend on how often that happened: the engine is exact to the bit
whatever the batch and the chunk, and a choice depends on seed, position and distribution alone.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TypeVar

from embedding import Degradation, embed
from hops import LayerHop, Ticket, VocabularyHop
from protocol.deadlines import together
from protocol.frames import BadFrame, Part
from protocol.pieces import piece_rows
from protocol.ports import Background, Clock
from protocol.steps import Choice, ForwardStep, Phase, Refusal, RefusalKind, Rows, Slice
from sampling import NotEnough, Sampled, Sampler, sample

T = TypeVar("T")
F32 = 4
# Embedded rows of a prompt that are in memory besides those that are on their way through the stations.
EMBED_BYTES = 2 << 20

# A fresh epoch may help against these; the others would only fail again.
REPLAY = frozenset(
    (RefusalKind.CACHE_MISS, RefusalKind.STALE_EPOCH, RefusalKind.LOST, RefusalKind.UNAVAILABLE)
)
# The same step may be sent again after these: it is idempotent.
RETRY = frozenset((RefusalKind.LOST, RefusalKind.UNAVAILABLE, RefusalKind.BUSY, RefusalKind.INTERNAL))


@dataclass(frozen=True, slots=True)
class Route:
    """An ordered list of hops that covers the layers once, and the shards that cover the vocabulary.

    `max_rows` is what every station takes in one step, `max_tokens` what every shard embeds in one; with
    `resident` all weights stay in memory.
    """

    model: str
    hidden_size: int
    stations: Sequence[LayerHop]
    shards: Sequence[VocabularyHop]
    max_rows: int
    resident: bool = False
    max_tokens: int = 1 << 31

    def chunk(self, rows: int) -> int:
        """Rows of a piece of a prompt."""
        return piece_rows(rows, len(self.stations), min(self.max_rows, self.max_tokens), self.resident)


@dataclass(frozen=True, slots=True)
class Limits:
    """How patient a generation is. Times in seconds."""

    step_retries: int = 2
    busy_retries: int = 60
    attempts: int = 3
    pause: float = 0.05


@dataclass(slots=True)
class Report:
    """What a generation did, for its answer and for metrics. Times in seconds since `started`."""

    attempts: int = 0
    retries: int = 0
    reasons: list[str] = field(default_factory=list[str])
    degraded: Degradation = field(default_factory=Degradation)
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    first_token_seconds: float = 0.0
    decoded: int = 0


class Generation:
    """One generation. Iterate `tokens` once; whatever happens, what it held is released afterwards."""

    def __init__(
        self,
        route: Route,
        session: str,
        prompt: Sequence[int],
        sampler: Sampler,
        *,
        clock: Clock,
        background: Background,
        limits: Limits | None = None,
        allow_degraded: bool = False,
    ) -> None:
        if not prompt:
            raise ValueError("a generation needs at least one token to begin with")
        self._route = route
        self._session = session
        self._prompt = tuple(prompt)
        self._sampler = sampler
        self._clock = clock
        self._background = background
        self._limits = limits or Limits()
        self._allow_degraded = allow_degraded
        self._epoch = 0
        self._touched = Degradation()
        self.report = Report()

    async def tokens(self, most: int) -> AsyncGenerator[Sampled, None]:
        """Up to `most` tokens after the prompt. Raises `Refusal` when no attempt is left or would help."""
        made: list[int] = []
        started = self._clock()
        while len(made) < most:
            self.report.attempts += 1
            self._epoch += 1
            self._touched = Degradation()
            try:
                async with aclosing(self._attempt([*self._prompt, *made], most - len(made))) as attempt:
                    async for sampled in attempt:
                        if not made:
                            self.report.first_token_seconds = self._clock() - started
                        made.append(sampled.id)
                        # Whatever becomes of later attempts, this token has come of what was touched here.
                        self.report.degraded.include(self._touched)
                        yield sampled
            except Refusal as refusal:
                self.report.reasons.append(str(refusal))
                if refusal.kind not in REPLAY or self.report.attempts >= self._limits.attempts:
                    raise
            finally:
                self._background(self._end(self._ticket(), len(made)))

    async def _attempt(self, ids: list[int], most: int) -> AsyncGenerator[Sampled, None]:
        """Prefill of `ids`, then decode, token by token."""
        began = self._clock()
        normed = await self._prefill(ids)
        self.report.prefill_seconds += self._clock() - began
        for index in range(most):
            position = len(ids)
            sampled = await self._choose(normed, position)
            if index:
                self.report.decoded += 1
            yield sampled
            if index + 1 < most:
                began = self._clock()
                ids.append(sampled.id)
                hidden = await self._embed(f"embed-{position}", [sampled.id])
                normed = await self._through(Phase.DECODE, position, hidden, 1, Rows.LAST)
                self.report.decode_seconds += self._clock() - began

    async def _prefill(self, ids: Sequence[int]) -> bytes:
        """All rows through all stations, chunk after chunk, each station busy with another one."""
        size = self._route.chunk(len(ids))
        turns = [asyncio.Lock() for _ in self._route.stations]
        # Embedding is the first stage. So that a long prompt is never in memory whole, chunks are embedded a
        # few at a time, and only as many are under way as there are stations to be at, and one.
        embedding = asyncio.Lock()
        embedded: deque[bytes] = deque()
        under_way = asyncio.Semaphore(len(turns) + 1)

        async def chunk(start: int) -> bytes:
            count = min(size, len(ids) - start)
            rows = Rows.LAST if start + count == len(ids) else Rows.NONE
            async with under_way:
                async with embedding:
                    if not embedded:
                        embedded.extend(await self._embed_chunks(ids, start, size))
                    hidden = embedded.popleft()
                return await self._through(Phase.PREFILL, start, hidden, count, rows, turns)

        # Locks are served in order, so a chunk never overtakes the one before it at any stage.
        return (await together(chunk(start) for start in range(0, len(ids), size)))[-1]

    async def _embed_chunks(self, ids: Sequence[int], start: int, size: int) -> list[bytes]:
        """The next chunks of a prompt from `start` on, as many as are embedded together."""
        row_bytes = F32 * self._route.hidden_size
        most = min(EMBED_BYTES // row_bytes, self._route.max_tokens)
        tokens = ids[start : start + max(1, most // size) * size]
        hidden = await self._embed(f"embed-{start}", tokens)
        return [bytes(hidden[at : at + size * row_bytes]) for at in range(0, len(hidden), size * row_bytes)]

    async def _through(
        self,
        phase: Phase,
        position: int,
        hidden: bytes | bytearray,
        count: int,
        rows: Rows,
        turns: Sequence[asyncio.Lock] | None = None,
    ) -> bytes:
        """Rows through every station; the exit's normalised rows, as many as `rows` says."""
        data = bytes(hidden)
        for index, station in enumerate(self._route.stations):
            envelope = self._ticket().envelope(station.layers, f"{phase}-{position}-{count}")
            step = ForwardStep(envelope, phase, position, count, position, rows)
            if turns is None:
                part = await self._patiently(lambda s=station, x=step, d=data: s.forward(x, d))
            else:
                async with turns[index]:
                    part = await self._patiently(lambda s=station, x=step, d=data: s.forward(x, d))
            if index + 1 < len(self._route.stations):
                data = self._rows_of(part, station, "hidden", count)
            else:
                wanted = {Rows.NONE: 0, Rows.LAST: 1, Rows.ALL: count}[rows]
                data = self._rows_of(part, station, "normed", wanted)
        return data

    def _rows_of(self, part: Part, station: LayerHop, name: str, count: int) -> bytes:
        expected = (count, self._route.hidden_size)
        try:
            tensor = part.tensor(name, "f32", 2)
            if tensor.shape != expected:
                raise BadFrame(f"{name} is {list(tensor.shape)}, expected {list(expected)}")
        except BadFrame as error:
            start, end = station.layers
            raise Refusal(RefusalKind.LOST, f"station {start}-{end} answered wrongly: {error}") from error
        return bytes(tensor.data)

    async def _embed(self, step: str, tokens: Sequence[int]) -> bytearray:
        return await embed(
            self._route.shards,
            self._ticket(),
            step,
            tokens,
            self._route.hidden_size,
            retries=self._limits.step_retries,
            pause=self._limits.pause,
            degraded=self._touched if self._allow_degraded else None,
        )

    async def _choose(self, normed: bytes, position: int) -> Sampled:
        """The next token: every shard's slice, merged; more of it where the truncation needs more."""
        choice = self._sampler.first_choice(position)
        sizes = [end - start for start, end in (shard.ids for shard in self._route.shards)]
        row: bytes | None = normed
        while True:
            slices = await self._slices(position, row, normed, choice)
            try:
                return sample(self._sampler, slices, sizes, choice.top_k, position)
            except NotEnough as more:
                if more.top_k <= choice.top_k:
                    raise Refusal(RefusalKind.OVER_BUDGET, f"{more}, which is more than is given") from more
                row = None
                choice = Choice(top_k=more.top_k, temperature=choice.temperature)

    async def _slices(self, position: int, row: bytes | None, normed: bytes, choice: Choice) -> list[Slice]:
        ticket, step = self._ticket(), f"logits-{position}"

        async def one(shard: VocabularyHop) -> Slice:
            try:
                return await self._patiently(lambda: shard.logits(ticket, step, row, choice))
            except Refusal as refusal:
                if row is not None or refusal.kind is not RefusalKind.CACHE_MISS:
                    raise
            # The shard has forgotten the row in between: it gets it once more.
            return await self._patiently(lambda: shard.logits(ticket, step, normed, choice))

        # A missing slice is an error: there is no distribution without it.
        return await together(one(shard) for shard in self._route.shards)

    async def _patiently(self, ask: Callable[[], Awaitable[T]]) -> T:
        """Sends a step again where that may help; it is idempotent."""
        lost = busy = 0
        while True:
            try:
                return await ask()
            except Refusal as refusal:
                if refusal.kind is RefusalKind.BUSY:
                    busy += 1
                elif refusal.kind in RETRY:
                    lost += 1
                else:
                    raise
                if lost > self._limits.step_retries or busy > self._limits.busy_retries:
                    raise
                self.report.retries += 1
                pause = self._limits.pause * 2 ** min(lost + busy, 5)
                await asyncio.sleep(max(pause, (refusal.retry_after_ms or 0) / 1000))

    def _ticket(self) -> Ticket:
        return Ticket(self._session, self._session, self._epoch, self._route.model)

    async def _end(self, ticket: Ticket, made: int) -> None:
        """Frees the session everywhere; a station that cannot be reached frees it by its time to live."""
        phase = Phase.RELEASE if made else Phase.CANCEL
        await asyncio.gather(
            *(station.end(ticket, phase) for station in self._route.stations), return_exceptions=True
        )
