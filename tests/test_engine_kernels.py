"""Dequantisation and products: exact against the reference library, and the same bits everywhere."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from engine_blocks import FORMATS, HOSTS, arena, random_blocks, random_rows
from gguf.constants import GGML_QUANT_SIZES
from gguf.constants import GGMLQuantizationType as Kind
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import values_of

from engine.errors import BadArgument, OutOfBounds, Unsupported
from knot.quants import ENGINE_TYPES, QUANTS

# |engine - exact| ≤ this times Σ|w·x|. Eight lanes of f32 over at most 512 columns stay well below it.
PRODUCT_TOLERANCE = 5e-7
# Types that are multiplied as integers: activations are multiples of a 32512th of the largest of their 32.
CODED = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")
BATCHES = (1, 7, 32, 65, 512)


def dequantised(kind: str, name: str, blocks: np.ndarray) -> np.ndarray:
    engine = arena(kind)
    elements, _ = GGML_QUANT_SIZES[Kind[name]]
    at, cols = engine.arena_at, elements * len(blocks)
    engine.host.write(at + 1, blocks.tobytes())
    out_at = at + (blocks.size + 64) // 64 * 64 + 64
    length = asyncio.run(engine.embed_range_sliced(Kind[name], cols, 1, at + 1, blocks.size, out_at))
    return np.frombuffer(engine.host.read(out_at, length), "<f4")


def product(
    kind: str, name: str, rows: np.ndarray, x: np.ndarray, function: str = "matmul_block"
) -> np.ndarray:
    engine = arena(kind)
    n_rows, (batch, cols) = len(rows), x.shape
    w_at = engine.arena_at
    x_at = w_at + (rows.size + 67) // 64 * 64
    y_at = x_at + x.nbytes
    engine.host.write(w_at + 1, rows.tobytes())
    engine.host.write(x_at, x.tobytes())
    length = engine.host.call(function, Kind[name], cols, n_rows, w_at + 1, rows.size, batch, x_at, y_at)
    return np.frombuffer(engine.host.read(y_at, length), "<f4").reshape(batch, n_rows)


def tolerance(name: str, x: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """How far products [batch, n_rows] may be from exact ones."""
    x, weights = np.abs(x.astype(np.float64)), np.abs(weights)
    if name not in CODED:
        return PRODUCT_TOLERANCE * (x @ weights.T)
    # Half a step for every activation, and what f32 rounds off of codes and minimums, which are up to twice
    # the largest weight.
    blocks = x.reshape(len(x), -1, 32)
    steps = np.repeat(blocks.max(axis=2) / 32512, 32, axis=1)
    largest = np.repeat(weights.reshape(len(weights), -1, 32).max(axis=2), 32, axis=1)
    return 0.51 * (steps @ weights.T) + PRODUCT_TOLERANCE * 2 * (x @ largest.T)


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    return a.shape == b.shape and bool((a.view(np.uint32) == b.view(np.uint32)).all())


@pytest.mark.parametrize("kind", HOSTS)
def test_the_engine_and_the_table_of_quants_agree_on_every_block(kind: str) -> None:
    engine = arena(kind)
    assert set(FORMATS) == set(ENGINE_TYPES)
    for name, (ggml_id, elements, size) in QUANTS.items():
        if name in ENGINE_TYPES:
            assert engine.type_block(ggml_id) == (elements, size)
        else:
            with pytest.raises(Unsupported, match=f"{name} \\(ggml type {ggml_id}\\)|ggml type {ggml_id}"):
                engine.type_block(ggml_id)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("kind", HOSTS)
def test_blocks_with_any_finite_scales_are_read_bit_for_bit_like_the_reference(kind: str, name: str) -> None:
    blocks = random_blocks(name, 4096, np.random.default_rng(FORMATS.index(name)), wild=True)
    with np.errstate(invalid="ignore"):
        expected = values_of(blocks, Kind[name]).ravel()
    assert np.isfinite(expected).all()
    assert len(np.unique(expected)) > 1000
    assert same_bits(dequantised(kind, name, blocks), expected)


@pytest.mark.parametrize("kind", HOSTS)
def test_all_half_precision_numbers_are_read_exactly(kind: str) -> None:
    bits = np.arange(1 << 16, dtype="<u2")
    expected = bits.view("<f2").astype("<f4")
    found = dequantised(kind, "F16", bits.view(np.uint8).reshape(-1, 2))
    numbers = ~np.isnan(expected)
    assert same_bits(found[numbers], expected[numbers])
    assert np.isnan(found[~numbers]).all()


@pytest.mark.parametrize("kind", HOSTS)
@pytest.mark.parametrize("name", ["Q4_K", "Q5_K"])
def test_scales_of_upper_sub_blocks_are_gathered_from_two_places(kind: str, name: str) -> None:
    """Sub-block 6 has scale 50 and minimum 9; reading it as sub-block 2 is read would give 3 and 38."""
    _, size = GGML_QUANT_SIZES[Kind[name]]
    block = np.zeros((1, size), np.uint8)
    block[0, 0:2] = block[0, 2:4] = np.frombuffer(np.float16(1).tobytes(), np.uint8)
    block[0, 4 + 2] = 0b11 << 6 | 3
    block[0, 4 + 6] = 0b00 << 6 | 38
    block[0, 4 + 10] = 9 << 4 | 0b0010
    block[0, -128:] = 0x11  # every element is 1
    values = dequantised(kind, name, block)
    assert (values[6 * 32 : 7 * 32] == 50 - 9).all()
    assert (values[2 * 32 : 3 * 32] == 3 - 38).all()


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("kind", HOSTS)
def test_products_are_exact_within_the_tolerance_and_do_not_depend_on_batch_or_blocks(
    kind: str, name: str
) -> None:
    rng = np.random.default_rng(FORMATS.index(name))
    elements, _ = GGML_QUANT_SIZES[Kind[name]]
    for cols in {1: (1, 100, 264, 515), 32: (32, 96, 288), 256: (256, 512)}[elements]:
        rows = random_rows(name, 19, cols, rng)
        weights = values_of(rows, Kind[name]).astype(np.float64)
        x = rng.standard_normal((max(BATCHES), cols)).astype(np.float32)
        whole = product(kind, name, rows, x)
        exact = x.astype(np.float64) @ weights.T
        assert (np.abs(whole - exact) <= tolerance(name, x, weights)).all()
        assert same_bits(product(kind, name, rows, x, "matmul_block_plain"), whole)
        assert same_bits(product("native", name, rows, x), whole)
        for batch in BATCHES:
            assert same_bits(product(kind, name, rows, x[-batch:]), whole[-batch:])
        for block in (1, 7):
            parts = [product(kind, name, rows[at : at + block], x) for at in range(0, len(rows), block)]
            assert same_bits(np.concatenate(parts, axis=1), whole)


@pytest.mark.parametrize("batch", [1, 40])
def test_threads_change_no_bit(batch: int) -> None:
    rng = np.random.default_rng(7)
    rows = random_rows("Q4_K", 64 * 33 + 9, 2048, rng)
    x = rng.standard_normal((batch, 2048)).astype(np.float32)
    expected = product("native", "Q4_K", rows, x)
    host = arena("native").host
    for threads in (2, 3):
        assert host.call("engine_threads", threads) == threads
        assert same_bits(product("native", "Q4_K", rows, x), expected)
    host.call("engine_threads", 1)
    with pytest.raises(BadArgument, match="0 threads, expected 1 to"):
        host.call("engine_threads", 0)


@pytest.mark.wasm
def test_webassembly_has_one_thread() -> None:
    with pytest.raises(BadArgument, match="2 threads, expected 1 to 1"):
        arena("wasm").host.call("engine_threads", 2)


@pytest.mark.wasm
@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(FORMATS),
    blocks=st.integers(1, 5),
    n_rows=st.integers(1, 12),
    batch=st.integers(1, 40),
    seed=st.integers(0, 2**32 - 1),
)
def test_every_host_multiplies_to_the_same_bits(
    name: str, blocks: int, n_rows: int, batch: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    elements, _ = GGML_QUANT_SIZES[Kind[name]]
    cols = blocks * (elements if elements > 1 else int(rng.integers(1, 70)))
    rows = random_rows(name, n_rows, cols, rng)
    x = (rng.standard_normal((batch, cols)) * 10.0 ** rng.integers(-3, 4)).astype(np.float32)
    results = [product(kind, name, rows, x) for kind in ("native", "wasm", "relaxed")]
    assert same_bits(results[0], results[1])
    assert same_bits(results[0], results[2])


@pytest.mark.parametrize("kind", HOSTS)
def test_a_row_of_another_type_than_f32_is_never_zero(kind: str) -> None:
    """A reader that knows only F32 and answers zeros for the rest embeds every prompt as nothing."""
    for name in FORMATS:
        rows = random_blocks(name, 8, np.random.default_rng(3))
        assert np.count_nonzero(dequantised(kind, name, rows)) > 0.9 * len(rows)


@pytest.mark.parametrize("kind", HOSTS)
def test_a_type_without_a_kernel_is_an_error_that_names_it_and_leaves_the_output_alone(kind: str) -> None:
    engine = arena(kind)
    at = engine.arena_at
    engine.host.write(at + 4096, b"\x55" * 1024)
    with pytest.raises(Unsupported, match=r"IQ1_S \(ggml type 19\).*Q4_K"):
        asyncio.run(engine.embed_range_sliced(19, 256, 1, at, 84, at + 4096))
    with pytest.raises(Unsupported, match="ggml type 4242"):
        engine.host.call("matmul_block", 4242, 256, 1, at, 84, 1, at, at + 4096)
    assert engine.host.read(at + 4096, 1024) == b"\x55" * 1024


@pytest.mark.parametrize("kind", HOSTS)
def test_lengths_that_do_not_fit_the_shape_are_refused_with_both_numbers(kind: str) -> None:
    engine = arena(kind)
    at = engine.arena_at
    with pytest.raises(BadArgument, match="272 bytes, but 288 were given"):
        asyncio.run(engine.embed_range_sliced(Kind.Q8_0, 256, 1, at, 288, at + 4096))  # 36 bytes a block
    with pytest.raises(BadArgument, match="multiple of 256 elements, but has 172"):
        asyncio.run(engine.embed_range_sliced(Kind.Q4_K, 172, 1, at, 144, at + 4096))
    with pytest.raises(BadArgument, match="overlap"):
        asyncio.run(engine.embed_range_sliced(Kind.F32, 64, 1, at, 256, at + 252))
    with pytest.raises(OutOfBounds, match="leave the region"):
        asyncio.run(engine.embed_range_sliced(Kind.F32, 64, 1, at, 256, engine.engine_memory().region - 4))
    with pytest.raises(BadArgument, match="multiple of 4 bytes"):
        engine.host.call("matmul_block", Kind.F32, 1, 1, at, 4, 1, at + 5, at + 16)
