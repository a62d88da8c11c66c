"""GGUF → knot: the same bytes in another order, whole or not at all."""

from __future__ import annotations

import errno
import hashlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import xxhash
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize
from synth import make_tiny_gguf

import knot.writer
from knot.atomic import partial_path, replacing
from knot.convert import convert
from knot.errors import BusyError, GgufError, KnotError, OutputError, SourceError, UnsupportedModelError
from knot.gguf_config import knot_name
from knot.gguf_guard import read_gguf
from knot.header import KnotHeader
from knot.quants import ENGINE_TYPES
from knot.reader import load_header
from knot.tokenizer_section import build_section, read_section_info


def converted(path: Path, **arguments: object) -> tuple[Path, KnotHeader]:
    return convert(make_tiny_gguf(path, **arguments), force=True, show_progress=False)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize(
    "arguments",
    [
        {"arch": "qwen2"},
        {"arch": "llama"},
        {"arch": "qwen2", "tied": True, "padded_rows": 5},
        {"arch": "llama", "tied": False, "bias": True, "rope_freqs": True, "head_dim": 16},
        {
            "arch": "llama",
            "hidden": 64,
            "heads": 9,
            "kv_heads": 3,
            "head_dim": 32,
            "layers": 1,
            "unused_tokens": 0,
        },
        {"arch": "qwen2", "types": "F32"},
    ],
)
def test_every_tensor_has_the_bytes_the_gguf_has(tmp_path: Path, arguments: dict[str, object]) -> None:
    path, header = converted(tmp_path / "x.gguf", **arguments)
    source, data = (tmp_path / "x.gguf").read_bytes(), path.read_bytes()
    tensors = read_gguf(tmp_path / "x.gguf").tensors
    assert {knot_name(name) for name in tensors} == set(header.tensors)
    for name, tensor in tensors.items():
        info = header.tensors[knot_name(name)]
        at = header.file_offset(info.offset)
        assert (info.type, info.shape) == (tensor.type, tensor.shape)
        assert data[at : at + info.length] == source[tensor.offset : tensor.offset + tensor.length]


def test_together_the_tiny_models_have_every_type_the_engine_computes(tmp_path: Path) -> None:
    found = {
        info.type
        for arch in ("qwen2", "llama", "qwen3")
        for info in converted(tmp_path / f"{arch}.gguf", arch=arch)[1].tensors.values()
    }
    assert found == ENGINE_TYPES


def test_the_configuration_is_the_ggufs(tmp_path: Path) -> None:
    config = converted(tmp_path / "x.gguf", padded_rows=4)[1].config
    assert config.to_json() == {
        "architecture": "qwen2",
        "num_layers": 3,
        "hidden_size": 96,
        "ffn_size": 256,
        "num_heads": 3,
        "num_kv_heads": 1,
        "head_dim": 32,
        "vocab_size": 300,
        "embedding_rows": 304,
        "context_length": 512,
        "rope_theta": 1e6,
        "rope_type": "neox",
        "rope_dim": 32,
        "rope_scaling": None,
        "norm_eps": float(np.float32(1e-6)),
        "tie_embeddings": False,
        "qkv_bias": True,
        "unused_token_ranges": [[297, 300]],
        "bos_token_id": 294,
        "eos_token_id": 296,
        "eot_token_id": None,
    }
    llama = converted(tmp_path / "y.gguf", arch="llama")[1].config
    assert (llama.rope_type, llama.tie_embeddings, llama.qkv_bias) == ("norm", True, False)
    assert llama.rope_theta == 1e5


def test_the_digests_are_xxh3_of_each_row_group_and_the_sha256_is_the_payloads(tmp_path: Path) -> None:
    path, header = converted(tmp_path / "x.gguf")
    payload = path.read_bytes()[header.payload_offset :]
    expected = b""
    for info in header.tensors.values():
        for group in range(info.group_count):
            offset, length = info.row_range(
                group * info.group_rows, min((group + 1) * info.group_rows, info.rows)
            )
            expected += xxhash.xxh3_64_intdigest(payload[offset : offset + length]).to_bytes(8, "little")
    section = header.digests
    assert payload[section.offset : section.end] == expected
    assert section.digest == xxhash.xxh3_64_hexdigest(expected)
    assert header.sha256 == hashlib.sha256(payload).hexdigest()


