"""The founders' tiny model converts, and keeps every byte."""

from __future__ import annotations

from pathlib import Path

import pytest

from knot.convert import convert
from knot.gguf_config import knot_name
from knot.gguf_guard import read_gguf
from knot.verify import verify

SHARED = Path(__file__).parents[2] / "shared"

pytestmark = [
    pytest.mark.shared,
    pytest.mark.skipif(not SHARED.is_dir(), reason=f"{SHARED} is not there"),
]


def test_the_founders_tiny_model_converts_and_keeps_every_byte(tmp_path: Path) -> None:
    source = SHARED / "tiny-qwen2.gguf"
    path, header = convert(source, tmp_path / "tiny.knot", show_progress=False)
    assert verify(path, show_progress=False).header == header
    assert (header.config.num_layers, header.config.hidden_size, header.config.vocab_size) == (4, 256, 2048)
    before, after = source.read_bytes(), path.read_bytes()
    for name, tensor in read_gguf(source).tensors.items():
        info = header.tensors[knot_name(name)]
        at = header.file_offset(info.offset)
        assert after[at : at + info.length] == before[tensor.offset : tensor.offset + tensor.length], name


@pytest.mark.slow
def test_the_founders_tiny_model_cut_anywhere_is_refused(tmp_path: Path) -> None:
    source = SHARED / "tiny-qwen2.gguf"
    data = source.read_bytes()
    cut = tmp_path / "cut.gguf"
    header_bytes = read_gguf(source).header_bytes
    for length in (*range(0, header_bytes, 31), *range(header_bytes, len(data), 9973), len(data) - 1):
        cut.write_bytes(data[:length])
        with pytest.raises(ValueError, match=r"cut short|ends|but the file has"):
            read_gguf(cut)
