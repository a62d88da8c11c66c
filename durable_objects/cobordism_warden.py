"""The CobordismWarden: raw embedding rows of a shard's slice in the memory of an isolate near it."""

from __future__ import annotations

from typing import Any

import boundary
from durable_objects.budget import ENGINE_BYTES, IsolateBudget
from durable_objects.cobordism_warden_api import CobordismWardenApi
from durable_objects.front import unavailable, warden_answer
from durable_objects.layer_warden import isolate_budget
from engine.client import Engine
from engine.host import EngineHost
from engine.rows import Desk, RowReader, desk_bytes
from knot.bucket import BucketKnot
from knot.errors import KnotError
from protocol.settings import MIB, Settings, SettingsError
from workers import DurableObject, Request, Response

# Rows are checked against their digests before they are kept, by a small engine that the isolate shares.
DESK_BYTES = 2 * MIB

_budgets: dict[int, IsolateBudget] = {}
_desks: list[tuple[Engine, Desk]] = []


class CobordismWarden(DurableObject):
    """One warden; its name is `{knot key}@{fingerprint}|{first id}-{end id}`."""

    def __init__(self, ctx: Any, env: Any) -> None:
        super().__init__(ctx, env)
        self._api: CobordismWardenApi | None = None

    async def fetch(self, request: Request) -> Response:
        """Answers a request from the cluster. POST /restart resets the object."""
        settings = Settings(lambda name: boundary.variable(self.env, name))
        try:
            secret = settings.secret()
            budget = isolate_budget(settings, _budgets)
            if self._api is None:
                self._api = CobordismWardenApi(budget, self._open)
                budget.register(str(self.ctx.id), self._api.cache)
            api = self._api
            budget.touch(str(self.ctx.id))
        except SettingsError as error:
            return boundary.response_of(unavailable(error))
        return await warden_answer(request, self.ctx, secret, api.answer)

    async def _open(self, key: str) -> tuple[str, RowReader]:
        knot = await BucketKnot.open(boundary.blobs(self.env.KNOT_BUCKET), key)
        needed = desk_bytes(knot.header.embedding_tensor(), 0)
        if needed > DESK_BYTES:
            raise KnotError(f"rows of {key} need a desk of {needed} bytes, the warden has {DESK_BYTES}")
        engine, desk = shared_desk(await boundary.engine(ENGINE_BYTES))
        return knot.id, RowReader(knot, engine, desk)


def shared_desk(host: EngineHost) -> tuple[Engine, Desk]:
    """The one engine of this isolate and the one desk in it, made at once when the first warden asks."""
    if not _desks:
        engine = Engine(host)
        host.call("engine_reserve_arena", DESK_BYTES)
        _desks.append((engine, Desk(engine.arena_at, DESK_BYTES)))
    return _desks[0]