def test_the_tokenizer_section_is_the_ggufs_tokenizer(tmp_path: Path) -> None:
    path, header = converted(tmp_path / "x.gguf")
    section = header.tokenizer
    assert section is not None
    at = header.file_offset(section.offset)
    found = path.read_bytes()[at : at + section.length]
    assert found == build_section(read_gguf(tmp_path / "x.gguf").metadata)
    assert section.digest == xxhash.xxh3_64_hexdigest(found)
    assert read_section_info(found).n_tokens == 300


def test_the_same_gguf_gives_the_same_knot(tmp_path: Path) -> None:
    first, _ = converted(tmp_path / "a.gguf")
    second, _ = converted(tmp_path / "b.gguf")
    assert first.read_bytes() == second.read_bytes()


def test_streaming_in_pieces_of_any_size_gives_the_same_knot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, _ = converted(tmp_path / "a.gguf")
    monkeypatch.setattr(knot.writer, "CHUNK", 1009)
    pieces, _ = converted(tmp_path / "b.gguf")
    assert whole.read_bytes() == pieces.read_bytes()


def test_the_knot_takes_the_ggufs_time(tmp_path: Path) -> None:
    source = make_tiny_gguf(tmp_path / "x.gguf")
    os.utime(source, ns=(1_600_000_000_123_456_789, 1_600_000_000_123_456_789))
    path, _ = convert(source)
    assert path.stat().st_mtime_ns == source.stat().st_mtime_ns


def test_a_knot_that_exists_is_kept_unless_forced(tmp_path: Path) -> None:
    source = make_tiny_gguf(tmp_path / "x.gguf")
    target = tmp_path / "y.knot"
    target.write_bytes(b"precious")
    with pytest.raises(OutputError, match=r"y\.knot exists; add --force"):
        convert(source, target)
    assert target.read_bytes() == b"precious"
    convert(source, target, force=True)
    assert load_header(target).name == "tiny qwen2 1"


def test_the_gguf_itself_is_never_replaced(tmp_path: Path) -> None:
    source = make_tiny_gguf(tmp_path / "x.gguf")
    before = source.read_bytes()
    with pytest.raises(OutputError, match="choose another name"):
        convert(source, source, force=True)
    assert source.read_bytes() == before


def test_a_leftover_of_an_interrupted_run_is_replaced(tmp_path: Path) -> None:
    source = make_tiny_gguf(tmp_path / "x.gguf")
    partial_path(tmp_path / "x.knot").write_bytes(b"half" * 1_000_000)
    path, header = convert(source)
    assert path.stat().st_size == header.file_size
    assert names(tmp_path) == ["x.gguf", "x.knot"]


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()])
def test_a_full_disk_or_ctrl_c_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    source = make_tiny_gguf(tmp_path / "x.gguf")
    old = tmp_path / "x.knot"
    old.write_bytes(b"the one from before")
    feed = knot.writer.GroupDigests.feed
    calls = []

    def failing(self: knot.writer.GroupDigests, data: memoryview) -> None:
        calls.append(len(data))
        if len(calls) == 20:
            raise error
        feed(self, data)

    monkeypatch.setattr(knot.writer.GroupDigests, "feed", failing)
    expected = KeyboardInterrupt if isinstance(error, KeyboardInterrupt) else OutputError
    with pytest.raises(expected) as caught:
        convert(source, force=True)
    if expected is OutputError:
        assert "No space left on device; it needs" in str(caught.value)
    assert old.read_bytes() == b"the one from before"
    assert names(tmp_path) == ["x.gguf", "x.knot"]


def test_a_disk_known_to_be_too_small_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = make_tiny_gguf(tmp_path / "x.gguf")
    monkeypatch.setattr("shutil.disk_usage", lambda folder: type("Usage", (), {"free": 1000})())
    with pytest.raises(OutputError, match=r"x\.knot needs \d+ bytes, but its disk has 1000 left"):
        convert(source)
    assert names(tmp_path) == ["x.gguf"]


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="No such file or directory"):
        convert(make_tiny_gguf(tmp_path / "x.gguf"), tmp_path / "none" / "x.knot")


