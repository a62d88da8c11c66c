"""`POST /v1/completions`: what a request asks for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, cast

from knot.strict_json import is_int
from parameters import (
    MAX_CHOICES,
    MAX_LOGPROBS,
    REQUEST,
    Parameters,
    only,
    read_max_tokens,
    read_parameters,
)
from protocol.fields import BadField, Fields, MissingField, UnknownField

MAX_PROMPT_CHARS: Final = 4 << 20
MAX_PROMPT_IDS: Final = 1 << 20
DEFAULT_TOKENS: Final = 16

Prompt = str | tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """A request: every prompt is text or ids; with `echo` the answer begins with its prompt."""

    prompts: tuple[Prompt, ...]
    parameters: Parameters
    echo: bool = False

    @classmethod
    def from_fields(cls, fields: Fields) -> CompletionRequest:
        """Reads a request. Raises `BadField` that names the parameter."""
        logprobs = fields.integer("logprobs", 0, MAX_LOGPROBS) if fields.has("logprobs") else None
        max_tokens = read_max_tokens(fields, "max_tokens", "max_completion_tokens")
        request = cls(
            _prompts(fields),
            read_parameters(fields, DEFAULT_TOKENS if max_tokens is None else max_tokens, logprobs),
            fields.flag("echo", False),
        )
        if fields.has("best_of"):
            best_of = fields.integer("best_of", 1, MAX_CHOICES)
            if best_of != request.parameters.n:
                raise UnknownField(
                    f"{REQUEST}.best_of is {best_of}; only as many answers as are wanted are made, so give n",
                    "best_of",
                )
        only(fields, "suffix", ("",))
        fields.end()
        choices = len(request.prompts) * request.parameters.n
        if choices > MAX_CHOICES:
            raise BadField(
                f"{REQUEST} asks for {choices} answers, n for every prompt; at most {MAX_CHOICES} are made",
                "n",
            )
        return request


def _prompts(fields: Fields) -> tuple[Prompt, ...]:
    """One prompt or several: a text, ids, or a list of texts or of lists of ids."""
    value: Any = fields.raw("prompt")
    if value is None:
        raise MissingField(f"{REQUEST} lacks the field 'prompt'", "prompt")
    if isinstance(value, str):
        return (_text(value),)
    if isinstance(value, list):
        listed = cast(list[Any], value)
        if not listed or all(is_int(one) for one in listed):
            return (_ids(listed),)
        if len(listed) > MAX_CHOICES:
            raise BadField(f"{REQUEST}.prompt has {len(listed)} prompts, at most {MAX_CHOICES}", "prompt")
        if all(isinstance(one, str) for one in listed):
            return tuple(_text(one) for one in listed)
        if all(isinstance(one, list) for one in listed):
            return tuple(_ids(one) for one in listed)
    raise BadField(
        f"{REQUEST}.prompt is of a wrong kind, expected text, a list of token ids, or a list of such prompts",
        "prompt",
    )


def _text(value: str) -> str:
    if len(value) > MAX_PROMPT_CHARS:
        raise BadField(
            f"{REQUEST}.prompt has {len(value)} characters, at most {MAX_PROMPT_CHARS} are taken", "prompt"
        )
    return value


def _ids(value: list[Any]) -> tuple[int, ...]:
    fields = Fields({"prompt": value}, REQUEST)
    return tuple(fields.integers("prompt", MAX_PROMPT_IDS, 0, (1 << 31) - 1))
