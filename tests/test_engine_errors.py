"""Every refusal of a station says what, where, expected and found; and the engine goes on."""

from __future__ import annotations

import asyncio
import math
import re
import struct
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_blocks import HOSTS, tiny
from engine_support import Station, make_host, station_config
from gguf.constants import GGMLQuantizationType as Kind

import engine.errors as errors
from engine.client import Phase, StationConfig, StationEngine, Tensor, Vector, Weights
from engine.errors import BadArgument, BadState, NonFinite, OutOfBounds, OverBudget, Unsupported

F32, Q8_0 = int(Kind.F32), int(Kind.Q8_0)
HOSTS_ = HOSTS[:2]


def small(kind: str = "native", **changes: Any) -> StationEngine:
    """A station of one layer of the tiny model, without vectors."""
    engine = StationEngine(make_host(kind, 1 << 24))
    engine.station_configure(station_config(tiny("qwen2"), layer_start=5, layer_end=7, **changes))
    return engine


def ready(kind: str = "native", **changes: Any) -> StationEngine:
    """The same with vectors of ones."""
    engine = small(kind, **changes)
    config = engine.config
    assert config is not None
    at = engine.arena_at
    engine.host.write(at, np.ones(config.hidden, "<f4").tobytes())
    for layer in (5, 6):
        for kind_, count in ((0, 96), (1, 96), (2, 96), (3, 32), (4, 32)):
            engine.set_vector(layer, kind_, at, count)
    engine.set_vector(0, Vector.OUTPUT_NORM, at, 96)
    engine.host.write(at, bytes(config.arena_bytes))
    return engine


def begun(engine: StationEngine, rows: int = 2) -> int:
    """Opens a batch with a finite hidden state; returns its offset."""
    slot = engine.kv_open()
    engine.batch_begin([(slot, i) for i in range(rows)])
    at = engine.batch_hidden_at()
    engine.host.write(at, np.ones(rows * 96, "<f4").tobytes())
    return at


def block(engine: StationEngine, tensor: int, row: int, rows: int, cols: int = 96, type: int = F32) -> None:
    asyncio.run(engine.phase_block(tensor, type, row, rows, engine.arena_at, rows * cols * 4))


def attention(engine: StationEngine, layer: int = 5) -> None:
    engine.phase_begin(layer, Phase.ATTN)
    for tensor, rows in ((Tensor.Q, 96), (Tensor.K, 32), (Tensor.V, 32), (Tensor.O, 96)):
        block(engine, tensor, 0, rows)
    engine.phase_end()


def test_kinds_of_errors_are_the_same_on_both_sides() -> None:
    source = Path(__file__).parent.parent / "rust/distributed-inference/src/error.rs"
    kinds = dict(re.findall(r"^    (\w+) = (\d+),", source.read_text(), re.MULTILINE))
    assert len(kinds) >= 9
    names = {"EnginePanicked": "Panic"}
    known = {
        names.get(kind.__name__, kind.__name__): str(status) for status, kind in errors.BY_STATUS.items()
    }
    assert known == kinds


