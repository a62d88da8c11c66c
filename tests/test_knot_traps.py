"""Bugs that once cost days, each in its own test, which fails when the bug is put back."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from knot_bytes import as_old, edited, old_layout, split_knot
from synth import make_tiny_knot

from knot.errors import MissingTensorError, OldLayoutError
from knot.parse import parse_header
from knot.repair import repair


@pytest.fixture(scope="module")
def knot(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return make_tiny_knot(tmp_path_factory.mktemp("knot") / "tiny.knot").read_bytes()


def test_a_table_that_says_tensor_type_reads_the_same_as_one_that_says_type(knot: bytes) -> None:
    """Reading the wrong one of the two names gave no type at all, and every row came out as zeros."""

    def rename(meta: dict) -> None:
        for entry in meta["tensors"].values():
            entry["tensor_type"] = entry.pop("type")

    renamed = edited(knot, rename)
    found, expected = parse_header(renamed, len(renamed)), parse_header(knot, len(knot))
    assert {name: info.type for name, info in found.tensors.items()} == {
        name: info.type for name, info in expected.tensors.items()
    }


def test_a_table_whose_two_names_for_the_type_disagree_is_refused(knot: bytes) -> None:
    data = edited(knot, lambda meta: meta["tensors"]["output_weight"].update(tensor_type="Q4_0"))
    with pytest.raises(ValueError, match="'Q8_0' and the string 'Q4_0'"):
        parse_header(data, len(data))


@pytest.mark.parametrize("spaces", range(4))
def test_a_payload_one_byte_early_is_recognised_and_never_read_as_if_it_were_in_place(
    knot: bytes, spaces: int
) -> None:
    """The old encoder counted its padding into metaLen; every scale was then read a byte off."""
    meta, payload = split_knot(knot)
    meta["name"] = "x" * (10 + spaces)
    data = old_layout(meta, payload)
    with pytest.raises(OldLayoutError, match="payload starts one byte early; run `knot repair`"):
        parse_header(data, len(data))


def test_the_payload_is_where_the_last_tensor_ends_with_the_file(knot: bytes) -> None:
    header = parse_header(knot, len(knot))
    assert header.payload_offset + header.digests.end == len(knot)
    norm = header.output_norm()
    at = header.file_offset(norm.offset)
    values = np.frombuffer(knot[at : at + norm.length], np.float32)
    # One byte off, these norms around 1 would be anything.
    assert np.all((values > 0.5) & (values < 1.5))


def test_repair_of_the_off_by_one_gives_the_tensors_their_own_bytes(knot: bytes, tmp_path: Path) -> None:
    old = tmp_path / "old.knot"
    old.write_bytes(as_old(knot, field="tensor_type"))
    data = repair(old, show_progress=False).path.read_bytes()
    after, before = parse_header(data, len(data)), parse_header(knot, len(knot))
    for name, info in after.tensors.items():
        at, was = after.file_offset(info.offset), before.file_offset(before.tensors[name].offset)
        assert data[at : at + info.length] == knot[was : was + info.length], name


@pytest.mark.parametrize(
    ("layer", "phase", "tensor"),
    [
        (0, "attn", "blk_0_attn_v_weight"),
        (1, "ffn_gate", "blk_1_ffn_gate_weight"),
        (2, "ffn_up", "blk_2_ffn_up_weight"),
        (2, "ffn_down", "blk_2_ffn_down_weight"),
    ],
)
def test_a_missing_tensor_is_an_error_that_names_phase_layer_and_tensor(
    knot: bytes, layer: int, phase: str, tensor: str
) -> None:
    """It was once skipped in silence, and the phase ran on whatever lay in memory."""
    header = parse_header(knot, len(knot))
    without = dataclasses.replace(
        header, tensors={name: info for name, info in header.tensors.items() if name != tensor}
    )
    for load in (without.phase_tensors, without.phase_range):
        with pytest.raises(
            MissingTensorError, match=f"phase {phase} of layer {layer} needs the tensor {tensor}"
        ) as caught:
            load(layer, phase)
        assert (caught.value.phase, caught.value.layer, caught.value.tensor) == (phase, layer, tensor)


def test_a_missing_bias_or_norm_is_an_error_that_names_layer_and_tensor(knot: bytes) -> None:
    header = parse_header(knot, len(knot))
    for tensor, layer in (("blk_1_attn_k_bias", 1), ("output_norm_weight", None)):
        without = dataclasses.replace(
            header, tensors={name: info for name, info in header.tensors.items() if name != tensor}
        )
        with pytest.raises(MissingTensorError, match=tensor) as caught:
            without.vector_range(0, 3)
        assert caught.value.layer == layer
