"""Synthetic models: real sizes and types, sound knots, finite arithmetic, the same bytes every time."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from core_support import run
from station_support import station_on

from bench.synthetic import SHAPES, random_blocks, write_synthetic_header, write_synthetic_knot
from knot.gguf_config import knot_name
from knot.gguf_guard import read_gguf
from knot.quants import tensor_bytes
from knot.reader import load_header
from knot.verify import verify

SMALL = replace(SHAPES["small"], layers=2, hidden=256, ffn=512, heads=4, vocab=600, rows=640)


def test_a_synthetic_knot_is_sound_and_the_same_every_time(tmp_path: Path) -> None:
    header = write_synthetic_knot(tmp_path / "a.knot", SMALL)
    assert write_synthetic_knot(tmp_path / "b.knot", SMALL).fingerprint == header.fingerprint
    assert verify(tmp_path / "a.knot", show_progress=False).tensors == len(header.tensors)
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["a.knot", "b.knot"], (
        "nothing is left beside"
    )
    config = header.config
    assert (config.vocab_size, config.embedding_rows, config.num_layers) == (600, 640, 2)
    assert {header.tensors[f"blk_{i}_ffn_down_weight"].type for i in range(2)} == {"Q4_K", "Q6_K"}


@pytest.mark.parametrize("kind", ["Q4_K", "Q6_K", "Q8_0"])
def test_random_blocks_have_about_the_spread_that_was_asked_for(kind: str) -> None:
    import gguf

    data = b"".join(random_blocks(kind, 0.05, tensor_bytes(kind, (64, 2048))))
    values = gguf.quants.dequantize(np.frombuffer(data, np.uint8), gguf.GGMLQuantizationType[kind])
    assert np.isfinite(values).all()
    assert 0.02 < values.std() < 0.1
    assert abs(values.mean()) < 0.01


def test_activations_of_a_synthetic_model_stay_finite(tmp_path: Path) -> None:
    path = tmp_path / "a.knot"
    write_synthetic_knot(path, SMALL)

    async def body() -> None:
        one = await station_on(path, (0, 2))
        hidden = np.linspace(-1, 1, 5 * 256, dtype="<f4").reshape(5, 256)
        rows = await one.forward("s", 0, hidden)
        assert np.isfinite(rows).all()
        assert 0.1 < np.abs(rows).max() < 100

    run(body())


def test_a_header_alone_states_what_the_whole_file_would_have(tmp_path: Path) -> None:
    write_synthetic_knot(tmp_path / "a.knot", SMALL)
    header = load_header(tmp_path / "a.knot")
    file = read_gguf(write_synthetic_header(tmp_path / "a.gguf", SMALL), header_only=True)
    found = {knot_name(tensor.name): (tensor.type, tensor.shape) for tensor in file.tensors.values()}
    assert found == {info.name: (info.type, info.shape) for info in header.tensors.values()}


def test_the_7b_shape_has_the_sizes_of_the_real_one(tmp_path: Path) -> None:
    file = read_gguf(write_synthetic_header(tmp_path / "7b.gguf", SHAPES["7b"]), header_only=True)
    kinds = [tensor.type for tensor in file.tensors.values()]
    assert {kind: kinds.count(kind) for kind in set(kinds)} == {"Q4_K": 169, "Q6_K": 29, "F32": 141}
    assert file.tensors["blk.0.ffn_down.weight"].length == 55_695_360
    assert file.tensors["blk.0.ffn_gate.weight"].length == 38_191_104
    assert file.tensors["output.weight"].shape == (152_064, 3584)
    assert len(file.metadata["tokenizer.ggml.tokens"]) == 151_936  # type: ignore[arg-type]
