"""The gateway's endpoints: POST /v1/completions, GET /v1/models, /health, /cluster, /metrics and /memory."""

from __future__ import annotations

import hmac
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

from completions import CompletionRequest, error_body, event, usage
from generation import Generation, Limits
from knot.header import KnotHeader
from knot.tokenizer import Tokenizer
from observer import CONTENT_TYPE, Observer
from protocol.calls import Call, Reply, json_reply
from protocol.fields import BadField, json_fields
from protocol.serving import not_found
from protocol.steps import Refusal, RefusalKind
from route import GatewaySettings
from shared import Shared
from text import TextStream

ENDPOINTS: Final = "POST /v1/completions, GET /v1/models, /health, /cluster, /metrics and /memory"
EVENTS: Final = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache"}
STATUS: Final = {
    RefusalKind.BUSY: 503,
    RefusalKind.UNAVAILABLE: 503,
    RefusalKind.OVER_BUDGET: 503,
    RefusalKind.LOST: 502,
    RefusalKind.BAD_WEIGHTS: 502,
    RefusalKind.BAD_FRAME: 400,
}


@dataclass(slots=True)
class _Made:
    """What a completion has come to: ids, text and why it ended."""

    ids: list[int]
    text: str = ""
    finish: str = "length"


class Owned:
    """A stream that gives up its generation when it is closed, even if nobody has ever read of it."""

    def __init__(self, pieces: AsyncGenerator[bytes, None], generation: Generation) -> None:
        self._pieces = pieces
        self._generation = generation

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        return await anext(self._pieces)

    async def aclose(self) -> None:
        """Ends both."""
        try:
            await self._pieces.aclose()
        finally:
            self._generation.leave()