@pytest.mark.parametrize("kind", HOSTS_)
def test_a_configuration_takes_what_it_is_said_to_take(kind: str) -> None:
    engine = small(kind)
    assert engine.config is not None
    assert engine.station_bytes(engine.config) == engine.engine_memory().region
    memory = engine.engine_memory()
    row = 2 * 96 + 32 + max(2 * 96 + 2 * 32, 256)  # x, h, angles, and the wider of attention and gate
    assert memory.scratch == 64 * row * 4
    vectors = 2 * ((2 * 96 + 96 + 64 + 15) // 16 * 16 * 4) + 96 * 4
    assert memory.persistent == vectors + 32 * engine.kv_page_bytes()
    assert memory.region == 65536 + memory.persistent + memory.scratch + memory.arena


@pytest.mark.parametrize("kind", HOSTS_)
def test_a_configuration_over_the_limit_is_refused_with_the_figures_and_the_old_one_stays(kind: str) -> None:
    engine = small(kind)
    assert engine.config is not None
    before = engine.engine_memory()
    with pytest.raises(OverBudget, match=rf"= \d+, more than its limit of {1 << 24}"):
        engine.station_configure(replace(engine.config, kv_pages=100_000))
    with pytest.raises(OverBudget, match="more than the 2147483647 that its ABI can address"):
        engine.station_bytes(replace(engine.config, kv_pages=1_000_000))
    assert engine.engine_memory() == before
    assert engine.kv_free_pages() == 32


def test_every_field_of_a_configuration_is_checked() -> None:
    engine = small()
    good = engine.config
    assert good is not None
    bad: dict[str, tuple[object, ...]] = {
        "layer_start": (7, 4096),
        "layer_end": (5, 0, 5000),
        "hidden": (0, 1 << 21),
        "ffn": (0, 2**32 - 1),
        "n_heads": (0, 2**32 - 1),
        "n_kv_heads": (0, 2, 4),
        "head_dim": (0, 2**32 - 1),
        "rope_type": (2,),
        "rope_dim": (0, 33, 34),
        "rope_theta": (0.0, -1.0, math.nan, math.inf),
        "norm_eps": (0.0, -1.0, math.nan, math.inf),
        "max_rows": (0, 1 << 20),
        "max_sessions": (0, 1 << 30),
        "kv_pages": (0, 1 << 30),
        "kv_type": (2, 99),
    }
    assert set(bad) | {"qkv_bias", "qk_norm", "output_norm", "arena_bytes"} == {
        f.name for f in fields(StationConfig)
    }
    for name, values in bad.items():
        for value in values:
            with pytest.raises((BadArgument, Unsupported), match=name.split("_")[0]):
                engine.station_configure(replace(good, **{name: value}))
    with pytest.raises(Unsupported, match=r"kv_type 8 \(Q8_0\) .* but head_dim is 48"):
        engine.station_configure(replace(good, kv_type=8, head_dim=48))
    with pytest.raises(BadArgument, match="32-bit"):
        replace(good, hidden=1 << 32).pack()
    data = bytearray(good.pack())
    engine.host.write(0, struct.pack("<I", 2) + data[4:])
    with pytest.raises(Unsupported, match="version 2"):
        engine.host.call("station_configure", 0, len(data))
    engine.host.write(0, bytes(data) + bytes(4))
    with pytest.raises(BadArgument, match="has 76 bytes, expected 72"):
        engine.host.call("station_configure", 0, len(data) + 4)


@pytest.mark.parametrize("kind", HOSTS_)
def test_a_missing_vector_is_named_with_its_layer(kind: str) -> None:
    engine = small(kind)
    at = engine.arena_at
    slot = engine.kv_open()
    missing = [
        (lambda: engine.set_vector(5, Vector.ATTN_NORM, at, 96), "attn_norm of layer 5"),
        (lambda: engine.set_vector(5, Vector.FFN_NORM, at, 96), "ffn_norm of layer 5"),
        (lambda: engine.set_vector(5, Vector.Q_BIAS, at, 96), "attn_q bias of layer 5"),
        (lambda: engine.set_vector(5, Vector.K_BIAS, at, 32), "attn_k bias of layer 5"),
        (lambda: engine.set_vector(5, Vector.V_BIAS, at, 32), "attn_v bias of layer 5"),
        (lambda: engine.set_vector(6, Vector.ATTN_NORM, at, 96), "attn_norm of layer 6"),
    ]
    for repair, complaint in missing:
        with pytest.raises(BadState, match=f"{complaint} is missing"):
            engine.batch_begin([(slot, 0)])
        repair()
    with pytest.raises(BadState, match="ffn_norm of layer 6"):
        engine.batch_begin([(slot, 0)])


def test_a_vector_of_the_wrong_length_or_place_or_content_is_refused() -> None:
    engine = small()
    at = engine.arena_at
    for call, complaint in [
        (lambda: engine.set_vector(5, 0, at, 95), "attn_norm: expected 96 values, found 95"),
        (lambda: engine.set_vector(5, 3, at, 96), "attn_k bias: expected 32 values"),
        (lambda: engine.set_vector(7, 0, at, 96), "layer 7 is not this station's, which owns 5 to 7"),
        (lambda: engine.set_vector(5, 9, at, 96), "vector kind 9"),
        (lambda: engine.set_vector(0, Vector.ROPE_FREQS, at, 16), "positive factors"),
        (lambda: small(qkv_bias=False).set_vector(5, 2, at, 96), "without biases"),
        (lambda: engine.set_vector(5, Vector.K_NORM, at, 32), "without norms of heads"),
        (lambda: small(output_norm=False).set_vector(0, 5, at, 96), "not configured as the exit"),
    ]:
        with pytest.raises(BadArgument, match=complaint):
            call()
    with pytest.raises(OutOfBounds, match="attn_norm"):
        engine.set_vector(5, 0, engine.engine_memory().region - 380, 96)
    engine.host.write(at, np.full(96, np.nan, "<f4").tobytes())
    with pytest.raises(NonFinite, match="ffn_norm of layer 6: value 0"):
        engine.set_vector(6, 1, at, 96)


def test_rows_that_do_not_continue_their_sessions_are_refused_with_both_numbers() -> None:
    engine = ready()
    a, b = engine.kv_open(), engine.kv_open()
    engine.kv_restore(a, 20)
    for rows, kind, complaint in [
        ([(a, 19)], BadState, f"row 0: session {a} has 20 tokens, so position 20 was expected, found 19"),
        ([(b, 0), (a, 20), (a, 22)], BadState, "row 2: .* position 21 was expected, found 22"),
        ([(a, 20), (b, 0), (a, 21)], BadArgument, f"row 2: rows of session {a} must be together"),
        ([(9, 0)], BadState, "session 9 is not open"),
        ([(77, 0)], BadState, "session 77 is not open"),
        ([], BadArgument, "batch of 0 rows, expected 1 to 64"),
        ([(b, i) for i in range(65)], BadArgument, "batch of 65 rows"),
    ]:
        with pytest.raises(kind, match=complaint):
            engine.batch_begin(rows)
    engine.batch_begin([(a, 20), (b, 0)])
    with pytest.raises(BadState, match="a batch is open already"):
        engine.batch_begin([(b, 0)])
    with pytest.raises(BadState, match="while a batch is open"):
        engine.set_vector(5, 0, engine.arena_at, 96)


@pytest.mark.parametrize("kind", HOSTS_)
def test_phases_and_layers_come_strictly_in_order(kind: str) -> None:
    engine = ready(kind)
    with pytest.raises(BadState, match="no batch is open"):
        engine.phase_begin(5, 0)
    begun(engine)
    with pytest.raises(BadState, match="expected layer 5, phase attn, found layer 5, phase ffn_gate"):
        engine.phase_begin(5, 1)
    with pytest.raises(BadState, match="found layer 6, phase attn"):
        engine.phase_begin(6, 0)
    with pytest.raises(BadArgument, match="layer 4 is not this station's"):
        engine.phase_begin(4, 0)
    with pytest.raises(BadArgument, match="phase 4"):
        engine.phase_begin(5, 4)
    with pytest.raises(BadState, match="attn_q: no phase has begun"):
        block(engine, Tensor.Q, 0, 1)
    with pytest.raises(BadState, match="no phase has begun"):
        engine.phase_end()
    attention(engine)
    with pytest.raises(BadState, match="expected layer 5, phase ffn_gate, found layer 5, phase attn"):
        engine.phase_begin(5, 0)
    with pytest.raises(BadState, match="batch_end: 1 of 8 phases are complete"):
        engine.batch_end()
    with pytest.raises(BadState, match="output_norm: 1 of 8 phases"):
        engine.output_norm(0, 1)
    engine.phase_begin(5, 1)
    with pytest.raises(BadState, match="layer 5, phase ffn_gate has not ended"):
        engine.phase_begin(5, 2)


@pytest.mark.parametrize("kind", HOSTS_)
def test_missing_and_misplaced_rows_are_named(kind: str) -> None:
    engine = ready(kind)
    begun(engine)
    engine.phase_begin(5, Phase.ATTN)
    with pytest.raises(BadState, match="layer 5, phase attn: attn_q has 0 of 96 rows"):
        engine.phase_end()
    with pytest.raises(BadState, match="expected row 0 of attn_q, found row 0 of attn_k"):
        block(engine, Tensor.K, 0, 1)
    block(engine, Tensor.Q, 0, 90)
    with pytest.raises(
        BadState, match="layer 5, phase attn: expected row 90 of attn_q, found row 91 of attn_q"
    ):
        block(engine, Tensor.Q, 91, 1)
    with pytest.raises(BadArgument, match="7 rows of attn_q from row 90 on, expected 1 to 6"):
        block(engine, Tensor.Q, 90, 7)
    with pytest.raises(BadArgument, match="0 rows of attn_q"):
        block(engine, Tensor.Q, 90, 0)
    with pytest.raises(BadArgument, match="tensor 7"):
        block(engine, 7, 0, 1)
    block(engine, Tensor.Q, 90, 6)
    block(engine, Tensor.K, 0, 32)
    block(engine, Tensor.V, 0, 31)
    with pytest.raises(BadState, match="attn_v has 31 of 32 rows"):
        engine.phase_end()
    block(engine, Tensor.V, 31, 1)
    block(engine, Tensor.O, 0, 96)
    with pytest.raises(BadState, match="expected phase_end, found row 0 of attn_output"):
        block(engine, Tensor.O, 0, 1)
    engine.phase_end()


@pytest.mark.parametrize("kind", HOSTS_)
def test_a_block_that_is_not_what_it_is_said_to_be_is_refused_and_can_be_given_again(kind: str) -> None:
    engine = ready(kind)
    begun(engine)
    engine.phase_begin(5, Phase.ATTN)
    at, memory = engine.arena_at, engine.engine_memory()

    def give(type: int, at: int, length: int) -> Callable[[], None]:
        return lambda: asyncio.run(engine.phase_block(Tensor.Q, type, 0, 96, at, length))

    place = "layer 5, phase attn, attn_q"
    for call, kind_, complaint in [
        (
            give(Q8_0, at, 96 * 3 * 36),
            BadArgument,
            f"{place}: 96 rows of 96 elements in Q8_0 are 9792 bytes, but 10368",
        ),
        (
            give(int(Kind.Q4_K), at, 144),
            BadArgument,
            "Q4_K row must be a multiple of 256 elements, but has 96",
        ),
        (give(int(Kind.IQ2_XS), at, 144), Unsupported, r"IQ2_XS \(ggml type 17\)"),
        (give(F32, memory.region - 4, 96 * 96 * 4), OutOfBounds, f"{place}: .* neither in the mailbox"),
        (give(F32, 65536, 96 * 96 * 4), OutOfBounds, f"{place}: .* neither in the mailbox"),
        (give(F32, at - 4, 96 * 96 * 4), OutOfBounds, f"{place}: .* neither in the mailbox"),
        (give(F32, 2**32 - 1, 2**32 - 1), OutOfBounds, f"{place}: .* neither in the mailbox"),
    ]:
        with pytest.raises(kind_, match=complaint):
            call()
    asyncio.run(
        engine.phase_block(Tensor.Q, F32, 0, 96, 0, 96 * 96 * 4)
    )  # the mailbox is as good as the arena
    block(engine, Tensor.K, 0, 32)


@pytest.mark.parametrize("kind", HOSTS_)
@pytest.mark.parametrize("phase", list(Phase))
def test_a_number_that_is_none_is_named_with_layer_phase_and_row(kind: str, phase: Phase) -> None:
    engine = ready(kind)
    hidden_at = begun(engine)
    matrices = {
        Phase.ATTN: (Tensor.O, 96, 96),
        Phase.FFN_GATE: (Tensor.GATE, 256, 96),
        Phase.FFN_UP: (Tensor.UP, 256, 96),
        Phase.FFN_DOWN: (Tensor.DOWN, 96, 256),
    }
    engine.phase_begin(5, Phase.ATTN)
    for tensor, rows in ((Tensor.Q, 96), (Tensor.K, 32), (Tensor.V, 32)):
        block(engine, tensor, 0, rows)
    for current, (tensor, rows, cols) in matrices.items():
        if current != Phase.ATTN:
            engine.phase_begin(5, current)
        if current == phase:
            # Infinity in one weight: with activations of 0 a NaN, with others an infinity.
            engine.host.write(engine.arena_at + 4 * cols * 3, struct.pack("<f", math.inf))
        block(engine, tensor, 0, rows, cols)
        if current == phase:
            name = phase.name.lower()
            with pytest.raises(
                NonFinite, match=rf"layer 5, phase {name}: batch row 0 has (NaN|inf) at element 3"
            ):
                engine.phase_end()
            break
        engine.phase_end()
    with pytest.raises(BadState):
        engine.batch_end()
    engine.batch_abort()
    engine.host.write(engine.arena_at, bytes(1 << 16))
    assert begun(engine) == hidden_at
    attention(engine)


def test_a_hidden_state_that_came_in_broken_is_named_by_its_row() -> None:
    engine = ready()
    at = begun(engine, rows=3)
    engine.host.write(at + 4 * (2 * 96 + 17), struct.pack("<f", math.nan))
    complaint = "layer 5, phase attn, the hidden state that came in: batch row 2 has NaN at element 17"
    with pytest.raises(NonFinite, match=complaint):
        engine.phase_begin(5, 0)


def test_a_whole_phase_call_refuses_before_anything_has_begun() -> None:
    engine = ready()
    begun(engine)
    at = engine.arena_at
    good = Weights(F32, at, 96 * 96 * 4)
    kv = Weights(F32, at, 32 * 96 * 4)
    with pytest.raises(BadArgument, match=r"layer 5, phase attn, attn_v: 32 rows .* but 4 were given"):
        asyncio.run(engine.forward_range_attn_chunk(5, good, kv, Weights(F32, at, 4), good))
    asyncio.run(engine.forward_range_attn_chunk(5, good, kv, kv, good))
    with pytest.raises(BadState, match="expected layer 5, phase ffn_gate"):
        asyncio.run(engine.forward_range_ffn_down_chunk(5, Weights(F32, at, 96 * 256 * 4)))


def test_an_engine_that_is_no_station_says_so() -> None:
    host = make_host("native", 1 << 20)
    for name, args in (("batch_end", ()), ("kv_open", ()), ("phase_begin", (0, 0))):
        with pytest.raises(BadState, match="no layer station: call station_configure first"):
            host.call(name, *args)
    with pytest.raises(BadState, match="no vocabulary shard: call shard_configure first"):
        host.call("logits_end")
    host.call("engine_reserve_arena", 4096)
    with pytest.raises(OverBudget):
        host.call("engine_reserve_arena", 1 << 20)
    assert host.call("engine_region_bytes") == 65536 + 4096


def test_configuring_again_forgets_everything() -> None:
    station = Station(tiny("qwen2"), make_host("native"))
    slot = station.engine.kv_open()
    station.engine.kv_restore(slot, 30)
    station.engine.batch_begin([(slot, 30)])
    station.engine.station_configure(station.config)
    assert station.engine.kv_free_pages() == station.config.kv_pages
    with pytest.raises(BadState, match="not open"):
        station.engine.kv_length(slot)
    station.engine.batch_abort()
    with pytest.raises(BadState, match="attn_norm of layer 0 is missing"):
        station.engine.batch_begin([(station.engine.kv_open(), 0)])
