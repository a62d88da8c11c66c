"""`POST /v1/chat/completions`: what a request asks for, and its messages as a template takes them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, cast

from parameters import MAX_LOGPROBS, REQUEST, Parameters, only, read_max_tokens, read_parameters
from protocol.fields import BadField, Fields, UnknownField

MAX_MESSAGES: Final = 4096
MAX_CONTENT_CHARS: Final = 4 << 20
# Templates know the older word for what OpenAI now calls developer messages.
ROLES: Final = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}
# What templates are given by us; nobody else may say it.
OURS: Final = frozenset(("messages", "tools", "add_generation_prompt", "bos_token", "eos_token"))
# What OpenAI's API has and this gateway does not, with the values at which it changes nothing.
NOT_SERVED: Final[Mapping[str, tuple[Any, ...]]] = {
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "reasoning_effort": ("none",),
    "verbosity": ("medium",),
}


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A request: messages as templates take them, and further variables of the template."""

    messages: tuple[Mapping[str, Any], ...]
    parameters: Parameters
    variables: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @classmethod
    def from_fields(cls, fields: Fields) -> ChatRequest:
        """Reads a request. Raises `BadField` that names the parameter."""
        best = fields.integer("top_logprobs", 0, MAX_LOGPROBS) if fields.has("top_logprobs") else None
        wanted = fields.flag("logprobs", False)
        if best is not None and not wanted:
            raise BadField(
                f"{REQUEST}.top_logprobs is given without logprobs; set it to true", "top_logprobs"
            )
        # The newer name first: it is the one that stays.
        max_tokens = read_max_tokens(fields, "max_completion_tokens", "max_tokens")
        variables: dict[str, Any] = {}
        if fields.has("chat_template_kwargs"):
            variables = _variables(fields.raw("chat_template_kwargs"))
        request = cls(
            _messages(fields),
            read_parameters(fields, max_tokens, (best or 0) if wanted else None),
            variables,
        )
        for name, among in NOT_SERVED.items():
            only(fields, name, among)
        fields.end()
        return request


def _variables(given: Any) -> dict[str, Any]:
    name = "chat_template_kwargs"
    if not isinstance(given, dict):
        raise BadField(f"{REQUEST}.{name} is wrong, expected an object", name)
    found = cast(dict[str, Any], given)
    taken = sorted(OURS & found.keys())
    if taken:
        raise BadField(f"{REQUEST}.{name} has {taken[0]!r}, which the gateway says itself", name)
    return found


def _messages(fields: Fields) -> tuple[dict[str, Any], ...]:
    listed = fields.array("messages", MAX_MESSAGES)
    if not listed:
        raise BadField(f"{REQUEST}.messages is empty, expected at least one message", "messages")
    return tuple(_message(given, f"messages[{at}]") for at, given in enumerate(listed))


def _message(given: Any, name: str) -> dict[str, Any]:
    if not isinstance(given, dict):
        raise BadField(f"{REQUEST}.{name} is wrong, expected an object with role and content", name)
    what = f"{REQUEST}.{name}"
    fields = Fields(cast(dict[str, Any], given), what)
    try:
        message: dict[str, Any] = {"role": fields.choice("role", ROLES)}
        calls = fields.array("tool_calls", 128, []) if message["role"] == "assistant" else []
        message["content"] = _content(fields.raw("content"), name, optional=bool(calls))
        if calls:
            message["tool_calls"] = calls
        for key in ("name", "tool_call_id"):
            if fields.has(key):
                message[key] = fields.text(key)
        # An answer that a client sends back has these; without a value they say nothing.
        for key in ("refusal", "annotations", "audio", "function_call"):
            only(fields, key, ([],), what)
        fields.end()
    except BadField as error:
        inside = error.name or ""
        raise type(error)(str(error), inside if inside.startswith(name) else f"{name}.{inside}") from None
    return message


def _content(given: Any, name: str, optional: bool) -> str:
    """A message's text; parts of it are put together, since templates take text."""
    name = f"{name}.content"
    if given is None and optional:
        return ""
    if isinstance(given, str):
        text = given
    elif isinstance(given, list):
        parts = cast(list[Any], given)
        text = "".join(_part(part, f"{name}[{at}]") for at, part in enumerate(parts))
    else:
        raise BadField(f"{REQUEST}.{name} is missing or wrong, expected text or a list of parts", name)
    if len(text) > MAX_CONTENT_CHARS:
        raise BadField(
            f"{REQUEST}.{name} has {len(text)} characters, at most {MAX_CONTENT_CHARS} are taken", name
        )
    return text


def _part(given: Any, name: str) -> str:
    part: dict[str, Any] = cast(dict[str, Any], given) if isinstance(given, dict) else {}
    kind, text = part.get("type"), part.get("text")
    if kind == "text" and isinstance(text, str):
        unknown = sorted(part.keys() - {"type", "text"})
        if unknown:
            raise UnknownField(f"{REQUEST}.{name} has the unknown field {unknown[0]!r}; leave it out", name)
        return text
    found = f"a part of type {str(kind)[:40]!r}" if kind is not None else "no part with a type"
    raise BadField(f'{REQUEST}.{name} is {found}, expected {{"type": "text", "text": …}}', name)
