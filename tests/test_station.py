"""A station's forward pass: as exact arithmetic has it, and to the bit the same whatever is around it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from core_support import grouped, knot_of, run
from fake_cluster import make_native
from station_support import embedded, exact_states, line_on, station_on, through, values

from engine.blocks import largest_block, phase_units
from engine.wasm import WasmEngine
from knot.bucket import ATTEMPTS
from knot.header import PHASES
from protocol.fluid import check_fluid
from protocol.ports import BlobFailed
from protocol.recorder import Recorder
from protocol.steps import Rows

# Of the largest value, over three layers whose activations are 16-bit integers; measured below 8e-5.
TOLERANCE = 4e-4
IDS = [7, 260, 31, 299, 0, 128, 77, 260, 5, 91, 14, 200, 63, 17, 9, 250, 111, 42, 3, 18, 18, 90, 211]
OTHER = [299, 1, 54, 9, 9, 9, 200, 33, 120, 77, 4]


@pytest.mark.parametrize("arch", ["qwen2", "llama"])
@pytest.mark.parametrize("stations", [1, 2, 3])
def test_rows_come_out_as_exact_arithmetic_has_them(arch: str, stations: int) -> None:
    path = grouped(arch)

    async def body() -> None:
        line = await line_on(path, stations)
        hidden, exact = embedded(path, IDS), exact_states(path, IDS)
        for one in line:
            hidden = await one.forward("s", 0, hidden)
            last = one.station.settings.is_exit
            expected = exact[-1] if last else exact[one.station.layers[1] - 1]
            assert hidden.shape == expected.shape
            assert np.abs(expected).max() > 1
            assert np.abs(hidden - expected).max() < TOLERANCE * np.abs(expected).max()

    run(body())


def bits(rows: np.ndarray) -> bytes:
    return np.ascontiguousarray(rows).tobytes()


async def alone(path: Path, ids: Sequence[int]) -> bytes:
    """What every variant below must give to the bit: one station, one session, one piece."""
    known = _ALONE.get((path, tuple(ids)))
    if known is None:
        [one] = await line_on(path, 1, RESIDENCY="resident", BLOCK_BYTES="1000000")
        known = _ALONE[path, tuple(ids)] = bits(await one.forward("s", 0, embedded(path, ids)))
    return known


_ALONE: dict[tuple[Path, tuple[int, ...]], bytes] = {}


VARIANTS: dict[str, dict[str, Any]] = {
    "one station, fluid": {"RESIDENCY": "fluid"},
    "a row group a block": {"RESIDENCY": "fluid", "BLOCK_BYTES": "1"},
    "blocks of 5000": {"RESIDENCY": "fluid", "BLOCK_BYTES": "5000"},
    "blocks of 20000": {"BLOCK_BYTES": "20000"},
    "resident": {"RESIDENCY": "resident"},
    "a pinned prefix": {"ENGINE_BYTES": str(1 << 20), "KV_BYTES": "700000", "MAX_BATCH_ROWS": "64"},
    "two stations": {"stations": 2},
    "three stations": {"stations": 3, "RESIDENCY": "fluid"},
    "an engine on threads": {"host": make_native, "RESIDENCY": "fluid"},
}  # fmt: skip


@pytest.mark.parametrize("arch", ["qwen2", "llama"])
@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
def test_not_a_bit_depends_on_blocks_residency_stations_or_threads(
    arch: str, variant: dict[str, Any]
) -> None:
    path = grouped(arch)

    async def body() -> None:
        line = await line_on(path, **{"stations": 1, **variant})
        expected = await alone(path, IDS)
        for session in ("cold", "warm", "warmer"):
            assert bits(await through(line, session, 0, embedded(path, IDS))) == expected

    run(body())


def test_the_pinned_prefix_above_is_a_real_one() -> None:
    async def body() -> None:
        one = await station_on(grouped(), **VARIANTS["a pinned prefix"])
        arena = one.station.weights.arena
        assert arena.pinned_bytes
        assert not arena.whole

    run(body())


@pytest.mark.wasm
@pytest.mark.parametrize("arch", ["qwen2", "llama"])
@pytest.mark.parametrize("residency", ["fluid", "resident"])
def test_not_a_bit_depends_on_whether_the_engine_is_native_or_wasm(arch: str, residency: str) -> None:
    path = grouped(arch)

    async def body() -> None:
        line = await line_on(path, 2, host=WasmEngine, RESIDENCY=residency)
        for session in ("cold", "warm"):
            assert bits(await through(line, session, 0, embedded(path, IDS))) == await alone(path, IDS)

    run(body())


@pytest.mark.parametrize("arch", ["qwen2", "llama"])
def test_not_a_bit_depends_on_where_a_prompt_is_cut(arch: str) -> None:
    path = grouped(arch)

    async def body() -> None:
        expected = await alone(path, IDS)
        [one] = await line_on(path, 1)
        hidden = embedded(path, IDS)
        cuts = [[n] for n in (1, 5, 15, 16, 17, 22)] + [[7, 9, 20], list(range(1, len(IDS)))]
        for number, cut in enumerate(cuts):
            edges = [0, *cut, len(IDS)]
            rows = [
                await one.forward(f"s{number}", start, hidden[start:end]) for start, end in pairwise(edges)
            ]
            assert bits(np.concatenate(rows)) == expected

    run(body())


def test_not_a_bit_depends_on_who_is_in_the_batch() -> None:
    path = grouped()

    async def body() -> None:
        expected, others = await alone(path, IDS), await alone(path, OTHER)
        [one] = await line_on(path, 1, MAX_BATCH_ROWS="64")
        hidden, other = embedded(path, IDS), embedded(path, OTHER)
        # A decode step, a long and a short prompt, in one pass.
        await one.forward("writer", 0, other[:10])
        answers = await one.send(
            one.step("writer", 10, other[10:]), one.step("a", 0, hidden), one.step("b", 0, other)
        )
        writer, a, b = map(values, answers)
        assert one.api.loop.load.sessions_peak == 3, "they went together, or this tests nothing"
        assert bits(writer) == others[-len(bits(writer)) :]
        assert bits(a) == expected
        assert bits(b) == others

    run(body())


def test_sessions_that_come_as_calls_of_their_own_share_one_pass_over_the_weights() -> None:
    path = grouped()

    async def body() -> None:
        one = await station_on(path, RESIDENCY="fluid")
        hidden = embedded(path, OTHER)
        rows = await asyncio.gather(*(one.forward(f"s{i}", 0, hidden) for i in range(5)))
        assert one.api.loop.load.batches == 1
        assert one.station.weights.reads.opened == 3 * len(PHASES), "each phase was read once for all"
        assert {bits(found) for found in rows} == {await alone(path, OTHER)}

    run(body())


def test_the_exit_returns_as_many_normalised_rows_as_it_is_asked_for() -> None:
    path = grouped()

    async def body() -> None:
        [entry, exit] = await line_on(path, 2)
        hidden = embedded(path, IDS)
        middle = await entry.forward("s", 0, hidden, rows=Rows.NONE)
        assert len(middle) == len(IDS), "an entry passes every row on, whatever the exit is to return"
        every = await exit.forward("all", 0, middle, rows=Rows.ALL)
        last = await exit.forward("last", 0, middle, rows=Rows.LAST)
        none = await exit.forward("none", 0, middle, rows=Rows.NONE)
        assert every.shape == middle.shape
        assert bits(last) == bits(every[-1:])
        assert none.shape == (0, middle.shape[1])
        # Together in one batch as well.
        answers = await exit.send(
            exit.step("x", 0, middle, rows=Rows.NONE),
            exit.step("y", 0, middle, rows=Rows.LAST),
            exit.step("z", 0, middle[:5], rows=Rows.ALL),
        )
        assert [bits(values(answer)) for answer in answers] == [b"", bits(last), bits(every[:5])]

    run(body())


@pytest.mark.parametrize("host", [None, make_native], ids=["inline", "threads"])
def test_in_fluid_memory_a_station_never_holds_more_than_two_blocks_of_one_phase(host: Any) -> None:
    path, recorder = grouped(), Recorder()

    async def body() -> None:
        more = {} if host is None else {"host": host}
        one = await station_on(path, RESIDENCY="fluid", moved=recorder.moved("station"), **more)
        units = phase_units(one.knot.header, range(3), PHASES, 8192)
        hidden = embedded(path, IDS)
        await asyncio.gather(*(one.forward(f"s{i}", 0, hidden) for i in range(3)))
        await one.forward("s0", len(IDS), hidden[:1])
        flow = check_fluid(recorder)["station"]
        cycle = [(layer, phase) for layer in range(3) for phase in PHASES]
        assert flow.order == 2 * cycle, "all phases of all layers went by, one after the other, twice"
        assert flow.passed == {
            unit: 2 * sum(block.length for block in blocks) for unit, blocks in zip(cycle, units, strict=True)
        }
        # Where nobody waits there is no time for the next block to arrive beside the one that is multiplied.
        assert flow.most_blocks == (1 if host is None else 2)
        assert flow.most_bytes <= 2 * largest_block(units)
        assert flow.pinned_bytes == 0
        assert one.station.weights.arena.used == 2 * largest_block(units)

    run(body())


def test_a_batch_that_breaks_off_leaves_no_block_no_page_and_no_session_busy() -> None:
    path, recorder = grouped(), Recorder()

    async def body() -> None:
        one = await station_on(path, RESIDENCY="fluid", moved=recorder.moved("station"))
        hidden = embedded(path, IDS)
        before = await one.forward("s", 0, hidden[:9])
        pages, reads = one.free_pages, 0

        async def read(*arguments: Any) -> bytes:
            nonlocal reads
            reads += 1
            # The knot asks a few times before it gives up.
            if 6 <= reads < 6 + ATTEMPTS:
                raise BlobFailed("the store is out of breath")
            return await original(*arguments)

        original, one.blobs.read = one.blobs.read, read  # type: ignore[method-assign]
        [answer, other] = await one.send(one.step("s", 9, hidden[9:12]), one.step("t", 0, hidden[:4]))
        assert answer.envelope["status"] == other.envelope["status"] == "unavailable"
        assert "out of breath" in answer.envelope["detail"]
        check_fluid(recorder)
        assert one.free_pages == pages
        # The same step again does what it would have done.
        again = await one.forward("s", 9, hidden[9:12])
        whole = await one.forward("whole", 0, hidden[:12])
        assert bits(np.concatenate([before, again])) == bits(whole)

    run(body())


@pytest.mark.parametrize(
    "changes",
    [{"rope_freqs": True}, {"head_dim": 48, "heads": 6, "kv_heads": 3}],
    ids=["rope factors", "heads"],
)
def test_what_other_models_have_is_taken_from_the_knot(changes: dict[str, Any]) -> None:
    async def body() -> None:
        path = knot_of("llama", **changes)
        one = await station_on(path)
        expected = exact_states(path, OTHER)[-1]
        found = await one.forward("s", 0, embedded(path, OTHER))
        assert np.abs(found - expected).max() < TOLERANCE * np.abs(expected).max()

    run(body())
