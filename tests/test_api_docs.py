"""What docs/api.md says of parameters and errors is what the gateway does, row by row."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import chat
import parameters
from chat import ChatRequest
from completions import CompletionRequest
from failures import STATUS
from gateway_api import MAX_BODY
from protocol.fields import BadField, Fields, UnknownField
from protocol.steps import RefusalKind

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
GATEWAY = ROOT / "workers" / "gateway"


def rows(section: str) -> list[list[str]]:
    """The rows of a section's table, without its head."""
    text = PAGE.split(f"\n## {section}\n")[1].split("\n## ")[0]
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def names(section: str) -> set[str]:
    return {name for row in rows(section) for name in re.findall(r"`(\w+)`", row[0])}


COMMON, CHATS, COMPLETIONS = "Parameters of both endpoints", "Chats", "Completions"


def read(endpoint: str, **body: Any) -> Any:
    if endpoint == "chat":
        fields = {"messages": [{"role": "user", "content": "x"}], **body}
        return ChatRequest.from_fields(Fields(fields, "the request"))
    return CompletionRequest.from_fields(Fields({"prompt": "x", **body}, "the request"))


def numbers() -> list[tuple[str, float, float, float | None]]:
    """Every parameter whose range is of numbers: name, lowest, highest, default."""
    found: list[tuple[str, float, float, float | None]] = []
    for row in rows(COMMON):
        span = re.fullmatch(r"(-?[\d.]+) to (-?[\d.]+)", row[1])
        if span:
            default = float(row[2]) if re.fullmatch(r"[\d.]+", row[2]) else None
            found += [
                (name, float(span[1]), float(span[2]), default) for name in re.findall(r"`(\w+)`", row[0])
            ]
    return found


@pytest.mark.parametrize(("name", "low", "high", "default"), numbers())
@pytest.mark.parametrize("endpoint", ["chat", "completion"])
def test_a_range_ends_where_the_page_says_and_its_default_is_taken(
    endpoint: str, name: str, low: float, high: float, default: float | None
) -> None:
    def value(number: float) -> float | int:
        return int(number) if number == int(number) else number

    read(endpoint, **{name: value(low)})
    read(endpoint, **{name: value(high)})
    step = 1 if name in ("n", "top_k") else 0.001
    for outside in (low - step, high + step):
        with pytest.raises(BadField, match=name):
            read(endpoint, **{name: value(outside)})
    assert default is not None
    assert read(endpoint, **{name: value(default)}) == read(endpoint)


def test_the_page_has_numbers_to_be_tested() -> None:
    assert len(numbers()) >= 8


def test_every_parameter_that_is_read_is_on_the_page_and_the_other_way_round() -> None:
    pattern = re.compile(r'fields\.(?:has|text|integer|number|flag|choice|array|raw|object)\(\s*"(\w+)"')
    taken = {
        source: set(pattern.findall((GATEWAY / f"{source}.py").read_text(encoding="utf-8")))
        for source in ("parameters", "completions", "chat")
    }
    of_messages = {"role", "content", "tool_calls"}
    tokens = {"max_tokens", "max_completion_tokens"}
    assert names(COMMON) == (taken["parameters"] | tokens | {"logit_bias"})
    assert names(CHATS) == taken["chat"] - of_messages
    assert names(COMPLETIONS) == taken["completions"]


def test_what_the_page_says_is_without_effect_or_refused_is() -> None:
    for name in parameters.WITHOUT_EFFECT:
        assert f"`{name}`" in PAGE
    refused = PAGE.split("## What OpenAI's has and this has not")[1]
    for name in ("tools", "tool_choice", "functions", "prediction", "web_search_options", "reasoning_effort"):
        assert f"`{name}`" in refused
        with pytest.raises(UnknownField, match=name):
            read("chat", **{name: "something"})
    assert set(chat.ROLES) == {"system", "developer", "user", "assistant", "tool"}
    for role in chat.ROLES:
        assert f"`{role}`" in PAGE


def test_every_code_is_on_the_page_with_its_status() -> None:
    said = {code: int(row[0]) for row in rows("Errors") for code in re.findall(r"`(\w+)`", row[2])}
    for kind in RefusalKind:
        assert said.pop(str(kind)) == STATUS.get(kind, 500), kind
    sources = "".join(path.read_text(encoding="utf-8") for path in GATEWAY.glob("*.py"))
    for code in said:
        assert f'"{code}"' in sources, code
    for code in re.findall(r'code="(\w+)"', sources):
        assert code in said or code in list(RefusalKind), code
    assert f"{MAX_BODY >> 20} MiB" in PAGE