def test_a_gguf_that_shrinks_while_being_read_is_an_error_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = make_tiny_gguf(tmp_path / "x.gguf")
    plan = knot.writer._plan

    def cut(*arguments: object) -> object:
        os.truncate(source, 100_000)
        return plan(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(knot.writer, "_plan", cut)
    with pytest.raises(SourceError, match="bytes early"):
        convert(source)
    assert names(tmp_path) == ["x.gguf"]


def test_a_gguf_that_changes_while_being_read_is_an_error_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = make_tiny_gguf(tmp_path / "x.gguf")
    plan = knot.writer._plan

    def touch(*arguments: object) -> object:
        os.utime(source, ns=(1, 1))
        return plan(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(knot.writer, "_plan", touch)
    with pytest.raises(SourceError, match="changed while it was converted"):
        convert(source)
    assert names(tmp_path) == ["x.gguf"]


def test_two_processes_never_write_one_file(tmp_path: Path) -> None:
    target = tmp_path / "x.knot"
    with replacing(target, force=False) as file:
        file.write(b"first")
        with pytest.raises(BusyError, match="another process is writing"), replacing(target, force=False):
            pass
    assert target.read_bytes() == b"first"


def test_ctrl_c_in_the_command_ends_quietly_with_130_and_leaves_nothing(tmp_path: Path) -> None:
    source = make_tiny_gguf(tmp_path / "x.gguf")
    code = (
        "import signal, sys, time, knot.writer as w\n"
        # Whoever runs the tests in the background may have it ignored.
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "def slow(self, data):\n"
        "    print('converting', flush=True); time.sleep(30)\n"
        "w.GroupDigests.feed = slow\n"
        "from knot.cli import main\n"
        f"sys.exit(main(['convert', {str(source)!r}]))\n"
    )
    root = Path(__file__).parents[1]
    process = subprocess.Popen(
        [sys.executable, "-c", code], cwd=root, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "converting\n"
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 130
    assert errors == ""
    assert names(tmp_path) == ["x.gguf"]


def test_types_the_engine_cannot_compute_are_refused_by_name_with_what_would_work(tmp_path: Path) -> None:
    source = make_tiny_gguf(tmp_path / "x.gguf", types={"ffn_down": "TQ2_0"})
    with pytest.raises(UnsupportedModelError, match=r"blk\.0\.ffn_down\.weight is TQ2_0.*Q4_K"):
        convert(source)


def test_a_tensor_that_is_missing_from_the_gguf_is_named_with_phase_and_layer(tmp_path: Path) -> None:
    source = make_tiny_gguf(tmp_path / "x.gguf", leave_out=["blk.1.ffn_up.weight"])
    with pytest.raises(KnotError, match="phase ffn_up of layer 1 needs the tensor blk_1_ffn_up_weight"):
        convert(source)
    source = make_tiny_gguf(tmp_path / "y.gguf", leave_out=["blk.2.attn_k.bias"])
    with pytest.raises(KnotError, match="blk_2_attn_k_bias"):
        convert(source)


def test_a_file_that_is_no_gguf_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(b"PK\3\4 something else")
    with pytest.raises(GgufError, match=r"x\.gguf: this is no GGUF file"):
        convert(tmp_path / "x.gguf")


def test_the_gguf_cut_anywhere_converts_to_nothing(tmp_path: Path) -> None:
    source = make_tiny_gguf(tmp_path / "x.gguf", layers=1)
    for length in range(source.stat().st_size - 64, 0, -1999):
        os.truncate(source, length)
        with pytest.raises(GgufError):
            convert(source)
    assert names(tmp_path) == ["x.gguf"]


def test_lists_as_long_as_a_vocabulary_of_152k_are_read_whole(tmp_path: Path) -> None:
    tokens = [f"t{number}" for number in range(152_000)]
    source = make_tiny_gguf(
        tmp_path / "x.gguf",
        extra={"tokenizer.ggml.extra_list": tokens, "tokenizer.ggml.extra_numbers": list(range(152_000))},
    )
    metadata = read_gguf(source).metadata
    assert metadata["tokenizer.ggml.extra_list"] == tokens
    assert metadata["tokenizer.ggml.extra_numbers"] == list(range(152_000))


def test_the_weights_of_the_tiny_model_are_worth_testing_with(tmp_path: Path) -> None:
    """Blocks of zeros hide every mistake in a scale."""
    source = make_tiny_gguf(tmp_path / "x.gguf")
    data = source.read_bytes()
    for tensor in read_gguf(source).tensors.values():
        raw = np.frombuffer(data[tensor.offset : tensor.offset + tensor.length], np.uint8)
        values = dequantize(
            raw.reshape(tensor.shape[0] if len(tensor.shape) == 2 else 1, -1),
            GGMLQuantizationType[tensor.type],
        )
        assert np.isfinite(values).all()
        assert values.std() > 0.01, tensor.name
