"""The LayerWarden: tensors of a station's layers in the memory of an isolate near it."""

from __future__ import annotations

from typing import Any

import boundary
from durable_objects.budget import IsolateBudget, most_kept
from durable_objects.front import unavailable, warden_answer
from durable_objects.layer_cache import POLICIES, LayerCache
from durable_objects.layer_warden_api import LayerWardenApi
from knot.bucket import BucketKnot
from protocol.settings import Settings, SettingsError
from workers import DurableObject, Request, Response

# All wardens of this Worker live in one isolate, and share what it may keep.
_budgets: dict[int, IsolateBudget] = {}


class LayerWarden(DurableObject):
    """One warden; its name is `{knot key}@{fingerprint}|{first layer}-{end layer}`."""

    def __init__(self, ctx: Any, env: Any) -> None:
        super().__init__(ctx, env)
        self._api: LayerWardenApi | None = None

    async def fetch(self, request: Request) -> Response:
        """Answers a request from the cluster. POST /restart resets the object."""
        settings = Settings(lambda name: boundary.variable(self.env, name))
        try:
            secret = settings.secret()
            api = self._api = self._api or self._start(settings)
            isolate_budget(settings, _budgets).touch(str(self.ctx.id))
        except SettingsError as error:
            return boundary.response_of(unavailable(error))
        return await warden_answer(request, self.ctx, secret, api.answer)

    def _start(self, settings: Settings) -> LayerWardenApi:
        budget = isolate_budget(settings, _budgets)
        cache = LayerCache(settings.choice("WARDEN_POLICY", POLICIES, "pinned-prefix"), budget)
        budget.register(str(self.ctx.id), cache)
        bucket = boundary.blobs(self.env.KNOT_BUCKET)
        return LayerWardenApi(
            cache, lambda key: BucketKnot.open(bucket, key), boundary.background(self.ctx), boundary.hold
        )


def isolate_budget(settings: Settings, budgets: dict[int, IsolateBudget]) -> IsolateBudget:
    """The one budget of an isolate, made when the first warden starts."""
    limit = most_kept(settings)
    if not budgets:
        budgets[limit] = IsolateBudget(limit, boundary.clock, boundary.held)
    return next(iter(budgets.values()))
