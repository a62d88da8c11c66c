"""A CobordismWarden's endpoints: raw embedding rows of one slice of one knot, kept in memory by plain LRU.

POST /configure or the X-Knot-Id, X-Knot-Key, X-Vocab-Start and X-Vocab-End headers say which. POST /tensors
takes a frame of row ids and answers with those it holds, or with `fill`, with all; POST /invalidate/<row>;
GET /stats.
"""

from __future__ import annotations

import struct
from collections.abc import Awaitable, Callable
from dataclasses import asdict

from durable_objects.budget import IsolateBudget
from durable_objects.row_cache import RowCache
from engine.rows import RowReader, RowsUnavailable
from knot.errors import KnotError
from protocol.calls import FRAME, Call, Reply, ShortBody, json_reply
from protocol.fields import BadField, Fields, json_fields
from protocol.frames import BadFrame, Kind, Part, Tensor, decode, encode
from protocol.identity import Identity, WrongIdentity
from protocol.ports import BlobChanged, BlobError, BlobFailed
from protocol.serving import bad_frame, not_found

MAX_ROWS = 4096
ENDPOINTS = "POST /configure, /tensors and /invalidate/<row>, GET /stats"


# Opens the knot of a key; returns its id and a reader of its embedding rows.
OpenRows = Callable[[str], Awaitable[tuple[str, RowReader]]]


class CobordismWardenApi:
    """One warden."""

    def __init__(self, budget: IsolateBudget, open_rows: OpenRows) -> None:
        self._open_rows = open_rows
        self._identity: Identity | None = None
        self._reader: RowReader | None = None
        self.cache = RowCache(budget)

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
        except (BlobError, RowsUnavailable, KnotError) as error:
            return json_reply({"error": {"kind": "bad_weights", "detail": str(error)}}, 502)
        except (BadField, BadFrame) as error:
            return bad_frame(error)

    async def _route(self, call: Call) -> Reply:
        if call.method == "GET" and call.path == "/stats":
            return json_reply(self.stats())
        if call.method == "POST" and call.path == "/configure":
            fields = json_fields(call.body, "the request")
            await self._become(Identity.from_fields("vocab", fields))
            return json_reply(self.stats())
        asked = Identity.from_headers("vocab", call.headers)
        if asked is not None:
            await self._become(asked)
        verb, _, name = call.path[1:].partition("/")
        match call.method, verb:
            case "POST", "tensors":
                return await self._tensors(call.body)
            case "POST", "invalidate":
                return json_reply({"invalidated": self._invalidate(name)})
            case _:
                return not_found(call, "a CobordismWarden", ENDPOINTS)

    def stats(self) -> dict[str, object]:
        """What the warden is, holds, and has done."""
        return {
            "kind": "cobordism-warden",
            "identity": None if self._identity is None else asdict(self._identity),
            "rows": len(self.cache),
            "bytes": self.cache.size,
            **asdict(self.cache.counts),
        }

    async def _tensors(self, body: bytes) -> Reply:
        if self._reader is None or self._identity is None:
            raise BadField("the warden does not know its knot yet; POST /configure or send X-Knot-Id first")
        frame = decode(body)
        if frame.kind is not Kind.ROWS or len(frame.parts) != 1:
            raise BadFrame("this endpoint takes frames of kind rows with one step")
        part = frame.parts[0]
        fields = Fields(part.envelope, "the step")
        fill = fields.flag("fill", False)
        fields.end()
        wanted = part.tensor("ids", "i32", 1)
        if wanted.shape[0] > MAX_ROWS:
            raise BadFrame(f"{wanted.shape[0]} rows in one call, at most {MAX_ROWS} are given")
        ids = struct.unpack(f"<{wanted.shape[0]}i", wanted.data)
        identity = self._identity
        for row in ids:
            if not identity.start <= row < identity.end:
                raise BadFrame(f"row {row} is none of [{identity.start}, {identity.end})")
        reader = self._reader
        found = self.cache.held(ids)
        if fill:
            missing = [row for row in ids if row not in found]
            for row, data in (await reader.read(missing)).items():
                found[row] = data
                # The warden may have forgotten whose rows these are while they were on their way.
                if self._reader is reader:
                    self.cache.keep(row, data)
        return _answer(found, reader.table.row_bytes)

    def _invalidate(self, name: str) -> bool:
        if not (name.isascii() and name.isdigit() and len(name) <= 10):
            raise BadField(f"{name[:40]!r} is no row number")
        return self.cache.invalidate(int(name))

    def _forget(self) -> None:
        self.cache.clear()
        self._identity = self._reader = None

    async def _become(self, identity: Identity) -> None:
        if self._identity is not None:
            self._identity.check_is(identity)
            return
        found, reader = await self._open_rows(identity.knot_key)
        identity.check_found(found)
        if self._identity is not None:  # somebody else was quicker
            self._identity.check_is(identity)
            return
        self._identity, self._reader = identity, reader


def _answer(rows: dict[int, bytes], row_bytes: int) -> Reply:
    ids = struct.pack(f"<{len(rows)}i", *rows)
    part = Part(
        {"status": "ok"},
        {
            "ids": Tensor("ids", "i32", (len(rows),), ids),
            "rows": Tensor("rows", "u8", (len(rows), row_bytes), b"".join(rows.values())),
        },
    )
    return Reply(200, encode(Kind.ROWS, [part], answer=True), {"content-type": FRAME})
