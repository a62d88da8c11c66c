"""Whatever a host passes, the engine answers or refuses: no panic, no trap, and it goes on working."""

from __future__ import annotations

import struct
from contextlib import suppress
from typing import Any

import pytest
from engine_blocks import HOSTS, tiny
from engine_support import make_host, station_config
from gguf.constants import GGMLQuantizationType as Kind
from hypothesis import given, settings
from hypothesis import strategies as st

from engine import _native
from engine.client import Engine, ShardConfig, ShardEngine, StationEngine
from engine.errors import BY_STATUS, EnginePanicked

LIMIT = 1 << 20
FUNCTIONS = dict(_native.FUNCTIONS)
STATION = station_config(tiny("qwen2"), layer_end=1, kv_pages=4, max_rows=4, arena_bytes=1 << 16)
SHARD = ShardConfig(hidden=96, vocab_start=10, vocab_end=90, max_rows=4, kept=3, arena_bytes=1 << 16)
# Where things are in those configurations, and what lies just beside.
PLACES = [
    0,
    1,
    4,
    64,
    4096,
    65532,
    65536,
    65540,
    100_000,
    200_000,
    LIMIT - 4,
    LIMIT,
    2**31 - 1,
    2**31,
    2**32 - 1,
]
TYPES = [int(Kind[name]) for name in ("F32", "F16", "Q4_0", "Q8_0", "Q4_K", "Q6_K", "Q2_K")]

# A panic, or a trap of wasm, is none of these.
REFUSALS = [kind for kind in BY_STATUS.values() if kind is not EnginePanicked]

argument = st.one_of(
    st.integers(0, 9),
    st.sampled_from([16, 32, 64, 80, 96, 97, 256, 1024, 96 * 96 * 4, 96 * 34 * 3, 96 * 4]),
    st.sampled_from(PLACES),
    st.sampled_from(TYPES),
    st.integers(0, 2**32 - 1),
)
call = st.tuples(st.sampled_from(sorted(FUNCTIONS)), st.lists(argument, min_size=8, max_size=8))


@st.composite
def mail(draw: st.DrawFn) -> tuple[str, bytes]:
    """Something for the mailbox: a configuration with a few fields changed, a table, or anything."""
    choice = draw(st.sampled_from(["station", "shard", "table", "bytes"]))
    if choice == "bytes":
        return "write", draw(st.binary(max_size=80))
    if choice == "table":
        fields = draw(st.lists(argument, max_size=20))
    else:
        packed = (STATION if choice == "station" else SHARD).pack()
        fields = list(struct.unpack(f"<{len(packed) // 4}I", packed))
        for index, value in draw(st.dictionaries(st.integers(0, 17), argument, max_size=2)).items():
            fields[index % len(fields)] = value
    return "write", struct.pack(f"<{len(fields)}I", *fields)


def run(engine: Engine, steps: list[tuple[str, Any]]) -> None:
    for name, value in steps:
        if name == "write":
            engine.host.write(0, value)
            continue
        with suppress(*REFUSALS):
            engine.host.call(name, *value[: FUNCTIONS[name]])


def check_that_it_still_works(engine: Engine) -> None:
    station = StationEngine(engine.host)
    station.station_configure(STATION)
    at = station.arena_at
    slot = station.kv_open()
    station.kv_restore(slot, 20)
    station.host.write(at, struct.pack("<4f", 1, 2, 3, 4))
    station.host.call("matmul_block", 0, 2, 1, at, 8, 1, at + 8, at + 64)
    assert struct.unpack("<f", station.host.read(at + 64, 4)) == (11.0,)


ANY = st.lists(st.one_of(call, call, call, mail()), max_size=25)
# Calls that belong together, so that batches, passes and selections are reached at all.
STEPS = st.lists(
    st.one_of(
        mail(),
        call,
        *(
            st.tuples(st.just(name), st.lists(argument, min_size=8, max_size=8))
            for name in FUNCTIONS
            if name.startswith(("kv_", "batch_", "phase_", "logits_", "forward_"))
        ),
    ),
    max_size=40,
)


@pytest.mark.parametrize("kind", HOSTS[:2])
@settings(max_examples=100, deadline=None)
@given(steps=ANY)
def test_no_sequence_of_calls_breaks_an_engine(kind: str, steps: list[tuple[str, Any]]) -> None:
    engine = Engine(make_host(kind, LIMIT))
    run(engine, steps)
    check_that_it_still_works(engine)


@pytest.mark.parametrize("kind", HOSTS[:2])
@settings(max_examples=100, deadline=None)
@given(steps=STEPS, rows=st.integers(1, 4))
def test_no_sequence_of_calls_breaks_a_station_in_the_middle_of_a_batch(
    kind: str, steps: list[tuple[str, Any]], rows: int
) -> None:
    station = StationEngine(make_host(kind, LIMIT))
    station.station_configure(STATION)
    at = station.arena_at
    station.host.write(at, struct.pack("<96f", *[1.0] * 96))
    for vector, count in ((0, 96), (1, 96), (2, 96), (3, 32), (4, 32), (5, 96)):
        station.set_vector(0, vector, at, count)
    slot = station.kv_open()
    station.batch_begin([(slot, i) for i in range(rows)])
    station.phase_begin(0, 0)
    run(station, steps)
    check_that_it_still_works(station)


@pytest.mark.parametrize("kind", HOSTS[:2])
@settings(max_examples=100, deadline=None)
@given(steps=STEPS, rows=st.integers(1, 3))
def test_no_sequence_of_calls_breaks_a_shard_in_the_middle_of_a_pass(
    kind: str, steps: list[tuple[str, Any]], rows: int
) -> None:
    shard = ShardEngine(make_host(kind, LIMIT))
    shard.shard_configure(SHARD)
    shard.logits_begin(list(range(rows)), shard.arena_at)
    shard.host.call("logits_block", 0, 0, 40, shard.arena_at, 40 * 96 * 4)
    run(shard, steps)
    check_that_it_still_works(shard)


@pytest.mark.parametrize("kind", HOSTS[:2])
def test_every_function_refuses_the_largest_and_answers_the_smallest_arguments(kind: str) -> None:
    for value in (0, 1, 2**31 - 1, 2**31, 2**32 - 1):
        engine = Engine(make_host(kind, LIMIT))
        run(engine, [(name, [value] * 8) for name in FUNCTIONS])
        check_that_it_still_works(engine)
