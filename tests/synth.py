"""A tiny model made on the spot: a GGUF of a few hundred KB, with everything that real ones trip over.

`make_tiny_gguf` writes it. By default: 3 layers, hidden 96 (no multiple of 256, so that the types must be
mixed), three query heads over one key-value head, biases for qwen2, 300 tokens of a real byte-level BPE
with merges, control tokens and unused ids, untied for qwen2 and tied for the others. The same arguments give
the same bytes.
"""

from __future__ import annotations

import re
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache, lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import gguf
import libgguf
import numpy as np
from gguf.constants import GGML_QUANT_SIZES
from gguf.constants import GGMLQuantizationType as Kind

from knot.convert import convert

TEXT = (
    "the quick brown fox jumps over the lazy dog and then the other thing that there is in the end\n"
    "def add(one, two):\n    return one + two\n\nfor item in range(100):\n    print(add(item, 1))\n"
)
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for m in messages %}{{'<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{'<|im_start|>assistant\n'}}{% endif %}"
)
# Tensor → type; a sequence is gone through layer by layer. Together they have every type that the engine
# multiplies with.
TYPES: Mapping[str, Mapping[str, str | Sequence[str]]] = {
    "qwen2": {
        "token_embd": "Q5_0",
        "output": "Q8_0",
        "attn_q": ("Q5_0", "Q4_0", "Q5_1"),
        "attn_k": ("Q4_1", "Q8_0"),
        "attn_v": ("Q8_0", "F16"),
        "attn_output": ("Q4_0", "BF16"),
        "ffn_gate": "Q5_1",
        "ffn_up": ("Q5_0", "F32"),
        "ffn_down": ("Q6_K", "Q4_K", "Q5_K"),
    },
    "llama": {
        "token_embd": "Q8_0",
        "output": "Q6_K",
        "attn_q": "Q4_1",
        "attn_k": "Q4_1",
        "attn_v": "Q5_1",
        "attn_output": "Q4_1",
        "ffn_gate": ("Q4_1", "BF16"),
        "ffn_up": "Q4_0",
        "ffn_down": ("Q4_K", "Q6_K"),
    },
    "qwen3": {
        "token_embd": "Q8_0",
        "output": "Q6_K",
        "attn_q": ("IQ4_NL", "MXFP4"),
        "attn_k": "Q5_0",
        "attn_v": ("Q8_0", "IQ4_NL"),
        "attn_output": ("MXFP4", "IQ4_NL"),
        "ffn_gate": "Q4_0",
        "ffn_up": "IQ4_NL",
        "ffn_down": ("Q2_K", "Q3_K", "IQ4_XS"),
    },
}


def make_tiny_gguf(
    path: Path,
    *,
    arch: str = "qwen2",
    layers: int = 3,
    hidden: int = 96,
    ffn: int = 256,
    heads: int = 3,
    kv_heads: int = 1,
    head_dim: int = 32,
    vocab: int = 300,
    unused_tokens: int = 3,
    padded_rows: int = 0,
    tied: bool | None = None,
    bias: bool | None = None,
    types: str | Mapping[str, str | Sequence[str]] | None = None,
    rope_freqs: bool = False,
    context: int = 512,
    seed: int = 1,
    pre: str | None = None,
    chat_template: str | None = CHAT_TEMPLATE,
    extra: Mapping[str, Any] | None = None,
    leave_out: Sequence[str] = (),
) -> Path:
    """Writes a synthetic model and returns `path`.

    - `vocab`: ids of the tokenizer, at least 260 + `unused_tokens`: 256 bytes, merges, 3 control tokens,
      and last the unused ones; `padded_rows` more rows than that in the table.
    - `types`: one type for every matrix, or tensor → type (or one type a layer, repeated); the rest is as
      `TYPES` says. A type whose block does not fit a row gives way to Q8_0 or F16.
    - `extra`: further metadata (int, float, bool, str or list); a value of None removes a key that would
      have been written.
    - `leave_out`: full names of tensors that are not written.
    """
    tied = (arch != "qwen2") if tied is None else tied
    bias = (arch == "qwen2") if bias is None else bias
    chosen = dict(TYPES[arch])
    if isinstance(types, str):
        chosen = dict.fromkeys(chosen, types)
    else:
        chosen.update(types or {})
    writer = gguf.GGUFWriter(path, arch)
    for key, value in _metadata(locals()).items():
        _add(writer, key, value)
    scale = hidden**-0.5
    q_dim, kv_dim, rows = heads * head_dim, kv_heads * head_dim, vocab + padded_rows
    # (name, shape, spread, mean); vectors are F32.
    # A tied table is kept small beside what the layers add, or every token would predict itself.
    spread = 0.3 if tied else 1.0
    plan: list[tuple[str, tuple[int, ...], float, float]] = [
        ("token_embd.weight", (rows, hidden), spread, 0.0)
    ]
    if rope_freqs:
        plan.append(("rope_freqs.weight", (head_dim // 2,), 0.5, 2.0))
    for layer in range(layers):
        at = f"blk.{layer}."
        plan += [
            (f"{at}attn_norm.weight", (hidden,), 0.1, 1.0),
            (f"{at}attn_q.weight", (q_dim, hidden), scale, 0.0),
        ]
        if bias:
            plan += [
                (f"{at}attn_q.bias", (q_dim,), 0.5, 0.0),
                (f"{at}attn_k.bias", (kv_dim,), 0.5, 0.0),
                (f"{at}attn_v.bias", (kv_dim,), 0.2, 0.0),
            ]
        plan += [
            (f"{at}attn_k.weight", (kv_dim, hidden), scale, 0.0),
            *((f"{at}attn_{name}_norm.weight", (head_dim,), 0.3, 1.0) for name in "qk" if arch == "qwen3"),
            (f"{at}attn_v.weight", (kv_dim, hidden), scale, 0.0),
            (f"{at}attn_output.weight", (hidden, q_dim), q_dim**-0.5, 0.0),
            (f"{at}ffn_norm.weight", (hidden,), 0.1, 1.0),
            (f"{at}ffn_gate.weight", (ffn, hidden), scale, 0.0),
            (f"{at}ffn_up.weight", (ffn, hidden), scale, 0.0),
            (f"{at}ffn_down.weight", (hidden, ffn), ffn**-0.5, 0.0),
        ]
    plan.append(("output_norm.weight", (hidden,), 0.1, 1.0))
    if not tied:
        plan.append(("output.weight", (rows, hidden), 3 * scale, 0.0))
    for name, shape, spread, mean in plan:
        if name not in leave_out:
            kind = Kind.F32 if len(shape) == 1 else _fitting(_choice(chosen, name), shape[-1])
            data = _weights(f"{seed}/{name}", shape, spread, mean, kind)
            writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def uniform(key: str, shape: tuple[int, ...], spread: float, mean: float = 0.0) -> np.ndarray:
    """Float32 numbers of standard deviation `spread`, the same for the same `key` on every machine."""
    bits = np.random.Philox(key=zlib.crc32(key.encode())).random_raw(int(np.prod(shape)))
    unit = (bits >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-23) - np.float32(1)
    return (unit * np.float32(spread * 3**0.5) + np.float32(mean)).reshape(shape)


def quantized(values: np.ndarray, kind: Kind) -> np.ndarray:
    """`values` in another type, byte for byte as ggml's own quantisers make it."""
    if kind == Kind.F32:
        return values
    if kind in (Kind.F16, Kind.BF16):
        data = gguf.quants.quantize(values, kind)
        return data if kind == Kind.F16 else data.view(np.uint8)
    return np.asarray(libgguf.quantize_rows(values, kind))


def tiny_vocabulary(vocab: int, unused: int = 0) -> tuple[list[str], list[int], list[str]]:
    """(tokens, types, merges) of a byte-level BPE of `vocab` tokens, learned from a few lines of text."""
    n_merges = vocab - 256 - len(SPECIALS) - unused
    merges = _learned(max(n_merges, 0))
    if len(merges) != n_merges:
        raise ValueError(f"a vocabulary of {vocab} with {unused} unused cannot be made")
    tokens = [*_alphabet(), *("".join(merge) for merge in merges), *SPECIALS]
    tokens += [f"<|unused_{number}|>" for number in range(unused)]
    kinds = [1] * (256 + n_merges) + [3] * len(SPECIALS) + [5] * unused
    return tokens, kinds, [" ".join(merge) for merge in merges]


def _weights(key: str, shape: tuple[int, ...], spread: float, mean: float, kind: Kind) -> np.ndarray:
    make = _small_weights if np.prod(shape) < 100_000 else _small_weights.__wrapped__
    return make(key, shape, spread, mean, kind)


@lru_cache(512)
def _small_weights(key: str, shape: tuple[int, ...], spread: float, mean: float, kind: Kind) -> np.ndarray:
    """Kept, since most tests make the same model."""
    return quantized(uniform(key, shape, spread, mean), kind)


def _metadata(given: Mapping[str, Any]) -> dict[str, Any]:
    arch = given["arch"]
    tokens, kinds, merges = tiny_vocabulary(given["vocab"], given["unused_tokens"])
    first_special = tokens.index(SPECIALS[0])
    metadata: dict[str, Any] = {
        "general.name": f"tiny {arch} {given['seed']}",
        f"{arch}.block_count": given["layers"],
        f"{arch}.context_length": given["context"],
        f"{arch}.embedding_length": given["hidden"],
        f"{arch}.feed_forward_length": given["ffn"],
        f"{arch}.attention.head_count": given["heads"],
        f"{arch}.attention.head_count_kv": given["kv_heads"],
        f"{arch}.rope.freq_base": 1e5 if arch == "llama" else 1e6,
        f"{arch}.attention.layer_norm_rms_epsilon": 1e-5 if arch == "llama" else 1e-6,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": given["pre"] or {"llama": "smollm"}.get(arch, "qwen2"),
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": first_special + (1 if arch == "llama" else 0),
        "tokenizer.ggml.eos_token_id": first_special + 2,
        "tokenizer.ggml.padding_token_id": first_special,
        "tokenizer.ggml.add_bos_token": False,
        "general.quantization_version": 2,
    }
    if given["head_dim"] * given["heads"] != given["hidden"]:
        metadata[f"{arch}.attention.key_length"] = given["head_dim"]
        metadata[f"{arch}.attention.value_length"] = given["head_dim"]
    if arch == "llama":
        metadata["llama.vocab_size"] = given["vocab"]
        metadata["llama.rope.dimension_count"] = given["head_dim"]
    if given["chat_template"]:
        metadata["tokenizer.chat_template"] = given["chat_template"]
    metadata.update(given["extra"] or {})
    return metadata


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if value is None:
        return
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


def _choice(types: Mapping[str, str | Sequence[str]], name: str) -> str:
    parts = name.split(".")
    choice = types[parts[-2]]
    return choice if isinstance(choice, str) else choice[int(parts[1]) % len(choice)]


def _fitting(kind: str, cols: int) -> Kind:
    for name in (kind, "Q8_0", "F16"):
        if cols % GGML_QUANT_SIZES[Kind[name]][0] == 0:
            return Kind[name]
    raise AssertionError("F16 fits everything")


@cache
def _alphabet() -> list[str]:
    """A printable character for every byte: plain ones stand for themselves, the rest follow from 256."""
    plain = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(byte) if byte in plain else chr(next(others)) for byte in range(256)]


@cache
def _learned(count: int) -> list[tuple[str, str]]:
    """The `count` merges that pay most on `TEXT`; where the text runs out, two and three letters."""
    alphabet = _alphabet()
    # Words as pre-tokenizers cut them, so that every merge can happen.
    words = [
        [alphabet[byte] for byte in word.encode()] for word in re.findall(r" ?[A-Za-z]+|[^A-Za-z]", TEXT)
    ]
    merges: list[tuple[str, str]] = []
    made: set[str] = set()
    while len(merges) < count:
        pairs = Counter(pair for word in words for pair in pairwise(word))
        best = max(
            (pair for pair in pairs if "".join(pair) not in made), key=lambda p: (pairs[p], p), default=None
        )
        if best is None:
            break
        merges.append(best)
        made.add("".join(best))
        for word in words:
            at = 0
            while at < len(word) - 1:
                if (word[at], word[at + 1]) == best:
                    word[at : at + 2] = ["".join(best)]
                at += 1
    letters = "abcdefghijklmnopqrstuvwxyz"
    twos = [(a, b) for a in letters for b in letters if a + b not in made]
    made.update(a + b for a, b in twos)
    threes = [(a + b, c) for a in letters for b in letters for c in letters if a + b + c not in made]
    return (merges + twos + threes)[:count]


def make_tiny_knot(path: Path, **arguments: Any) -> Path:
    """Writes the knot of a tiny model (arguments as for `make_tiny_gguf`) and returns `path`.

    The GGUF stays beside it, under the same name with ".gguf".
    """
    gguf_path = make_tiny_gguf(path.with_suffix(".gguf"), **arguments)
    convert(gguf_path, path, force=True, show_progress=False)
    return path
