"""A station is admitted by a forward pass with a known answer.

Every station is sent the same made-up rows: two in one step, and the first of them alone, together in one
frame and so in one pass over its weights. It is admitted if every number is finite, if the row that shared a
step has the same bits as the row that did not, and if the answer is the one that these layers of this model
gave when they were admitted first. That answer is remembered by its digest, under everything that it depends
on; a station whose answer is another one is broken, or runs another engine under the same ABI, and would
make sessions that move to it go on differently.
"""

from __future__ import annotations

import hashlib
import math
import secrets
import struct
from contextlib import suppress
from typing import Any, Final

from hops import F32, LayerHop, Ticket
from patience import Limits, Patience
from protocol.deadlines import together
from protocol.frames import BadFrame, Part
from protocol.ports import Storage
from protocol.steps import ForwardStep, Phase, Refusal, Rows

SESSIONS: Final = ("together", "alone")
ROWS: Final = 2


class CanaryFailed(Exception):
    """A station must not be used; the sentence says which, and what is wrong with its answer."""


def rows(hidden_size: int) -> bytes:
    """The rows: f32 [ROWS, hidden_size], between -1 and 1, the same on every machine."""
    made = (((i * 2654435761) % 65536) / 32768 - 1 for i in range(1, ROWS * hidden_size + 1))
    return struct.pack(f"<{ROWS * hidden_size}f", *made)


async def admit(station: LayerHop, model: str, abi: Any, hidden_size: int, known: Storage) -> None:
    """Sends a station its canary. Raises `CanaryFailed`, and `Refusal` when it does not answer."""
    start, end = station.layers
    name = f"station {start}-{end}"
    data, patience = rows(hidden_size), Patience(Limits())
    nonce = secrets.token_hex(8)  # a session that was ended cannot be begun again
    tickets = [Ticket(f"canary-{nonce}", f"canary-{nonce}-{session}", 1, model) for session in SESSIONS]

    async def forward(ticket: Ticket, count: int) -> bytes:
        envelope = ticket.envelope(station.layers, f"canary-{count}")
        step = ForwardStep(envelope, Phase.PREFILL, 0, count, 0, Rows.ALL)
        part = await patience(lambda: station.forward(step, data[: count * F32 * hidden_size]))
        return _rows_of(name, part, count, hidden_size)

    try:
        both, alone = await together((forward(tickets[0], ROWS), forward(tickets[1], 1)))
    finally:
        await together(_end(station, ticket) for ticket in tickets)
    if not all(map(math.isfinite, struct.unpack(f"<{len(both) // F32}f", both))):
        raise CanaryFailed(f"{name} answers the canary by numbers that are not finite")
    if both[: len(alone)] != alone:
        raise CanaryFailed(f"{name} answers a row that shares a step otherwise than the same row alone")
    digest = hashlib.sha256(both).hexdigest()[:32].encode()
    key = f"canary|{model}|{abi}|{start}-{end}"
    before = await known.get(key)
    if before is None:
        await known.put(key, digest)
    elif before != digest:
        raise CanaryFailed(
            f"{name} has canary {digest.decode()}, expected {before.decode()}: the same layers of the same "
            "model gave another answer when they were admitted first"
        )


def _rows_of(name: str, part: Part, count: int, hidden_size: int) -> bytes:
    found = "normed" if "normed" in part.tensors else "hidden"
    try:
        tensor = part.tensor(found, "f32", 2)
        if tensor.shape != (count, hidden_size):
            raise BadFrame(f"{found} is {list(tensor.shape)}, expected {[count, hidden_size]}")
    except BadFrame as error:
        raise CanaryFailed(f"{name} answers the canary wrongly: {error}") from error
    return bytes(tensor.data)


async def _end(station: LayerHop, ticket: Ticket) -> None:
    with suppress(Refusal):  # its time to live ends it
        await station.end(ticket, Phase.CANCEL)
