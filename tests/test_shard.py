"""A shard's slice of the logits: it merges exactly, is kept for more, and one pass serves many."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np
import pytest
from core_support import exact_logits, grouped, header_of, reference_of, run
from fake_cluster import make_native
from shard_support import OneShard, shard_on
from station_support import Gate, embedded, exact_states

from engine.wasm import WasmEngine
from hops import read_slice
from knot.topology import split
from protocol.fluid import check_fluid
from protocol.frames import Kind
from protocol.recorder import Recorder
from protocol.steps import Adjustment, Choice, Ranked, Slice
from sampling import logsumexp

PATH = grouped()
IDS = (7, 260, 31, 299, 0, 128, 77, 260, 5)
# Normalised rows as an exit station would send them, and their exact logits.
NORMED = exact_states(PATH, IDS)[-1].astype("<f4")
EXACT = exact_logits(PATH, IDS)
USED = 297  # the last three ids are marked unused
# Of logits up to about 10; activations are 16-bit integers. Measured below 3e-4.
TOLERANCE = 1e-3


def case(body: Callable[[OneShard], Coroutine[Any, Any, None]], **more: Any) -> None:
    async def main() -> None:
        one = await shard_on(more.pop("path", PATH), **more)
        await body(one)
        await one.background.drain()

    run(main())


async def shards_on(count: int, **more: Any) -> list[OneShard]:
    return [await shard_on(PATH, ids, **more) for ids in split(300, count)]


def pairs(slices: list[Slice], count: int) -> list[Ranked]:
    """The best of several slices."""
    merged = [candidate for part in slices for candidate in part.candidates]
    return sorted(merged, key=lambda c: (-c.key, c.id))[:count]


def test_logits_are_as_exact_arithmetic_has_them() -> None:
    async def body(one: OneShard) -> None:
        for position, normed in enumerate(NORMED):
            found = await one.logits(normed, Choice(top_k=300), f"l{position}")
            assert len(found.candidates) == USED
            for candidate in found.candidates:
                assert abs(candidate.raw - EXACT[position, candidate.id]) < TOLERANCE
                assert candidate.raw == candidate.adjusted == candidate.key

    case(body)


@pytest.mark.parametrize("count", [3, 8])
@pytest.mark.parametrize(
    "choice",
    [
        Choice(top_k=1),
        Choice(top_k=40),
        Choice(top_k=40, temperature=0.7),
        Choice(top_k=40, temperature=1.3, seed=12345),
        Choice(
            top_k=40,
            temperature=0.5,
            adjustments=tuple(Adjustment(i, 1.5, 0.25 * i % 3) for i in range(0, 300, 7)),
            wanted=(0, 99, 100, 101, 296, 299, 150),
        ),
    ],
    ids=["greedy", "top 40", "temperature", "gumbel", "adjusted"],
)
def test_merged_over_any_number_of_shards_it_is_the_whole_to_the_bit(count: int, choice: Choice) -> None:
    async def main() -> None:
        one = await shard_on(PATH)
        parts = await shards_on(count)
        for position in (0, 4, 8):
            whole = await one.logits(NORMED[position], choice, f"l{position}")
            slices = [
                await part.logits(NORMED[position], _own(choice, part), f"l{position}") for part in parts
            ]
            assert pairs(slices, choice.top_k) == list(whole.candidates)
            assert logsumexp(s.lse_raw for s in slices) == pytest.approx(whole.lse_raw, abs=1e-12)
            assert logsumexp(s.lse_adjusted for s in slices) == pytest.approx(whole.lse_adjusted, abs=1e-12)
            wanted = sorted((w for s in slices for w in s.wanted), key=lambda w: choice.wanted.index(w.id))
            assert wanted == list(whole.wanted)

    run(main())


def _own(choice: Choice, part: OneShard) -> Choice:
    """What a hop sends to this shard of a choice."""
    start, end = part.shard.settings.slice
    return Choice(
        choice.top_k,
        choice.temperature,
        choice.seed,
        tuple(a for a in choice.adjustments if start <= a.id < end),
        tuple(w for w in choice.wanted if start <= w < end),
    )


def test_log_sum_exps_are_those_of_the_whole_slice_before_and_after_temperature() -> None:
    async def body(one: OneShard) -> None:
        for temperature in (0.3, 1.0, 2.5):
            found = await one.logits(NORMED[2], Choice(top_k=1, temperature=temperature))
            logits = EXACT[2, 100:USED]
            raw = reference_raw(2)[100:300]
            assert found.lse_raw == pytest.approx(lse(raw), abs=TOLERANCE), "unused ids count here"
            assert found.lse_adjusted == pytest.approx(lse(logits / temperature), abs=TOLERANCE / temperature)

    case(body, ids=(100, 300))


def lse(values: np.ndarray) -> float:
    return float(np.log(np.exp(values - values.max()).sum()) + values.max())


def reference_raw(position: int) -> np.ndarray:
    """Exact logits with those of unused ids."""
    [logits] = reference_of(PATH).logits([IDS])
    return logits[position]


def test_adjustments_and_wanted_ids_are_what_they_are_said_to_be() -> None:
    async def body(one: OneShard) -> None:
        plain = await one.logits(NORMED[1], Choice(top_k=300))
        raw = {c.id: np.float32(c.raw) for c in plain.candidates}
        best, worst = plain.candidates[0].id, plain.candidates[-1].id
        choice = Choice(
            top_k=3,
            temperature=0.5,
            adjustments=(
                Adjustment(best, 1.0, -1e9),
                Adjustment(worst, 2.0, 100.0),
                Adjustment(9999, 1.0, 5.0),
            ),
            wanted=(best, worst, best),
        )
        found = await one.logits(NORMED[1], choice)
        assert found.candidates[0].id == worst
        assert best not in {c.id for c in found.candidates}
        assert [w.id for w in found.wanted] == [best, worst, best]
        value = raw[worst]
        scaled = (value / np.float32(2) if value > 0 else value * np.float32(2)) + np.float32(100)
        assert found.wanted[1].adjusted == scaled / np.float32(0.5)
        assert found.wanted[1].raw == raw[worst]
        assert found.lse_raw == plain.lse_raw

    case(body)


def test_ids_that_are_marked_unused_are_never_chosen_but_may_be_asked_about() -> None:
    async def body(one: OneShard) -> None:
        choice = Choice(top_k=300, adjustments=(Adjustment(298, 1.0, 1e6),), wanted=(298,))
        found = await one.logits(NORMED[0], choice)
        assert {c.id for c in found.candidates} == set(range(200, USED))
        assert found.wanted[0].adjusted == -math.inf
        assert math.isfinite(found.wanted[0].raw)

    case(body, ids=(200, 300))


def test_a_slice_of_unused_ids_alone_has_no_candidates_and_no_mass() -> None:
    async def body(one: OneShard) -> None:
        found = await one.logits(NORMED[0], Choice(top_k=5))
        assert found.candidates == ()
        assert found.lse_adjusted == -math.inf
        assert math.isfinite(found.lse_raw)

    case(body, ids=(USED, 300))


def test_choosing_again_reads_no_weights_and_gives_what_the_first_time_would_have() -> None:
    async def body(one: OneShard) -> None:
        await one.logits(NORMED[3], Choice(top_k=1), "l3")
        reads = one.shard.weights.reads.opened
        again = await one.logits(None, Choice(top_k=50, temperature=0.8), "l3")
        assert one.shard.weights.reads.opened == reads
        assert again == await one.logits(NORMED[3], Choice(top_k=50, temperature=0.8), "other")

    case(body, RESIDENCY="fluid")


def test_choosing_again_of_a_step_nobody_knows_is_a_cache_miss() -> None:
    async def body(one: OneShard) -> None:
        await one.logits(NORMED[3], Choice(), "l3")
        for changes in ({"step": "l4"}, {"session": "t"}, {"epoch": 1}):
            step = one.logits_step(None, Choice(), **{"step": "l3", **changes})
            [answer] = await one.send("/logits", Kind.LOGITS, step)
            assert answer.envelope["status"] == "cache_miss"
            assert "no longer kept here; send the row again" in answer.envelope["detail"]

    case(body)


def test_kept_slices_make_room_for_newer_ones_the_least_used_first() -> None:
    async def body(one: OneShard) -> None:
        for name in ("a", "b", "c"):
            await one.logits(NORMED[0], Choice(), name)
        assert one.shard.kept == 3
        await one.logits(None, Choice(), "a")
        await one.logits(NORMED[1], Choice(), "d")
        assert one.shard.kept == 3
        [answer] = await one.send("/logits", Kind.LOGITS, one.logits_step(None, Choice(), "b"))
        assert answer.envelope["status"] == "cache_miss"
        for name in ("a", "c", "d"):
            await one.logits(None, Choice(), name)

    case(body, MAX_BATCH_ROWS="3", KEPT_LOGITS_BYTES="0")


def test_rows_of_many_sessions_go_through_the_weights_once_for_all() -> None:
    async def body(one: OneShard) -> None:
        parts = [
            one.logits_step(normed, Choice(top_k=3), f"l{i}", session=f"s{i}")
            for i, normed in enumerate(NORMED)
        ]
        answers = await asyncio.gather(*(one.send("/logits", Kind.LOGITS, part) for part in parts))
        assert one.shard.weights.reads.opened == 1
        assert one.api.loop.load.rows_peak == len(NORMED)
        single = await shard_on(PATH)
        for i, [answer] in enumerate(answers):
            assert answer.envelope["session"] == f"s{i}"
            assert read_slice(answer) == await single.logits(NORMED[i], Choice(top_k=3), f"l{i}")

    case(body, RESIDENCY="fluid")


def test_the_same_step_again_gives_the_same_answer() -> None:
    async def body(one: OneShard) -> None:
        choice = Choice(top_k=5, temperature=0.9, seed=7)
        first = await one.logits(NORMED[0], choice)
        assert await one.logits(NORMED[0], choice) == first
        both = await asyncio.gather(one.logits(NORMED[0], choice), one.logits(NORMED[0], choice))
        assert both == [first, first]
        assert one.shard.kept == 1

    case(body)


VARIANTS: dict[str, dict[str, Any]] = {
    "fluid": {"RESIDENCY": "fluid"},
    "a row group a block": {"RESIDENCY": "fluid", "BLOCK_BYTES": "1"},
    "resident": {"RESIDENCY": "resident", "BLOCK_BYTES": "1000000"},
    "threads": {"RESIDENCY": "fluid", "host": make_native},
}


@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
def test_not_a_bit_depends_on_blocks_residency_or_threads(variant: dict[str, Any]) -> None:
    async def body(one: OneShard) -> None:
        expected = await (await shard_on(PATH)).logits(NORMED[5], Choice(top_k=300))
        for step in ("cold", "warm"):
            assert await one.logits(NORMED[5], Choice(top_k=300), step) == expected

    case(body, **variant)


@pytest.mark.wasm
def test_not_a_bit_depends_on_whether_the_engine_is_native_or_wasm() -> None:
    async def body(one: OneShard) -> None:
        choice = Choice(top_k=300, temperature=0.7, seed=99)
        assert await one.logits(NORMED[5], choice) == await (await shard_on(PATH)).logits(NORMED[5], choice)
        assert await one.embed([0, 5, 299]) == await (await shard_on(PATH)).embed([0, 5, 299])

    case(body, host=WasmEngine)


def test_in_fluid_memory_a_shard_never_holds_more_than_two_blocks() -> None:
    recorder = Recorder()

    async def body(one: OneShard) -> None:
        await asyncio.gather(*(one.logits(NORMED[i], Choice(), f"l{i}") for i in range(4)))
        flow = check_fluid(recorder)["shard"]
        assert flow.most_blocks == 2
        assert flow.order == [(None, "head")]

    case(body, RESIDENCY="fluid", moved=recorder.moved("shard"), host=make_native, BLOCK_BYTES="1")


def test_a_slice_that_begins_inside_a_row_group_is_the_same_slice() -> None:
    async def main() -> None:
        whole = await (await shard_on(PATH)).logits(NORMED[1], Choice(top_k=300))
        rows = header_of(PATH).head_tensor().group_rows
        assert rows > 3
        start, end = rows + 1, 2 * rows + 3
        part = await (await shard_on(PATH, (start, end))).logits(NORMED[1], Choice(top_k=300))
        assert list(part.candidates) == [c for c in whole.candidates if start <= c.id < end]

    run(main())


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_one_sessions_broken_row_is_its_own(poison: float) -> None:
    async def body(one: OneShard) -> None:
        broken = NORMED[1].copy()
        broken[5] = poison
        good = await one.logits(NORMED[0], Choice(top_k=3), "alone")
        answers = await one.send(
            "/logits",
            Kind.LOGITS,
            one.logits_step(NORMED[0], Choice(top_k=3), "l0"),
            one.logits_step(broken, Choice(top_k=3), "l1"),
            one.logits_step(NORMED[0], Choice(top_k=3), "l2"),
        )
        assert [answer.envelope["status"] for answer in answers] == ["ok", "non_finite", "ok"]
        assert read_slice(answers[0]) == read_slice(answers[2]) == good
        [answer] = await one.send("/logits", Kind.LOGITS, one.logits_step(None, Choice(), "l1"))
        assert answer.envelope["status"] == "cache_miss", "nothing of it was kept"

    case(body)


def test_passes_that_fail_give_their_slices_back() -> None:
    async def body(one: OneShard) -> None:
        broken = np.full(96, math.nan, "<f4")
        for number in range(5):
            step = one.logits_step(broken, Choice(), f"broken {number}")
            [answer] = await one.send("/logits", Kind.LOGITS, step)
            assert answer.envelope["status"] == "non_finite"
        assert one.shard.kept == 0
        for number in range(5):
            await one.logits(NORMED[0], Choice(), f"l{number}")
        assert one.shard.kept == 2

    case(body, MAX_BATCH_ROWS="2", KEPT_LOGITS_BYTES="0")


def test_a_head_that_does_not_match_its_digests_is_refused_by_name_and_rows() -> None:
    async def body(one: OneShard) -> None:
        head = one.knot.header.head_tensor()
        at = one.knot.header.file_offset(head.offset + head.length // 2)

        def spoil(offset: int, data: bytes) -> bytes:
            if not offset <= at < offset + len(data):
                return data
            return data[: at - offset] + bytes([data[at - offset] ^ 1]) + data[at - offset + 1 :]

        one.blobs.spoil = spoil
        [answer] = await one.send("/logits", Kind.LOGITS, one.logits_step(NORMED[0], Choice()))
        assert answer.envelope["status"] == "bad_weights"
        assert "tensor output_weight, rows [" in answer.envelope["detail"]
        one.blobs.spoil = lambda offset, data: data
        await one.logits(NORMED[0], Choice())

    case(body, RESIDENCY="fluid")


def test_embeddings_and_logits_at_the_same_time_do_not_get_in_each_others_way() -> None:
    async def body(one: OneShard) -> None:
        tokens = [5, 100, 299]
        expected = embedded(PATH, tokens)
        whole = await (await shard_on(PATH)).logits(NORMED[0], Choice(top_k=300))
        for round in range(5):
            *slices, rows = await asyncio.gather(
                *(one.logits(NORMED[0], Choice(top_k=300), f"l{round}{i}") for i in range(3)),
                one.embed(tokens),
            )
            assert slices == [whole] * 3
            assert rows == {i: expected[i].tobytes() for i in range(3)}

    case(body, host=make_native, RESIDENCY="fluid", BLOCK_BYTES="1")


def test_choosing_again_while_the_rows_pass_is_running_is_a_miss_and_never_half_a_slice() -> None:
    blobs = Gate(PATH.parent)

    async def body(one: OneShard) -> None:
        running = await blobs.closed(
            one.send("/logits", Kind.LOGITS, one.logits_step(NORMED[0], Choice(), "l0"))
        )
        [answer] = await one.send("/logits", Kind.LOGITS, one.logits_step(None, Choice(), "l0"))
        assert answer.envelope["status"] == "cache_miss"
        blobs.gate.set()
        await running
        await one.logits(None, Choice(), "l0")

    case(body, blobs=blobs, RESIDENCY="fluid")


def test_more_candidates_than_a_shard_can_list_are_over_budget_and_all_of_its_own_are_not() -> None:
    async def body(one: OneShard) -> None:
        found = await one.logits(NORMED[0], Choice(top_k=1 << 20))
        assert len(found.candidates) == USED
        wanted = tuple(i % 300 for i in range(1 << 14))
        step = one.logits_step(NORMED[0], Choice(top_k=300, wanted=wanted))
        [answer] = await one.send("/logits", Kind.LOGITS, step)
        assert answer.envelope["status"] == "over_budget"
        assert "candidates need" in answer.envelope["detail"]

    case(body)
