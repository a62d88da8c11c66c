"""What of a GGUF's metadata is taken, what means nothing, and what is refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from synth import make_tiny_gguf

from knot.config import ModelConfig
from knot.convert import check_model, tensors_of, tokenizer_of
from knot.errors import KnotError, UnsupportedModelError
from knot.gguf_parts import open_gguf


def config(tmp_path: Path, **arguments: Any) -> ModelConfig:
    model = open_gguf(make_tiny_gguf(tmp_path / "x.gguf", **arguments))
    found = check_model(model, tensors_of(model))
    tokenizer_of(model)
    return found


@pytest.mark.parametrize(
    ("arch", "key", "value"),
    [
        ("llama", "llama.expert_count", 8),
        ("llama", "llama.expert_used_count", 2),
        ("qwen2", "qwen2.attention.sliding_window", 128),
        ("llama", "llama.attention.scale", 0.5),
        ("llama", "llama.attn_logit_softcapping", 50.0),
        ("llama", "llama.final_logit_softcapping", 30.0),
        ("llama", "llama.logit_scale", 0.25),
        ("llama", "llama.residual_scale", 0.22),
        ("llama", "llama.embedding_scale", 12.0),
        ("llama", "llama.attention.clamp_kqv", 8.0),
        ("llama", "llama.attention.max_alibi_bias", 8.0),
        ("llama", "llama.attention.causal", False),
        ("llama", "llama.use_parallel_residual", True),
        ("llama", "llama.tensor_data_layout", "transposed"),
        ("llama", "llama.rope.scaling.type", "yarn"),
        ("llama", "llama.rope.scaling.type", "longrope"),
        ("llama", "llama.rope.scaling.factor", 4.0),
        ("llama", "llama.rope.scale_linear", 2.0),
        ("llama", "llama.attention.value_length", 16),
        ("llama", "llama.vocab_size", 299),
        ("llama", "llama.something_new", 1),
        ("llama", "llama.attention.head_count_kv", [1, 1, 1]),
        ("llama", "llama.feed_forward_length", [256, 256, 128]),
        ("qwen2", "qwen2.attention.layer_norm_rms_epsilon", None),
        ("qwen2", "qwen2.context_length", None),
        ("qwen2", "qwen2.block_count", None),
        ("qwen2", "qwen2.attention.head_count", None),
        ("qwen2", "qwen2.attention.head_count", True),
        ("qwen2", "qwen2.rope.freq_base", 10000),
    ],
)
def test_a_key_that_changes_the_arithmetic_in_an_unsupported_way_is_refused_by_name(
    tmp_path: Path, arch: str, key: str, value: object
) -> None:
    with pytest.raises(UnsupportedModelError, match=key.replace(".", r"\.")):
        config(tmp_path, arch=arch, extra={key: value})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("llama.expert_count", 0),
        ("llama.logit_scale", 1.0),
        ("llama.attention.causal", True),
        ("llama.attention.sliding_window", 512),
        ("llama.attention.scale", 32**-0.5),
        ("llama.rope.scaling.type", "none"),
        ("llama.rope.scaling.factor", 1.0),
        ("llama.tensor_data_layout", "Meta AI original pth"),
        ("llama.vocab_size", None),
        ("general.anything", 5),
        ("quantize.imatrix.file", "x"),
    ],
)
def test_a_key_that_says_nothing_changes_nothing(tmp_path: Path, key: str, value: object) -> None:
    assert config(tmp_path, arch="llama", extra={key: value}) == config(tmp_path, arch="llama")


def test_scaling_that_is_switched_off_is_ignored(tmp_path: Path) -> None:
    extra = {"llama.rope.scaling.type": "none", "llama.rope.scaling.factor": 8.0}
    assert config(tmp_path, arch="llama", extra=extra).rope_scaling is None


@pytest.mark.parametrize("arch", ["gpt2", "gemma3", "qwen2moe", "mamba"])
def test_another_architecture_is_refused_with_the_supported_ones(tmp_path: Path, arch: str) -> None:
    with pytest.raises(
        UnsupportedModelError, match=f"'{arch}'; the supported architectures are llama, qwen2"
    ):
        config(tmp_path, extra={"general.architecture": arch})


@pytest.mark.parametrize(
    ("model", "pre"), [("llama", "default"), ("bert", "x"), ("gpt2", "gpt-4o"), ("gpt2", None)]
)
def test_another_tokenizer_is_refused_by_name(tmp_path: Path, model: str, pre: str | None) -> None:
    with pytest.raises(UnsupportedModelError, match="the tokenizer cannot be carried over") as caught:
        config(tmp_path, extra={"tokenizer.ggml.model": model, "tokenizer.ggml.pre": pre})
    assert (model if model != "gpt2" else str(pre) if pre else "missing") in str(caught.value)


def test_a_model_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=r"tokenizer\.ggml\.tokens is missing"):
        config(tmp_path, extra={"tokenizer.ggml.tokens": None})


def test_head_dim_is_the_key_length_where_stated_and_never_assumed(tmp_path: Path) -> None:
    assert config(tmp_path, head_dim=64).head_dim == 64
    with pytest.raises(UnsupportedModelError, match="96 elements cannot be shared by 5 heads"):
        config(tmp_path, heads=5, kv_heads=5, extra={"qwen2.attention.key_length": None})


def test_a_missing_count_of_kv_heads_means_one_for_each_head(tmp_path: Path) -> None:
    found = config(tmp_path, heads=3, kv_heads=3, extra={"qwen2.attention.head_count_kv": None})
    assert found.num_kv_heads == 3


def test_a_missing_rope_base_is_10000(tmp_path: Path) -> None:
    assert config(tmp_path, extra={"qwen2.rope.freq_base": None}).rope_theta == 10_000.0


def test_rows_past_the_tokenizer_are_no_vocabulary(tmp_path: Path) -> None:
    found = config(tmp_path, arch="llama", padded_rows=20)
    assert (found.vocab_size, found.embedding_rows) == (300, 320)


def test_a_table_with_fewer_rows_than_tokens_is_refused_with_both_numbers(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="270 rows for 300 tokens"):
        config(tmp_path, padded_rows=-30)


def test_a_token_id_outside_the_vocabulary_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=r"tokenizer\.ggml\.eos_token_id is 300"):
        config(tmp_path, extra={"tokenizer.ggml.eos_token_id": 300})
    assert config(tmp_path, extra={"tokenizer.ggml.bos_token_id": 0xFFFFFFFF}).bos_token_id is None


def test_a_shape_that_the_metadata_contradicts_is_refused_with_both(tmp_path: Path) -> None:
    with pytest.raises(
        KnotError, match=r"blk_0_ffn_gate_weight has the shape \[256, 96\].* makes it \[255, 96\]"
    ):
        config(tmp_path, extra={"qwen2.feed_forward_length": 255})


def test_fewer_layers_than_tensors_is_an_unexpected_tensor(tmp_path: Path) -> None:
    with pytest.raises(KnotError, match=r"tensor blk_2_\w+ is none that qwen2 has"):
        config(tmp_path, extra={"qwen2.block_count": 2})
    with pytest.raises(KnotError, match="layer 3 needs the tensor blk_3_"):
        config(tmp_path, extra={"qwen2.block_count": 4})


def test_llama_may_have_biases_and_qwen2_must(tmp_path: Path) -> None:
    assert config(tmp_path, arch="llama", bias=True).qkv_bias
    with pytest.raises(KnotError, match="blk_0_attn_q_bias"):
        config(tmp_path, arch="qwen2", bias=False)


def test_llama_may_have_a_table_of_rope_frequencies_and_qwen2_may_not(tmp_path: Path) -> None:
    assert config(tmp_path, arch="llama", rope_freqs=True)
    with pytest.raises(KnotError, match="rope_freqs_weight is none that qwen2 has"):
        config(tmp_path, arch="qwen2", rope_freqs=True)
