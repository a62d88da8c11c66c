"""Hops: one step sent, one answer or one refusal back, whatever the other side says or does not say."""

from __future__ import annotations

import asyncio
import json
import struct
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from core_support import run
from fake_cluster import HEADERS, Background, FakePeer

from hops import ShardHop, StationHop, Ticket
from lanes import Wire
from protocol.calls import FRAME, Call, Reply, json_reply
from protocol.frames import Kind, Part, Tensor, decode, encode
from protocol.steps import (
    Adjustment,
    Choice,
    ForwardStep,
    Phase,
    Refusal,
    RefusalKind,
    Rows,
    embed_step,
    forward_step,
    logits_step,
)

TICKET = Ticket("r", "s", 3, "model")
STEP = ForwardStep(TICKET.envelope((0, 2), "prefill-0-1"), Phase.PREFILL, 0, 1, 0, Rows.LAST)
HIDDEN = struct.pack("<2f", 1, 2)


def floats(name: str, *shape: int, values: list[float] | None = None) -> Tensor:
    count = 1
    for size in shape:
        count *= size
    return Tensor(name, "f32", shape, struct.pack(f"<{count}f", *(values or [0.5] * count)))


def ints(name: str, *numbers: int) -> Tensor:
    return Tensor(name, "i32", (len(numbers),), struct.pack(f"<{len(numbers)}i", *numbers))


def ok(*tensors: Tensor, **envelope: Any) -> Part:
    return Part({"status": "ok", **envelope}, {tensor.name: tensor for tensor in tensors})


def answering(kind: Kind, *parts: Part, answer: bool = True, status: int = 200) -> FakePeer:
    async def reply(call: Call) -> Reply:
        return Reply(status, encode(kind, parts, answer), {"content-type": FRAME})

    return FakePeer(reply)


def saying(reply: Reply) -> FakePeer:
    async def answer(call: Call) -> Reply:
        return reply

    return FakePeer(answer)


def station(peer: FakePeer, deadline: float = 5) -> StationHop:
    return StationHop((0, 2), peer, Wire(HEADERS, deadline, Background()), 2)


def shard(peer: FakePeer, deadline: float = 5) -> ShardHop:
    return ShardHop((10, 20), peer, Wire(HEADERS, deadline, Background()), 2)


def refused(work: Coroutine[Any, Any, Any]) -> Refusal:
    with pytest.raises(Refusal) as caught:
        run(work)
    return caught.value


def test_a_station_is_sent_the_step_with_its_rows_and_the_clusters_secret() -> None:
    peer = answering(Kind.FORWARD, ok(floats("hidden", 1, 2)))
    answer = run(station(peer).forward(STEP, HIDDEN))
    assert answer.tensors["hidden"].shape == (1, 2)
    [call] = peer.calls
    assert (call.method, call.path, call.headers["content-type"]) == ("POST", "/forward", FRAME)
    assert call.headers["x-knot-secret"] == HEADERS["x-knot-secret"]
    [part] = decode(call.body).parts
    assert forward_step(part.envelope) == STEP
    assert bytes(part.tensor("hidden", "f32", 2).data) == HIDDEN


@pytest.mark.parametrize("phase", [Phase.RELEASE, Phase.CANCEL])
def test_a_session_is_ended_by_a_step_without_rows(phase: Phase) -> None:
    peer = answering(Kind.FORWARD, ok())
    run(station(peer).end(TICKET, phase))
    [part] = decode(peer.calls[0].body).parts
    step = forward_step(part.envelope)
    assert (step.phase, step.count, step.envelope.epoch, step.envelope.range) == (phase, 0, 3, (0, 2))
    assert part.tensors == {}


