"""A knot's header: the bytes as documented, and where everything lies."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from knot_bytes import edited
from synth import make_tiny_knot

from knot.architectures import PHASES, payload_order
from knot.container import frame_metadata, payload_offset, read_frame
from knot.errors import (
    HeaderError,
)
from knot.header import KnotHeader, TensorInfo, build_header, group_rows
from knot.parse import parse_header

Meta = dict[str, Any]


@pytest.fixture(scope="module")
def knot(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return make_tiny_knot(tmp_path_factory.mktemp("knot") / "tiny.knot").read_bytes()


@pytest.fixture(scope="module")
def header(knot: bytes) -> KnotHeader:
    return parse_header(knot, len(knot))


def test_the_bytes_are_magic_version_length_json_padding_marker_payload(
    knot: bytes, header: KnotHeader
) -> None:
    magic, version, length = struct.unpack_from("<4sHI", knot)
    assert (magic, version) == (b"KNOT", 1)
    json.loads(knot[10 : 10 + length])
    assert knot[10 + length - 1 : 10 + length] == b"}"
    align = (10 + length + 3) & ~3
    assert knot[10 + length : align] == b"\0" * (align - 10 - length)
    assert knot[align] == 0x40
    assert header.payload_offset == align + 1
    assert header.payload_offset % 4 == 1


@given(st.integers(1, 4 << 20))
def test_every_metadata_length_gives_a_payload_at_1_mod_4(length: int) -> None:
    offset = payload_offset(length)
    assert offset % 4 == 1
    assert 0 <= offset - 1 - (10 + length) <= 3


@given(st.binary(min_size=1, max_size=50))
def test_a_frame_that_is_written_is_read_back(meta: bytes) -> None:
    data = frame_metadata(meta)
    frame = read_frame(data, len(data))
    assert (frame.meta_length, frame.payload_offset, frame.old) == (len(meta), len(data), False)


def test_what_is_read_can_be_written_again_byte_for_byte(knot: bytes, header: KnotHeader) -> None:
    head = build_header(header.name, header.config, header.tensors.values(), header.sections, header.sha256)
    assert head == knot[: header.payload_offset]


def test_each_phase_of_each_layer_is_one_range_in_the_order_of_the_engine(
    knot: bytes, header: KnotHeader
) -> None:
    end = None
    for layer in range(3):
        for phase in PHASES:
            offset, length, tensors = header.phase_range(layer, phase)
            assert length == sum(info.length for info in tensors)
            assert end in (None, offset)
            end = offset + length
            assert all(info.name.startswith(f"blk_{layer}_{phase}") for info in tensors)
    names = [info.name for info in header.phase_range(1, "attn").tensors]
    assert names == [f"blk_1_attn_{part}_weight" for part in ("q", "k", "v", "output")]
    assert end == header.embedding_tensor().offset


def test_a_stations_vectors_are_one_range_and_the_last_one_has_output_norm(header: KnotHeader) -> None:
    first, last = header.vector_range(0, 2), header.vector_range(2, 3)
    assert first.offset == 0
    assert last.offset == first.length
    assert len(first.tensors) == 2 * 5
    assert last.tensors[-1].name == "output_norm_weight"
    assert header.phase_range(0, "attn").offset == last.offset + last.length
    for start, end in ((0, 0), (2, 1), (-1, 1), (0, 4)):
        with pytest.raises(HeaderError, match=r"layers \["):
            header.vector_range(start, end)


def test_the_head_is_the_output_or_the_tied_table(header: KnotHeader, tmp_path: Path) -> None:
    assert header.head_tensor().name == "output_weight"
    data = make_tiny_knot(tmp_path / "tied.knot", tied=True).read_bytes()
    assert parse_header(data, len(data)).head_tensor().name == "token_embd_weight"


def test_rows_and_their_digests_are_found_by_arithmetic(knot: bytes, header: KnotHeader) -> None:
    table = header.embedding_tensor()
    assert table.group_rows == 16
    assert table.row_range(3, 5) == (table.offset + 3 * table.row_bytes, 2 * table.row_bytes)
    groups = table.groups(17, 40)
    assert (groups.row_start, groups.row_end, groups.digest_count) == (16, 48, 2)
    assert groups.first_digest == table.first_digest + 1
    assert table.groups(299, 300).row_end == 300
    offset, length = header.digest_range(groups.first_digest, 2)
    assert length == 16
    assert offset == header.digests.offset + groups.first_digest * 8
    for start, end in ((0, 0), (5, 3), (0, 301), (-1, 2)):
        with pytest.raises(HeaderError, match="do not exist"):
            table.groups(start, end)
    with pytest.raises(HeaderError, match="do not exist"):
        header.digest_range(header.digests.length // 8, 1)


def test_the_digests_of_a_span_are_consecutive(header: KnotHeader) -> None:
    span = header.phase_range(0, "attn")
    first = span.tensors[0]
    assert header.span_digests(span.tensors) == header.digest_range(first.first_digest, 4)


@given(
    st.integers(1, 200_000),
    st.sampled_from(["F32", "Q4_K", "Q6_K", "Q8_0"]),
    st.integers(1, 80),
    st.sampled_from(["token_embd_weight", "output_weight"]),
)
def test_row_groups_cover_every_row_once_and_stay_near_a_megabyte(
    rows: int, kind: str, blocks: int, name: str
) -> None:
    cols = blocks * 256
    info = TensorInfo(name, kind, (rows, cols), 0, 1, group_rows(name, kind, (rows, cols)), 0)
    assert sum(info.group_lengths()) == rows * info.row_bytes
    assert len(list(info.group_lengths())) == info.group_count
    assert max(info.group_lengths()) <= max(1 << 20, 16 * info.row_bytes)


def test_the_fingerprint_changes_with_any_byte_of_header_or_payload_digest(
    knot: bytes, header: KnotHeader
) -> None:
    def reparsed(edit: Callable[[Meta], object]) -> str:
        data = edited(knot, edit)
        return parse_header(data, len(data)).fingerprint

    changed = {
        reparsed(lambda meta: meta.update(sha256="1" * 64)),
        reparsed(lambda meta: meta["config"].update(rope_theta=10000.0)),
        reparsed(lambda meta: meta.update(name="another")),
        header.fingerprint,
    }
    assert len(changed) == 4


def test_a_head_dim_other_than_hidden_over_heads_is_honoured(tmp_path: Path) -> None:
    data = make_tiny_knot(tmp_path / "x.knot", heads=5, kv_heads=5, head_dim=64, hidden=96).read_bytes()
    header = parse_header(data, len(data))
    assert header.config.head_dim == 64
    assert header.tensors["blk_0_attn_q_weight"].shape == (320, 96)
    assert header.tensors["blk_0_attn_output_weight"].shape == (96, 320)


def test_the_table_of_an_architecture_has_every_tensor_once(header: KnotHeader) -> None:
    names = [place.name for place in payload_order(header.config)]
    assert len(names) == len(set(names)) == len(header.tensors)
    assert names == list(header.tensors)
