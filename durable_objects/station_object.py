"""The object behind a station: it owns the engine, the sessions and the loop in which they meet."""

from __future__ import annotations

import asyncio
from typing import Any

import boundary
from durable_objects.front import optional_binding, unavailable
from engine.budget import OverBudgetError
from engine.client import StationEngine
from engine.errors import EngineError
from engine.weights import BadWeights
from knot.bucket import BucketKnot
from knot.errors import KnotError
from near import NearSource, identity
from protocol import access
from protocol.calls import ShortBody
from protocol.ports import BlobError
from protocol.settings import Settings, SettingsError
from specialization import StationSettings
from station import Station
from station_api import StationApi
from workers import DurableObject, Request, Response

BOOT_ERRORS = (
    SettingsError, KnotError, EngineError, OverBudgetError, BadWeights, BlobError, ShortBody,
)  # fmt: skip

# What this isolate has booted, by knot, role and layers: an object that is restarted finds it again.
_booted: dict[str, Station] = {}


class StationObject(DurableObject):
    """One station. All its requests come to this one object."""

    def __init__(self, ctx: Any, env: Any) -> None:
        super().__init__(ctx, env)
        self._api: StationApi | None = None
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

    async def _ready(self, asked: bool) -> StationApi:
        async with self._booting:
            api = self._api
            # Whoever asks how things are gets to know of a knot that was uploaded again.
            if api is not None and (api.station.stale or (asked and not await api.station.knot.is_current())):
                # The engine is about to be made anew: nothing may be running in it.
                await api.loop.close()
                api = None
            if api is None:
                api = self._api = await self._boot()
            return api

    async def _boot(self) -> StationApi:
        env = self.env

        def variable(name: str) -> str | None:
            return boundary.variable(env, name)

        settings = StationSettings.read(variable)
        background = boundary.background(self.ctx)
        knot = await BucketKnot.open(boundary.blobs(env.KNOT_BUCKET), settings.knot_key)
        layers = (settings.start_layer, settings.end_layer)
        namespace = optional_binding(env, "LAYER_WARDEN") if settings.use_warden else None
        warden = None
        if namespace is not None:
            warden = boundary.objects(namespace).peer(identity(knot, layers).object_name)
        headers = access.headers(Settings(variable).secret())
        source = NearSource(knot, warden, layers, headers, background)
        station = _booted.get(settings.boot_key)
        if station is not None and station.settings == settings and station.knot.id == knot.id:
            station.take_over(knot, source)
        else:
            for old in _booted.values():
                old.weights.drop()
            _booted.clear()
            engine = StationEngine(await boundary.engine(settings.engine_bytes))
            station = await Station.boot(
                settings, knot, engine, source, boundary.clock, held=boundary.held, moved=boundary.moved
            )
            _booted[settings.boot_key] = station
        await station.keep_sessions_in(boundary.storage(self.ctx), background, boundary.clock)
        return StationApi(station, source, boundary.clock, background, boundary.memory)
