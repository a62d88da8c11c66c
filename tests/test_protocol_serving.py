"""How a part answers: frames by frames with a status a step, curl by JSON, and whatever breaks by words."""

from __future__ import annotations

import asyncio
import json
import struct
from typing import Any

import pytest
from core_support import run

from protocol.calls import FRAME, Call, json_call
from protocol.fields import BadField
from protocol.frames import MAX_HEADER, MAX_PAYLOAD, MAX_STEPS, BadFrame, Kind, Part, Tensor, decode, encode
from protocol.serving import answer_frame, answer_step, curl_answer, f32_row, is_frame, not_found
from protocol.steps import Refusal, RefusalKind


def call(parts: list[Part], kind: Kind = Kind.FORWARD, answer: bool = False) -> Call:
    return Call("POST", "/forward", encode(kind, parts, answer), {"content-type": FRAME})


def named(name: str, **more: Any) -> Part:
    return Part({"session": name, "step": f"{name}-1", **more})


async def ok(part: Part) -> Part:
    return Part({"status": "ok", "echo": part.envelope["session"]}, part.tensors)


def test_each_step_of_a_frame_gets_its_own_status_and_one_refusal_sinks_no_other() -> None:
    async def some(part: Part) -> Part:
        match part.envelope["session"]:
            case "refused":
                raise Refusal(RefusalKind.BUSY, "later", 250)
            case "field":
                raise BadField("the step.count is wrong")
            case "frame":
                raise BadFrame("hidden is missing")
            case "defect":
                raise ZeroDivisionError("division by zero")
        await asyncio.sleep(0)
        return await ok(part)

    names = ["one", "refused", "field", "frame", "defect", "two"]
    reply = run(answer_frame(call([named(name) for name in names]), Kind.FORWARD, some))
    assert (reply.status, reply.headers["content-type"]) == (200, FRAME)
    frame = decode(reply.bytes())
    assert frame.answer
    envelopes = [dict(part.envelope) for part in frame.parts]
    assert [e["session"] for e in envelopes] == names
    assert [e["step"] for e in envelopes] == [f"{name}-1" for name in names]
    assert [e["status"] for e in envelopes] == ["ok", "busy", "bad_frame", "bad_frame", "internal", "ok"]
    assert envelopes[1]["retry_after_ms"] == 250
    assert envelopes[4]["detail"] == "ZeroDivisionError: division by zero"


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (Call("POST", "/forward", b"AWFR", {"content-type": FRAME}), "prefix, got 4 bytes"),
        (call([named("a")], Kind.EMBED), "takes frames of kind forward that are no answers"),
        (call([named("a")], answer=True), "takes frames of kind forward that are no answers"),
    ],
)
def test_bytes_that_are_no_frame_of_this_kind_are_400_with_the_reason(bad: Call, reason: str) -> None:
    reply = run(answer_frame(bad, Kind.FORWARD, ok))
    assert reply.status == 400
    assert reply.json()["error"]["kind"] == "bad_frame"
    assert reason in reply.json()["error"]["detail"]


@pytest.mark.parametrize("value", [3, None, ["deep"], {"a": 1}, "x" * 129, True])
def test_what_cannot_be_a_name_is_not_repeated_in_the_answer(value: Any) -> None:
    async def refuse(part: Part) -> Part:
        raise BadField("the step.session is wrong")

    answer = run(answer_step(Part({"session": value, "step": "s-1"}), refuse))
    assert dict(answer.envelope) == {
        "step": "s-1",
        "status": "bad_frame",
        "detail": "the step.session is wrong",
    }


def test_a_frame_of_many_steps_is_answered_however_long_the_reasons_are() -> None:
    async def refuse(part: Part) -> Part:
        raise Refusal(RefusalKind.BAD_FRAME, "x" * (MAX_HEADER // 500))

    reply = run(answer_frame(call([named("n")] * MAX_STEPS), Kind.FORWARD, refuse))
    assert reply.status == 400
    assert "ask for less at a time" in reply.json()["error"]["detail"]


def test_answers_that_do_not_fit_a_frame_together_are_refused_and_not_raised() -> None:
    large = Tensor("rows", "u8", (MAX_PAYLOAD // 2 + 1,), bytes(MAX_PAYLOAD // 2 + 1))

    async def much(part: Part) -> Part:
        return Part({"status": "ok"}, {"rows": large})

    reply = run(answer_frame(call([named("a"), named("b")]), Kind.FORWARD, much))
    assert reply.status == 400
    assert "the answer does not fit a frame" in reply.json()["error"]["detail"]


def test_whether_a_body_is_a_frame_is_said_by_its_content_type() -> None:
    assert is_frame(Call("POST", "/", b"", {"content-type": FRAME}))
    assert is_frame(Call("POST", "/", b"", {"content-type": FRAME + "; v=1"}))
    assert not is_frame(json_call("POST", "/", {}))
    assert not is_frame(Call("POST", "/", b"AWFR"))


def test_curl_gets_tensors_as_rows_and_refusals_as_http() -> None:
    tensors = {
        "rows": Tensor("rows", "f32", (2, 2), struct.pack("<4f", 1, -2, 0.5, 4)),
        "ids": Tensor("ids", "i32", (3,), struct.pack("<3i", 1, 2, -3)),
        "none": Tensor("none", "f32", (0, 2), b""),
    }
    reply = curl_answer(Part({"status": "ok", "count": 2}, tensors))
    assert reply.status == 200
    assert reply.json() == {
        "status": "ok",
        "count": 2,
        "rows": [[1.0, -2.0], [0.5, 4.0]],
        "ids": [1, 2, -3],
        "none": [],
    }
    for kind, status in (("bad_frame", 400), ("busy", 503), ("cache_miss", 409), ("bad_weights", 502)):
        reply = curl_answer(Part({"status": kind, "detail": "why"}))
        assert (reply.status, reply.json()["error"]) == (status, {"kind": kind, "detail": "why"})


def test_what_json_has_no_number_for_is_null() -> None:
    values = struct.pack("<3f", -float("inf"), float("nan"), 1.5)
    reply = curl_answer(Part({"status": "ok"}, {"values": Tensor("values", "f32", (1, 3), values)}))
    refused: list[str] = []
    found = json.loads(reply.bytes(), parse_constant=refused.append)
    assert found["values"] == [[None, None, 1.5]]
    assert refused == []


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (3, "not a list of 2 numbers"),
        ([1], "not a list of 2 numbers"),
        ([1, 2, 3], "not a list of 2 numbers"),
        ([1, "2"], "no f32"),
        ([1, None], "no f32"),
        ([1, [2]], "no f32"),
        ([1, 1e39], "no f32"),
    ],
)
def test_a_row_from_json_that_is_no_row_is_named(row: Any, reason: str) -> None:
    with pytest.raises(BadField, match=f"hidden has a .*{reason}"):
        f32_row(row, 2, "hidden")
    assert f32_row([1, -0.5], 2, "hidden") == struct.pack("<2f", 1, -0.5)


def test_a_path_that_nobody_has_says_which_there_are() -> None:
    reply = not_found(Call("PUT", "/forwards"), "a station", "POST /forward")
    assert reply.status == 404
    detail = reply.json()["error"]["detail"]
    assert detail == "PUT /forwards is nothing that a station answers; it has POST /forward"
