"""The way to one part: steps that are sent at the same moment travel in one frame.

Sessions may only meet inside a Durable Object; there, steps that several of them send in the same turn of the
event loop become one call. Each step still has its own answer, its own refusal and its own caller, who may
leave without disturbing the others.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from protocol.calls import FRAME, Call, Reply, brief
from protocol.deadlines import DeadlineExceeded, within
from protocol.frames import MAX_STEPS, BadFrame, Kind, Part, decode, encode
from protocol.ports import Background, Clock, Peer, PeerLost
from protocol.steps import Refusal, RefusalKind, raise_refusal
from turns import Turns

# What the steps of one frame have together at most, in bytes; a step that has more travels alone.
FRAME_BYTES: Final = 4 << 20


# Is told of every call: the part's name, the path, seconds, bytes there and back, steps, and whether it went
# well.
Observe = Callable[[str, str, float, int, int, int, bool], None]


@dataclass(eq=False, slots=True)
class _Asked:
    """A step that waits for its frame, or for its answer."""

    part: Part
    answer: asyncio.Future[Part]
    frame: _Sent | None = None


@dataclass(eq=False, slots=True)
class _Sent:
    """A frame that is on its way, and for how many callers."""

    task: asyncio.Task[None] | None
    callers: int


@dataclass(slots=True)
class Wire:
    """What all lanes share. `headers` prove the gateway to the parts, `deadline` is a call's, in seconds.

    `turns` is told before, and `observe` after every call.
    """

    headers: Mapping[str, str]
    deadline: float
    background: Background
    clock: Clock = time.monotonic
    turns: Turns = field(default_factory=Turns)
    observe: Observe | None = None


class Lane:
    """Steps of one kind to one part."""

    def __init__(self, name: str, peer: Peer, path: str, kind: Kind, wire: Wire) -> None:
        self.name = name
        self._peer = peer
        self._path = path
        self._kind = kind
        self._wire = wire
        self._waiting: list[_Asked] = []

    async def ask(self, part: Part) -> Part:
        """Sends one step; returns its answer. Raises `Refusal`, of kind `lost` when nobody answered."""
        asked = _Asked(part, asyncio.get_running_loop().create_future())
        self._waiting.append(asked)
        if len(self._waiting) == 1:
            self._wire.background(self._flush())
        try:
            answer = await asked.answer
        except asyncio.CancelledError:
            self._leave(asked)
            raise
        raise_refusal(answer.envelope, self.name)
        return answer

    def _leave(self, asked: _Asked) -> None:
        if asked in self._waiting:
            self._waiting.remove(asked)
        elif asked.frame is not None:
            asked.frame.callers -= 1
            if not asked.frame.callers and asked.frame.task is not None:
                asked.frame.task.cancel()  # nobody is left who wants to know

    async def _flush(self) -> None:
        await asyncio.sleep(0)  # whoever is ready in this turn of the event loop comes along
        waiting, self._waiting = self._waiting, []
        first, *others = list(_frames(waiting)) or [[]]
        for frame in others:
            self._wire.background(self._send(frame))
        if first:
            await self._send(first)

    async def _send(self, asked: list[_Asked]) -> None:
        frame = _Sent(asyncio.current_task(), len(asked))
        for one in asked:
            one.frame = frame
        try:
            answers = await self._exchange([one.part for one in asked])
        except Refusal as refusal:
            for one in asked:
                _settle(one, Refusal(refusal.kind, refusal.detail, refusal.retry_after_ms))
            return
        except BaseException as error:
            stopped = Refusal(RefusalKind.LOST, f"{self.name}: the call broke off: {type(error).__name__}")
            for one in asked:
                _settle(one, stopped)
            raise
        for one, answer in zip(asked, answers, strict=True):
            _settle(one, answer)

    async def _exchange(self, parts: list[Part]) -> list[Part]:
        body = encode(self._kind, parts)
        call = Call("POST", self._path, body, {**self._wire.headers, "content-type": FRAME})
        wire, began, size, well = self._wire, self._wire.clock(), 0, False
        try:
            await wire.turns.call()
            began = wire.clock()
            reply = await within(wire.deadline, self._peer.call(call), self.name, wire.background)
            size = len(reply.body) if isinstance(reply.body, bytes) else 0
            well = reply.status == 200
        except (PeerLost, DeadlineExceeded) as error:
            raise Refusal(RefusalKind.LOST, f"{self.name}: {brief(error)}") from error
        finally:
            if wire.observe is not None:
                seconds = wire.clock() - began
                wire.observe(self.name, self._path, seconds, len(body), size, len(parts), well)
        if reply.status != 200:
            raise refusal_of(self.name, reply)
        try:
            frame = decode(reply.bytes())
            if frame.kind is not self._kind or not frame.answer or len(frame.parts) != len(parts):
                raise BadFrame(f"expected {len(parts)} answers of kind {self._kind.name.lower()}")
        except BadFrame as error:
            raise Refusal(RefusalKind.LOST, f"{self.name} answered by a bad frame: {error}") from error
        return list(frame.parts)


def _settle(one: _Asked, answer: Part | Refusal) -> None:
    if one.answer.done():
        return
    if isinstance(answer, Refusal):
        one.answer.set_exception(answer)
    else:
        one.answer.set_result(answer)


def _frames(waiting: Iterable[_Asked]) -> Iterable[list[_Asked]]:
    """The steps in as few frames as can be, in their order."""
    frame: list[_Asked] = []
    room = FRAME_BYTES
    for asked in waiting:
        size = sum(len(tensor.data) for tensor in asked.part.tensors.values())
        if frame and (size > room or len(frame) == MAX_STEPS):
            yield frame
            frame, room = [], FRAME_BYTES
        frame.append(asked)
        room -= size
    if frame:
        yield frame


# What an answer without steps means; a part says it in words where it can.
STATUS: Final = {400: RefusalKind.BAD_FRAME, 413: RefusalKind.OVER_BUDGET, 503: RefusalKind.BUSY}


def refusal_of(name: str, reply: Reply) -> Refusal:
    """The refusal of a whole call: of the kind that the part states, or what its status stands for."""
    body = reply.body if isinstance(reply.body, bytes) else b""
    kind = STATUS.get(reply.status, RefusalKind.LOST)
    try:
        error = reply.json()["error"]
        kind, said = RefusalKind(error["kind"]), str(error["detail"])
    except (ValueError, LookupError, TypeError):
        said = body.decode(errors="replace")
    return Refusal(kind, f"{name} answered {reply.status}: {said[:300]}")
