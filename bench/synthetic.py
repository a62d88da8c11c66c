"""Models of real size and random content: for memory, streaming and speed, where only sizes and types matter.

    python -m bench.synthetic 7b OUT.knot            a whole knot (7b: 4.7 GB in about a minute)
    python -m bench.synthetic 70b OUT.gguf           the header of a GGUF alone, for the planner
    python -m bench.synthetic 70b OUT.knot --layers 1 --vocab 2048

Blocks are random bits with scales that keep activations finite, types are those of Q4_K_M files. The same
arguments give the same bytes.
"""

from __future__ import annotations

import argparse
import tempfile
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import gguf
import numpy as np

from knot.architectures import OUTPUT, TOKEN_EMBD, payload_order
from knot.config import ModelConfig
from knot.gguf_config import config_from_gguf, knot_name
from knot.header import KnotHeader
from knot.quants import block_size, ggml_id, tensor_bytes
from knot.tokenizer_section import build_section, byte_alphabet
from knot.writer import TensorSource, write_knot

LETTERS: Final = "abcdefghijklmnopqrstuvwxyz"
SPECIALS: Final = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


@dataclass(frozen=True, slots=True)
class Shape:
    """A model's dimensions. `rows` of the embedding table are at least `vocab` ids."""

    arch: str
    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    rows: int
    context: int = 32_768


SHAPES: Final = {
    "7b": Shape("qwen2", 28, 3584, 18_944, 28, 4, 128, 151_936, 152_064),
    "70b": Shape("llama", 80, 8192, 28_672, 64, 8, 128, 128_256, 128_256),
    "small": Shape("qwen2", 4, 512, 1536, 8, 2, 64, 4096, 4160),
}


def write_synthetic_knot(path: Path, shape: Shape, *, name: str = "synthetic") -> KnotHeader:
    """Writes a knot of random blocks and returns its header."""
    metadata = _metadata(shape, name)
    config = _config(shape, metadata)
    with tempfile.TemporaryDirectory(prefix="synthetic-", dir=path.parent) as folder:
        patterns = _Patterns(Path(folder))
        sources = {
            place.name: patterns.source(
                place.name, place.shape, type_of(place.name, place.shape, shape.layers)
            )
            for place in payload_order(config)
            if not place.optional
        }
        patterns.write()
        return write_knot(
            path, name, config, sources, build_section(metadata), force=True, show_progress=False
        )


