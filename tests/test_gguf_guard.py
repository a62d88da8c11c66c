"""Hostile and broken GGUF files: an error that names the thing, at once and in little memory."""

from __future__ import annotations

import contextlib
import io
import os
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import gguf
import pytest
from gguf_bytes import ARRAY, BOOL, F32, I32, STRING, U8, U16, U32, U64, gguf_bytes, pair, tensor, text, value
from hypothesis import given, settings
from hypothesis import strategies as st
from synth import make_tiny_gguf

from knot.errors import GgufError, KnotError
from knot.gguf_guard import GgufFile, header_sha256, parse_gguf, read_gguf


def parse(data: bytes, *, header_only: bool = False) -> GgufFile:
    return parse_gguf(io.BytesIO(data), Path("x.gguf"), len(data), header_only=header_only)


def refusal(data: bytes) -> str:
    """The error for `data`, which must come without a large allocation."""
    tracemalloc.start()
    try:
        with pytest.raises(GgufError) as caught:
            parse(data)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 4 << 20, f"{peak} bytes were allocated for a file of {len(data)}"
    return str(caught.value)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf")


def test_metadata_and_tensors_are_those_the_gguf_library_reads(tiny: Path) -> None:
    ours, theirs = read_gguf(tiny), gguf.GGUFReader(tiny)
    assert set(ours.metadata) == {key for key in theirs.fields if not key.startswith("GGUF.")}
    for key, found in ours.metadata.items():
        expected = theirs.fields[key].contents()
        assert found == expected, key
    data = tiny.read_bytes()
    assert len(ours.tensors) == len(theirs.tensors)
    for tensor_ in theirs.tensors:
        mine = ours.tensors[tensor_.name]
        assert mine.type == tensor_.tensor_type.name
        assert mine.shape == tuple(reversed(tensor_.shape.tolist()))
        assert data[mine.offset : mine.offset + mine.length] == tensor_.data.tobytes()


@pytest.mark.parametrize("version", [2, 3])
def test_versions_2_and_3_are_read(version: int) -> None:
    file = parse(gguf_bytes([pair("a", U32, 7)], version=version))
    assert (file.version, file.metadata) == (version, {"a": 7})


@pytest.mark.parametrize(
    ("version", "expected"), [(1, "version 1"), (4, "version 4"), (0x03000000, "big-endian")]
)
def test_other_versions_are_refused_by_number(version: int, expected: str) -> None:
    assert expected in refusal(gguf_bytes(version=version))


def test_a_file_of_another_kind_is_refused_by_its_magic() -> None:
    assert "b'KNOT'" in refusal(gguf_bytes(magic=b"KNOT"))


@pytest.mark.parametrize("count", [1 << 61, (1 << 64) - 1, 1 << 32, 65_537])
def test_a_count_of_tensors_beyond_reason_is_refused_at_once(count: int) -> None:
    assert f"{count} tensors" in refusal(gguf_bytes(n_tensors=count))


@pytest.mark.parametrize("count", [1 << 61, (1 << 64) - 1, 65_537])
def test_a_count_of_keys_beyond_reason_is_refused_at_once(count: int) -> None:
    assert f"{count} metadata keys" in refusal(gguf_bytes(n_pairs=count))


def test_counts_that_the_file_is_too_short_for_are_refused_with_the_bytes() -> None:
    assert "5000 tensors, which take at least 165000 bytes" in refusal(gguf_bytes(n_tensors=5000))


@pytest.mark.parametrize("length", [1 << 63, (1 << 64) - 1, 1 << 40])
def test_a_string_longer_than_the_file_is_refused(length: int) -> None:
    data = gguf_bytes([text("general.name") + value(U32, STRING) + value(U64, length) + b"x" * 20])
    assert f"{length} bytes" in refusal(data)


