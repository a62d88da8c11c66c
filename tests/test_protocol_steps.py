"""Steps as values: what goes out as JSON comes back the same, and what contradicts itself is refused."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.fields import BadField
from protocol.frames import Kind, Part, decode, encode
from protocol.steps import (
    MAX_ID,
    MAX_LISTED,
    MAX_POSITION,
    MAX_ROWS,
    MAX_TOP_K,
    Adjustment,
    Choice,
    EmbedStep,
    Envelope,
    ForwardStep,
    LogitsStep,
    Phase,
    Refusal,
    RefusalKind,
    Rows,
    embed_step,
    forward_step,
    logits_step,
    raise_refusal,
)

ids = st.text('az09-"\\\né歪😀', min_size=1, max_size=20)
tokens = st.integers(0, (1 << 31) - 1)
envelopes = st.builds(Envelope, ids, ids, st.integers(0, MAX_POSITION), ids, st.tuples(tokens, tokens), ids)
ends = st.sampled_from([Phase.RELEASE, Phase.CANCEL])
forwards = st.one_of(
    st.builds(
        lambda envelope, phase, at, count, rows: ForwardStep(envelope, phase, at, count, at, rows),
        envelopes,
        st.sampled_from([Phase.PREFILL, Phase.DECODE]),
        st.integers(0, MAX_POSITION),
        st.integers(1, MAX_ROWS),
        st.sampled_from(Rows),
    ),
    st.builds(lambda envelope, phase: ForwardStep(envelope, phase, 0, 0, 0), envelopes, ends),
    st.builds(
        lambda envelope, at, source, claims: ForwardStep(
            envelope, Phase.OPEN, at, 0, at, source=source, claims=claims
        ),
        envelopes,
        st.integers(0, MAX_POSITION),
        st.none() | ids,
        st.booleans(),
    ),
)
choices = st.builds(
    Choice,
    st.integers(0, MAX_TOP_K),
    st.floats(0, 1e6),
    st.none() | st.integers(0, (1 << 63) - 1),
    st.lists(st.builds(Adjustment, tokens, st.floats(1e-6, 1e6), st.floats(-1e9, 1e9)), max_size=4).map(
        tuple
    ),
    st.lists(tokens, max_size=4).map(tuple),
)


def sent(kind: Kind, step: Any) -> Mapping[str, Any]:
    """The step's envelope as it arrives."""
    return decode(encode(kind, [Part(step.to_json())])).parts[0].envelope


@settings(max_examples=40, deadline=None)
@given(forwards, st.builds(EmbedStep, envelopes), st.builds(LogitsStep, envelopes, choices, st.booleans()))
def test_a_step_arrives_as_it_was_sent(forward: ForwardStep, embed: EmbedStep, logits: LogitsStep) -> None:
    assert forward_step(sent(Kind.FORWARD, forward)) == forward
    assert embed_step(sent(Kind.EMBED, embed)) == embed
    assert logits_step(sent(Kind.LOGITS, logits)) == logits


ENVELOPE = Envelope("r", "s", 1, "m", (0, 3), "prefill-0-4")
FORWARD = ForwardStep(ENVELOPE, Phase.PREFILL, 0, 4, 0).to_json()
EMBED = EmbedStep(ENVELOPE).to_json()
LOGITS = LogitsStep(
    ENVELOPE, Choice(top_k=3, wanted=(1, 2), adjustments=(Adjustment(5, 1.5, -2.0),))
).to_json()
READERS: dict[str, tuple[Callable[[Mapping[str, Any]], Any], dict[str, Any]]] = {
    "forward": (forward_step, FORWARD),
    "embed": (embed_step, EMBED),
    "logits": (logits_step, LOGITS),
}
LONG = "x" * (MAX_ID + 1)
WRONG: list[tuple[str, str, Any]] = [
    *((kind, "version", value) for kind in READERS for value in (0, 2, "1", 1.0, True)),
    *((kind, name, value) for kind in READERS for name in ("request", "session", "model", "step")
      for value in ("", LONG, 3, ["s"], True)),
    *((kind, "epoch", value) for kind in READERS for value in (-1, MAX_POSITION + 1, "1", 1.5, False)),
    *((kind, "range", value) for kind in READERS
      for value in ([], [0], [0, 1, 2], [0, -1], [0, 1 << 31], [0, "1"], [0, True], "0-3", {}, 3)),
    *(("forward", "phase", value) for value in ("Prefill", "", "train", 1)),
    *(("forward", "position", value) for value in (-1, MAX_POSITION + 1, "0", 0.0, True)),
    *(("forward", "cache_length", value) for value in (-1, MAX_POSITION + 1, "0")),
    *(("forward", "count", value) for value in (-1, MAX_ROWS + 1, "4", 4.0)),
    *(("forward", "rows", value) for value in ("some", "", 1)),
    *(("logits", "again", value) for value in (0, 1, "false")),
    *(("logits", "choice", value) for value in (3, [], "greedy")),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "name", "value"), WRONG)
