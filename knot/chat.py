"""Chat templates: messages to the one text that a model was trained on, by the template its file carries.

A template is a program from an untrusted file. It runs in Jinja's sandbox, without access to attributes that
lead out of it, and whatever it does wrong is a `ChatTemplateError`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment

from knot.errors import KnotError


class ChatTemplateError(KnotError):
    """A template that does not compile, fails, or refuses the messages; in its own words."""


def render(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool = True,
    bos_token: str = "",
    eos_token: str = "",
    **variables: Any,
) -> str:
    """The prompt for `messages`, each with `role` and `content`. Raises `ChatTemplateError`."""
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    functions: dict[str, Any] = environment.globals
    functions |= {"raise_exception": _refuse, "strftime_now": _now}
    environment.policies["json.dumps_kwargs"] = {"ensure_ascii": False, "sort_keys": False}
    try:
        return environment.from_string(template).render(
            messages=list(messages),
            add_generation_prompt=add_generation_prompt,
            bos_token=bos_token,
            eos_token=eos_token,
            tools=variables.pop("tools", None),
            **variables,
        )
    except TemplateError as error:
        raise ChatTemplateError(f"the chat template refused: {error}") from error
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, RecursionError) as error:
        raise ChatTemplateError(f"the chat template failed: {type(error).__name__}: {error}") from error
    except MemoryError as error:
        raise ChatTemplateError("the chat template wanted more memory than there is") from error


def _refuse(message: object) -> NoReturn:
    raise TemplateError("no reason was given" if isinstance(message, Undefined) else str(message))


def _now(layout: str) -> str:
    return datetime.now().astimezone().strftime(layout)
