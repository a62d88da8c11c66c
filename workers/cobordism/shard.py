"""A vocabulary shard: rows of the embedding table for the ids it owns, and its slice of the logits.

For an id outside its slice a shard's partial embedding is zero, and it says so by leaving the row out; the
coordinator adds the partials up. Rows of the head that many sessions want go through its weights together.
"""

from __future__ import annotations

import struct
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from engine.blocks import HEAD, Arena, Block, Rows, unit
from engine.budget import Budget
from engine.client import Adjust, Candidate, Selection, ShardEngine
from engine.errors import BadState, EngineError, NonFinite
from engine.fit import CANDIDATE_BYTES, fit_shard, most_embedded, shard_desk
from engine.rows import Desk
from engine.weights import BadWeights, Placed, Weights, named
from knot.bucket import BucketKnot
from knot.quants import ggml_id
from protocol.calls import Inflow, ShortBody
from protocol.frames import Part, Tensor
from protocol.ports import BlobChanged, BlobError, BlobFailed, PeerLost
from protocol.recorder import Moved
from protocol.steps import Choice, LogitsStep, Refusal, RefusalKind
from slice_settings import ShardSettings


@dataclass(frozen=True, slots=True)
class LogitsWork:
    """A logits step with its row, f32 [1, hidden_size]."""

    step: LogitsStep
    normed: bytes | memoryview

    @property
    def rows(self) -> int:
        """Rows of a batch that it takes."""
        return 1

    @property
    def session(self) -> str:
        """Whose it is. A session may want several rows at once, so this is the step."""
        return key_of(self.step)

    @property
    def urgent(self) -> bool:
        """Somebody always waits for logits."""
        return True


class HeadSource:
    """A shard's slice of the head, straight from the bucket."""

    def __init__(self, knot: BucketKnot) -> None:
        self._knot = knot

    async def open(self, blocks: Sequence[Block]) -> Inflow:
        """Consecutive blocks as one body."""
        return await self._knot.stream(blocks[0].offset, sum(block.length for block in blocks))

    async def open_origin(self, block: Block) -> Inflow:
        """One block again; there is no cache in between."""
        return await self._knot.stream(block.offset, block.length)