@pytest.mark.parametrize("length", [1 << 63, (1 << 64) - 1, 1 << 40])
def test_a_key_longer_than_the_file_is_refused(length: int) -> None:
    assert "a metadata key" in refusal(gguf_bytes([value(U64, length) + b"x" * 40]))


@pytest.mark.parametrize("length", [1 << 63, (1 << 64) - 1, 1 << 40, 50])
@pytest.mark.parametrize("element", [U8, U64, F32, STRING, BOOL])
def test_an_array_longer_than_the_file_is_refused(length: int, element: int) -> None:
    data = gguf_bytes(
        [text("a.list") + value(U32, ARRAY) + value(U32, element) + value(U64, length) + b"x" * 15]
    )
    assert f"a.list states {length} elements" in refusal(data)


def test_a_string_in_an_array_that_runs_past_the_file_is_refused() -> None:
    data = gguf_bytes(
        [text("a") + value(U32, ARRAY) + value(U32, STRING) + value(U64, 2) + text("b") + value(U64, 99)]
    )
    assert "a[1]" in refusal(data)


def test_arrays_of_more_elements_than_any_vocabulary_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("knot.gguf_guard.MAX_ELEMENTS", 10)
    assert "11 elements" in refusal(
        gguf_bytes([pair("a", ARRAY, (U8, [0] * 6)), pair("b", ARRAY, (U8, [0] * 5))])
    )


def test_metadata_beyond_the_most_that_is_read_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("knot.gguf_guard.MAX_METADATA", 1000)
    assert "over 1000 bytes" in refusal(gguf_bytes([pair("a", STRING, "x" * 2000)]))


def test_nested_arrays_and_unknown_types_are_refused_by_key() -> None:
    assert "a is an array of arrays" in refusal(gguf_bytes([pair("a", ARRAY, (ARRAY, [(U8, [1])]))]))
    assert "b has the type 13" in refusal(gguf_bytes([text("b") + value(U32, 13) + b"\0" * 8]))
    assert "c is an array of elements of type 99" in refusal(
        gguf_bytes([text("c") + value(U32, ARRAY) + value(U32, 99) + value(U64, 0)])
    )


def test_a_boolean_is_0_or_1() -> None:
    assert parse(gguf_bytes([pair("a", BOOL, 1), pair("b", ARRAY, (BOOL, [0, 1]))])).metadata == {
        "a": True,
        "b": [False, True],
    }
    assert "value 2" in refusal(gguf_bytes([pair("a", BOOL, 2)]))
    assert "neither 0 nor 1" in refusal(gguf_bytes([pair("a", ARRAY, (BOOL, [0, 3]))]))


def test_duplicate_keys_are_refused() -> None:
    assert "'a' is there twice" in refusal(gguf_bytes([pair("a", U8, 1), pair("a", U8, 1)]))


def test_invalid_utf8_is_refused_in_keys_names_and_tokens_and_mended_in_free_text() -> None:
    assert "a metadata key is not UTF-8" in refusal(gguf_bytes([pair(b"\xff\xfe", U8, 1)]))
    assert "a tensor's name is not UTF-8" in refusal(
        gguf_bytes(tensors=[tensor(b"\xc3", (1,))], data=b"\0" * 4)
    )
    assert "tokenizer.ggml.tokens[1] is not UTF-8" in refusal(
        gguf_bytes([pair("tokenizer.ggml.tokens", ARRAY, (STRING, ["a", b"\x80"]))])
    )
    file = parse(gguf_bytes([pair("general.author", STRING, b"J\xfcrgen")]))
    assert file.metadata["general.author"] == "J\ufffdrgen"


def test_a_name_of_many_bytes_is_accepted_to_63_and_refused_from_64() -> None:
    assert list(parse(gguf_bytes(tensors=[tensor("n" * 63, (1,))], data=b"\0" * 4)).tensors) == ["n" * 63]
    assert "64 bytes long, expected 1 to 63" in refusal(
        gguf_bytes(tensors=[tensor("n" * 64, (1,))], data=b"\0" * 4)
    )
    assert "0 bytes long" in refusal(gguf_bytes(tensors=[tensor("", (1,))], data=b"\0" * 4))


