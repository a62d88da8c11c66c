"""How answers are said: whole or as events, in the shapes of OpenAI's two endpoints."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from choosing import Scored
from knot.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Token:
    """An id of an answer's text: where its text begins, in characters, and what the model made of it.

    `scored` is None for the first id of a prompt, which nothing came before.
    """

    id: int
    start: int
    scored: Scored | None


@dataclass(frozen=True, slots=True)
class Delta:
    """A piece of text that is certain, and the tokens that are complete with it."""

    text: str
    tokens: Sequence[Token] = ()


@dataclass(slots=True)
class Written:
    """What a choice has come to: all its text and tokens, its own ids, and why it ended."""

    text: str = ""
    tokens: list[Token] = field(default_factory=list[Token])
    ids: list[int] = field(default_factory=list[int])
    finish: str = "length"


@dataclass(frozen=True, slots=True)
class Head:
    """What every piece of one answer begins with. `created` is in seconds since 1970."""

    id: str
    created: int
    model: str
    fingerprint: str

    def of(self, kind: str) -> dict[str, Any]:
        """The fields, for an object of a kind."""
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
        }


class Answer(Protocol):
    """One answer in the shape of its endpoint. Choices are by number."""

    def opening(self, choice: int) -> dict[str, Any] | None:
        """What a choice's stream begins with."""
        ...

    def delta(self, choice: int, delta: Delta) -> dict[str, Any]:
        """A piece of a choice."""
        ...

    def ending(self, choice: int, finish: str) -> dict[str, Any]:
        """A choice's end."""
        ...

    def counts(self) -> dict[str, Any]:
        """An event of no choice, for usage."""
        ...

    def whole(self, choices: Sequence[Written]) -> dict[str, Any]:
        """All of it."""
        ...


class CompletionAnswer:
    """The shape of `/v1/completions`. Without `logprobs` there are none."""

    def __init__(self, head: Head, tokenizer: Tokenizer, logprobs: bool) -> None:
        self._head = head.of("text_completion")
        self._tokenizer = tokenizer
        self._logprobs = logprobs

    def opening(self, choice: int) -> dict[str, Any] | None:
        """Nothing."""
        return None

    def delta(self, choice: int, delta: Delta) -> dict[str, Any]:
        """A piece of a choice."""
        return self._with(self._choice(choice, delta.text, delta.tokens, None))

    def ending(self, choice: int, finish: str) -> dict[str, Any]:
        """A choice's end, without text."""
        return self._with(self._choice(choice, "", None, finish))

    def counts(self) -> dict[str, Any]:
        """An event of no choice."""
        return self._with()

    def whole(self, choices: Sequence[Written]) -> dict[str, Any]:
        """All choices."""
        return self._with(
            *(self._choice(i, one.text, one.tokens, one.finish) for i, one in enumerate(choices))
        )

    def _with(self, *choices: dict[str, Any]) -> dict[str, Any]:
        return {**self._head, "choices": list(choices)}

    def _choice(
        self, index: int, text: str, tokens: Sequence[Token] | None, finish: str | None
    ) -> dict[str, Any]:
        logprobs = self._list(tokens) if self._logprobs and tokens is not None else None
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish}

    def _list(self, tokens: Sequence[Token]) -> dict[str, Any]:
        scored = [token.scored for token in tokens]
        return {
            "tokens": [self._name(token.id) for token in tokens],
            "token_logprobs": [None if one is None else one.logprob for one in scored],
            "top_logprobs": [None if one is None else self._best(one) for one in scored],
            "text_offset": [token.start for token in tokens],
        }

    def _best(self, scored: Scored) -> dict[str, float]:
        """The best tokens, and the one that was taken."""
        return {self._name(id): logprob for id, logprob in (*scored.best, (scored.id, scored.logprob))}

    def _name(self, token: int) -> str:
        """A token's text; its bytes where those are no whole characters."""
        data = self._tokenizer.token_bytes(token)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


class ChatAnswer:
    """The shape of `/v1/chat/completions`. Without `logprobs` there are none."""

    def __init__(self, head: Head, tokenizer: Tokenizer, logprobs: bool) -> None:
        self._head = head
        self._tokenizer = tokenizer
        self._logprobs = logprobs

    def opening(self, choice: int) -> dict[str, Any] | None:
        """Who speaks."""
        return self._chunk(choice, {"role": "assistant", "content": "", "refusal": None})

    def delta(self, choice: int, delta: Delta) -> dict[str, Any]:
        """A piece of a choice."""
        return self._chunk(choice, {"content": delta.text}, delta.tokens)

    def ending(self, choice: int, finish: str) -> dict[str, Any]:
        """A choice's end: an empty delta."""
        return self._chunk(choice, {}, finish=finish)

    def counts(self) -> dict[str, Any]:
        """An event of no choice."""
        return {**self._head.of("chat.completion.chunk"), "choices": []}

    def whole(self, choices: Sequence[Written]) -> dict[str, Any]:
        """All choices."""
        found = [
            {
                "index": index,
                "message": {"role": "assistant", "content": one.text, "refusal": None},
                "logprobs": self._list(one.tokens),
                "finish_reason": one.finish,
            }
            for index, one in enumerate(choices)
        ]
        return {**self._head.of("chat.completion"), "choices": found}

    def _chunk(
        self, index: int, delta: dict[str, Any], tokens: Sequence[Token] = (), finish: str | None = None
    ) -> dict[str, Any]:
        logprobs = self._list(tokens) if tokens else None
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
        return {**self._head.of("chat.completion.chunk"), "choices": [choice]}

    def _list(self, tokens: Sequence[Token]) -> dict[str, Any] | None:
        if not self._logprobs:
            return None
        content = [
            {
                **self._entry(token.id, token.scored.logprob),
                "top_logprobs": [self._entry(id, logprob) for id, logprob in token.scored.best],
            }
            for token in tokens
            if token.scored is not None
        ]
        return {"content": content, "refusal": None}

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        data = self._tokenizer.token_bytes(token)
        return {"token": data.decode(errors="replace"), "logprob": logprob, "bytes": list(data)}


def event(value: Mapping[str, Any] | str) -> bytes:
    """A server-sent event; text is sent as it is, such as [DONE]."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return f"data: {text}\n\n".encode()


def usage(prompt: int, completion: int, cached: int = 0) -> dict[str, Any]:
    """How many tokens a request took, and how many of its prompt did not have to be read."""
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
