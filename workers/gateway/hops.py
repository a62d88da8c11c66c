"""The parts a generation is made with: stations and shards, each one small interface.

A hop is asked for one step at a time and answers by a value or a `Refusal`. Today a hop is an object of a
Worker behind a binding; whatever else can carry a step can be one too. Steps that are asked for at the same
moment travel together (`lanes`).
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from lanes import Lane, Wire
from protocol.frames import BadFrame, Kind, Part, Tensor
from protocol.ports import Peer
from protocol.steps import (
    DIGEST_BYTES,
    Choice,
    EmbedStep,
    Envelope,
    ForwardStep,
    LogitsStep,
    Phase,
    Ranked,
    Refusal,
    RefusalKind,
    Slice,
)

F32 = 4


@dataclass(frozen=True, slots=True)
class Ticket:
    """Whose step it is: request, session, epoch and model; the rest of an envelope is the hop's."""

    request: str
    session: str
    epoch: int
    model: str

    def envelope(self, range: tuple[int, int], step: str) -> Envelope:
        """The envelope of one step for a hop that owns `range`."""
        return Envelope(self.request, self.session, self.epoch, self.model, range, step)


@dataclass(frozen=True, slots=True)
class Known:
    """What a session's pages will be: a digest of every full page, and whether others may begin with them."""

    digests: tuple[bytes, ...]
    claims: bool


class LayerHop(Protocol):
    """Something that takes rows of hidden state through a range of layers."""

    @property
    def layers(self) -> tuple[int, int]:
        """The layers it owns, [start, end)."""
        ...

    async def forward(self, step: ForwardStep, hidden: bytes) -> Part:
        """Rows through the layers. Raises `Refusal`."""
        ...

    async def open(self, ticket: Ticket, known: Known | str, most: int) -> int:
        """Begins a session with up to `most` tokens that are there already; returns how many those are.

        They are what is known by digests, or exactly `most` of another session. Raises `Refusal`.
        """
        ...

    async def end(self, ticket: Ticket, phase: Phase, kept: Sequence[bytes] = ()) -> None:
        """Releases or cancels a session; pages of which digests are given are kept. Raises `Refusal`."""
        ...


class VocabularyHop(Protocol):
    """Something that owns a slice of the vocabulary."""

    @property
    def ids(self) -> tuple[int, int]:
        """The ids it owns, [start, end)."""
        ...

    async def embed(self, ticket: Ticket, step: str, tokens: Sequence[int]) -> dict[int, bytes]:
        """Rows of the tokens it owns, by position in `tokens`, f32 [hidden_size]. Raises `Refusal`."""
        ...

    async def logits(self, ticket: Ticket, step: str, normed: bytes | None, choice: Choice) -> Slice:
        """Its slice of the logits of one row; of the row it has seen for `step` when `normed` is None."""
        ...


class StationHop:
    """A layer station behind a binding."""

    def __init__(self, layers: tuple[int, int], peer: Peer, wire: Wire, hidden_size: int) -> None:
        self.name = f"station {layers[0]}-{layers[1]}"
        self.layers = layers
        self._hidden_size = hidden_size
        self._lane = Lane(self.name, peer, "/forward", Kind.FORWARD, wire)

    async def forward(self, step: ForwardStep, hidden: bytes) -> Part:
        """Rows through the station's layers."""
        tensor = Tensor("hidden", "f32", (step.count, self._hidden_size), hidden)
        return await self._lane.ask(Part(step.to_json(), {"hidden": tensor}))

    async def open(self, ticket: Ticket, known: Known | str, most: int) -> int:
        """Begins a session with what the station has."""
        source = known if isinstance(known, str) else None
        claims = isinstance(known, Known) and known.claims
        envelope = ticket.envelope(self.layers, "open")
        step = ForwardStep(envelope, Phase.OPEN, most, 0, most, source=source, claims=claims)
        answer = await self._lane.ask(Part(step.to_json(), _digests(known) if source is None else {}))
        length = answer.envelope.get("cache_length")
        if type(length) is not int or not 0 <= length <= most or (source is not None and length != most):
            raise Refusal(
                RefusalKind.LOST, f"{self.name} says that a session begins with {length!r} of {most} tokens"
            )
        return length

    async def end(self, ticket: Ticket, phase: Phase, kept: Sequence[bytes] = ()) -> None:
        """Releases or cancels a session."""
        step = ForwardStep(ticket.envelope(self.layers, str(phase)), phase, 0, 0, 0)
        tensors = _digests(Known(tuple(kept), False)) if kept else {}
        await self._lane.ask(Part(step.to_json(), tensors))


