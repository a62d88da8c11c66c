"""The parts a generation is made with: stations and shards, each one small interface.

A hop is asked for one step at a time and answers by a value or a `Refusal`. Today a hop is a Worker behind a
binding; whatever else can carry a step can be one too.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from protocol.calls import FRAME, Call, Reply, brief
from protocol.deadlines import DeadlineExceeded, within
from protocol.frames import BadFrame, Kind, Part, Tensor, decode, encode
from protocol.ports import Background, Peer, PeerLost
from protocol.steps import (
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
    raise_refusal,
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


class LayerHop(Protocol):
    """Something that takes rows of hidden state through a range of layers."""

    @property
    def layers(self) -> tuple[int, int]:
        """The layers it owns, [start, end)."""
        ...

    async def forward(self, step: ForwardStep, hidden: bytes) -> Part:
        """Rows through the layers. Raises `Refusal`."""
        ...

    async def end(self, ticket: Ticket, phase: Phase) -> None:
        """Releases or cancels a session. Raises `Refusal`."""
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


class FrameHop:
    """What both kinds of hop share: a peer that is sent one-step frames until a deadline."""

    def __init__(
        self, name: str, peer: Peer, headers: dict[str, str], deadline: float, background: Background
    ) -> None:
        self.name = name
        self._peer = peer
        self._headers = {**headers, "content-type": FRAME}
        self._deadline = deadline
        self._background = background

    async def ask(self, path: str, kind: Kind, part: Part) -> Part:
        """Sends one step; returns its answer. Raises `Refusal`, of kind `lost` when nobody answered."""
        call = Call("POST", path, encode(kind, [part]), self._headers)
        try:
            reply = await within(self._deadline, self._peer.call(call), self.name, self._background)
        except (PeerLost, DeadlineExceeded) as error:
            raise Refusal(RefusalKind.LOST, f"{self.name}: {brief(error)}") from error
        if reply.status != 200:
            raise _refusal_of(self.name, reply)
        try:
            frame = decode(reply.bytes())
            if frame.kind is not kind or not frame.answer or len(frame.parts) != 1:
                raise BadFrame(f"expected one answer of kind {kind.name.lower()}")
        except BadFrame as error:
            raise Refusal(RefusalKind.LOST, f"{self.name} answered by a bad frame: {error}") from error
        answer = frame.parts[0]
        try:
            raise_refusal(answer.envelope)
        except Refusal as refusal:
            detail = f"{self.name}: {refusal.detail}"
            raise Refusal(refusal.kind, detail, refusal.retry_after_ms) from None
        return answer


class StationHop(FrameHop):
    """A layer station behind a binding."""

    def __init__(
        self,
        layers: tuple[int, int],
        peer: Peer,
        headers: dict[str, str],
        deadline: float,
        background: Background,
        hidden_size: int,
    ) -> None:
        super().__init__(f"station {layers[0]}-{layers[1]}", peer, headers, deadline, background)
        self.layers = layers
        self._hidden_size = hidden_size

    async def forward(self, step: ForwardStep, hidden: bytes) -> Part:
        """Rows through the station's layers."""
        tensor = Tensor("hidden", "f32", (step.count, self._hidden_size), hidden)
        return await self.ask("/forward", Kind.FORWARD, Part(step.to_json(), {"hidden": tensor}))

    async def end(self, ticket: Ticket, phase: Phase) -> None:
        """Releases or cancels a session."""
        step = ForwardStep(ticket.envelope(self.layers, str(phase)), phase, 0, 0, 0)
        await self.ask("/forward", Kind.FORWARD, Part(step.to_json()))


class ShardHop(FrameHop):
    """A vocabulary shard behind a binding."""

    def __init__(
        self,
        ids: tuple[int, int],
        peer: Peer,
        headers: dict[str, str],
        deadline: float,
        background: Background,
        hidden_size: int,
    ) -> None:
        super().__init__(f"shard {ids[0]}-{ids[1]}", peer, headers, deadline, background)
        self.ids = ids
        self._row_bytes = F32 * hidden_size
        self._hidden_size = hidden_size

    async def embed(self, ticket: Ticket, step: str, tokens: Sequence[int]) -> dict[int, bytes]:
        """The shard's partial embedding: rows by position in `tokens`."""
        data = struct.pack(f"<{len(tokens)}i", *tokens)
        envelope = EmbedStep(ticket.envelope(self.ids, step)).to_json()
        part = Part(envelope, {"tokens": Tensor("tokens", "i32", (len(tokens),), data)})
        answer = await self.ask("/embed", Kind.EMBED, part)
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
        answer = await self.ask("/logits", Kind.LOGITS, Part(envelope, tensors))
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


def _refusal_of(name: str, reply: Reply) -> Refusal:
    kind = {400: RefusalKind.BAD_FRAME, 413: RefusalKind.OVER_BUDGET, 503: RefusalKind.BUSY}.get(
        reply.status, RefusalKind.LOST
    )
    body = reply.body if isinstance(reply.body, bytes) else b""
    return Refusal(kind, f"{name} answered {reply.status}: {body[:300].decode(errors='replace')}")
