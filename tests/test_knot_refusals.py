"""Everything a knot's reader must refuse, by name and number."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from knot_bytes import edited, join_knot, split_knot
from synth import make_tiny_knot

from knot.container import frame_metadata, header_bytes, read_frame
from knot.errors import (
    ConfigError,
    HeaderError,
    KnotError,
    MissingTensorError,
    UnexpectedTensorError,
)
from knot.header import KnotHeader
from knot.parse import parse_header

Meta = dict[str, Any]


@pytest.fixture(scope="module")
def knot(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return make_tiny_knot(tmp_path_factory.mktemp("knot") / "tiny.knot").read_bytes()


@pytest.fixture(scope="module")
def header(knot: bytes) -> KnotHeader:
    return parse_header(knot, len(knot))


def refusal(knot: bytes, edit: Callable[[Meta], object], kind: type[KnotError] = HeaderError) -> str:
    data = edited(knot, edit)
    with pytest.raises(kind) as caught:
        parse_header(data, len(data))
    return str(caught.value)


@pytest.mark.parametrize(
    ("prefix", "message"),
    [
        (b"GGUF\1\0\5\0\0\0", "begins with b'GGUF'"),
        (b"KNOT\2\0\5\0\0\0", "version 2"),
        (b"KNOT\0\0\5\0\0\0", "version 0"),
        (b"KNOT\1\0\0\0\0\0", "states 0 bytes"),
        (b"KNOT\1\0\1\0\x40\0", "states 4194305 bytes"),
        (b"KNOT\1\0\xff\xff\xff\xff", "states 4294967295 bytes"),
        (b"KNOT\1\0\x00\x10\0\0", "header is 4109 bytes, but the file has 100"),
    ],
)
def test_a_prefix_that_cannot_be_right_is_refused_with_its_number(prefix: bytes, message: str) -> None:
    with pytest.raises(HeaderError, match=message):
        header_bytes(prefix, 100)


def test_padding_and_marker_are_checked(knot: bytes, header: KnotHeader) -> None:
    for position in range(header.payload_offset - 1, header.payload_offset):
        data = bytearray(knot)
        data[position] = 0x41
        with pytest.raises(HeaderError, match="expected"):
            parse_header(bytes(data), len(data))
    data = frame_metadata(b"{}xx ").replace(b"\0\x40", b"\1\x40")
    with pytest.raises(HeaderError, match="01 40"):
        read_frame(data, len(data))


@pytest.mark.parametrize(
    ("meta", "message"),
    [
        (b"nonsense", "not JSON"),
        (b"[1]", "is a list"),
        (b'"text"', "is the string"),
        (b"\xff\xfe", "not UTF-8: byte 0"),
        (b"[" * 100_000, "more than 8 deep"),
        (b'{"a":' * 100_000, "more than 8 deep"),
        (b"[" + b"[]," * 300_000 + b"1]", "more than 200000 lists"),
        (b'{"name":"a","name":"b"}', "the key 'name' twice"),
        (b'{"config":{"a":1,"a":2}}', "the key 'a' twice"),
        (b'{"a":NaN}', "number NaN"),
        (b'{"a":-Infinity}', "number -Infinity"),
        (b'{"a":1e999}', "expected a finite one"),
        (b'{"a":' + b"9" * 5000 + b"}", "5000 characters"),
        (b'{"a":0.' + b"9" * 5000 + b"}", "expected a finite one"),
        (b'{"a":"\\ud800"}', "half a character"),
        (b'{"a":"' + b'\\"' * 500_000, "not JSON"),
        (b'{"name":"x"', "not JSON"),
    ],
)
def test_metadata_that_is_a_bomb_or_no_json_is_refused(meta: bytes, message: str) -> None:
    data = join_knot(meta, b"payload")
    with pytest.raises(HeaderError, match=message):
        parse_header(data, len(data))


@pytest.mark.parametrize("name", [None, "", 5, True, "a\nb", "x" * 257, "\x1b[31mred", ["a"]])
def test_a_name_is_a_short_printable_string(knot: bytes, name: object) -> None:
    assert "name is" in refusal(knot, lambda meta: meta.update(name=name))


@pytest.mark.parametrize(
    ("field", "bad"),
    [
        ("offset", -1),
        ("offset", True),
        ("offset", 1.0),
        ("offset", "0"),
        ("offset", None),
        ("offset", 1 << 60),
        ("length", 0),
        ("length", False),
        ("length", -5),
        ("group_rows", 0),
        ("group_rows", True),
        ("shape", []),
        ("shape", [1, 2, 3]),
        ("shape", [True, 96]),
        ("shape", [0, 96]),
        ("shape", [-300, 96]),
        ("shape", "300x96"),
        ("shape", [1 << 50, 96]),
        ("type", "Q4_K_M"),
        ("type", 12),
        ("type", None),
    ],
)
def test_a_tensor_entry_with_a_bad_field_is_refused_by_tensor(knot: bytes, field: str, bad: object) -> None:
    message = refusal(knot, lambda meta: meta["tensors"]["output_weight"].update({field: bad}))
    assert "tensor 'output_weight'" in message


def test_a_tensor_entry_that_lacks_a_field_is_refused_by_field(knot: bytes) -> None:
    for field in ("type", "shape", "offset", "length", "group_rows"):
        message = refusal(knot, lambda meta, field=field: meta["tensors"]["output_weight"].pop(field))
        assert "tensor 'output_weight'" in message
        assert field in message


def test_a_length_that_type_and_shape_contradict_is_refused_with_both(knot: bytes) -> None:
    def longer(meta: Meta) -> None:
        meta["tensors"]["output_weight"]["length"] += 2

    assert "Q8_0 [300, 96] is 30600 bytes, but 30602 are stated" in refusal(knot, longer)


def test_a_row_length_that_is_no_multiple_of_its_block_is_refused(knot: bytes) -> None:
    message = refusal(knot, lambda meta: meta["tensors"]["output_weight"].update(type="Q6_K"))
    assert "multiple of 256 elements, but has 96" in message


def test_tensors_that_overlap_are_refused_by_both_names(knot: bytes) -> None:
    def shift(meta: Meta) -> None:
        meta["tensors"]["blk_0_ffn_up_weight"]["offset"] -= 22

    message = refusal(knot, shift)
    assert "tensor blk_0_ffn_up_weight begins at" in message
    assert "inside tensor blk_0_ffn_gate_weight" in message


def test_a_tensor_that_leaves_the_file_is_refused_with_both_numbers(knot: bytes) -> None:
    message = refusal(knot, lambda meta: meta["tensors"]["output_weight"].update(offset=1 << 40))
    assert "tensor output_weight is at [1099511627776" in message


def test_a_payload_longer_or_shorter_than_stated_is_refused_with_both_numbers(knot: bytes) -> None:
    meta, payload = split_knot(knot)
    for size in (len(payload) + 1, len(payload) - 1):
        data = join_knot(meta, payload.ljust(size, b"\0")[:size])
        with pytest.raises(HeaderError, match=f"payload has {size} bytes"):
            parse_header(data, len(data))


def test_tensors_out_of_canonical_order_are_refused_with_repair_advised(knot: bytes) -> None:
    def swap(meta: Meta) -> None:
        gate, up = meta["tensors"]["blk_1_ffn_gate_weight"], meta["tensors"]["blk_0_ffn_gate_weight"]
        gate["offset"], up["offset"] = up["offset"], gate["offset"]

    message = refusal(knot, swap)
    assert "tensor blk_0_ffn_gate_weight is at" in message
    assert "knot repair" in message


def test_a_tensor_too_many_or_too_few_is_named(knot: bytes) -> None:
    def rename(meta: Meta) -> None:
        tensors = meta["tensors"]
        tensors["blk_2_ffn_extra_weight"] = tensors.pop("blk_2_ffn_up_weight")

    message = refusal(knot, rename, MissingTensorError)
    assert "phase ffn_up of layer 2 needs the tensor blk_2_ffn_up_weight" in message

    def fewer_layers(meta: Meta) -> None:
        meta["config"]["num_layers"] = 2

    assert "tensor blk_2_" in refusal(knot, fewer_layers, UnexpectedTensorError)


@pytest.mark.parametrize(
    ("key", "bad"),
    [
        ("num_layers", 0),
        ("num_layers", True),
        ("num_layers", 3.0),
        ("num_layers", "3"),
        ("num_layers", -3),
        ("num_layers", 1 << 40),
        ("num_layers", None),
        ("hidden_size", 128),
        ("ffn_size", 255),
        ("num_heads", 6),
        ("num_kv_heads", 2),
        ("num_kv_heads", 3),
        ("head_dim", 16),
        ("vocab_size", 301),
        ("vocab_size", 0),
        ("embedding_rows", 299),
        ("embedding_rows", 301),
        ("context_length", 0),
        ("rope_theta", 0),
        ("rope_theta", -1.0),
        ("rope_theta", 1e300),
        ("rope_theta", True),
        ("rope_type", "norm"),
        ("rope_type", "spiral"),
        ("rope_dim", 7),
        ("rope_dim", 34),
        ("rope_scaling", "yarn"),
        ("rope_scaling", {"type": "yarn", "factor": 4.0}),
        ("rope_scaling", {"type": "linear"}),
        ("rope_scaling", {"type": "linear", "factor": 0}),
        ("norm_eps", 0),
        ("norm_eps", 1.5),
        ("norm_eps", "1e-6"),
        ("tie_embeddings", True),
        ("tie_embeddings", 0),
        ("qkv_bias", False),
        ("qkv_bias", 1),
        ("unused_token_ranges", None),
        ("unused_token_ranges", [[5, 5]]),
        ("unused_token_ranges", [[5, 3]]),
        ("unused_token_ranges", [[0, 3], [2, 5]]),
        ("unused_token_ranges", [[299, 301]]),
        ("unused_token_ranges", [[-1, 2]]),
        ("unused_token_ranges", [[0, True]]),
        ("unused_token_ranges", [7]),
        ("bos_token_id", 300),
        ("eos_token_id", -1),
        ("eot_token_id", True),
        ("architecture", "mamba"),
        ("architecture", 7),
        ("sliding_window", 4096),
    ],
)
def test_a_config_value_that_is_wrong_or_contradicts_the_tensors_is_refused(
    knot: bytes, key: str, bad: object
) -> None:
    message = refusal(knot, lambda meta: meta["config"].update({key: bad}))
    assert "config" in message or "tensor" in message


def test_a_config_that_is_missing_or_lacks_a_key_is_refused_by_key(knot: bytes) -> None:
    assert "no config" in refusal(knot, lambda meta: meta.pop("config"), ConfigError)
    meta, _ = split_knot(knot)
    for key in meta["config"]:
        message = refusal(knot, lambda meta, key=key: meta["config"].pop(key), ConfigError)
        assert f"config.{key} is missing" in message


@pytest.mark.parametrize("section", ["tokenizer", "digests"])
def test_sections_are_checked_like_tensors(knot: bytes, section: str) -> None:
    for field, bad in (("offset", 0), ("length", 8), ("digest", "xyz"), ("digest", None), ("offset", True)):
        assert refusal(knot, lambda meta, f=field, b=bad: meta["sections"][section].update({f: b}))


def test_a_knot_without_digests_or_with_unknown_ones_is_refused(knot: bytes) -> None:
    meta, payload = split_knot(knot)
    digests = meta["sections"].pop("digests")
    data = join_knot(meta, payload[: digests["offset"]])
    with pytest.raises(HeaderError, match="no section of digests; run `knot repair`"):
        parse_header(data, len(data))
    assert "algorithm" in refusal(knot, lambda meta: meta["sections"]["digests"].update(algorithm="crc32"))
    assert "not known" in refusal(
        knot, lambda meta: meta["sections"].update(extra={"offset": 0, "length": 1})
    )


@pytest.mark.parametrize("bad", [None, "", "0" * 63, "G" * 64, "A" * 64, 5])
def test_the_sha256_is_64_lower_case_hexadecimal_digits(knot: bytes, bad: object) -> None:
    assert "sha256" in refusal(knot, lambda meta: meta.update(sha256=bad))


def test_vectors_are_f32(knot: bytes) -> None:
    def halve(meta: Meta) -> None:
        entry = meta["tensors"]["output_norm_weight"]
        entry.update(type="F16", shape=[192])

    message = refusal(knot, halve)
    assert "output_norm_weight" in message


def test_a_knot_cut_anywhere_is_refused(knot: bytes, header: KnotHeader) -> None:
    for length in (*range(0, header.payload_offset, 7), *range(header.payload_offset, len(knot), 1499)):
        with pytest.raises(HeaderError):
            parse_header(knot[:length], length)


@pytest.mark.slow
def test_a_knot_cut_at_every_single_byte_is_refused(tmp_path: Path) -> None:
    knot = make_tiny_knot(
        tmp_path / "x.knot",
        layers=1,
        hidden=32,
        heads=1,
        head_dim=32,
        ffn=32,
        vocab=262,
        unused_tokens=1,
        types="Q8_0",
    ).read_bytes()
    for length in range(len(knot)):
        with pytest.raises(HeaderError):
            parse_header(knot[:length], length)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_flipped_bits_of_a_header_raise_a_header_error_or_nothing(knot: bytes, data: st.DataObject) -> None:
    raw = bytearray(knot)
    limit = parse_header(knot, len(knot)).payload_offset * 8
    for position in data.draw(st.lists(st.integers(0, limit - 1), min_size=1, max_size=6)):
        raw[position // 8] ^= 1 << position % 8
    # Anything but a HeaderError would fail the test.
    with contextlib.suppress(HeaderError):
        parse_header(bytes(raw), len(raw))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=300, deadline=None)
@given(st.data(), JSON)
def test_any_json_in_any_place_raises_a_header_error_or_nothing(
    knot: bytes, data: st.DataObject, junk: Any
) -> None:
    meta, payload = split_knot(knot)
    place: Any = meta
    while True:
        key = data.draw(st.sampled_from(list(place) if isinstance(place, dict) else list(range(len(place)))))
        inner = place[key]
        if not isinstance(inner, (dict, list)) or not inner or data.draw(st.booleans()):
            place[key] = junk
            break
        place = inner
    raw = join_knot(meta, payload)
    with contextlib.suppress(HeaderError):
        parse_header(raw, len(raw))