def write_synthetic_header(path: Path, shape: Shape, *, name: str = "synthetic") -> Path:
    """Writes the header of a GGUF without its data: what `knot plan` takes of a model that is elsewhere."""
    metadata = _metadata(shape, name)
    writer = gguf.GGUFWriter(path, shape.arch)
    for key, value in metadata.items():
        if key != "general.architecture":
            _add(writer, key, value)
    for place in payload_order(_config(shape, metadata)):
        if place.optional:
            continue
        kind = type_of(place.name, place.shape, shape.layers)
        elements, size = block_size(kind)
        stored = (*place.shape[:-1], place.shape[-1] // elements * size)
        raw = None if kind == "F32" else gguf.GGMLQuantizationType(ggml_id(kind))
        writer.add_tensor_info(
            _gguf_name(place.name),
            place.shape if kind == "F32" else stored,
            np.dtype(np.float32 if kind == "F32" else np.uint8),
            tensor_bytes(kind, place.shape),
            raw_dtype=raw,
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    return path


def type_of(name: str, shape: Sequence[int], layers: int) -> str:
    """A tensor's type in a Q4_K_M file; Q8_0 where rows are no multiple of 256."""
    if len(shape) == 1:
        return "F32"
    if shape[-1] % 256:
        return "Q8_0"
    if name == OUTPUT:
        return "Q6_K"
    if name.endswith(("attn_v_weight", "ffn_down_weight")):
        layer = int(name.split("_")[1])
        # The first and the last eighth of the layers, and every third one between.
        finer = layer < layers // 8 or layer >= 7 * layers // 8 or (layer - layers // 8) % 3 == 2
        return "Q6_K" if finer else "Q4_K"
    return "Q4_K"


class _Patterns:
    """Files of random blocks, one for each type and scale; tensors are stretches of them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._sizes: dict[tuple[str, float], int] = {}

    def source(self, name: str, shape: tuple[int, ...], kind: str) -> TensorSource:
        """Where a tensor's bytes will lie once `write` has been called."""
        spread = _spread(name, shape)
        _, size = block_size(kind)
        # Stretches begin at different blocks, so that no two tensors are the same.
        offset = zlib.crc32(name.encode()) % 997 * size
        length = offset + tensor_bytes(kind, shape)
        self._sizes[kind, spread] = max(length, self._sizes.get((kind, spread), 0))
        return TensorSource(kind, shape, self._path(kind, spread), offset)

    def write(self) -> None:
        """Makes the files."""
        for (kind, spread), length in self._sizes.items():
            with self._path(kind, spread).open("wb") as file:
                for piece in random_blocks(kind, spread, length):
                    file.write(piece)

    def _path(self, kind: str, spread: float) -> Path:
        return self._folder / f"{kind}-{spread:.6f}"


def random_blocks(kind: str, spread: float, length: int, seed: int = 1) -> Iterator[bytes]:
    """`length` bytes of blocks whose values have a standard deviation of about `spread`."""
    _, size = block_size(kind)
    generator = np.random.Generator(np.random.Philox(key=[seed, zlib.crc32(f"{kind}/{spread:.6f}".encode())]))
    at_once = 4096
    while length > 0:
        if kind == "F32":
            values = generator.random(at_once * 8, np.float32) * np.float32(2) - np.float32(1)
            data = (values * np.float32(spread * 3**0.5) + np.float32(_mean(spread))).astype("<f4").tobytes()
        else:
            blocks = generator.integers(0, 256, (at_once, size), np.uint8)
            _set_scales(kind, blocks, spread)
            data = blocks.tobytes()
        yield data[:length]
        length -= len(data)


def _set_scales(kind: str, blocks: np.ndarray, spread: float) -> None:
    def half(value: float) -> np.ndarray:
        return np.frombuffer(np.float16(value).tobytes(), np.uint8)

    match kind:
        case "Q4_K":  # d · scale · q - dmin · min, scales and mins of six bits
            blocks[:, 0:2], blocks[:, 2:4] = half(spread / 257), half(7.5 * spread / 257)
        case "Q6_K":  # d · scale · (q - 32), scales of eight bits
            blocks[:, 208:210] = half(spread / 1369)
        case "Q8_0":  # d · q
            blocks[:, 0:2] = half(spread / 74)
        case _:
            raise ValueError(f"random blocks of {kind} are not made")


def _spread(name: str, shape: tuple[int, ...]) -> float:
    if len(shape) == 1:
        return 0.2 if name.endswith("bias") else 0.1
    return 1.0 if name == TOKEN_EMBD else (3.0 if name == OUTPUT else 1.0) * shape[-1] ** -0.5


def _mean(spread: float) -> float:
    """Norms are about 1, biases about 0."""
    return 1.0 if spread == 0.1 else 0.0


def _config(shape: Shape, metadata: dict[str, Any]) -> ModelConfig:
    shapes = {TOKEN_EMBD: (shape.rows, shape.hidden), OUTPUT: (shape.rows, shape.hidden)}
    return config_from_gguf({**metadata, "general.architecture": shape.arch}, shapes)


def _metadata(shape: Shape, name: str) -> dict[str, Any]:
    arch = shape.arch
    tokens, merges = _vocabulary(shape.vocab)
    first = len(tokens) - len(SPECIALS)
    return {
        "general.architecture": arch,
        "general.name": name,
        f"{arch}.block_count": shape.layers,
        f"{arch}.context_length": shape.context,
        f"{arch}.embedding_length": shape.hidden,
        f"{arch}.feed_forward_length": shape.ffn,
        f"{arch}.attention.head_count": shape.heads,
        f"{arch}.attention.head_count_kv": shape.kv_heads,
        f"{arch}.rope.freq_base": 1e6 if arch == "qwen2" else 5e5,
        f"{arch}.attention.layer_norm_rms_epsilon": 1e-6 if arch == "qwen2" else 1e-5,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2" if arch == "qwen2" else "llama-bpe",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * first + [3] * len(SPECIALS),
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": first,
        "tokenizer.ggml.eos_token_id": first + 2,
        "tokenizer.ggml.padding_token_id": first,
        "tokenizer.ggml.add_bos_token": False,
    }


def _vocabulary(size: int) -> tuple[list[str], list[str]]:
    """(tokens, merges): the bytes, words of two, three and four letters, and the specials."""
    words = list(LETTERS)
    pairs: list[tuple[str, str]] = []
    wanted = size - 256 - len(SPECIALS)
    while len(pairs) < wanted:
        longer = [(word, letter) for word in words for letter in LETTERS]
        pairs += longer
        words = [word + letter for word, letter in longer]
    pairs = pairs[:wanted]
    tokens = [*byte_alphabet(), *(left + right for left, right in pairs), *SPECIALS]
    return tokens, [f"{left} {right}" for left, right in pairs]


def _gguf_name(name: str) -> str:
    """A tensor's name in a GGUF: "blk_0_attn_q_weight" is "blk.0.attn_q.weight"."""
    head, _, tail = name.rpartition("_")
    if head.startswith("blk_"):
        _, layer, what = head.split("_", 2)
        head = f"blk.{layer}.{what}"
    found = f"{head}.{tail}"
    assert knot_name(found) == name
    return found


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def main(argv: Sequence[str] | None = None) -> int:
    """Writes a knot, or a GGUF's header, whichever the name of the output says."""
    parser = argparse.ArgumentParser(prog="python -m bench.synthetic", description=__doc__)
    parser.add_argument("shape", choices=sorted(SHAPES))
    parser.add_argument("output", type=Path, help="OUT.knot, or OUT.gguf for a header alone")
    parser.add_argument("--layers", type=int, help="fewer layers than the shape has")
    parser.add_argument("--vocab", type=int, help="fewer ids than the shape has")
    given = parser.parse_args(argv)
    shape = SHAPES[given.shape]
    if given.layers:
        shape = replace(shape, layers=given.layers)
    if given.vocab:
        shape = replace(shape, vocab=given.vocab, rows=given.vocab)
    if given.output.suffix == ".gguf":
        write_synthetic_header(given.output, shape, name=f"synthetic {given.shape}")
    else:
        write_synthetic_knot(given.output, shape, name=f"synthetic {given.shape}")
    print(f"{given.output}: {given.output.stat().st_size} bytes")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
