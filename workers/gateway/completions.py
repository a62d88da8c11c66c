"""`POST /v1/completions` as values: what a request asks for, and how an answer is said."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from protocol.fields import BadField, Fields
from sampling import Sampler

MAX_PROMPT_CHARS: Final = 4 << 20
MAX_PROMPT_IDS: Final = 1 << 20
MAX_STOPS: Final = 16


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """A request: `prompt` is text or ids; `seed` None means a fresh one."""

    model: str | None
    prompt: str | tuple[int, ...]
    max_tokens: int
    sampler: Sampler
    seed: int | None
    stops: tuple[str, ...]
    stream: bool
    include_usage: bool
    allow_degraded: bool
    ignore_end: bool
    details: bool

    @classmethod
    def from_fields(cls, fields: Fields) -> CompletionRequest:
        """Reads a request. Raises `BadField` that names the parameter.

        Beyond OpenAI's: `top_k`, `min_p`, `on_shard_failure` ("refuse" or "degrade"), `ignore_eos`, and
        `details` for what the cluster did.
        """
        model = fields.text("model") if fields.has("model") else None
        options = fields.object("stream_options") if fields.has("stream_options") else None
        seed = fields.integer("seed", -(1 << 63), (1 << 63) - 1) if fields.has("seed") else None
        request = cls(
            model=model,
            prompt=_prompt(fields),
            max_tokens=fields.integer("max_tokens", 0, 1 << 20, 16),
            sampler=Sampler(
                temperature=fields.number("temperature", 0, 2, 1.0),
                top_k=fields.integer("top_k", 0, 1 << 20, 0),
                top_p=fields.number("top_p", 0, 1, 1.0),
                min_p=fields.number("min_p", 0, 1, 0.0),
            ),
            seed=seed,
            stops=_stops(fields),
            stream=fields.flag("stream", False),
            include_usage=options.flag("include_usage", False) if options else False,
            allow_degraded=fields.choice("on_shard_failure", {"refuse": False, "degrade": True}, "refuse"),
            ignore_end=fields.flag("ignore_eos", False),
            details=fields.flag("details", False),
        )
        if options:
            options.end()
        fields.raw("user")  # who the caller's user is does not matter here
        fields.end()
        return request


def _prompt(fields: Fields) -> str | tuple[int, ...]:
    value = fields.raw("prompt")
    if isinstance(value, str):
        if len(value) > MAX_PROMPT_CHARS:
            raise BadField(f"the prompt has {len(value)} characters, at most {MAX_PROMPT_CHARS} are taken")
        return value
    if isinstance(value, list):
        ids = Fields({"prompt": value}, "the request")
        return tuple(ids.integers("prompt", MAX_PROMPT_IDS, 0, (1 << 31) - 1))
    raise BadField("the request.prompt is missing or of a wrong kind, expected text or a list of token ids")


def _stops(fields: Fields) -> tuple[str, ...]:
    value: Any = fields.raw("stop", [])
    stops: list[Any] = [value] if isinstance(value, str) else value
    if not isinstance(value, str | list):
        stops = [None]
    if len(stops) > MAX_STOPS or not all(isinstance(stop, str) and stop for stop in stops):
        raise BadField(f"the request.stop is wrong, expected up to {MAX_STOPS} strings that are not empty")
    return tuple(stops)


def error_body(message: str, kind: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """An error in OpenAI's shape."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def event(value: Mapping[str, Any] | str) -> bytes:
    """A server-sent event; text is sent as it is, such as [DONE]."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return f"data: {text}\n\n".encode()


def usage(prompt: int, completion: int) -> dict[str, int]:
    """How many tokens a request took."""
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
