"""An isolate's memory: asked first, refused with the figures, and never over its ceiling."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from core_support import grouped, header_of, run
from engine_support import make_host
from hypothesis import given, settings
from hypothesis import strategies as st
from shard_support import shard_on
from station_support import embedded, station_on

from durable_objects.budget import MOST_KEPT, IsolateBudget
from engine.blocks import Rows, arena_bytes, largest_block, phase_units, unit
from engine.budget import (
    CEILING_BYTES,
    ENGINE_OVERHEAD,
    ISOLATE_BYTES,
    MIB,
    Budget,
    OverBudgetError,
    engine_memory,
    python_heap,
)
from engine.client import ShardEngine, StationConfig, StationEngine
from engine.errors import Unsupported
from engine.fit import (
    ENGINE,
    FRAMES_IN,
    ShardMemory,
    StationMemory,
    fit_shard,
    fit_station,
    kv_page_bytes,
    shard_desk,
    station_config,
)
from engine.wasm import WasmEngine
from knot.header import PHASES
from protocol.calls import FRAME, Call
from protocol.settings import Settings
from protocol.steps import Choice

PATH = grouped()
HEADER = header_of(PATH)
UNITS = phase_units(HEADER, range(3), PHASES, 8192)
SIZES = StationEngine(make_host("native", MIB)).station_bytes
SHARD_SIZES = ShardEngine(make_host("native", MIB)).shard_bytes


def station_memory(**variables: str) -> StationMemory:
    return StationMemory.of(Settings(variables.get))


def test_pythons_heap_grows_as_it_was_seen_to_on_workerd() -> None:
    """Bodies of so many MiB came in, one after the other; then the heap was so large."""
    seen = {1: 30.0, 2: 30.0, 4: 36.0, 6: 36.0, 8: 36.0, 10: 43.25, 12: 43.25, 16: 43.25}
    for size, heap in seen.items():
        assert python_heap(size * MIB) / MIB == pytest.approx(heap, abs=0.001)


def test_what_does_not_fit_is_refused_with_the_figures_and_changes_nothing() -> None:
    budget = Budget(100_000_000)
    budget.reserve(ENGINE, 20_000_000, python=False)
    before = budget.table()
    with pytest.raises(
        OverBudgetError, match=r"20000000 bytes for answers .* 100000000: python \d+, .* engine 2"
    ):
        budget.reserve("answers", 20_000_000)
    with pytest.raises(OverBudgetError, match="50000000 bytes for engine"):
        budget.reserve(ENGINE, 50_000_000, python=False)
    assert budget.table() == before
    assert sum(before.values()) == budget.total <= budget.ceiling


def test_what_is_reserved_is_there_whatever_others_take() -> None:
    budget = Budget(100_000_000)
    budget.reserve("frames", 2_000_000)
    assert not budget.take("kept", budget.room() + 4 * MIB)
    taken = 0
    while budget.take("kept", 1_000_000):
        taken += 1_000_000
    assert taken > 10_000_000
    assert budget.take("frames", 2_000_000)
    assert not budget.take("frames", 1_000_000)
    budget.give("kept", taken)
    assert budget.take("frames", 1_000_000), "beyond what is reserved there is what nobody has"
    assert (budget.used("frames"), budget.used("kept"), budget.used("never heard of")) == (3_000_000, 0, 0)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from("rtg"), st.integers(0, 40 * MIB))))
def test_whatever_is_asked_for_the_sum_stays_under_the_ceiling(asked: list[tuple[str, str, int]]) -> None:
    budget, taken = Budget(), dict.fromkeys("abc", 0)
    for purpose, what, size in asked:
        if what == "r" and size >= taken[purpose]:
            try:
                budget.reserve(purpose, size, python=purpose != "c")
            except OverBudgetError:
                assert budget.total <= CEILING_BYTES
        elif what == "t" and budget.take(purpose, size):
            taken[purpose] += size
        elif what == "g" and 0 < size <= taken[purpose]:
            budget.give(purpose, size)
            taken[purpose] -= size
        assert sum(budget.table().values()) == budget.total <= CEILING_BYTES < ISOLATE_BYTES
        assert budget.room() == CEILING_BYTES - budget.total
        assert {name: budget.used(name) for name in "abc"} == taken


@settings(max_examples=60)
@given(
    st.sampled_from(["fluid", "pinned-prefix", "resident"]),
    st.integers(MIB, 4 * MIB),
    st.integers(0, 2 * MIB),
    st.integers(1, 4096),
    st.sampled_from(["f32", "f16", "q8_0"]),
    st.integers(76_000_000, CEILING_BYTES),
)
def test_a_batch_has_as_many_rows_as_fit_and_not_one_tile_more(
    residency: str, engine: int, kv: int, most: int, kv_type: str, isolate: int
) -> None:
    memory = station_memory(
        RESIDENCY=residency, ENGINE_BYTES=str(engine), KV_BYTES=str(kv), MAX_BATCH_ROWS=str(most),
        KV_TYPE=kv_type, ISOLATE_BYTES=str(isolate),
    )  # fmt: skip
    least = arena_bytes(UNITS) if residency == "resident" else 2 * largest_block(UNITS)

    def needed(rows: int) -> int:
        return SIZES(station_config(memory, HEADER.config, (0, 3), rows, least))

    try:
        config, budget = fit_station(memory, HEADER.config, (0, 3), UNITS, SIZES)
    except OverBudgetError:
        assert needed(1) > engine or needed(1) > isolate - Budget().total - 8 * MIB
        return
    assert budget.total <= isolate
    assert least // 64 * 64 <= config.arena_bytes <= max(least, arena_bytes(UNITS))
    assert SIZES(config) <= engine
    assert budget.table()[ENGINE] == engine_memory(SIZES(config))
    if config.max_rows < most:
        more = config.max_rows + (8 if config.max_rows > 8 else 1)
        assert needed(more) > engine or budget.room() < needed(more) - SIZES(config) + MIB
    else:
        assert config.max_rows == most


def test_what_a_shard_reserves_fits_too_and_leaves_room_for_rows_to_embed() -> None:
    desk = shard_desk(HEADER, (0, 300), 32)
    blocks = unit([Rows(HEADER.head_tensor(), 0, 300)], 8192)
    memory = ShardMemory.of(Settings({}.get))
    config, budget = fit_shard(memory, HEADER.config, (0, 300), desk, blocks, SHARD_SIZES)
    assert budget.total <= CEILING_BYTES
    assert budget.table()["frames out"] == 4 * 128 * 4 * 96
    assert config.kept == memory.kept_bytes // (4 * 300)
    small = ShardMemory.of(Settings({"ISOLATE_BYTES": "75000000"}.get))
    with pytest.raises(
        OverBudgetError, match=r"a shard of ids \[0, 300\) needs .* the isolate has -?[\d.]+ MB for it"
    ):
        fit_shard(small, HEADER.config, (0, 300), desk, blocks, SHARD_SIZES)


@pytest.mark.parametrize(("kv_type", "bytes_a_token"), [("f32", 768), ("f16", 384), ("q8_0", 204)])
def test_a_page_is_as_large_as_the_engine_makes_it(kv_type: str, bytes_a_token: int) -> None:
    """Three layers of keys and values of 32 elements each."""

    async def body() -> None:
        one = await station_on(PATH, KV_TYPE=kv_type, KV_BYTES="1000000")
        page = kv_page_bytes(HEADER.config, 3, kv_type)
        assert page == one.station.engine.kv_page_bytes() == 16 * bytes_a_token
        assert one.station.engine.engine_memory().kv_pages == 1_000_000 // page
        hidden = embedded(PATH, [5, 6, 7, 8, 9, 10])
        whole = await one.forward("a", 0, hidden)
        parts = [await one.forward("b", 0, hidden[:4]), await one.forward("b", 4, hidden[4:])]
        assert np.concatenate(parts).tobytes() == whole.tobytes(), "and nothing depends on how it was cut"

    run(body())


def test_heads_that_do_not_fit_blocks_of_keys_are_refused_by_name() -> None:
    from dataclasses import replace

    model = replace(HEADER.config, head_dim=48, rope_dim=48)
    with pytest.raises(Unsupported, match=r"KV_TYPE q8_0 wants heads of a multiple of 32 .* have 48"):
        kv_page_bytes(model, 1, "q8_0")


@pytest.mark.wasm
def test_an_engine_takes_no_more_beside_its_region_than_is_reckoned() -> None:
    for config in (
        station_config(station_memory(), HEADER.config, (0, 3), 128, 1 << 20),
        station_config(station_memory(KV_BYTES=str(30 * MIB)), HEADER.config, (0, 3), 8, 8 << 20),
    ):
        assert isinstance(config, StationConfig)
        engine = StationEngine(WasmEngine(48 * MIB))
        engine.station_configure(config)
        beside = engine.host.memory_bytes() - engine.engine_memory().region
        assert ENGINE_OVERHEAD // 2 < beside <= ENGINE_OVERHEAD


def test_steps_wait_no_longer_in_memory_than_there_is_room_for_them() -> None:
    async def body() -> None:
        one = await station_on(PATH, ISOLATE_BYTES="80000000", ENGINE_BYTES=str(2 * MIB), KV_BYTES="100000")
        budget = one.station.budget
        step = one.step("s", 0, embedded(PATH, [1, 2, 3]))
        # Somebody else's frames take what there is.
        taken = 0
        while budget.take(FRAMES_IN, 10_000):
            taken += 10_000
        refused = await one.post(b"x" * 20_000)
        assert refused.status == 503
        assert refused.json()["error"]["kind"] == "busy"
        assert (
            "20000 bytes for frames in do not fit an isolate of 80000000" in refused.json()["error"]["detail"]
        )
        budget.give(FRAMES_IN, taken)
        refused = await one.post(b"x" * (taken + 20_000))
        assert (refused.status, refused.json()["error"]["kind"]) == (413, "over_budget")
        [answer] = await one.send(step)
        assert answer.envelope["status"] == "ok"
        assert budget.used(FRAMES_IN) == 0, "and nothing is left behind"

    run(body())


def test_a_shard_embeds_as_many_rows_at_once_as_it_has_room_for() -> None:
    async def body() -> None:
        one = await shard_on(PATH, ISOLATE_BYTES="86000000")
        most = one.shard.max_tokens
        assert one.api.health()["max_tokens"] == most
        assert 128 <= most < 65_536
        assert len(await one.embed([7] * most)) == most
        [answer] = await one.send("/embed", kind_of_embed(), one.embed_step([7] * (most + 1000)))
        assert answer.envelope["status"] == "over_budget"
        assert "do not fit an isolate of 86000000 bytes: python" in answer.envelope["detail"]
        assert one.shard.budget.used("frames out") == 0
        await one.logits(np.zeros(96, "<f4"), Choice())

    run(body())


def kind_of_embed() -> Any:
    from protocol.frames import Kind

    return Kind.EMBED


def test_what_wardens_keep_is_counted_with_all_the_rest() -> None:
    told: list[int] = []
    budget = IsolateBudget(1 << 40, lambda: 0.0, told.append)
    assert budget.limit == MOST_KEPT
    assert not budget.take(MOST_KEPT + 1)
    assert budget.take(MOST_KEPT)
    assert sum(told) == MOST_KEPT


@pytest.mark.parametrize("content", [FRAME, "application/json"])
def test_memory_tells_what_everything_is_for(content: str) -> None:
    async def body() -> None:
        one = await station_on(PATH)
        told = (await one.api.answer(Call("GET", "/memory", headers={"content-type": content}))).json()
        figures = dict(told["budget"])
        ceiling = figures.pop("ceiling")
        assert sum(figures.values()) == one.station.budget.total <= ceiling == CEILING_BYTES
        assert figures["engine"] >= told["engine"]["region"]

    run(body())
