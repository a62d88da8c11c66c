"""Knots of the old layout come out as if converted today, as far as what they say allows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from knot_bytes import as_old, join_knot, old_layout, split_knot
from synth import make_tiny_gguf, make_tiny_knot

from knot.errors import ConfigError, HeaderError, KnotError, MissingTensorError, OutputError
from knot.reader import load_header
from knot.repair import repair
from knot.verify import verify


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_knot(tmp_path_factory.mktemp("knot") / "tiny.knot")


@pytest.fixture
def old(tiny: Path, tmp_path: Path) -> Path:
    path = tmp_path / "old.knot"
    path.write_bytes(as_old(tiny.read_bytes()))
    return path


@pytest.mark.parametrize("field", ["type", "tensor_type"])
@pytest.mark.parametrize("keep_config", [False, True])
def test_with_the_gguf_an_old_knot_becomes_the_fresh_conversion_byte_for_byte(
    tiny: Path, tmp_path: Path, field: str, keep_config: bool
) -> None:
    old = tmp_path / "old.knot"
    old.write_bytes(as_old(tiny.read_bytes(), field=field, keep_config=keep_config))
    repaired = repair(old, tokenizer_from=tiny.with_suffix(".gguf"), show_progress=False)
    assert repaired.path == tmp_path / "old.repaired.knot"
    assert repaired.path.read_bytes() == tiny.read_bytes()
    assert "the payload started one byte early (the old layout)" in repaired.notes


def test_without_a_gguf_the_tensors_are_those_of_a_fresh_conversion_and_the_lack_is_said(
    tiny: Path, old: Path
) -> None:
    repaired = repair(old, show_progress=False)
    assert verify(repaired.path, show_progress=False).tokenizer is None
    found, fresh = load_header(repaired.path), load_header(tiny)
    assert found.tensors == fresh.tensors
    tensors_end = fresh.tokenizer.offset if fresh.tokenizer else 0
    after, before = repaired.path.read_bytes(), tiny.read_bytes()
    assert after[found.payload_offset :][:tensors_end] == before[fresh.payload_offset :][:tensors_end]
    notes = "; ".join(repaired.notes)
    for part in (
        "no tokenizer",
        "--tokenizer-from GGUF",
        "context_length is missing; 2048",
        "unused is not known",
    ):
        assert part in notes


def test_what_an_old_configuration_leaves_out_follows_from_the_tensors(tiny: Path, tmp_path: Path) -> None:
    fresh = make_tiny_knot(tmp_path / "y.knot", arch="llama", padded_rows=7)
    old = tmp_path / "old.knot"
    old.write_bytes(as_old(fresh.read_bytes()))
    config = repair(old, show_progress=False).header.config
    assert (config.embedding_rows, config.vocab_size) == (307, 300)
    assert (config.rope_type, config.rope_dim) == ("norm", 32)
    assert (config.tie_embeddings, config.qkv_bias) == (True, False)


def test_an_old_knot_that_has_a_tokenizer_keeps_it(tiny: Path, tmp_path: Path) -> None:
    meta, payload = split_knot(tiny.read_bytes())
    section = meta["sections"]["tokenizer"]
    meta["sections"] = {"tokenizer": {"offset": section["offset"], "length": section["length"]}}
    old = tmp_path / "old.knot"
    old.write_bytes(old_layout(meta, payload[: section["offset"] + section["length"]]))
    assert repair(old, show_progress=False).path.read_bytes() == tiny.read_bytes()


def test_a_knot_of_todays_layout_without_digests_is_mended_too(tiny: Path, tmp_path: Path) -> None:
    meta, payload = split_knot(tiny.read_bytes())
    digests = meta["sections"].pop("digests")
    path = tmp_path / "bare.knot"
    path.write_bytes(join_knot(meta, payload[: digests["offset"]]))
    repaired = repair(path, show_progress=False)
    assert repaired.path.read_bytes() == tiny.read_bytes()
    assert repaired.notes == ("there were no digests",)


def test_a_sound_knot_is_left_alone(tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(HeaderError, match="needs no repair"):
        repair(tiny, tmp_path / "x.knot", show_progress=False)
    assert list(tmp_path.iterdir()) == []


def test_a_gguf_of_another_model_is_refused_by_what_differs(tiny: Path, old: Path, tmp_path: Path) -> None:
    other = make_tiny_gguf(tmp_path / "other.gguf", extra={"qwen2.rope.freq_base": 5e5})
    with pytest.raises(
        ConfigError, match=r"config.rope_theta is the number 1000000\.0, but other\.gguf says 500000\.0"
    ):
        repair(old, tokenizer_from=other, show_progress=False)
    taller = make_tiny_gguf(tmp_path / "taller.gguf", layers=4)
    with pytest.raises(KnotError, match="num_layers is the number 3, but taller"):
        repair(old, tokenizer_from=taller, show_progress=False)


def test_what_is_not_known_of_an_old_configuration_is_left_out_and_said(tiny: Path, tmp_path: Path) -> None:
    meta, payload = split_knot(tiny.read_bytes())
    meta["config"]["quantization"] = "Q4_K_M"
    old = tmp_path / "old.knot"
    old.write_bytes(old_layout(meta, payload))
    notes = repair(old, show_progress=False).notes
    assert "config.quantization (the string 'Q4_K_M') is not known and was left out" in notes


@pytest.mark.parametrize(
    "key", ["num_layers", "rope_theta", "norm_eps", "head_dim", "vocab_size", "architecture"]
)
def test_what_cannot_be_derived_is_asked_for_by_name(tiny: Path, tmp_path: Path, key: str) -> None:
    data = as_old(tiny.read_bytes())
    length = int.from_bytes(data[6:10], "little")
    meta = json.loads(data[10 : 10 + length])
    del meta["config"][key]
    old = tmp_path / "old.knot"
    old.write_bytes(old_layout(meta, data[11 + length :]))
    with pytest.raises(HeaderError, match=rf"config\.({key}|rope_dim|rope_type)"):
        repair(old, show_progress=False)


def test_a_missing_tensor_cannot_be_mended_and_is_named(tiny: Path, tmp_path: Path) -> None:
    data = as_old(tiny.read_bytes())
    length = int.from_bytes(data[6:10], "little")
    meta = json.loads(data[10 : 10 + length])
    meta["tensors"]["blk_9_what"] = meta["tensors"].pop("blk_1_ffn_down_weight")
    old = tmp_path / "old.knot"
    old.write_bytes(old_layout(meta, data[11 + length :]))
    with pytest.raises(MissingTensorError, match="blk_1_ffn_down_weight"):
        repair(old, show_progress=False)


def test_an_old_knot_cut_anywhere_is_refused(old: Path) -> None:
    data = old.read_bytes()
    for length in range(len(data) - 1, 0, -997):
        old.write_bytes(data[:length])
        with pytest.raises(HeaderError):
            repair(old, show_progress=False)
    assert [path.name for path in old.parent.iterdir()] == ["old.knot"]


def test_a_repaired_knot_is_not_overwritten_unless_forced_and_may_replace_the_old_one(
    tiny: Path, old: Path
) -> None:
    repair(old, show_progress=False)
    with pytest.raises(OutputError, match="exists"):
        repair(old, show_progress=False)
    repair(old, old, tokenizer_from=tiny.with_suffix(".gguf"), force=True, show_progress=False)
    assert old.read_bytes() == tiny.read_bytes()
