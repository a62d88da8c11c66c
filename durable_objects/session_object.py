"""The object in which sessions live: it calls shards and stations, and streams what they make.

Requests may only meet inside an object, and sessions must meet so that their steps can go together. So one
object has all of a gateway's sessions.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import boundary
from durable_objects.front import PASSING
from engine.budget import Budget, OverBudgetError
from engine.errors import EngineError
from engine.fit import ENGINE
from failures import ApiError, not_serving
from gateway_api import GatewayApi
from keys import check_key
from knot.bucket import BucketKnot
from knot.errors import KnotError
from knot.header import KnotHeader
from knot.tokenizer import Tokenizer
from lanes import Wire
from observer import Observer, Parts
from protocol import access
from protocol.calls import Call, Reply, ShortBody
from protocol.ports import BlobError, Peer
from protocol.settings import SettingsError
from route import GatewaySettings, RouteUnavailable, find_route
from shared import Shared
from telemetry import Telemetry
from turns import Turns
from workers import DurableObject, Request, Response

TOKENIZER_ENGINE_BYTES = 40 << 20


@dataclass(frozen=True, slots=True)
class Model:
    """What this isolate has read of a knot."""

    etag: str
    header: KnotHeader
    tokenizer: Tokenizer


@dataclass(frozen=True, slots=True)
class Serving:
    """A model that is being served."""

    api: GatewayApi
    shared: Shared


# What this isolate has read, and what is taken of its memory: an object that is restarted finds it again.
_models: dict[str, Model] = {}
_memory = Budget()

BOOT_ERRORS = (
    SettingsError, KnotError, EngineError, OverBudgetError, RouteUnavailable, BlobError, ShortBody,
)  # fmt: skip


class SessionObject(DurableObject):
    """All sessions of a gateway."""

    def __init__(self, ctx: Any, env: Any) -> None:
        super().__init__(ctx, env)
        self._serving: Serving | None = None
        self._booting = asyncio.Lock()
        self._failed: tuple[float, Exception] | None = None
        self._turns: Turns | None = None

    async def fetch(self, request: Request) -> Response:
        """Answers a request from outside."""
        self._begin()
        call = await boundary.call_of(request)
        return boundary.response_of(await self._answer(call))

    async def _answer(self, call: Call) -> Reply:
        try:
            if self._serving is None:
                # Strangers do not make it start, nor learn why it does not.
                check_key(self._settings(), call.headers)
            api = (await self._ready()).api
        except ApiError as error:
            return error.reply
        except BOOT_ERRORS as error:
            return not_serving(error, isinstance(error, (*PASSING, RouteUnavailable))).reply
        return await api.answer(call)

    def _settings(self) -> GatewaySettings:
        return GatewaySettings.read(lambda name: boundary.variable(self.env, name))

    async def alarm(self) -> None:
        """Begins a new event, which is all that the sessions need to go on."""
        self._begin()

    def _begin(self) -> None:
        if self._turns is not None:
            self._turns.begin()

    async def _ready(self) -> Serving:
        came = boundary.clock()
        async with self._booting:
            serving = self._serving
            if serving is not None and not serving.shared.stale:
                return serving
            if self._failed is not None and self._failed[0] >= came:
                raise self._failed[1]  # it was tried while this request waited
            try:
                if serving is not None and not serving.shared.at_rest:
                    raise RouteUnavailable(
                        "the parts serve another model now; the sessions of the one before are ending"
                    )
                serving = self._serving = await self._boot()
            except BOOT_ERRORS as error:
                self._failed = boundary.clock(), error
                boundary.log("the gateway cannot serve", error=f"{type(error).__name__}: {error}")
                raise
            return serving

    async def _boot(self) -> Serving:
        settings = self._settings()
        model = await self._model(settings.knot_key)
        settings.check(model.header)
        background = boundary.background(self.ctx)
        telemetry = Telemetry()
        self._turns = turns = Turns(
            background,
            lambda seconds: boundary.set_alarm(self.ctx, seconds),
            seconds=settings.turn_seconds,
            calls=settings.turn_calls,
            clock=boundary.clock,
        )
        wire = Wire(
            access.headers(settings.secret),
            settings.deadline,
            background,
            boundary.clock,
            turns,
            telemetry.observe,
        )
        parts = Parts(
            [self._part(f"STATION_{i}", "station") for i in range(len(settings.stations))],
            [self._part(f"SHARD_{i}", "shard") for i in range(len(settings.shards))],
        )
        known = boundary.storage(self.ctx)
        route = await find_route(settings, model.header, parts.stations, parts.shards, wire, known)
        shared = Shared(
            route,
            boundary.clock,
            background,
            _memory,
            sharing=settings.sharing,
            telemetry=telemetry,
            log=boundary.log,
        )
        boundary.log("the gateway serves", model=model.header.name, fingerprint=route.model)
        observer = Observer(shared, wire, parts, boundary.memory)
        return Serving(GatewayApi(settings, model.header, model.tokenizer, shared, observer), shared)

    def _part(self, binding: str, name: str) -> Peer:
        """The object behind a part's Worker: a call of it is no invocation of another Worker."""
        return boundary.objects(getattr(self.env, binding)).peer(name)

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
            host = await boundary.engine(TOKENIZER_ENGINE_BYTES)
            # Nobody uses another one any more: its sessions have ended.
            for old in _models.values():
                old.tokenizer.close()
            _models.clear()
            tokenizer = Tokenizer(host, data)
            _memory.reserve(ENGINE, host.memory_bytes(), python=False)
            found = _models[key] = Model(knot.etag, knot.header, tokenizer)
        return found
