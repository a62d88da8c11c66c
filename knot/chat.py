"""Chat templates: messages to the one text that a model was trained on, by the template its file carries.

A template is a program from an untrusted file. It runs in Jinja's sandbox, without access to attributes that
lead out of it, goes round its loops and makes text within bounds, and whatever it does wrong is a
`ChatTemplateError`. Jinja is only imported when a template is rendered: a Worker that renders none has no
memory to spare for it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from datetime import datetime
from functools import lru_cache, wraps
from typing import TYPE_CHECKING, Any, Final, NoReturn, cast

from knot.errors import KnotError

if TYPE_CHECKING:
    from jinja2 import Environment, Template

# Rounds of all loops of a template together, of which a call takes several; characters that one operation may
# make.
MAX_ROUNDS: Final = 1 << 18
ROUNDS_OF_A_CALL: Final = 16
MAX_CHARS: Final = 1 << 23
# An item of a list counts as so many characters.
ITEM: Final = 8
# The largest number that a template may hand to a function: widths and counts become text.
MAX_NUMBER: Final = 1 << 16


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
    from jinja2 import TemplateError

    try:
        compiled, budget = _compiled(template)
        budget.begin()
        pieces = compiled.generate(
            messages=list(messages),
            add_generation_prompt=add_generation_prompt,
            bos_token=bos_token,
            eos_token=eos_token,
            tools=variables.pop("tools", None),
            **variables,
        )
        return budget.together(pieces)
    except TemplateError as error:
        raise ChatTemplateError(f"the chat template refused: {error}") from error
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, RecursionError) as error:
        raise ChatTemplateError(f"the chat template failed: {type(error).__name__}: {error}") from error
    except MemoryError as error:
        raise ChatTemplateError("the chat template wanted more memory than there is") from error


@lru_cache(maxsize=2)
def _compiled(template: str) -> tuple[Template, Budget]:
    budget = Budget()
    environment = _environment(budget)
    functions: dict[str, Any] = environment.globals
    functions |= {"raise_exception": _refuse, "strftime_now": _now}
    environment.policies["json.dumps_kwargs"] = {"ensure_ascii": False, "sort_keys": False}
    return environment.from_string(template), budget


class Budget:
    """What one rendering may still do. Raises Jinja's `SecurityError` beyond it."""

    def __init__(self) -> None:
        self.rounds = 0

    def begin(self) -> None:
        """A rendering begins."""
        self.rounds = MAX_ROUNDS

    def round(self, count: int = 1) -> None:
        """A loop goes round once more, or something is called."""
        self.rounds -= count
        if self.rounds < 0:
            self._exceeded(f"more than {MAX_ROUNDS} rounds of loops and calls")

    def rounds_of(self, values: Iterable[Any]) -> Iterator[Any]:
        """`values`, each of which is a round."""
        for value in values:
            self.round()
            yield value

    def numbers(self, values: Iterable[Any]) -> None:
        """Numbers that a template hands to something; widths and counts become text."""
        for value in values:
            if isinstance(value, int) and abs(value) > MAX_NUMBER:
                self._exceeded(f"the number {value:.3g}, of at most {MAX_NUMBER}")

    def size(self, size: int) -> None:
        """Characters or items of what is about to be made."""
        if size > MAX_CHARS:
            self._exceeded(f"a text or list of {size}, of at most {MAX_CHARS}")

    def made(self, value: object) -> object:
        """What was made."""
        if isinstance(value, Sized):
            self.size(_size(value))
        return value

    def together(self, values: Iterable[object]) -> str:
        """The values' texts as one."""
        pieces: list[str] = []
        size = 0
        for value in values:
            pieces.append(str(value))
            size += len(pieces[-1])
            self.size(size)
        return "".join(pieces)

    def _exceeded(self, what: str) -> NoReturn:
        from jinja2.exceptions import SecurityError

        raise SecurityError(f"it wants {what}")


def _environment(budget: Budget) -> Environment:
    """Jinja's sandbox, within a budget. (A class inside: its base is imported only here.)"""
    from jinja2 import nodes, pass_context
    from jinja2.sandbox import ImmutableSandboxedEnvironment
    from jinja2.visitor import NodeTransformer

    class Watch(NodeTransformer):
        """Has loops and `~` ask the budget."""

        def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802, the visitor's own naming
            self.generic_visit(node)
            node.iter = nodes.Filter(node.iter, "rounds_of", [], [], None, None)
            return node

        def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
            self.generic_visit(node)
            return nodes.Filter(nodes.List(node.nodes), "together", [], [], None, None)

    class Bounded(ImmutableSandboxedEnvironment):
        intercepted_binops = frozenset(("+", "*", "**", "%"))

        def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
            return cast(nodes.Template, Watch().visit(super()._parse(source, name, filename)))

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            if operator == "*":
                for times, value in ((left, right), (right, left)):
                    if isinstance(times, int) and isinstance(value, Sized):
                        budget.size(times * _size(value))
            elif operator == "**":
                budget.numbers((left, right))
                budget.numbers((right * 1024 if isinstance(right, int) else 0,))
            elif operator == "%" and isinstance(left, str):
                _widths(budget, left)
                budget.numbers(cast(Any, right) if isinstance(right, tuple) else ())
            elif operator == "+" and isinstance(left, Sized) and isinstance(right, Sized):
                budget.size(_size(left) + _size(right))
            return super().call_binop(context, operator, left, right)

        def wrap_str_format(self, value: Any) -> Any:
            wrapped = super().wrap_str_format(value)
            if wrapped is not None:
                _widths(budget, str(value.__self__))
            return wrapped

        def call(self, context: Any, function: Any, /, *args: Any, **kwargs: Any) -> Any:
            budget.round(ROUNDS_OF_A_CALL)
            budget.numbers((*args, *kwargs.values()))
            return budget.made(super().call(context, function, *args, **kwargs))

    def bounded(filter: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(filter)
        def call(*args: Any, **kwargs: Any) -> Any:
            budget.round(ROUNDS_OF_A_CALL)
            budget.numbers((*args, *kwargs.values()))
            return budget.made(filter(*args, **kwargs))

        return call

    made = Bounded(trim_blocks=True, lstrip_blocks=True)
    filters: dict[str, Any] = made.filters
    filters |= {name: bounded(filter) for name, filter in filters.items()}

    # With the context they are not tried out when the template is compiled.
    def rounds_of(_: Any, values: Any) -> Iterator[Any]:
        return budget.rounds_of(values)

    def together(_: Any, values: Any) -> str:
        return budget.together(values)

    filters |= {"rounds_of": pass_context(rounds_of), "together": pass_context(together)}
    return made


def _size(value: Sized) -> int:
    return len(value) * (1 if isinstance(value, str) else ITEM)


def _widths(budget: Budget, layout: str) -> None:
    """Widths inside a format."""
    budget.numbers(int(digits[:18]) for digits in re.findall(r"\d{5,}", layout))


def _refuse(message: object) -> NoReturn:
    from jinja2 import TemplateError, Undefined

    raise TemplateError("no reason was given" if isinstance(message, Undefined) else str(message))


def _now(layout: str) -> str:
    return datetime.now().astimezone().strftime(layout)
