"""How a request is answered: its choices are made side by side, and said whole or as events."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any, Final

from admission import Place
from answers import Answer, Head, event, usage
from completions import Prompt
from details import degradation, details
from failures import bad_request, of_refusal
from generation import Generation, Limits
from knot.header import KnotHeader
from knot.tokenizer import Tokenizer
from parameters import Parameters
from protocol.calls import Reply, json_reply
from protocol.steps import Refusal
from route import GatewaySettings
from shared import Shared
from writing import Echo, Writing, merged

EVENTS: Final = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache"}


@dataclass(slots=True)
class _Asked:
    """A request that is being served: a writing for every choice, `n` for each prompt."""

    parameters: Parameters
    prompts: Sequence[Sequence[int]]
    writings: Sequence[Writing]
    answer: Answer

    def prompt_of(self, choice: int) -> Sequence[int]:
        return self.prompts[choice // self.parameters.n]

    def usage(self) -> dict[str, Any]:
        leads = self.writings[:: self.parameters.n]
        return usage(
            sum(len(ids) for ids in self.prompts),
            sum(len(one.written.ids) for one in self.writings),
            sum(one.generation.report.cached_tokens for one in leads),
        )


class Owned:
    """A stream that gives up its generations when it is closed, even if nobody has ever read of it."""

    def __init__(self, pieces: AsyncGenerator[bytes, None], generations: Sequence[Generation]) -> None:
        self._pieces = pieces
        self._generations = generations

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        return await anext(self._pieces)

    async def aclose(self) -> None:
        """Ends all of them."""
        try:
            await self._pieces.aclose()
        finally:
            for generation in self._generations:
                generation.leave()


class Answering:
    """Answers requests whose prompts are ids."""

    def __init__(
        self, settings: GatewaySettings, header: KnotHeader, tokenizer: Tokenizer, shared: Shared
    ) -> None:
        self._settings = settings
        self._header = header
        self._tokenizer = tokenizer
        self._shared = shared
        self._route = shared.route

    async def reply(
        self,
        parameters: Parameters,
        prompts: Sequence[Sequence[int]],
        param: str,
        prefix: str,
        shape: Callable[[Head, Tokenizer, bool], Answer],
        echoed: Sequence[Prompt] = (),
    ) -> Reply:
        """Checks what only the model can tell, and answers in the shape of the endpoint.

        `param` names the prompt in errors, `prefix` begins the answer's id; with `echoed`, answers begin with
        their prompts. Raises `ApiError` and `Refusal`.
        """
        for token in parameters.shaping.bias:
            self._check_id(token, "logit_bias")
        most = [self._most(ids, parameters, param) for ids in prompts]
        if parameters.seed is None:
            parameters = replace(parameters, seed=secrets.randbits(63))
        head = Head(
            prefix + secrets.token_hex(12),
            int(time.time()),
            self._header.name,
            f"fp_{self._route.model[:16]}",
        )
        answer = shape(head, self._tokenizer, parameters.logprobs is not None)
        writings = self._writings(head.id, parameters, prompts, most, echoed)
        asked = _Asked(parameters, prompts, writings, answer)
        generations = [one.generation for one in writings]
        if parameters.stream:
            return Reply(200, Owned(self._stream(asked), generations), EVENTS)
        try:
            async with aclosing(merged([one.deltas() for one in writings])) as deltas:
                async for _ in deltas:
                    pass
        finally:
            for generation in generations:
                generation.leave()
        whole = answer.whole([one.written for one in writings])
        return json_reply({**whole, "usage": asked.usage(), **self._details(asked, range(len(writings)))})

    def _writings(
        self,
        name: str,
        parameters: Parameters,
        prompts: Sequence[Sequence[int]],
        most: Sequence[int],
        echoed: Sequence[Prompt],
    ) -> list[Writing]:
        """The choices of every prompt. Raises `Refusal` when there is no room for all of them."""
        room = self._settings.max_sessions + self._settings.max_waiting
        if len(prompts) * parameters.n > room:
            raise bad_request(
                f"the request asks for {len(prompts) * parameters.n} answers, {room} is most here", "n"
            )
        found: list[Writing] = []
        try:
            for number, ids in enumerate(prompts):
                places = self._shared.enter(name, parameters.n, len(ids), most[number])
                echo = echoed[number] if echoed else None
                found += self._choices(f"{name}-{number}", name, parameters, ids, most[number], echo, places)
        except BaseException:
            for one in found:
                one.generation.leave()
            raise
        return found

    def _choices(
        self,
        name: str,
        request: str,
        parameters: Parameters,
        ids: Sequence[int],
        most: int,
        prompt: Prompt | None,
        places: Sequence[Place],
    ) -> list[Writing]:
        """The choices of one prompt: the first reads it, the others begin with what it has read."""
        scores = prompt is not None and parameters.logprobs is not None

        def generation(choice: int, twins: Sequence[Generation] = ()) -> Generation:
            return Generation(
                self._shared,
                f"{name}-{choice}",
                ids,
                parameters.sampler_of(choice),
                limits=Limits(attempts=self._settings.attempts),
                allow_degraded=parameters.allow_degraded,
                shaping=parameters.shaping,
                best=parameters.logprobs or 0,
                scores=scores and not choice,
                place=places[choice],
                twins=twins,
                request=request,
            )

        twins = [generation(choice) for choice in range(1, parameters.n)]
        lead = generation(0, twins)
        echo = None
        if prompt is not None:
            echo = Echo(self._tokenizer, prompt, ids, lead if scores else None)
        ends = () if parameters.ignore_end else self._tokenizer.info.end_ids
        return [
            Writing(one, self._tokenizer, most=most, stops=parameters.stops, ends=ends, echo=echo)
            for one in (lead, *twins)
        ]

    async def _stream(self, asked: _Asked) -> AsyncGenerator[bytes, None]:
        answer, parameters = asked.answer, asked.parameters
        # With usage to come, OpenAI's events say that they have none themselves.
        common: dict[str, Any] = {"usage": None} if parameters.include_usage else {}
        try:
            async with aclosing(
                merged([self._events(asked, i) for i in range(len(asked.writings))])
            ) as found:
                async for _, value in found:
                    yield event({**value, **common})
        except Refusal as refusal:
            # The status is sent already: the error comes as an event, and nothing follows it.
            yield event(of_refusal(refusal).body)
            return
        if parameters.include_usage:
            yield event({**answer.counts(), "usage": asked.usage()})
        yield event("[DONE]")

    async def _events(self, asked: _Asked, choice: int) -> AsyncGenerator[dict[str, Any], None]:
        writing, answer = asked.writings[choice], asked.answer
        opening = answer.opening(choice)
        if opening is not None:
            yield opening
        async with aclosing(writing.deltas()) as deltas:
            async for delta in deltas:
                yield answer.delta(choice, delta)
        yield {**answer.ending(choice, writing.written.finish), **self._details(asked, [choice])}

    def _most(self, ids: Sequence[int], parameters: Parameters, param: str) -> int:
        """How many tokens may be written after `ids`. Raises `ApiError`."""
        context, ceiling = self._header.config.context_length, self._settings.max_tokens
        if not ids:
            raise bad_request(f"the request.{param} is empty; a model continues at least one token", param)
        for token in ids:
            self._check_id(token, param)
        asked = parameters.max_tokens
        if asked is not None and asked > ceiling:
            raise bad_request(f"the request.max_tokens is {asked}, {ceiling} is most", "max_tokens")
        if len(ids) + (asked or 0) > context or (asked is None and len(ids) == context):
            wanted = "" if asked is None else f" and max_tokens is {asked}"
            raise bad_request(
                f"the prompt has {len(ids)} tokens{wanted}, more than the model's context of {context} holds",
                param,
                "context_length_exceeded",
            )
        return min(ceiling, context - len(ids)) if asked is None else asked

    def _check_id(self, token: int, param: str) -> None:
        size = self._header.config.vocab_size
        if token >= size:
            raise bad_request(f"token id {token} does not exist; the vocabulary has {size} ids", param)

    def _details(self, asked: _Asked, choices: Sequence[int]) -> dict[str, Any]:
        """What the cluster did for these choices; a degraded answer always says so."""
        found: list[dict[str, Any]] = []
        for choice in choices:
            writing = asked.writings[choice]
            report = writing.generation.report
            if asked.parameters.details:
                seed = asked.parameters.sampler_of(choice % asked.parameters.n).seed
                found.append(details(report, writing.written, asked.prompt_of(choice), seed))
            elif report.degraded:
                found.append(degradation(report))
        if not found:
            return {}
        # One choice is said plainly; of several the first is, and all of them are listed.
        plain = dict(found[0])
        if len(found) > 1:
            plain["choices"] = found
        if asked.parameters.details:
            plain |= {"stations": len(self._route.stations), "shards": len(self._route.shards)}
        return {"knot": plain}