class Shard:
    """A booted shard. Make it with `boot`; run one batch at a time."""

    def __init__(
        self,
        settings: ShardSettings,
        knot: BucketKnot,
        engine: ShardEngine,
        weights: Weights,
        desk: Desk,
        budget: Budget,
    ) -> None:
        self.settings = settings
        self.knot = knot
        self.engine = engine
        self.weights = weights
        self.desk = desk
        self.budget = budget
        self.max_tokens = most_embedded(budget, knot.header.config, settings.max_tokens)
        config = engine.config
        assert config is not None
        self.max_rows = config.max_rows
        self.stale = False
        self._kept: OrderedDict[str, int] = OrderedDict()
        self._free = list(range(config.kept))

    @classmethod
    async def boot(
        cls,
        settings: ShardSettings,
        knot: BucketKnot,
        engine: ShardEngine,
        *,
        moved: Moved | None = None,
    ) -> Shard:
        """Reserves the engine's memory and reads the digests of the slice.

        Raises `SettingsError`, `KnotError`, `EngineError` and `OverBudgetError`.
        """
        model = knot.header.config
        settings.check_vocabulary(model)
        blocks = unit([Rows(knot.header.head_tensor(), *settings.slice)], settings.block_bytes)
        desk_size = shard_desk(knot.header, settings.slice, settings.max_rows)
        config, budget = fit_shard(settings, model, settings.slice, desk_size, blocks, engine.shard_bytes)
        engine.shard_configure(config)
        desk = Desk(engine.arena_at, desk_size)
        arena = Arena.plan(
            [blocks], settings.residency, engine.arena_at + desk_size, engine.arena_bytes - desk_size
        )
        for unused in model.unused_token_ranges:
            engine.shard_ban(*unused)
        digests = await knot.digests([knot.header.head_tensor()])
        weights = Weights(
            engine, settings.knot_key, [blocks], arena, HeadSource(knot),
            lambda block: digests.of(block.first_digest, block.groups),
            named([blocks], [HEAD], arena, moved),
        )  # fmt: skip
        return cls(settings, knot, engine, weights, desk, budget)

    def take_over(self, knot: BucketKnot) -> None:
        """Serves a restarted object: engine and weights stay, kept logits and the way there do not."""
        self.knot = knot
        self.stale = False
        self.weights.source = HeadSource(knot)
        self._free.extend(self._kept.values())
        self._kept.clear()

    @property
    def kept(self) -> int:
        """How many slices of logits are kept at present."""
        return len(self._kept)

    async def run(self, batch: Sequence[LogitsWork]) -> list[Part | Exception]:
        """One pass over the slice for every row of the batch; each is answered by its part or a `Refusal`."""
        if self.stale:
            return [Refusal(RefusalKind.LOST, "another knot was uploaded; the shard boots anew")] * len(batch)
        try:
            kept = [self._keep(work.step) for work in batch]
            await self._multiply([work.normed for work in batch], kept)
        except (ShortBody, BlobFailed, PeerLost) as error:
            return self._failed(batch, Refusal(RefusalKind.UNAVAILABLE, str(error), 100))
        except (BadWeights, BlobError) as error:
            # Another upload lies under the key: the next request boots anew.
            self.stale = self.stale or isinstance(error, BlobChanged)
            return self._failed(batch, Refusal(RefusalKind.BAD_WEIGHTS, str(error)))
        except NonFinite as error:
            if len(batch) > 1:
                # One session's numbers broke: the others get theirs from a pass without it.
                return [answer for work in batch for answer in await self.run([work])]
            return self._failed(batch, Refusal(RefusalKind.NON_FINITE, str(error)))
        except BaseException:
            self._failed(batch, Refusal(RefusalKind.INTERNAL, "the pass broke off"))
            raise
        return [await self._chosen(work.step) for work in batch]

    async def choose_again(self, step: LogitsStep) -> Part:
        """More of a row whose logits are still kept; reads no weights. Raises `Refusal`."""
        return await self._choose(step)

    def _slot(self, step: LogitsStep) -> int:
        slot = self._kept.get(key_of(step))
        if slot is None:
            raise Refusal(
                RefusalKind.CACHE_MISS,
                f"the logits of step {step.envelope.step} are no longer kept here; send the row again",
            )
        self._kept.move_to_end(key_of(step))
        return slot

    async def _multiply(self, rows: Sequence[bytes | memoryview], kept: Sequence[int]) -> None:
        engine = self.engine
        async with self.desk.use():
            engine.host.write(self.desk.at, b"".join(rows))
            engine.logits_begin(kept, self.desk.at)
        await self.weights.each(0, self._multiply_block)
        engine.logits_end()

    async def _multiply_block(self, placed: Placed) -> None:
        block = placed.block
        await self.engine.logits_block(
            ggml_id(block.tensor.type),
            block.start - self.settings.vocab_start,
            block.end - block.start,
            placed.at,
            block.row_bytes,
        )

    async def _chosen(self, step: LogitsStep) -> Part | Exception:
        try:
            return await self._choose(step)
        except Refusal as refusal:
            return refusal

    async def _choose(self, step: LogitsStep) -> Part:
        choice = step.choice
        start, end = self.settings.slice
        answers = min(choice.top_k, end - start) + len(choice.wanted)
        needed = CANDIDATE_BYTES * (answers + len(choice.wanted) + len(choice.adjustments) + 16)
        if needed > self.desk.size:
            raise Refusal(
                RefusalKind.OVER_BUDGET,
                f"{answers} candidates need {needed} bytes, the shard has {self.desk.size}: ask for fewer",
            )
        try:
            async with self.desk.use():
                slot = self._slot(step)
                selection = await self.engine.select(
                    slot,
                    top_k=choice.top_k,
                    temperature=choice.temperature,
                    seed=choice.seed,
                    adjust=[Adjust(entry.id, entry.multiply, entry.add) for entry in choice.adjustments],
                    wanted=[token for token in choice.wanted if start <= token < end],
                    workspace=(self.desk.at, self.desk.size),
                )
        except BlobFailed as error:
            raise Refusal(RefusalKind.UNAVAILABLE, str(error), 100) from error
        except BadState as error:
            # Its pass is still running, or broke off.
            raise Refusal(RefusalKind.CACHE_MISS, str(error)) from error
        except EngineError as error:
            raise Refusal(RefusalKind.BAD_FRAME, str(error)) from error
        return slice_part(choice, selection)

    def _keep(self, step: LogitsStep) -> int:
        """A slot for a step's logits; the one used least recently makes room."""
        key = key_of(step)
        slot = self._kept.pop(key, None)
        if slot is None:
            slot = self._free.pop() if self._free else self._kept.popitem(last=False)[1]
        self._kept[key] = slot
        return slot

    def _failed(self, batch: Sequence[LogitsWork], refusal: Refusal) -> list[Part | Exception]:
        for work in batch:
            slot = self._kept.pop(key_of(work.step), None)
            if slot is not None:
                self._free.append(slot)
        return [refusal] * len(batch)


def key_of(step: LogitsStep) -> str:
    """What a step's logits are kept under."""
    envelope = step.envelope
    return f"{envelope.session}|{envelope.epoch}|{envelope.step}"


def slice_part(choice: Choice, selection: Selection) -> Part:
    """A selection as an answer: ids, and per id (raw, adjusted, key); `wanted` ids likewise."""
    envelope = {
        "status": "ok",
        "lse_raw": selection.lse_raw,
        # JSON has no minus infinity: null says that every id of the slice is banned.
        "lse_adjusted": None if selection.lse_adjusted == -float("inf") else selection.lse_adjusted,
    }
    tensors: dict[str, Tensor] = {}
    for name, entries in (("candidates", selection.candidates), ("wanted", selection.wanted)):
        if name == "wanted" and not choice.wanted:
            continue
        tensors.update(_table(name, entries))
    return Part(envelope, tensors)


def _table(name: str, entries: Sequence[Candidate]) -> dict[str, Tensor]:
    ids = struct.pack(f"<{len(entries)}i", *(entry.id for entry in entries))
    values = b"".join(struct.pack("<3f", entry.raw, entry.adjusted, entry.key) for entry in entries)
    return {
        name: Tensor(name, "i32", (len(entries),), ids),
        f"{name}_values": Tensor(f"{name}_values", "f32", (len(entries), 3), values),
    }
