"""A layer station: rows of hidden state go in, and come out having passed its layers.

A batch is a handful of rows from any number of sessions. Its layers' weights come by phase and by block, are
multiplied with every row of the batch, and are forgotten or kept as the residency says. A row's result never
depends on the rows beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from engine.blocks import Arena, phase_units, unit_names
from engine.budget import Budget
from engine.client import KV_PAGE_TOKENS, Row, StationEngine, Vector
from engine.client import Tensor as Matrix
from engine.errors import EngineError, NonFinite, OverBudget
from engine.fit import fit_station
from engine.weights import BadWeights, PayloadSource, Placed, Weights, named
from knot.bucket import BucketKnot
from knot.header import PHASES, TensorInfo
from knot.quants import ggml_id
from protocol.calls import ShortBody
from protocol.frames import Part, Tensor
from protocol.ports import Background, BlobChanged, BlobError, BlobFailed, Clock, PeerLost, Storage
from protocol.recorder import Moved
from protocol.steps import ForwardStep, Phase, Refusal, RefusalKind, Rows
from saved import SavedSessions
from sessions import Admitted, Sessions
from specialization import StationSettings

MATRICES: Final = {
    "attn_q_weight": Matrix.Q,
    "attn_k_weight": Matrix.K,
    "attn_v_weight": Matrix.V,
    "attn_output_weight": Matrix.O,
    "ffn_gate_weight": Matrix.GATE,
    "ffn_up_weight": Matrix.UP,
    "ffn_down_weight": Matrix.DOWN,
}
VECTORS: Final = {
    "attn_norm_weight": Vector.ATTN_NORM,
    "ffn_norm_weight": Vector.FFN_NORM,
    "attn_q_bias": Vector.Q_BIAS,
    "attn_k_bias": Vector.K_BIAS,
    "attn_v_bias": Vector.V_BIAS,
    "attn_q_norm_weight": Vector.Q_NORM,
    "attn_k_norm_weight": Vector.K_NORM,
}
F32: Final = 4


@dataclass(frozen=True, slots=True)
class ForwardWork:
    """A forward step with its rows, f32 [count, hidden_size], and a checksum of them."""

    step: ForwardStep
    hidden: bytes | memoryview
    checksum: int

    @property
    def rows(self) -> int:
        """Rows of a batch that it takes."""
        return self.step.count

    @property
    def session(self) -> str:
        """Whose it is."""
        return self.step.envelope.session

    @property
    def urgent(self) -> bool:
        """Whether somebody waits for a token."""
        return self.step.phase is Phase.DECODE


# A piece of work with its place in the batch and the session that it was admitted to.
Entry = tuple[int, ForwardWork, Admitted]


class Station:
    """A booted station. Make it with `boot`; run one batch at a time."""

    def __init__(
        self,
        settings: StationSettings,
        knot: BucketKnot,
        engine: StationEngine,
        weights: Weights,
        sessions: Sessions,
        budget: Budget,
    ) -> None:
        self.settings = settings
        self.knot = knot
        self.engine = engine
        self.weights = weights
        self.sessions = sessions
        self.budget = budget
        self.max_rows = engine.config.max_rows if engine.config else 0
        self.stale = False
        self.saved: SavedSessions | None = None

    @classmethod
    async def boot(
        cls,
        settings: StationSettings,
        knot: BucketKnot,
        engine: StationEngine,
        source: PayloadSource,
        clock: Clock,
        *,
        held: Callable[[int], None] = lambda delta: None,
        moved: Moved | None = None,
    ) -> Station:
        """Reserves the engine's memory, and reads the small vectors and the digests of the station's layers.

        Raises `SettingsError`, `KnotError`, `EngineError` and `OverBudgetError`.
        """
        header = knot.header
        settings.check_layers(header.config.num_layers)
        layers = range(settings.start_layer, settings.end_layer)
        units = phase_units(header, layers, PHASES, settings.block_bytes)
        owned = (settings.start_layer, settings.end_layer)
        config, budget = fit_station(settings, header.config, owned, units, engine.station_bytes)
        engine.station_configure(config)
        arena = Arena.plan(units, settings.residency, engine.arena_at, engine.arena_bytes)
        await load_vectors(knot, engine, layers)
        digests = await knot.digests(block.tensor for unit in units for block in unit)
        weights = Weights(
            engine, settings.knot_key, units, arena, source,
            lambda block: digests.of(block.first_digest, block.groups),
            named(units, unit_names(layers, PHASES), arena, moved),
        )  # fmt: skip
        sessions = Sessions(
            engine,
            clock,
            max_sessions=settings.max_sessions,
            ttl=settings.session_ttl,
            idle=settings.session_idle,
            answer_bytes=settings.answer_bytes,
            max_prefixes=settings.max_prefixes,
            held=held,
        )
        return cls(settings, knot, engine, weights, sessions, budget)

    def take_over(self, knot: BucketKnot, source: PayloadSource) -> None:
        """Serves a restarted object: engine and weights stay, sessions and ways to the bucket do not."""
        self.engine.batch_abort()
        self.sessions.clear()
        self.knot = knot
        self.weights.source = source
        self.stale = False

    async def keep_sessions_in(self, storage: Storage, background: Background, clock: Clock) -> None:
        """Lets sessions outlive the object, by its storage."""
        if self.settings.save_bytes:
            identity = f"{self.knot.id}|{self.layers}"
            self.saved = SavedSessions(
                self.sessions, self.engine, storage, background, clock, identity, self.settings.save_bytes
            )
            await self.saved.clean()

    @property
    def layers(self) -> tuple[int, int]:
        """The layers it owns, [start, end)."""
        return self.settings.start_layer, self.settings.end_layer

    def kept_pages(self) -> int:
        """Pages of keys and values that no session needs and that are kept for sessions to come."""
        return len(
            {
                self.engine.kv_page_at(kept.slot, index)
                for kept in self.sessions.prefixes.kept()
                for index in range(kept.length // KV_PAGE_TOKENS)
            }
        )

    async def run(self, batch: Sequence[ForwardWork]) -> list[Part | Exception]:
        """Runs a batch; each piece of work is answered by its part of a frame or by a `Refusal`."""
        if self.stale:
            return [Refusal(RefusalKind.LOST, "another knot was uploaded; the station boots anew")] * len(
                batch
            )
        if self.saved is not None:
            for work in batch:
                await self.saved.restore(work.step)
                await self.saved.before_cut(work.step)
        answers: dict[int, Part | Exception] = {}
        admitted: list[Entry] = []
        pages = 0
        for index, work in enumerate(batch):
            try:
                # A step may have been answered while a repeat of it was waiting.
                known = self.sessions.answer_to(work.step, work.checksum)
                if known is not None:
                    answers[index] = known
                else:
                    pages += new_pages(work.step)
                    self._make_room(work.session, pages)
                    admitted.append((index, work, self.sessions.admit(work.step, work.checksum)))
            except Refusal as refusal:
                answers[index] = refusal
            except EngineError as error:
                answers[index] = Refusal(RefusalKind.OVER_BUDGET, str(error), 1000)
        answers.update(await self._run_admitted(admitted))
        if self.saved is not None:
            self.saved.after_batch()
        return [answers[index] for index in range(len(batch))]

    async def _run_admitted(self, admitted: Sequence[Entry]) -> dict[int, Part | Exception]:
        if not admitted:
            return {}
        try:
            parts = await self._forward([(work, entry) for _, work, entry in admitted])
        except (NonFinite, OverBudget) as error:
            if len(admitted) > 1:
                # One session's numbers broke, or all together are too many: each gets a batch of its own.
                return await self._run_alone(admitted)
            broken = isinstance(error, NonFinite)
            kind = RefusalKind.NON_FINITE if broken else RefusalKind.OVER_BUDGET
            return self._refuse(admitted, Refusal(kind, str(error), None if broken else 1000))
        except (BlobFailed, PeerLost, ShortBody) as error:
            return self._refuse(admitted, Refusal(RefusalKind.UNAVAILABLE, str(error), 100))
        except (BadWeights, BlobError) as error:
            # Another upload lies under the key: the next request boots anew.
            self.stale = self.stale or isinstance(error, BlobChanged)
            return self._refuse(admitted, Refusal(RefusalKind.BAD_WEIGHTS, str(error)))
        except BaseException:
            self._refuse(admitted, Refusal(RefusalKind.INTERNAL, "the batch broke off"))
            raise
        for (_, work, entry), part in zip(admitted, parts, strict=True):
            self.sessions.done(entry, work.step, part)
        return {index: part for (index, _, _), part in zip(admitted, parts, strict=True)}

    async def _run_alone(self, admitted: Sequence[Entry]) -> dict[int, Part | Exception]:
        found: dict[int, Part | Exception] = {}
        for place, one in enumerate(admitted):
            try:
                found.update(await self._run_admitted([one]))
            except BaseException:
                self._refuse(admitted[place + 1 :], Refusal(RefusalKind.INTERNAL, "the batch broke off"))
                raise
        return found

    def _refuse(self, admitted: Sequence[Entry], refusal: Refusal) -> dict[int, Part | Exception]:
        for _, work, entry in admitted:
            self.sessions.failed(entry, work.step)
        return {index: refusal for index, _, _ in admitted}

    async def _forward(self, batch: Sequence[tuple[ForwardWork, Admitted]]) -> list[Part]:
        """The forward pass: every owned layer, attention then feed-forward, over all rows of the batch."""
        engine = self.engine
        rows = [
            Row(entry.slot, work.step.position + index)
            for work, entry in batch
            for index in range(work.step.count)
        ]
        with engine.batch(rows) as opened:
            at = opened.hidden_at
            for work, _ in batch:
                engine.host.write(at, work.hidden)
                at += len(work.hidden)
            unit = 0
            for layer in range(*self.layers):
                for phase in range(len(PHASES)):
                    engine.phase_begin(layer, phase)
                    await self.weights.each(unit, self._multiply)
                    engine.phase_end()
                    unit += 1
            return self._outputs([work.step for work, _ in batch], opened.hidden_at)

    async def _multiply(self, placed: Placed) -> None:
        block = placed.block
        tensor = block.tensor
        matrix = MATRICES[tensor.name.split("_", 2)[2]]
        await self.engine.phase_block(
            matrix, ggml_id(tensor.type), block.start, block.end - block.start, placed.at, block.row_bytes
        )

    def _outputs(self, steps: Sequence[ForwardStep], hidden_at: int) -> list[Part]:
        hidden_size = self.knot.header.config.hidden_size
        row_bytes = hidden_size * F32
        parts: list[Part] = []
        first = 0
        for step in steps:
            skipped = step.count - 1 if self.settings.is_exit and step.rows is Rows.LAST else 0
            count = 0 if self.settings.is_exit and step.rows is Rows.NONE else step.count - skipped
            name = "normed" if self.settings.is_exit else "hidden"
            at = hidden_at + (first + skipped) * row_bytes
            if count and self.settings.is_exit:
                at = self.engine.output_norm(first + skipped, count)
            data = self.engine.host.read(at, count * row_bytes) if count else b""
            envelope = {"status": "ok", "cache_length": step.position + step.count}
            parts.append(Part(envelope, {name: Tensor(name, "f32", (count, hidden_size), data)}))
            first += step.count
        return parts

    def _make_room(self, session: str, pages: int) -> None:
        """Gives up kept prefixes, then idle sessions other than `session`, until so many pages are free."""
        while self.engine.kv_free_pages() < pages and self.sessions.make_room(session):
            pass


def new_pages(step: ForwardStep) -> int:
    """Pages of keys and values that a step takes beyond those of the tokens before it."""
    return -(-(step.position + step.count) // KV_PAGE_TOKENS) + -step.position // KV_PAGE_TOKENS


async def load_vectors(knot: BucketKnot, engine: StationEngine, layers: range) -> None:
    """Reads norms and biases of the station's layers in one range, checks them, and keeps them."""
    header = knot.header
    span = header.vector_range(layers.start, layers.stop)
    tensors = list(span.tensors)
    data = await knot.read(span.offset, span.length)
    digests = await knot.digests(tensors)
    for tensor in tensors:
        at = tensor.offset - span.offset
        await _set_vector(
            knot, engine, tensor, data[at : at + tensor.length], digests.of(tensor.first_digest, 1)
        )
    freqs = header.rope_freqs()
    if freqs is not None:
        found = (await knot.digests([freqs])).of(freqs.first_digest, 1)
        await _set_vector(knot, engine, freqs, await knot.read(freqs.offset, freqs.length), found)


async def _set_vector(
    knot: BucketKnot, engine: StationEngine, tensor: TensorInfo, data: bytes, digest: bytes
) -> None:
    at = engine.arena_at
    engine.host.write(at, data)
    if await engine.first_bad_group(at, len(data), len(data), digest) is not None:
        raise BadWeights(f"knot {knot.key}, tensor {tensor.name}: the digest is wrong; upload the knot again")
    if tensor.name.startswith("blk_"):
        _, layer, name = tensor.name.split("_", 2)
        engine.set_vector(int(layer), VECTORS[name], at, tensor.cols)
    else:
        kind = Vector.OUTPUT_NORM if tensor.name == "output_norm_weight" else Vector.ROPE_FREQS
        engine.set_vector(0, kind, at, tensor.cols)