def test_a_shard_is_sent_all_tokens_and_only_what_concerns_its_own_ids() -> None:
    peer = answering(Kind.EMBED, ok(ints("positions", 1), floats("rows", 1, 2, values=[3, 4])))
    assert run(shard(peer).embed(TICKET, "e", [5, 12, 25])) == {1: struct.pack("<2f", 3, 4)}
    [part] = decode(peer.calls[0].body).parts
    assert embed_step(part.envelope).envelope.range == (10, 20)
    assert bytes(part.tensor("tokens", "i32", 1).data) == struct.pack("<3i", 5, 12, 25)

    choice = Choice(3, 0.5, 7, (Adjustment(9), Adjustment(10), Adjustment(20)), (5, 11, 19, 20))
    values = floats("candidates_values", 1, 3, values=[1, 2, 3])
    wanted = floats("wanted_values", 2, 3, values=[1, 2, 3, 4, 5, 6])
    body = ok(ints("candidates", 12), values, ints("wanted", 11, 19), wanted, lse_raw=1.5, lse_adjusted=None)
    peer = answering(Kind.LOGITS, body)
    found = run(shard(peer).logits(TICKET, "l", HIDDEN, choice))
    assert (found.lse_raw, found.lse_adjusted) == (1.5, -float("inf"))
    assert [(c.id, c.raw, c.adjusted, c.key) for c in found.candidates] == [(12, 1, 2, 3)]
    assert [(w.id, w.key) for w in found.wanted] == [(11, 3), (19, 6)]
    step = logits_step(decode(peer.calls[0].body).parts[0].envelope)
    assert step.choice == Choice(3, 0.5, 7, (Adjustment(10),), (11, 19))
    assert not step.again


def test_a_shard_that_has_the_row_already_is_not_sent_it_again() -> None:
    body = ok(ints("candidates"), floats("candidates_values", 0, 3), lse_raw=1.0, lse_adjusted=1.0)
    peer = answering(Kind.LOGITS, body)
    run(shard(peer).logits(TICKET, "l", None, Choice(top_k=4)))
    [part] = decode(peer.calls[0].body).parts
    assert logits_step(part.envelope).again
    assert part.tensors == {}


@pytest.mark.parametrize("kind", RefusalKind)
def test_a_refusal_comes_through_with_the_name_of_who_refused(kind: RefusalKind) -> None:
    peer = answering(Kind.FORWARD, Part(Refusal(kind, "why", 70).to_json()))
    refusal = refused(station(peer).forward(STEP, HIDDEN))
    assert (refusal.kind, refusal.detail, refusal.retry_after_ms) == (kind, "station 0-2: why", 70)


def test_a_lost_call_is_lost_and_named() -> None:
    peer = answering(Kind.FORWARD, ok())
    peer.dead = True
    refusal = refused(station(peer).forward(STEP, HIDDEN))
    assert (refusal.kind, refusal.detail) == (RefusalKind.LOST, "station 0-2: the peer is dead")


def test_a_hang_is_lost_after_the_deadline_and_leaves_nothing_running() -> None:
    ended: list[str] = []

    async def hang(call: Call) -> Reply:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("stopped")
        raise AssertionError

    async def main() -> None:
        background = Background()
        hop = StationHop((0, 2), FakePeer(hang), Wire(HEADERS, 0.01, background), 2)
        with pytest.raises(Refusal) as caught:
            await hop.forward(STEP, HIDDEN)
        assert caught.value.kind is RefusalKind.LOST
        assert "station 0-2 did not answer within 0.01 s" in caught.value.detail
        await background.drain()
        assert ended == ["stopped"]

    run(main())


@pytest.mark.parametrize(
    ("reply", "kind"),
    [
        (Reply(400, b"no frame"), RefusalKind.BAD_FRAME),
        (Reply(401, b"who?"), RefusalKind.LOST),
        (Reply(404, b""), RefusalKind.LOST),
        (Reply(500, b"\xff\xfe broke"), RefusalKind.LOST),
        (Reply(503, b"full"), RefusalKind.BUSY),
        (json_reply({"error": {"kind": "nonsense", "detail": "x" * 9000}}, 502), RefusalKind.LOST),
        # A part that cannot start is no part whose queue is full.
        (json_reply({"error": {"kind": "unavailable", "detail": "x" * 9000}}, 503), RefusalKind.UNAVAILABLE),
        (json_reply({"error": {"kind": "busy", "detail": "full"}}, 503), RefusalKind.BUSY),
        (json_reply({"error": {"kind": "over_budget", "detail": "x"}}, 503), RefusalKind.OVER_BUDGET),
    ],
)
def test_an_http_error_is_a_refusal_with_the_beginning_of_what_was_said(
    reply: Reply, kind: RefusalKind
) -> None:
    refusal = refused(station(saying(reply)).forward(STEP, HIDDEN))
    assert refusal.kind is kind
    assert f"station 0-2 answered {reply.status}" in refusal.detail
    assert len(refusal.detail) < 400


FRAMES: dict[str, FakePeer] = {
    "no frame": saying(Reply(200, b"<html>")),
    "nothing": saying(Reply(200, b"")),
    "json": saying(json_reply({"status": "ok"})),
    "a question": answering(Kind.FORWARD, ok(floats("hidden", 1, 2)), answer=False),
    "another kind": answering(Kind.EMBED, ok(floats("hidden", 1, 2))),
    "no step": answering(Kind.FORWARD),
    "two steps": answering(Kind.FORWARD, ok(), ok()),
}