class ShardHop:
    """A vocabulary shard behind a binding."""

    def __init__(self, ids: tuple[int, int], peer: Peer, wire: Wire, hidden_size: int) -> None:
        self.name = f"shard {ids[0]}-{ids[1]}"
        self.ids = ids
        self._embed = Lane(self.name, peer, "/embed", Kind.EMBED, wire)
        self._logits = Lane(self.name, peer, "/logits", Kind.LOGITS, wire)
        self._row_bytes = F32 * hidden_size
        self._hidden_size = hidden_size

    async def embed(self, ticket: Ticket, step: str, tokens: Sequence[int]) -> dict[int, bytes]:
        """The shard's partial embedding: rows by position in `tokens`."""
        data = struct.pack(f"<{len(tokens)}i", *tokens)
        envelope = EmbedStep(ticket.envelope(self.ids, step)).to_json()
        part = Part(envelope, {"tokens": Tensor("tokens", "i32", (len(tokens),), data)})
        answer = await self._embed.ask(part)
        try:
            positions = answer.tensor("positions", "i32", 1)
            rows = answer.tensor("rows", "f32", 2)
        except BadFrame as error:
            raise Refusal(RefusalKind.LOST, f"{self.name} answered by a bad frame: {error}") from error
        count = positions.shape[0]
        found = struct.unpack(f"<{count}i", positions.data)
        start, end = self.ids
        owned = [position for position, token in enumerate(tokens) if start <= token < end]
        if rows.shape != (count, self._hidden_size) or list(found) != owned:
            raise Refusal(
                RefusalKind.LOST,
                f"{self.name} answered with rows {list(rows.shape)} for positions {list(found)[:8]}, "
                f"expected those of {len(owned)} tokens that it owns",
            )
        size = self._row_bytes
        return {position: bytes(rows.data[i * size : (i + 1) * size]) for i, position in enumerate(found)}

    async def logits(self, ticket: Ticket, step: str, normed: bytes | None, choice: Choice) -> Slice:
        """The shard's slice of the logits of one row."""
        start, end = self.ids
        wanted = tuple(token for token in choice.wanted if start <= token < end)
        adjustments = tuple(entry for entry in choice.adjustments if start <= entry.id < end)
        own = Choice(choice.top_k, choice.temperature, choice.seed, adjustments, wanted)
        envelope = LogitsStep(ticket.envelope(self.ids, step), own, normed is None).to_json()
        tensors = (
            {} if normed is None else {"normed": Tensor("normed", "f32", (1, self._hidden_size), normed)}
        )
        answer = await self._logits.ask(Part(envelope, tensors))
        try:
            found = read_slice(answer)
            if [entry.id for entry in found.wanted] != list(wanted) or len(found.candidates) > choice.top_k:
                raise BadFrame(f"{len(found.candidates)} candidates and {len(found.wanted)} wanted ids")
            for entry in found.candidates:
                if not start <= entry.id < end:
                    raise BadFrame(f"id {entry.id} is none of [{start}, {end})")
            return found
        except (BadFrame, KeyError, TypeError, ValueError) as error:
            raise Refusal(RefusalKind.LOST, f"{self.name} answered by a bad slice: {error}") from error


def read_slice(answer: Part) -> Slice:
    """A shard's answer as a value. Raises `BadFrame`, `KeyError`, `TypeError` and `ValueError`."""
    adjusted = answer.envelope["lse_adjusted"]
    return Slice(
        lse_raw=float(answer.envelope["lse_raw"]),
        lse_adjusted=-float("inf") if adjusted is None else float(adjusted),
        candidates=_ranked(answer, "candidates"),
        wanted=_ranked(answer, "wanted") if "wanted" in answer.tensors else (),
    )


def _ranked(answer: Part, name: str) -> tuple[Ranked, ...]:
    ids = answer.tensor(name, "i32", 1)
    values = answer.tensor(f"{name}_values", "f32", 2)
    count = ids.shape[0]
    if values.shape != (count, 3):
        raise BadFrame(f"{name}_values is {list(values.shape)}, expected {[count, 3]}")
    numbers = struct.iter_unpack("<3f", values.data)
    return tuple(
        Ranked(token, *three)
        for (token,), three in zip(struct.iter_unpack("<i", ids.data), numbers, strict=True)
    )


def _digests(known: Known | str) -> dict[str, Tensor]:
    digests = known.digests if isinstance(known, Known) else ()
    return {"digests": Tensor("digests", "u8", (len(digests), DIGEST_BYTES), b"".join(digests))}
