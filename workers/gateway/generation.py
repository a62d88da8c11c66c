"""A generation: from the ids of a prompt to one id after another, over a route of hops.

Its life is `lifecycle`'s; here is what is done. When a hop is lost, or has lost its cache, the attempt ends,
everything it held anywhere is released, and a new one replays prompt and written ids from token zero on a
fresh epoch. Results do not depend on how often that happened, on what was found in caches, or on who shared a
batch: the engine is exact to the bit whatever the batch and the chunk, and a choice depends on seed, position
and distribution alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Final

from admission import MadeRoom, Place
from choosing import Chooser, Scored
from digests import page_digests
from embedding import Degradation, embed
from engine.values import KV_PAGE_TOKENS
from hops import Known, LayerHop, Ticket
from lifecycle import Begun, Event, Found, Freed, Left, Life, Lost, Preempted, Stage, Stopped, Wrote, apply
from patience import Limits, Patience
from protocol.deadlines import together
from protocol.frames import BadFrame, Part
from protocol.steps import ForwardStep, Phase, Refusal, RefusalKind, Rows
from reading import Reader
from sampling import Sampler
from shaping import Shaper, Shaping
from shared import F32, Shared

# Reasons of lost attempts that the log has of one generation, the last ones.
REASONS_LOGGED: Final = 3


@dataclass(slots=True)
class Report:
    """What a generation did, for its answer and for metrics. Times in seconds; `first_token_seconds` counts
    from the beginning, waiting included."""

    prompt_tokens: int = 0
    written_tokens: int = 0
    attempts: int = 0
    retries: int = 0
    preempted: int = 0
    reasons: list[str] = field(default_factory=list[str])
    degraded: Degradation = field(default_factory=Degradation)
    cached_tokens: int = 0
    waiting_seconds: float = 0.0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    first_token_seconds: float = 0.0
    decoded: int = 0

    @property
    def prefill_tok_s(self) -> float:
        """Tokens of the prompt that were read, in a second; 0 when nothing was."""
        read = self.prompt_tokens - self.cached_tokens
        return read / self.prefill_seconds if self.prefill_seconds else 0.0

    @property
    def decode_tok_s(self) -> float:
        """Tokens after the first, in a second; 0 when there were none."""
        return self.decoded / self.decode_seconds if self.decode_seconds else 0.0

    def timings(self) -> dict[str, float | int]:
        """The figures that an answer may tell: milliseconds, tokens and tokens a second."""
        return {
            "queue_ms": round(1000 * self.waiting_seconds, 3),
            "ttft_ms": round(1000 * self.first_token_seconds, 3),
            "prefill_ms": round(1000 * self.prefill_seconds, 3),
            "decode_ms": round(1000 * self.decode_seconds, 3),
            "prefill_tok_s": round(self.prefill_tok_s, 3),
            "decode_tok_s": round(self.decode_tok_s, 3),
            "cached_tokens": self.cached_tokens,
        }


@dataclass(frozen=True, slots=True)
class Start:
    """What another generation has read for this one: the row after the prompt, and what it lacked."""

    normed: bytes
    touched: Degradation


class Generation:
    """One generation. Iterate `tokens` once; whatever happens, what it held is released afterwards.

    `best` of the best ids come with every token. With `scores` the prompt's own ids are scored as well, into
    `scored`. `twins` are other generations of the same prompt, which begin with what this one has read.
    """

    def __init__(
        self,
        shared: Shared,
        session: str,
        prompt: Sequence[int],
        sampler: Sampler,
        *,
        limits: Limits | None = None,
        allow_degraded: bool = False,
        shaping: Shaping | None = None,
        best: int = 0,
        scores: bool = False,
        place: Place | None = None,
        prefixes: bool = True,
        twins: Sequence[Generation] = (),
        request: str | None = None,
    ) -> None:
        if not prompt:
            raise ValueError("a generation needs at least one token to begin with")
        self.session = session
        self.request = request or session
        self.report = Report(prompt_tokens=len(prompt))
        self._shared = shared
        self._route = shared.route
        self._prompt = tuple(prompt)
        self._limits = limits or Limits()
        self._patience = Patience(self._limits)
        self._shaper = Shaper(shaping or Shaping(), prompt)
        self._chooser = Chooser(self._route.shards, sampler, self._shaper, self._patience, best)
        self._allow_degraded = allow_degraded
        self._scores = scores
        self._place = place
        self._prefixes = prefixes and shared.sharing.prefixes
        self._twins = tuple(twins)
        self._given: asyncio.Future[Start | None] | None = None
        self._life = Life(len(prompt), 0, self._limits.attempts)
        self._going = False
        self._touched = Degradation()
        self._written: list[int] = []
        self._scored: dict[int, list[Scored]] = {}
        for twin in twins:
            twin._given = asyncio.get_running_loop().create_future()
            # Its first epoch is for what it is given; when it is not, it begins at the one after.
            twin._life = Life(len(prompt), 0, self._limits.attempts, epoch=1)

    @property
    def life(self) -> Life:
        """Where it is, and what it still holds."""
        return self._life

    @property
    def scored(self) -> list[Scored]:
        """The prompt's ids from the second one on, scored."""
        return [scored for _, some in sorted(self._scored.items()) for scored in some]

    def stop(self) -> None:
        """The text is complete; what was read may serve others."""
        if not self._life.stage.final:
            self._apply(Stopped())

    async def tokens(self, most: int) -> AsyncGenerator[Scored, None]:
        """Up to `most` tokens after the prompt. Raises `Refusal` when no attempt is left or would help."""
        clock = self._shared.clock
        began = clock()
        self._going = True
        self._life = Life(len(self._prompt), most, self._limits.attempts, epoch=self._life.epoch)
        if not most:
            self._apply(Stopped())
        try:
            while not self._life.stage.final:
                start = await self._admitted()
                if not self._written:
                    self.report.waiting_seconds = clock() - began
                self._apply(Begun())
                freed = False
                try:
                    async with aclosing(self._attempt(start)) as attempt:
                        async for scored in attempt:
                            if not self._written:
                                self.report.first_token_seconds = clock() - began
                            self._apply(Wrote())
                            self._written.append(scored.id)
                            self.report.written_tokens += 1
                            # Whatever becomes of later attempts, this token has come of what was lost here.
                            self.report.degraded.include(self._touched)
                            yield scored
                            if self._life.stage.final:
                                break
                except MadeRoom:
                    self._apply(Preempted())
                    freed = True
                    await self._ending()
                    assert self._place is not None
                    self._place.pause()
                except Refusal as refusal:
                    self._shared.lost(refusal)
                    self._apply(Lost(refusal))
                    self.report.reasons.append(str(refusal))
                    if self._life.stage is Stage.FAILED:
                        raise
                finally:
                    if not freed:
                        self._shared.background(self._ending())
        except Refusal as refusal:
            if not self._life.stage.final:
                self._apply(Lost(refusal))
            raise
        finally:
            self._leave()

    def leave(self) -> None:
        """Nobody wants its tokens; does nothing for one whose `tokens` are being iterated."""
        if not self._going and not self._life.stage.final:
            self._leave()

    def _leave(self) -> None:
        if not self._life.stage.final:
            self._apply(Left())
        for twin in self._twins:
            twin.give(None)
        given = self._given
        if given is not None and given.done() and not given.cancelled() and given.result() is not None:
            self._shared.background(self._end_of(self._ticket_at(1), Phase.CANCEL))
        if self._place is not None and not self._life.held:
            self._place.leave()
        self._tell()

    def _tell(self) -> None:
        """Tells telemetry and log of a generation that is over."""
        report, stage = self.report, str(self._life.stage)
        self._shared.telemetry.generation_ended(report, stage)
        self._shared.log(
            "generation", request=self.request, session=self.session, ended=stage,
            prompt_tokens=report.prompt_tokens, written_tokens=report.written_tokens,
            attempts=report.attempts, retries=report.retries, preempted=report.preempted,
            reasons=" | ".join(report.reasons[-REASONS_LOGGED:]), degraded_tokens=report.degraded.tokens,
            **report.timings(),
        )  # fmt: skip

    def give(self, start: Start | None) -> bool:
        """Tells what another generation has read for this one, or that it will not; whether in time."""
        if self._given is None or self._given.done() or self._life.stage.final:
            return False
        self._given.set_result(start)
        return True

    async def _admitted(self) -> Start | None:
        if self._place is not None:
            await self._place.admitted()
        if self._given is None:
            return None
        start = await self._given
        self._given = None
        if start is not None:
            self._life = Life(len(self._prompt), self._life.most, self._limits.attempts)
        return start

    async def _attempt(self, start: Start | None) -> AsyncGenerator[Scored, None]:
        """Reads prompt and written ids, then writes, token by token."""
        ids = [*self._prompt, *self._written]
        clock = self._shared.clock
        began = clock()
        self._touched = Degradation()
        if start is None:
            normed = await self._read(ids)
        else:
            normed = start.normed
            self._touched.include(start.touched)
        await self._share(ids, normed)
        self.report.prefill_seconds += clock() - began
        scored = await self._chooser.choose(self._ticket(), normed, len(ids))
        yield scored
        rounds = self._shared.rounds
        rounds.join(self.session)
        try:
            while True:
                began = clock()
                if self._place is not None:
                    await self._place.hold(len(ids) + 1)
                ids.append(scored.id)
                scored = await self._step(ids)
                self.report.decode_seconds += clock() - began
                self.report.decoded += 1
                yield scored
        finally:
            rounds.leave(self.session)

    async def _step(self, ids: Sequence[int]) -> Scored:
        """The token after the last one of `ids`."""
        position = len(ids) - 1
        async with self._shared.rounds.seat(self.session) as group:
            data = bytes(await self._embed(position, ids[-1:]))
            await group.together()
            for index in range(len(self._route.stations)):
                data = await self._forward(index, position, data, 1, Rows.LAST, Phase.DECODE)
            return await self._chooser.choose(self._ticket(), data, len(ids))

    async def _read(self, ids: Sequence[int]) -> bytes:
        """Everything that the stations do not have yet; returns the last row."""
        scoring = self._scores and not self._written
        start = 0 if scoring else await self._open(ids)
        self._apply(Found(start))
        if not self._written:
            self.report.cached_tokens = start
        reader = Reader(
            self._shared, self.session, self._embed, self._forward, self._score if scoring else None
        )
        return await reader.read(ids, start)

    async def _open(self, ids: Sequence[int]) -> int:
        """Begins the session at every station with what all of them have; returns how many tokens that is."""
        # The last token is always read: what comes after it is wanted.
        digests = page_digests(self._route.model, ids[:-1]) if self._prefixes else ()
        if not digests:
            return 0
        ticket, known = self._ticket(), Known(digests, claims=not self._allow_degraded)
        most = KV_PAGE_TOKENS * len(digests)
        found = await together(
            self._patience(lambda s=station: s.open(ticket, known, most)) for station in self._route.stations
        )
        return min(found)

    async def _score(self, at: int, rows: bytes) -> None:
        """Scores the prompt's ids after the rows of a piece that began at `at`."""
        size = F32 * self._route.hidden_size
        count = min(len(rows) // size, len(self._prompt) - 1 - at)
        pieces = [rows[index * size : (index + 1) * size] for index in range(count)]
        ids = self._prompt[at + 1 : at + 1 + count]
        self._scored[at + 1] = await self._chooser.score(self._ticket(), at + 1, pieces, ids)

    async def _share(self, ids: Sequence[int], normed: bytes) -> None:
        """Lets the twins begin with what was read."""
        twins, self._twins = list(self._twins), ()
        try:
            while twins:
                await self._share_with(twins.pop(0), ids, normed)
        finally:
            for twin in twins:
                twin.give(None)

    async def _share_with(self, twin: Generation, ids: Sequence[int], normed: bytes) -> None:
        if twin.life.stage.final or (twin._place is not None and not twin._place.served):
            twin.give(None)
            return
        taken = False
        try:
            await together(
                self._patience(lambda s=station: s.open(twin._ticket_at(1), self.session, len(ids)))
                for station in self._route.stations
            )
            taken = twin.give(Start(normed, self._touched))
        except Refusal:
            pass  # it reads for itself then
        finally:
            if not taken:
                twin.give(None)
                self._shared.background(self._end_of(twin._ticket_at(1), Phase.CANCEL))

    async def _forward(
        self, index: int, position: int, data: bytes, count: int, rows: Rows, phase: Phase = Phase.PREFILL
    ) -> bytes:
        """Rows through one station; of the exit the normalised ones, as many as `rows` says."""
        stations = self._route.stations
        station = stations[index]
        envelope = self._ticket().envelope(station.layers, f"{phase}-{position}-{count}")
        step = ForwardStep(envelope, phase, position, count, position, rows)
        part = await self._patience(lambda: station.forward(step, data))
        if index + 1 < len(stations):
            return self._rows_of(part, station, "hidden", count)
        wanted = {Rows.NONE: 0, Rows.LAST: 1, Rows.ALL: count}[rows]
        return self._rows_of(part, station, "normed", wanted)

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

    async def _embed(self, position: int, tokens: Sequence[int]) -> bytearray:
        return await embed(
            self._route.shards,
            self._ticket(),
            f"embed-{position}",
            tokens,
            self._route.hidden_size,
            retries=self._limits.step_retries,
            pause=self._limits.pause,
            degraded=self._touched if self._allow_degraded else None,
        )

    def _apply(self, event: Event) -> None:
        self._life = apply(self._life, event)
        self.report.attempts, self.report.preempted = self._life.attempts, self._life.preempted
        self.report.retries = self._patience.retries

    def _ticket(self) -> Ticket:
        return self._ticket_at(self._life.epoch)

    def _ticket_at(self, epoch: int) -> Ticket:
        return Ticket(self.request, self.session, epoch, self._route.model)

    def _ending(self) -> Coroutine[Any, Any, None]:
        """Frees the present attempt everywhere; what it has read may serve others if it went well."""
        phase = Phase.RELEASE if self._written else Phase.CANCEL
        digests: tuple[bytes, ...] = ()
        well = self._life.stage in (Stage.ENDED, Stage.WAITING) and not self._touched
        if phase is Phase.RELEASE and well and self._prefixes:
            digests = page_digests(self._route.model, [*self._prompt, *self._written])
        return self._free(self._ticket(), phase, digests)

    async def _free(self, ticket: Ticket, phase: Phase, digests: Sequence[bytes]) -> None:
        await self._end_of(ticket, phase, digests)
        self._apply(Freed(ticket.epoch))
        if self._life.at_rest and self._place is not None:
            self._place.leave()

    async def _end_of(self, ticket: Ticket, phase: Phase, digests: Sequence[bytes] = ()) -> None:
        """Frees a session everywhere; a station that cannot be reached frees it by its time to live."""
        await asyncio.gather(
            *(station.end(ticket, phase, digests) for station in self._route.stations), return_exceptions=True
        )