def test_a_name_outside_ascii_is_legal() -> None:
    assert "gewölbe" in parse(gguf_bytes(tensors=[tensor("gewölbe", (1,))], data=b"\0" * 4)).tensors


def test_duplicate_tensor_names_are_refused() -> None:
    tensors = [tensor("w", (1,)), tensor("w", (1,), offset=32)]
    assert "'w' is there twice" in refusal(gguf_bytes(tensors=tensors, data=b"\0" * 36))


@pytest.mark.parametrize(
    "dimensions",
    [
        ((1 << 42) + 1,),
        (1 << 32, 1 << 32),
        ((1 << 64) - 1, (1 << 64) - 1),
        (32, 1 << 62),
        (1 << 21, 1 << 21, 1 << 22),
    ],
)
def test_dimensions_whose_product_overflows_are_refused_naming_the_tensor(
    dimensions: tuple[int, ...],
) -> None:
    assert "tensor w" in refusal(gguf_bytes(tensors=[tensor("w", dimensions)], data=b"\0" * 64))


@pytest.mark.parametrize("dimensions", [(0,), (0, 4), (4, 0), (4, 4, 0)])
def test_a_dimension_of_zero_is_refused_naming_the_tensor(dimensions: tuple[int, ...]) -> None:
    assert "tensor w has the shape" in refusal(gguf_bytes(tensors=[tensor("w", dimensions)], data=b"\0" * 64))


@pytest.mark.parametrize("count", [0, 5, 1 << 31])
def test_a_tensor_has_one_to_four_dimensions(count: int) -> None:
    entry = (
        text("w")
        + value(U32, count)
        + value(U64, 1) * min(count, 5)
        + value(U32, 0)
        + value(U64, 0)
        + b"\0" * 40
    )
    assert f"tensor w has {count} dimensions" in refusal(
        gguf_bytes(tensors=[entry], n_tensors=1, data=b"\0" * 64)
    )


def test_an_unknown_tensor_type_is_refused_by_number_and_tensor() -> None:
    assert "tensor w: ggml type 77" in refusal(
        gguf_bytes(tensors=[tensor("w", (32,), kind=77)], data=b"\0" * 64)
    )


@pytest.mark.parametrize("cols", [172, 576, 896])
def test_a_row_that_is_no_multiple_of_the_block_is_refused_naming_the_tensor(cols: int) -> None:
    message = refusal(gguf_bytes(tensors=[tensor("w", (cols, 4), kind=12)], data=b"\0" * 4096))
    assert "tensor w" in message
    assert f"has {cols}" in message


@pytest.mark.parametrize("alignment", [0, 1, 3, 48, 1 << 30, (1 << 32) - 1])
def test_an_alignment_that_is_no_reasonable_power_of_two_is_refused(alignment: int) -> None:
    assert f"general.alignment is {alignment}" in refusal(
        gguf_bytes([pair("general.alignment", U32, alignment)])
    )


@pytest.mark.parametrize(
    ("kind", "item"), [(U16, 32), (U64, 32), (I32, 32), (F32, 32.0), (STRING, "32"), (BOOL, 1)]
)
def test_an_alignment_of_another_type_is_refused(kind: int, item: object) -> None:
    assert "general.alignment has the type" in refusal(gguf_bytes([pair("general.alignment", kind, item)]))


def test_another_alignment_is_honoured() -> None:
    data = gguf_bytes(
        [pair("general.alignment", U32, 256)],
        [tensor("a", (1,)), tensor("b", (1,), offset=256)],
        b"AAAA".ljust(256, b"\0") + b"BBBB",
        alignment=256,
    )
    found = parse(data).tensors
    assert [data[found[name].offset :][:4] for name in "ab"] == [b"AAAA", b"BBBB"]


