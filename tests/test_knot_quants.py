from __future__ import annotations

import pytest
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from knot.errors import QuantError
from knot.quants import (
    ENGINE_TYPES,
    QUANTS,
    block_size,
    check_bytes,
    ggml_id,
    row_bytes,
    tensor_bytes,
    type_name,
)


def test_the_table_is_the_gguf_librarys_table() -> None:
    theirs = {kind.name: (kind.value, *sizes) for kind, sizes in GGML_QUANT_SIZES.items()}
    assert theirs == QUANTS


def test_every_library_type_has_a_size_here() -> None:
    assert {kind.name for kind in GGMLQuantizationType} == set(QUANTS)


def test_the_engines_types_are_in_the_table() -> None:
    assert set(QUANTS) > ENGINE_TYPES
    assert {"IQ2_XS", "IQ1_S", "NVFP4"}.isdisjoint(ENGINE_TYPES)


@pytest.mark.parametrize(
    ("type", "cols", "expected"),
    [
        ("F32", 5, 20),
        ("F16", 3, 6),
        ("Q8_0", 64, 68),
        ("Q4_K", 3584, 2016),
        ("Q6_K", 256, 210),
        ("Q5_0", 896, 616),
    ],
)
def test_row_bytes_counts_whole_blocks(type: str, cols: int, expected: int) -> None:
    assert row_bytes(type, cols) == expected
    assert tensor_bytes(type, (7, cols)) == 7 * expected
    assert tensor_bytes(type, (cols,)) == expected


@pytest.mark.parametrize(
    ("type", "cols"), [("Q4_K", 172), ("Q4_K", 576), ("Q6_K", 896), ("Q8_0", 33), ("Q4_1", 1)]
)
def test_a_row_that_is_no_multiple_of_its_block_is_refused_with_both_numbers(type: str, cols: int) -> None:
    with pytest.raises(QuantError, match=rf"multiple of {block_size(type)[0]} elements, but has {cols}"):
        row_bytes(type, cols)


@pytest.mark.parametrize("shape", [(), (0,), (0, 32), (-1, 32), (4, 0), (4, -32)])
def test_a_shape_with_nothing_in_it_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(QuantError, match=r"at least 1|no dimensions"):
        tensor_bytes("Q8_0", shape)


def test_q8_0_blocks_of_36_bytes_are_refused_with_expected_and_found() -> None:
    with pytest.raises(QuantError, match=r"Q8_0 \[4, 64\] is 272 bytes, but 288 are stated"):
        check_bytes("Q8_0", (4, 64), 4 * 2 * 36)


def test_unknown_types_are_refused_by_name() -> None:
    with pytest.raises(QuantError, match="'Q4_K_M' is unknown"):
        row_bytes("Q4_K_M", 256)
    with pytest.raises(QuantError, match="ggml type 4 is unknown"):
        type_name(4)
    assert type_name(ggml_id("Q6_K")) == "Q6_K"
