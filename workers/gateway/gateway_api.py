"""The gateway's endpoints: OpenAI's chat completions, completions and models, and what tells of itself."""

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Final
from urllib.parse import unquote

from answering import Answering
from answers import ChatAnswer, CompletionAnswer
from chat import ChatRequest
from completions import CompletionRequest, Prompt
from failures import ApiError, bad_request, of_field, of_refusal
from keys import check_key
from knot.chat import ChatTemplateError, render
from knot.header import KnotHeader
from knot.tokenizer import Tokenizer
from observer import CONTENT_TYPE, Observer
from protocol.calls import Call, Reply, json_reply
from protocol.fields import BadField, json_fields
from protocol.steps import Refusal
from route import GatewaySettings
from shared import Shared

MAX_BODY: Final = 8 << 20

Handler = Callable[[Call], Coroutine[Any, Any, Reply]]


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
        self._observer = observer
        self._route = shared.route
        self._answering = Answering(settings, header, tokenizer, shared)
        self._created = int(time.time())
        self._endpoints: Mapping[str, tuple[str, Handler]] = {
            "/v1/chat/completions": ("POST", self._chat),
            "/v1/completions": ("POST", self._completions),
            "/v1/models": ("GET", self._models),
            "/health": ("GET", self._health),
            "/cluster": ("GET", self._cluster),
            "/metrics": ("GET", self._metrics),
            "/memory": ("GET", self._memory),
        }

    async def answer(self, call: Call) -> Reply:
        """Answers one call, whatever it is."""
        try:
            check_key(self._settings, call.headers)
            return await self._handler(call)(call)
        except ApiError as error:
            return error.reply
        except BadField as error:
            return of_field(error).reply
        except Refusal as refusal:
            return of_refusal(refusal).reply

    def _handler(self, call: Call) -> Handler:
        method, handler = self._endpoints.get(call.path, ("", self._model))
        if not method and not call.path.startswith("/v1/models/"):
            known = ", ".join(f"{method} {path}" for path, (method, _) in self._endpoints.items())
            raise ApiError(
                404, f"there is no {call.method} {call.path} here; there are {known}", code="unknown_url"
            )
        method = method or "GET"
        if call.method != method:
            raise ApiError(
                405,
                f"{call.path} takes {method}, not {call.method}",
                code="method_not_allowed",
                headers={"allow": method},
            )
        if len(call.body) > MAX_BODY:
            raise ApiError(
                413, f"the request has {len(call.body)} bytes, at most {MAX_BODY} are taken", code="too_large"
            )
        return handler

    async def _models(self, call: Call) -> Reply:
        return json_reply({"object": "list", "data": [self._model_card()]})

    async def _model(self, call: Call) -> Reply:
        self._check_model(unquote(call.path.removeprefix("/v1/models/")))
        return json_reply(self._model_card())

    def _model_card(self) -> dict[str, Any]:
        return {"id": self._header.name, "object": "model", "created": self._created, "owned_by": "knot"}

    def _check_model(self, name: str | None) -> None:
        if name is not None and name != self._header.name:
            raise ApiError(
                404,
                f"the model {name!r} is not served here; there is {self._header.name!r}",
                param="model",
                code="model_not_found",
            )

    async def _health(self, call: Call) -> Reply:
        return json_reply({"status": "ok", "kind": "gateway", "model": self._route.model})

    async def _cluster(self, call: Call) -> Reply:
        return json_reply(
            {
                "model": self._header.name,
                "fingerprint": self._route.model,
                "stations": [list(station.layers) for station in self._route.stations],
                "shards": [list(shard.ids) for shard in self._route.shards],
                "max_rows": self._route.max_rows,
                "resident": self._route.resident,
            }
        )

    async def _metrics(self, call: Call) -> Reply:
        return Reply(200, (await self._observer.metrics()).encode(), {"content-type": CONTENT_TYPE})

    async def _memory(self, call: Call) -> Reply:
        return json_reply(self._observer.memory())

    async def _completions(self, call: Call) -> Reply:
        request = CompletionRequest.from_fields(json_fields(call.body, "the request"))
        self._check_model(request.parameters.model)
        prompts = [self._encoded(prompt) for prompt in request.prompts]
        return await self._answering.reply(
            request.parameters,
            prompts,
            "prompt",
            "cmpl-",
            CompletionAnswer,
            request.prompts if request.echo else (),
        )

    async def _chat(self, call: Call) -> Reply:
        request = ChatRequest.from_fields(json_fields(call.body, "the request"))
        self._check_model(request.parameters.model)
        ids = self._tokenizer.encode(self._rendered(request), allow_special=True)
        return await self._answering.reply(request.parameters, [ids], "messages", "chatcmpl-", ChatAnswer)

    def _encoded(self, prompt: Prompt) -> list[int]:
        return self._tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)

    def _rendered(self, request: ChatRequest) -> str:
        info = self._tokenizer.info
        if info.chat_template is None:
            raise bad_request(
                f"the model {self._header.name!r} has no chat template; use /v1/completions",
                code="no_chat_template",
            )
        try:
            return render(
                info.chat_template,
                request.messages,
                bos_token=self._word(info.bos_id),
                eos_token=self._word(info.eos_id),
                **request.variables,
            )
        except ChatTemplateError as error:
            raise bad_request(str(error), "messages", "chat_template_error") from error

    def _word(self, token: int | None) -> str:
        return "" if token is None else self._tokenizer.token_bytes(token).decode(errors="replace")
