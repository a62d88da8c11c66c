"""A LayerWarden's endpoints: tensors of one range of layers of one knot, near the station that needs them.

POST /configure or the X-Knot-Id, X-Knot-Key, X-Layer-Start and X-Layer-End headers say which; a warden that
is asked for another knot or other layers refuses, since an object of another name is meant. GET
/tensor/<name>, POST /tensors, POST /invalidate/<name>, GET /stats.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import asdict

from durable_objects.layer_cache import LayerCache
from knot.architectures import payload_order
from knot.bucket import BucketKnot
from knot.errors import KnotError
from knot.header import TensorInfo
from knot.strict_json import is_int
from protocol.bodies import JoinedInflow, Piece, hold_bytes
from protocol.calls import BYTES, Call, Inflow, Reply, ShortBody, json_reply
from protocol.fields import BadField, json_fields
from protocol.identity import Identity, WrongIdentity
from protocol.ports import Background, BlobChanged, BlobError, BlobFailed, Held, Hold
from protocol.serving import bad_frame, not_found

OpenKnot = Callable[[str], Awaitable[BucketKnot]]
MAX_PIECES = 64
ENDPOINTS = "POST /configure, /tensors and /invalidate/<name>, GET /tensor/<name> and /stats"


class LayerWardenApi:
    """One warden. `open_knot` opens a knot in the bucket by its key, `hold` keeps what a body brings.

    A tensor that is to be kept is given away while it arrives.
    """

    def __init__(
        self, cache: LayerCache, open_knot: OpenKnot, background: Background, hold: Hold = hold_bytes
    ) -> None:
        self.cache = cache
        self._background = background
        self._open_knot = open_knot
        self._hold = hold
        self._identity: Identity | None = None
        self._knot: BucketKnot | None = None
        self._names: frozenset[str] = frozenset()
        self._passed_bytes = 0
        self._admitted_bytes = 0

    async def answer(self, call: Call) -> Reply:
        """Answers one call, whatever it is."""
        try:
            return await self._route(call)
        except WrongIdentity as error:
            return json_reply({"error": {"kind": "wrong_model", "detail": str(error)}}, 409)
        except BlobChanged as error:
            self._forget()
            return json_reply({"error": {"kind": "wrong_model", "detail": str(error)}}, 409)
        except (BlobFailed, ShortBody) as error:
            return json_reply({"error": {"kind": "unavailable", "detail": str(error)}}, 503)
        except (BlobError, KnotError) as error:
            return json_reply({"error": {"kind": "bad_weights", "detail": str(error)}}, 502)
        except BadField as error:
            return bad_frame(error)

    async def _route(self, call: Call) -> Reply:
        if call.method == "GET" and call.path == "/stats":
            return json_reply(self.stats())
        if call.method == "POST" and call.path == "/configure":
            fields = json_fields(call.body, "the request")
            await self._become(Identity.from_fields("layer", fields))
            return json_reply(self.stats())
        asked = Identity.from_headers("layer", call.headers)
        if asked is not None:
            await self._become(asked)
        verb, _, name = call.path[1:].partition("/")
        match call.method, verb:
            case "GET", "tensor":
                tensor = self._tensor(name)
                return await self._bodies([(tensor, 0, tensor.length)])
            case "POST", "tensors":
                return await self._bodies(self._pieces(call.body))
            case "POST", "invalidate":
                return json_reply({"invalidated": self.cache.invalidate(name)})
            case _:
                return not_found(call, "a LayerWarden", ENDPOINTS)

    def stats(self) -> dict[str, object]:
        """What the warden is, holds, and has done."""
        return {
            "kind": "layer-warden",
            "identity": None if self._identity is None else asdict(self._identity),
            "tensors": len(self.cache),
            "bytes": self.cache.size,
            "passed_bytes": self._passed_bytes,
            "admitted_bytes": self._admitted_bytes,
            **asdict(self.cache.counts),
        }

    async def _become(self, identity: Identity) -> None:
        if self._identity is not None:
            self._identity.check_is(identity)
            return
        knot = await self._open_knot(identity.knot_key)
        identity.check_found(knot.id)
        if self._identity is not None:  # somebody else was quicker
            self._identity.check_is(identity)
            return
        layers = range(identity.start, identity.end)
        self._names = frozenset(
            place.name for place in payload_order(knot.header.config) if place.layer in layers
        )
        self._identity, self._knot = identity, knot

    def _forget(self) -> None:
        self.cache.clear()
        self._identity = self._knot = None

    def _known(self) -> tuple[BucketKnot, Identity]:
        if self._knot is None or self._identity is None:
            raise BadField("the warden does not know its knot yet; POST /configure or send X-Knot-Id first")
        return self._knot, self._identity

    def _tensor(self, name: str) -> TensorInfo:
        knot, identity = self._known()
        if name not in self._names:
            raise BadField(
                f"tensor {name[:80]!r} is none of layers [{identity.start}, {identity.end}) of "
                f"{identity.knot_key}"
            )
        return knot.header.tensor(name)

    def _pieces(self, body: bytes) -> list[tuple[TensorInfo, int, int]]:
        fields = json_fields(body, "the request")
        found: list[tuple[TensorInfo, int, int]] = []
        for entry in fields.array("tensors", MAX_PIECES):
            match entry:
                case [str(name), start, end] if is_int(start) and is_int(end):
                    tensor = self._tensor(name)
                    if not 0 <= start < end <= tensor.length:
                        raise BadField(
                            f"bytes [{start}, {end}) of {name} do not exist; it has {tensor.length}"
                        )
                    found.append((tensor, start, end))
                case _:
                    raise BadField(
                        "the request.tensors has an entry that is not [name, first byte, end byte]"
                    )
        fields.end()
        return found

    async def _bodies(self, pieces: list[tuple[TensorInfo, int, int]]) -> Reply:
        """The pieces one after the other: from memory, or from the bucket with neighbours in one read."""
        knot, _ = self._known()
        body: list[Piece] = []
        run: tuple[int, int] | None = None
        for tensor, start, end in pieces:
            data = self.cache.get(tensor.name) or await self._admit(knot, tensor)
            if data is None:
                offset = tensor.offset + start
                if run is not None and run[1] == offset:
                    body.pop()
                    offset = run[0]
                run = (offset, tensor.offset + end)
                body.append(_from_bucket(knot, *run))
                self._passed_bytes += end - start
            else:
                run = None
                body.append(_from_memory(data, start, end))
        joined = JoinedInflow(body)
        headers = {"content-type": BYTES, "content-length": str(joined.length)}
        return Reply(200, joined, headers)

    async def _admit(self, knot: BucketKnot, tensor: TensorInfo) -> Held | None:
        """Begins to keep a tensor; what has arrived of it can be had. None when it does not fit."""
        ticket = self.cache.reserve(tensor.name, tensor.length)
        if ticket is None:
            return None
        try:
            inflow = await knot.stream(tensor.offset, tensor.length)
        except BaseException:
            self.cache.release(ticket)
            raise
        self._admitted_bytes += tensor.length
        data, arrival = self._hold(inflow, tensor.length)
        # The warden may have forgotten whose tensors these are before this one began.
        if self._knot is not knot or not self.cache.put(ticket, tensor.name, data):
            self.cache.release(ticket)
        self._background(self._arrive(arrival, inflow, tensor.name, data))
        return data

    async def _arrive(self, arrival: Awaitable[None], inflow: Inflow, name: str, data: Held) -> None:
        """Goes on when whoever asked has left: the next one finds the tensor."""
        try:
            await arrival
        except (ShortBody, BlobError):
            # Whoever is reading it notices; nobody else shall.
            self.cache.lose(name, data)
        except BaseException:
            self.cache.lose(name, data)
            raise
        finally:
            await inflow.cancel()


def _from_bucket(knot: BucketKnot, start: int, end: int) -> Piece:
    return end - start, lambda: knot.stream(start, end - start)


def _from_memory(data: Held, start: int, end: int) -> Piece:
    async def opened() -> Inflow:
        return data.part(start, end)

    return end - start, opened