def test_an_offset_past_the_end_or_unaligned_is_refused_with_the_numbers() -> None:
    assert "expected a multiple of 32" in refusal(
        gguf_bytes(tensors=[tensor("w", (1,), offset=4)], data=b"\0" * 64)
    )
    assert "but the file has" in refusal(
        gguf_bytes(tensors=[tensor("w", (1,), offset=1 << 20)], data=b"\0" * 64)
    )
    assert "tensor w" in refusal(gguf_bytes(tensors=[tensor("w", (1,), offset=1 << 63)], data=b"\0" * 64))


def test_overlapping_tensors_are_refused_by_both_names() -> None:
    tensors = [tensor("a", (16,)), tensor("b", (1,), offset=32)]
    message = refusal(gguf_bytes(tensors=tensors, data=b"\0" * 64))
    assert "tensor b begins" in message
    assert "inside a" in message


def test_a_header_alone_is_enough_for_planning(tiny: Path, tmp_path: Path) -> None:
    whole = read_gguf(tiny)
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(tiny.read_bytes()[: whole.header_bytes])
    assert read_gguf(cut, header_only=True).tensors.keys() == whole.tensors.keys()
    assert header_sha256(read_gguf(cut, header_only=True)) == header_sha256(whole)
    with pytest.raises(GgufError, match="cut short"):
        read_gguf(cut)


def test_files_that_cannot_be_opened_are_named(tmp_path: Path) -> None:
    with pytest.raises(GgufError, match=r"none\.gguf cannot be read: No such file"):
        read_gguf(tmp_path / "none.gguf")
    with pytest.raises(GgufError, match="no regular file"):
        read_gguf(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(GgufError, match="no regular file"):
        read_gguf(tmp_path / "pipe")


def cut_everywhere(data: bytes, step: int, check: Callable[[bytes], object]) -> None:
    for length in range(0, len(data), step):
        with pytest.raises(KnotError) as caught:
            check(data[:length])
        assert len(str(caught.value)) > 20, length


def test_a_file_cut_anywhere_in_its_header_is_refused(tiny: Path) -> None:
    data = tiny.read_bytes()
    cut_everywhere(data[: read_gguf(tiny).header_bytes], 1 if len(data) < 1000 else 17, parse)


def test_a_file_cut_anywhere_in_its_data_is_refused(tiny: Path) -> None:
    end = max(entry.offset + entry.length for entry in read_gguf(tiny).tensors.values())
    data = tiny.read_bytes()
    cut_everywhere(data[:end], 4093, parse)
    # What comes after is padding: without it nothing is lost.
    assert len(data) - end < 32
    assert parse(data[:end]).tensors.keys() == parse(data).tensors.keys()


@pytest.mark.slow
def test_a_file_cut_at_every_single_byte_is_refused(tmp_path: Path) -> None:
    path = make_tiny_gguf(
        tmp_path / "x.gguf",
        layers=1,
        hidden=32,
        heads=1,
        head_dim=32,
        ffn=32,
        vocab=262,
        unused_tokens=1,
        types="Q8_0",
    )
    end = max(entry.offset + entry.length for entry in read_gguf(path).tensors.values())
    cut_everywhere(path.read_bytes()[:end], 1, parse)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_flipped_bits_are_refused_or_harmless_but_never_crash(tiny: Path, data: st.DataObject) -> None:
    raw = bytearray(tiny.read_bytes())
    limit = read_gguf(tiny).header_bytes * 8
    for position in data.draw(st.lists(st.integers(0, limit - 1), min_size=1, max_size=8)):
        raw[position // 8] ^= 1 << position % 8
    # Anything but a GgufError would fail the test.
    with contextlib.suppress(GgufError):
        parse(bytes(raw))


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=300))
def test_noise_after_a_plausible_start_never_crashes(noise: bytes) -> None:
    with contextlib.suppress(GgufError):
        parse(b"GGUF" + value(U32, 3) + noise)