def test_a_field_that_is_wrong_is_named(kind: str, name: str, value: Any) -> None:
    reader, good = READERS[kind]
    reader(good)
    with pytest.raises(BadField, match=rf"the step\.{name} is ") as caught:
        reader({**good, name: value})
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize("kind", READERS)
def test_a_field_that_is_missing_is_named(kind: str) -> None:
    reader, good = READERS[kind]
    for name in good:
        if (kind, name) in {("forward", "rows"), ("logits", "again")}:
            continue  # these have a default
        left = {key: value for key, value in good.items() if key != name}
        with pytest.raises(BadField, match=f"the step lacks the field '{name}'"):
            reader(left)
        with pytest.raises(BadField, match=f"the step lacks the field '{name}'"):
            reader({**left, name: None})


@pytest.mark.parametrize("kind", READERS)
def test_a_field_that_nobody_knows_is_refused_and_not_ignored(kind: str) -> None:
    reader, good = READERS[kind]
    with pytest.raises(BadField, match="unknown field 'priority'"):
        reader({**good, "priority": 1})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("top_k", -1), ("top_k", MAX_TOP_K + 1), ("top_k", 1.5), ("top_k", True),
        ("temperature", -0.1), ("temperature", 1e7), ("temperature", "1"), ("temperature", True),
        ("seed", -1), ("seed", 1 << 63), ("seed", 1.0),
        ("wanted", [-1]), ("wanted", [1 << 31]), ("wanted", ["1"]), ("wanted", 3),
        ("wanted", [0] * (MAX_LISTED + 1)),
        ("adjustments", {}), ("adjustments", [[0, 1.0, 0.0]] * (MAX_LISTED + 1)),
    ],
)  # fmt: skip
def test_a_choice_that_is_out_of_bounds_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(BadField, match=rf"the step\.choice\.{name} is "):
        logits_step({**LOGITS, "choice": {name: value}})


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        (3, "not a list of id, multiply and add"),
        ([1, 1.0], "not a list of id, multiply and add"),
        ([1, 1.0, 0.0, 0.0], "not a list of id, multiply and add"),
        ([-1, 1.0, 0.0], r"adjustment\.id"),
        ([1, 0, 0.0], r"adjustment\.multiply"),
        ([1, -1.0, 0.0], r"adjustment\.multiply"),
        ([1, 1.0, 1e10], r"adjustment\.add"),
        ([1, 1.0, None], "adjustment lacks the field 'add'"),
    ],
)
def test_an_adjustment_that_is_none_is_refused(entry: Any, reason: str) -> None:
    with pytest.raises(BadField, match=reason):
        logits_step({**LOGITS, "choice": {"adjustments": [entry]}})


def test_not_even_numbers_that_only_python_knows_pass_for_numbers() -> None:
    for value in (float("nan"), float("inf"), -float("inf")):
        with pytest.raises(BadField, match="temperature"):
            logits_step({**LOGITS, "choice": {"temperature": value}})


def test_a_step_with_rows_has_some_and_the_end_of_a_session_has_none() -> None:
    for phase in ("prefill", "decode"):
        with pytest.raises(BadField, match=f"count is 0, expected at least 1 to {phase}"):
            forward_step({**FORWARD, "phase": phase, "count": 0})
    for phase in ("release", "cancel"):
        with pytest.raises(BadField, match=f"count is 4, expected 0 to {phase}"):
            forward_step({**FORWARD, "phase": phase})


def test_rows_are_appended_and_nowhere_else() -> None:
    with pytest.raises(BadField, match="position is 3, expected its cache_length, 2: rows are appended"):
        forward_step({**FORWARD, "position": 3, "cache_length": 2})


def test_a_step_for_another_model_or_range_is_refused_with_both() -> None:
    ENVELOPE.check("m", (0, 3))
    with pytest.raises(Refusal, match="is for the model m, here is n") as caught:
        ENVELOPE.check("n", (0, 3))
    assert caught.value.kind is RefusalKind.WRONG_MODEL
    with pytest.raises(Refusal, match=r"is for \[0, 3\), here is \[3, 6\)") as caught:
        ENVELOPE.check("m", (3, 6))
    assert caught.value.kind is RefusalKind.WRONG_RANGE


@pytest.mark.parametrize("kind", RefusalKind)
@pytest.mark.parametrize("retry", [None, 500])
def test_a_refusal_arrives_as_it_was_made(kind: RefusalKind, retry: int | None) -> None:
    envelope = json.loads(json.dumps(Refusal(kind, "what and why", retry).to_json()))
    with pytest.raises(Refusal, match=f"^{kind}: what and why$") as caught:
        raise_refusal(envelope)
    assert (caught.value.kind, caught.value.detail, caught.value.retry_after_ms) == (
        kind,
        "what and why",
        retry,
    )


def test_an_answer_that_says_ok_raises_nothing_and_one_that_says_nonsense_is_internal() -> None:
    raise_refusal({"status": "ok"})
    for envelope in ({}, {"status": "tired"}, {"status": 3}, {"status": None, "retry_after_ms": "soon"}):
        with pytest.raises(Refusal) as caught:
            raise_refusal(envelope)
        assert caught.value.kind is RefusalKind.INTERNAL
        assert caught.value.retry_after_ms is None
