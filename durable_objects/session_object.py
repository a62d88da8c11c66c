"""The object in which one generation lives: it calls shards and stations, and streams what they make."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import boundary
from durable_objects.front import unavailable
from gateway_api import GatewayApi
from knot.bucket import BucketKnot
from knot.errors import KnotError
from knot.header import KnotHeader
from knot.tokenizer import Tokenizer
from protocol import access
from protocol.calls import ShortBody
from protocol.ports import BlobError
from protocol.settings import SettingsError
from route import GatewaySettings, RouteUnavailable, find_route
from workers import DurableObject, Request, Response

TOKENIZER_ENGINE_BYTES = 40 << 20


@dataclass(frozen=True, slots=True)
class Model:
    """What this isolate has read of a knot."""

    etag: str
    header: KnotHeader
    tokenizer: Tokenizer


# Read once an isolate. Objects share the values, never a wait for them: one object's promise must not be
# awaited by another.
_models: dict[str, Model] = {}

BOOT_ERRORS = (SettingsError, KnotError, RouteUnavailable, BlobError, ShortBody)


class SessionObject(DurableObject):
    """One generation, or one question about the cluster."""

    def __init__(self, ctx: Any, env: Any) -> None:
        super().__init__(ctx, env)
        self._api: GatewayApi | None = None

    async def fetch(self, request: Request) -> Response:
        """Answers a request from outside."""
        call = await boundary.call_of(request)
        try:
            self._api = api = self._api or await self._boot()
        except BOOT_ERRORS as error:
            return boundary.response_of(unavailable(error))
        return boundary.response_of(await api.answer(call))

    async def _boot(self) -> GatewayApi:
        env = self.env
        settings = GatewaySettings.read(lambda name: boundary.variable(env, name))
        model = await self._model(settings.knot_key)
        settings.check(model.header)
        background = boundary.background(self.ctx)
        route = await find_route(
            settings,
            model.header,
            [boundary.peer(getattr(env, f"STATION_{i}")) for i in range(len(settings.stations))],
            [boundary.peer(getattr(env, f"SHARD_{i}")) for i in range(len(settings.shards))],
            access.headers(settings.secret),
            background,
        )
        return GatewayApi(settings, model.header, model.tokenizer, route, boundary.clock, background)

    async def _model(self, key: str) -> Model:
        bucket = boundary.blobs(self.env.KNOT_BUCKET)
        info = await bucket.head(key)
        found = _models.get(key)
        if found is None or found.etag != info.etag:
            knot = await BucketKnot.open(bucket, key)
            section = knot.header.tokenizer
            if section is None:
                raise SettingsError(
                    f"KNOT_KEY is {key!r}, which has no tokenizer; convert the model again, or repair the "
                    "knot with --tokenizer-from"
                )
            data = await knot.read(section.offset, section.length)
            tokenizer = Tokenizer(await boundary.engine(TOKENIZER_ENGINE_BYTES), data)
            found = _models[key] = Model(knot.etag, knot.header, tokenizer)
        return found
