"""The CobordismWarden: raw embedding rows of a shard's slice in the memory of an isolate near it."""

from __future__ import annotations

import asyncio
from typing import Any

import boundary
from durable_objects.budget import IsolateBudget
from durable_objects.cobordism_warden_api import CobordismWardenApi
from durable_objects.front import unavailable
from durable_objects.layer_warden import isolate_budget
from engine.client import Engine
from engine.rows import Desk, RowReader, desk_bytes
from knot.bucket import BucketKnot
from protocol import access
from protocol.settings import MIB, Settings, SettingsError
from workers import DurableObject, Request, Response

# Rows are checked against their digests before they are kept, by a small engine that the isolate shares.
ENGINE_BYTES = 4 * MIB
LEAST_DESK = 256 * 1024

_budgets: dict[int, IsolateBudget] = {}
_desks: list[tuple[Engine, Desk]] = []


class CobordismWarden(DurableObject):
    """One warden; its name is `{knot key}@{fingerprint}|{first id}-{end id}`."""

    def __init__(self, ctx: Any, env: Any) -> None:
        super().__init__(ctx, env)
        self._api: CobordismWardenApi | None = None

    async def fetch(self, request: Request) -> Response:
        """Answers a request from the cluster."""
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
        call = await boundary.call_of(request)
        return boundary.response_of(access.refusal(secret, call.headers) or await api.answer(call))

    async def _open(self, key: str) -> tuple[str, RowReader]:
        knot = await BucketKnot.open(boundary.blobs(self.env.KNOT_BUCKET), key)
        engine, desk = await _shared_desk(desk_bytes(knot, LEAST_DESK))
        return knot.id, RowReader(knot, engine, desk)


async def _shared_desk(size: int) -> tuple[Engine, Desk]:
    if not _desks or _desks[-1][1].size < size:
        host = await boundary.engine(ENGINE_BYTES)
        engine = Engine(host)
        host.call("engine_reserve_arena", size)
        lock = _desks[-1][1].lock if _desks else asyncio.Lock()
        _desks[:] = [(engine, Desk(engine.arena_at, size, lock))]
    return _desks[-1]