class GatewayApi:
    """Answers calls from outside, over one route."""

    def __init__(
        self,
        settings: GatewaySettings,
        header: KnotHeader,
        tokenizer: Tokenizer,
        shared: Shared,
        observer: Observer,
    ) -> None:
        self._settings = settings
        self._header = header
        self._tokenizer = tokenizer
        self._shared = shared
        self._observer = observer
        self._route = shared.route

    async def answer(self, call: Call) -> Reply:
        """Answers one call, whatever it is."""
        if not self._may(call.headers):
            return json_reply(
                error_body("send Authorization: Bearer and a key of this gateway", "invalid_request_error"),
                401,
            )
        match call.method, call.path:
            case "POST", "/v1/completions":
                return await self._completions(call)
            case "GET", "/v1/models":
                model = {"id": self._header.name, "object": "model", "owned_by": "knot", "created": 0}
                return json_reply({"object": "list", "data": [model]})
            case "GET", "/health":
                return json_reply({"status": "ok", "kind": "gateway", "model": self._route.model})
            case "GET", "/cluster":
                return json_reply(self._cluster())
            case "GET", "/metrics":
                return Reply(200, (await self._observer.metrics()).encode(), {"content-type": CONTENT_TYPE})
            case "GET", "/memory":
                return json_reply(self._observer.memory())
            case _:
                return not_found(call, "the gateway", ENDPOINTS)

    def _may(self, headers: Mapping[str, str]) -> bool:
        given = headers.get("authorization", "").removeprefix("Bearer ").encode(errors="surrogatepass")
        keys = (*self._settings.api_keys, self._settings.secret)
        # Every key is compared, so that the time says nothing.
        return sum(hmac.compare_digest(given, key.encode()) for key in keys) > 0

    def _cluster(self) -> dict[str, Any]:
        return {
            "model": self._header.name,
            "fingerprint": self._route.model,
            "stations": [list(station.layers) for station in self._route.stations],
            "shards": [list(shard.ids) for shard in self._route.shards],
            "max_rows": self._route.max_rows,
            "resident": self._route.resident,
        }

    async def _completions(self, call: Call) -> Reply:
        try:
            fields = json_fields(call.body, "the request")
            request = CompletionRequest.from_fields(fields)
            ids = self._ids(request)
        except BadField as error:
            return json_reply(error_body(str(error), "invalid_request_error"), 400)
        seed = secrets.randbits(63) if request.seed is None else request.seed
        request = replace(request, sampler=replace(request.sampler, seed=seed))
        name = f"cmpl-{secrets.token_hex(12)}"
        try:
            [place] = self._shared.enter(name, 1, len(ids), request.max_tokens)
        except Refusal as refusal:
            return self._refused(refusal)
        generation = Generation(
            self._shared,
            name,
            ids,
            request.sampler,
            limits=Limits(attempts=self._settings.attempts),
            allow_degraded=request.allow_degraded,
            place=place,
        )
        if request.stream:
            return Reply(200, Owned(self._stream(request, name, ids, generation), generation), EVENTS)
        made = _Made([])
        try:
            async with aclosing(self._deltas(request, generation, made)) as deltas:
                async for _ in deltas:
                    pass
        except Refusal as refusal:
            return self._refused(refusal)
        answer = self._chunk(name, made.text, made.finish)
        answer["usage"] = usage(len(ids), len(made.ids))
        answer.update(self._details(request, ids, generation, made))
        return json_reply(answer)

    async def _stream(
        self, request: CompletionRequest, name: str, ids: list[int], generation: Generation
    ) -> AsyncGenerator[bytes, None]:
        made = _Made([])
        try:
            async with aclosing(self._deltas(request, generation, made)) as deltas:
                async for text in deltas:
                    if text:
                        yield event(self._chunk(name, text, None))
        except Refusal as refusal:
            # The status is sent already: the error comes as an event, and nothing follows it.
            yield event(error_body(str(refusal), "server_error", code=str(refusal.kind)))
            return
        last = self._chunk(name, "", made.finish)
        last.update(self._details(request, ids, generation, made))
        yield event(last)
        if request.include_usage:
            yield event(
                {**self._chunk(name, "", None), "choices": [], "usage": usage(len(ids), len(made.ids))}
            )
        yield event("[DONE]")

    async def _deltas(
        self, request: CompletionRequest, generation: Generation, made: _Made
    ) -> AsyncGenerator[str, None]:
        """Pieces of text as they become certain; `made` is complete when they end."""
        if request.max_tokens == 0:
            generation.leave()
            return
        ends = () if request.ignore_end else self._tokenizer.info.end_ids
        decoder = self._tokenizer.stream()
        text = TextStream(decoder, request.stops)
        finished = False
        try:
            async with aclosing(generation.tokens(request.max_tokens)) as tokens:
                async for sampled in tokens:
                    made.ids.append(sampled.id)
                    if sampled.id in ends:
                        made.finish = "stop"
                        break
                    delta = text.push(sampled.id)
                    made.text += delta
                    yield delta
                    if text.stopped:
                        made.finish = "stop"
                        break
            finished = True
            delta = text.finish()
            made.text += delta
            if text.stopped:
                made.finish = "stop"
            yield delta
        finally:
            if not finished:
                decoder.finish()  # frees the stream's place in the engine

    def _ids(self, request: CompletionRequest) -> list[int]:
        config = self._header.config
        if isinstance(request.prompt, str):
            ids = self._tokenizer.encode(request.prompt)
        else:
            ids = list(request.prompt)
        if not ids:
            raise BadField("the request.prompt is empty; a model continues at least one token")
        for token in ids:
            if token >= config.vocab_size:
                raise BadField(f"token id {token} does not exist; the vocabulary has {config.vocab_size} ids")
        if request.max_tokens > self._settings.max_tokens:
            raise BadField(
                f"the request.max_tokens is {request.max_tokens}, {self._settings.max_tokens} is most"
            )
        if len(ids) + request.max_tokens > config.context_length:
            raise BadField(
                f"the prompt has {len(ids)} tokens and max_tokens is {request.max_tokens}, more than "
                f"the model's context of {config.context_length}"
            )
        return ids

    def _chunk(self, name: str, text: str, finish: str | None) -> dict[str, Any]:
        choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": finish}
        return {
            "id": name,
            "object": "text_completion",
            "created": int(time.time()),
            "model": self._header.name,
            "choices": [choice],
        }

    def _details(
        self, request: CompletionRequest, ids: list[int], generation: Generation, made: _Made
    ) -> dict[str, Any]:
        """What the cluster did; a degraded answer always says so."""
        report = generation.report
        if not request.details and not report.degraded:
            return {}
        degraded = {"shards": report.degraded.shards, "tokens": report.degraded.tokens}
        details: dict[str, Any] = {"degraded": degraded if report.degraded else False}
        if request.details:
            details |= {**asdict(report), **report.timings(), **details}
            details |= {"prompt_ids": ids, "ids": made.ids, "seed": request.sampler.seed}
            details |= {"stations": len(self._route.stations), "shards": len(self._route.shards)}
        return {"knot": details}

    def _refused(self, refusal: Refusal) -> Reply:
        status = STATUS.get(refusal.kind, 500)
        headers: dict[str, str] = {}
        if refusal.retry_after_ms is not None:
            headers["retry-after"] = str(max(1, refusal.retry_after_ms // 1000))
        return json_reply(error_body(str(refusal), "server_error", code=str(refusal.kind)), status, headers)
