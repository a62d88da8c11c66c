"""The object behind a vocabulary shard: it owns the engine and the loop in which rows of sessions meet."""

from __future__ import annotations

import asyncio
from typing import Any

import boundary
from durable_objects.front import optional_binding, unavailable
from engine.budget import OverBudgetError
from engine.client import ShardEngine
from engine.errors import EngineError
from engine.rows import RowReader
from engine.weights import BadWeights
from knot.bucket import BucketKnot
from knot.errors import KnotError
from protocol import access
from protocol.calls import ShortBody
from protocol.ports import BlobError
from protocol.settings import Settings, SettingsError
from rows import EmbeddingRows, identity
from shard import Shard
from shard_api import ShardApi
from slice_settings import ShardSettings
from workers import DurableObject, Request, Response

BOOT_ERRORS = (
    SettingsError, KnotError, EngineError, OverBudgetError, BadWeights, BlobError, ShortBody,
)  # fmt: skip

# What this isolate has booted, by knot and slice: an object that is restarted finds it again.
_booted: dict[str, Shard] = {}


class ShardObject(DurableObject):
    """One shard. All its requests come to this one object."""

    def __init__(self, ctx: Any, env: Any) -> None:
        super().__init__(ctx, env)
        self._api: ShardApi | None = None
        self._booting = asyncio.Lock()

    async def fetch(self, request: Request) -> Response:
        """Answers a request, having booted if that is needed. POST /restart resets the object."""
        call = await boundary.call_of(request)
        if (call.method, call.path) == ("POST", "/restart"):
            boundary.abort(self.ctx, "a restart was asked for")
        try:
            api = await self._ready(call.path == "/health")
        except BOOT_ERRORS as error:
            return boundary.response_of(unavailable(error))
        return boundary.response_of(await api.answer(call))

    async def _ready(self, asked: bool) -> ShardApi:
        async with self._booting:
            api = self._api
            # Whoever asks how things are gets to know of a knot that was uploaded again.
            if api is not None and (api.shard.stale or (asked and not await api.shard.knot.is_current())):
                # The engine is about to be made anew: nothing may be running in it.
                await api.loop.close()
                await api.shard.desk.close()
                api = None
            if api is None:
                api = self._api = await self._boot()
            return api

    async def _boot(self) -> ShardApi:
        env = self.env

        def variable(name: str) -> str | None:
            return boundary.variable(env, name)

        settings = ShardSettings.read(variable)
        background = boundary.background(self.ctx)
        knot = await BucketKnot.open(boundary.blobs(env.KNOT_BUCKET), settings.knot_key)
        shard = _booted.get(settings.boot_key)
        if shard is None or shard.settings != settings or shard.knot.id != knot.id:
            for old in _booted.values():
                old.weights.drop()
            _booted.clear()
            engine = ShardEngine(await boundary.engine(settings.engine_bytes))
            shard = await Shard.boot(settings, knot, engine, moved=boundary.moved)
            _booted[settings.boot_key] = shard
        else:
            shard.take_over(knot)
        namespace = optional_binding(env, "COBORDISM_WARDEN") if settings.use_warden else None
        warden = None
        if namespace is not None:
            warden = boundary.objects(namespace).peer(identity(knot, settings.slice).object_name)
        cache = optional_binding(env, "EMBED_CACHE")
        rows = EmbeddingRows(
            settings,
            knot,
            RowReader(knot, shard.engine, shard.desk),
            warden,
            None if cache is None else boundary.key_values(cache),
            access.headers(Settings(variable).secret()),
            background,
        )
        return ShardApi(shard, rows, boundary.clock, background, boundary.memory)