@pytest.mark.parametrize("peer", FRAMES.values(), ids=FRAMES)
def test_an_answer_that_is_none_counts_as_lost(peer: FakePeer) -> None:
    refusal = refused(station(peer).forward(STEP, HIDDEN))
    assert refusal.kind is RefusalKind.LOST
    assert "answered by a bad frame" in refusal.detail


EMBEDS: dict[str, Part] = {
    "nothing": ok(),
    "no rows": ok(ints("positions", 1)),
    "rows for a token that is another's": ok(ints("positions", 0), floats("rows", 1, 2)),
    "a row too few": ok(ints("positions"), floats("rows", 0, 2)),
    "a row too many": ok(ints("positions", 1, 2), floats("rows", 2, 2)),
    "a place outside": ok(ints("positions", 7), floats("rows", 1, 2)),
    "a negative place": ok(ints("positions", -1), floats("rows", 1, 2)),
    "rows of another size": ok(ints("positions", 1), floats("rows", 1, 3)),
    "fewer rows than places": ok(ints("positions", 1), floats("rows", 2, 2)),
}


@pytest.mark.parametrize("part", EMBEDS.values(), ids=EMBEDS)
def test_a_partial_embedding_that_is_not_the_shards_own_tokens_counts_as_lost(part: Part) -> None:
    refusal = refused(shard(answering(Kind.EMBED, part)).embed(TICKET, "e", [5, 12, 25]))
    assert refusal.kind is RefusalKind.LOST
    assert refusal.detail.startswith("shard 10-20 answered")


def best(id: int = 12, **envelope: Any) -> Part:
    whole = {"lse_raw": 1.0, "lse_adjusted": 1.0, **envelope}
    return ok(ints("candidates", id), floats("candidates_values", 1, 3), **whole)


SLICES: dict[str, Part] = {
    "nothing": ok(),
    "no log-sum-exp": ok(ints("candidates", 12), floats("candidates_values", 1, 3)),
    "only one log-sum-exp": ok(ints("candidates", 12), floats("candidates_values", 1, 3), lse_adjusted=1.0),
    "a log-sum-exp that is text": best(lse_raw="high"),
    "a log-sum-exp that is a list": best(lse_raw=[1]),
    "candidates without values": ok(ints("candidates", 12), lse_raw=1.0, lse_adjusted=1.0),
    "values of another shape": ok(
        ints("candidates", 12), floats("candidates_values", 3, 1), lse_raw=1.0, lse_adjusted=1.0
    ),
    "an id below its own": best(9),
    "an id beyond its own": best(20),
    "more candidates than were asked for": ok(
        ints("candidates", 12, 13), floats("candidates_values", 2, 3), lse_raw=1.0, lse_adjusted=1.0
    ),
    "no wanted ids": best(),
}


@pytest.mark.parametrize("part", SLICES.values(), ids=SLICES)
def test_a_slice_that_contradicts_itself_counts_as_lost(part: Part) -> None:
    wanted = (11,) if part is SLICES["no wanted ids"] else ()
    hop = shard(answering(Kind.LOGITS, part))
    refusal = refused(hop.logits(TICKET, "l", HIDDEN, Choice(top_k=1, wanted=wanted)))
    assert refusal.kind is RefusalKind.LOST
    assert refusal.detail.startswith("shard 10-20 answered by a bad slice")


@pytest.mark.parametrize("spoil", [lambda data: data[:-3], lambda data: data[:30] + b"\0" + data[31:]])
def test_an_answer_damaged_on_its_way_counts_as_lost(spoil: Callable[[bytes], bytes]) -> None:
    peer = answering(Kind.LOGITS, best())
    peer.spoil = spoil
    assert refused(shard(peer).logits(TICKET, "l", HIDDEN, Choice())).kind is RefusalKind.LOST


def test_the_body_of_an_error_that_is_json_is_quoted() -> None:
    reply = json_reply(
        {"error": {"kind": "unavailable", "detail": "SettingsError: KNOT_KEY is not set"}}, 500
    )
    refusal = refused(station(saying(reply)).forward(STEP, HIDDEN))
    assert "KNOT_KEY is not set" in refusal.detail
    assert json.dumps(refusal.to_json())
