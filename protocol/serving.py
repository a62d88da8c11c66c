"""How a part answers: frames by frames with one status a step, and JSON for people with curl by JSON.

Only bytes that are no frame are answered by an HTTP error; everything else is a status of its step.
"""

from __future__ import annotations

import asyncio
import math
import struct
from array import array
from collections.abc import Awaitable, Callable
from typing import Any, Final, Protocol, cast

from protocol.calls import FRAME, Call, Reply, json_reply
from protocol.fields import BadField
from protocol.frames import BadFrame, Kind, Part, decode, encode
from protocol.steps import MAX_ID, Refusal, RefusalKind

# What people with curl see; the cluster's own parts read the kind.
HTTP_STATUS: Final = {
    "bad_frame": 400,
    "non_finite": 422,
    "internal": 500,
    "cannot_start": 500,
    "bad_weights": 502,
    "busy": 503,
    "unavailable": 503,
    "over_budget": 503,
}


class Room(Protocol):
    """What `no_room` wants to know of an isolate's budget."""

    ceiling: int

    def used(self, purpose: str) -> int:
        """Bytes that are taken for a purpose."""
        ...


Run = Callable[[Part], Awaitable[Part]]


def is_frame(call: Call) -> bool:
    """Whether the call says that its body is a frame."""
    return call.headers.get("content-type", "").startswith(FRAME)


async def answer_frame(call: Call, kind: Kind, run: Run) -> Reply:
    """Runs every step of a frame of this kind, all at once, and answers by a frame."""
    try:
        frame = decode(call.body)
        if frame.kind is not kind or frame.answer:
            raise BadFrame(f"{call.path} takes frames of kind {kind.name.lower()} that are no answers")
    except BadFrame as error:
        return bad_frame(error)
    parts = await asyncio.gather(*(answer_step(part, run) for part in frame.parts))
    try:
        return Reply(200, encode(kind, parts, answer=True), {"content-type": FRAME})
    except BadFrame as error:
        return bad_frame(BadFrame(f"the answer does not fit a frame, ask for less at a time: {error}"))


async def answer_step(part: Part, run: Run) -> Part:
    """One step's answer, with its session and step id; a refusal is an answer too."""
    # Only what can be a name is repeated: a step may have anything in these places.
    names = {
        key: name
        for key in ("session", "step")
        if isinstance(name := part.envelope.get(key), str) and len(name) <= MAX_ID
    }
    try:
        answer = await run(part)
    except Refusal as refusal:
        return Part({**names, **refusal.to_json()})
    except (BadField, BadFrame) as error:
        return Part({**names, **Refusal(RefusalKind.BAD_FRAME, str(error)).to_json()})
    except Exception as error:  # whatever broke, the other steps of the frame get their answers
        detail = f"{type(error).__name__}: {error}"
        return Part({**names, **Refusal(RefusalKind.INTERNAL, detail).to_json()})
    return Part({**names, **answer.envelope}, answer.tensors)


def no_room(budget: Room, purpose: str, size: int) -> Refusal:
    """The refusal of `size` bytes for which there is no room: now, or at any time."""
    detail = f"{size} bytes for {purpose} do not fit an isolate of {budget.ceiling} bytes: {budget}"
    if budget.used(purpose):
        return Refusal(RefusalKind.BUSY, detail, 500)
    return Refusal(RefusalKind.OVER_BUDGET, detail)


def refused(refusal: Refusal) -> Reply:
    """The answer to a call of which not even a step was begun."""
    status = 413 if refusal.kind is RefusalKind.OVER_BUDGET else HTTP_STATUS.get(refusal.kind, 503)
    return json_reply({"error": {"kind": str(refusal.kind), "detail": refusal.detail}}, status)


def bad_frame(error: Exception) -> Reply:
    """The answer to bytes that are no frame, or to JSON that is no step."""
    return json_reply({"error": {"kind": str(RefusalKind.BAD_FRAME), "detail": str(error)}}, 400)


def not_found(call: Call, what: str, endpoints: str) -> Reply:
    """The answer to a path that `what` does not have."""
    detail = f"{call.method} {call.path} is nothing that {what} answers; it has {endpoints}"
    return json_reply({"error": {"kind": "not_found", "detail": detail}}, 404)


def f32_row(row: object, size: int, what: str) -> bytes:
    """A list of `size` numbers from JSON as f32. Raises `BadField`, naming the field `what`."""
    if not isinstance(row, list) or len(cast(list[Any], row)) != size:
        raise BadField(f"{what} has a row that is not a list of {size} numbers")
    try:
        return struct.pack(f"<{size}f", *cast(list[Any], row))
    except (struct.error, OverflowError) as error:
        raise BadField(f"{what} has a value that is no f32: {error}") from None


def curl_answer(part: Part) -> Reply:
    """A step's answer in JSON: tensors as lists of rows."""
    answer = dict(part.envelope)
    for name, tensor in part.tensors.items():
        found = array("f" if tensor.dtype == "f32" else "i", bytes(tensor.data))
        # JSON has no infinities: null is the logit of an id that is banned.
        numbers = [number if math.isfinite(number) else None for number in found]
        width = tensor.shape[-1]
        rows = [numbers[at : at + width] for at in range(0, len(numbers), width or 1)]
        answer[name] = rows if len(tensor.shape) > 1 else numbers
    if answer.get("status") == "ok":
        return json_reply(answer)
    kind = str(answer.pop("status"))
    return json_reply({"error": {"kind": kind, **answer}}, HTTP_STATUS.get(kind, 409))
