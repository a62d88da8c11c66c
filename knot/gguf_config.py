"""What a GGUF's metadata says about a model, as a `ModelConfig`, or a refusal that names the key.

Every key of the architecture is accounted for: read, known to change nothing, or refused. A key that
nobody has heard of may change the arithmetic, and a model that is a little wrong is worse than one that is
refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NoReturn, cast

from knot.architectures import ARCHITECTURES, OUTPUT, TOKEN_EMBD, Architecture, layer_tensor
from knot.config import ModelConfig
from knot.errors import UnsupportedModelError
from knot.tokenizer_section import unused_ranges

_READ: Final = frozenset(
    (
        "block_count",
        "context_length",
        "embedding_length",
        "feed_forward_length",
        "attention.head_count",
        "attention.head_count_kv",
        "attention.key_length",
        "attention.value_length",
        "attention.layer_norm_rms_epsilon",
        "attention.sliding_window",
        "attention.scale",
        "rope.freq_base",
        "rope.dimension_count",
        "rope.scaling.type",
        "vocab_size",
    )
)
# The values of other keys that mean "not used".
_NEUTRAL: Final[Mapping[str, tuple[object, ...]]] = {
    "expert_count": (0,),
    "expert_used_count": (0,),
    "expert_shared_count": (0,),
    "expert_feed_forward_length": (0,),
    "expert_shared_feed_forward_length": (0,),
    "use_parallel_residual": (False,),
    "tensor_data_layout": ("", "default", "Meta AI original pth"),
    "attention.causal": (True,),
    "attention.layer_norm_epsilon": (0.0,),
    "attention.max_alibi_bias": (0.0,),
    "attention.clamp_kqv": (0.0,),
    "attn_logit_softcapping": (0.0,),
    "final_logit_softcapping": (0.0,),
    "router_logit_softcapping": (0.0,),
    "logit_scale": (0.0, 1.0),
    "residual_scale": (0.0, 1.0),
    "embedding_scale": (0.0, 1.0),
    "pooling_type": (0,),
    "rope.scale_linear": (0.0, 1.0),
    "rope.scaling.factor": (0.0, 1.0),
    "rope.scaling.attn_factor": (0.0, 1.0),
}
_NO_SCALING: Final = "supported are models without rope scaling and those with rope_freqs (llama 3)"
_WHY: Final[Mapping[str, str]] = {
    "expert_count": "mixtures of experts are not supported, only dense models",
    "expert_used_count": "mixtures of experts are not supported, only dense models",
    "attn_logit_softcapping": "soft-capped attention is not supported",
    "final_logit_softcapping": "soft-capped logits are not supported",
    "rope.scale_linear": _NO_SCALING,
    "attention.causal": "only causal attention is supported",
    "tensor_data_layout": "only the layout of today's converters is supported; convert the model again",
}


def config_from_gguf(metadata: Mapping[str, object], shapes: Mapping[str, tuple[int, ...]]) -> ModelConfig:
    """The configuration of a model with this GGUF metadata and these tensors (knot names → shapes).

    Raises `UnsupportedModelError` that says what would work, or `ConfigError`.
    """
    return _Reader(metadata).config(shapes)


def knot_name(gguf_name: str) -> str:
    """A GGUF tensor's name as knots have it: "blk.0.attn_q.weight" is "blk_0_attn_q_weight"."""
    return gguf_name.replace(".", "_")


class _Reader:
    def __init__(self, metadata: Mapping[str, object]) -> None:
        name = metadata.get("general.architecture")
        row = ARCHITECTURES.get(name) if isinstance(name, str) else None
        if row is None:
            found = "missing" if name is None else repr(name)
            raise UnsupportedModelError(
                f"general.architecture is {found}; the supported architectures are {', '.join(ARCHITECTURES)}"
            )
        self._row: Architecture = row
        self._all = metadata
        prefix = row.name + "."
        self._keys = {key[len(prefix) :]: value for key, value in metadata.items() if key.startswith(prefix)}

    def config(self, shapes: Mapping[str, tuple[int, ...]]) -> ModelConfig:
        self._refuse_what_is_not_known()
        hidden, heads = self._int("embedding_length"), self._int("attention.head_count")
        head_dim = self._head_dim(hidden, heads)
        self._check_attention(head_dim)
        tokens = self._all.get("tokenizer.ggml.tokens")
        if not isinstance(tokens, list) or not tokens:
            raise UnsupportedModelError(
                "tokenizer.ggml.tokens is missing; only models that carry their tokenizer can be converted"
            )
        vocab = len(cast(list[object], tokens))
        rows = shapes[TOKEN_EMBD][0] if len(shapes.get(TOKEN_EMBD, ())) == 2 else vocab
        self._check_vocab(vocab, rows)
        return ModelConfig(
            architecture=self._row.name,
            num_layers=self._int("block_count"),
            hidden_size=hidden,
            ffn_size=self._int("feed_forward_length"),
            num_heads=heads,
            num_kv_heads=self._int("attention.head_count_kv", heads),
            head_dim=head_dim,
            vocab_size=vocab,
            embedding_rows=rows,
            context_length=self._int("context_length"),
            rope_theta=self._float("rope.freq_base", 10_000.0),
            rope_type=self._row.rope_type,
            rope_dim=self._int("rope.dimension_count", head_dim),
            rope_scaling=None,
            norm_eps=self._float("attention.layer_norm_rms_epsilon"),
            tie_embeddings=OUTPUT not in shapes,
            qkv_bias=self._row.bias == "always"
            or (self._row.bias == "optional" and layer_tensor(0, "attn_q_bias") in shapes),
            unused_token_ranges=tuple((start, end) for start, end in unused_ranges(self._all)),
            bos_token_id=self._token("bos", vocab),
            eos_token_id=self._token("eos", vocab),
            eot_token_id=self._token("eot", vocab),
        )

    def _refuse_what_is_not_known(self) -> None:
        kind = self._keys.get("rope.scaling.type", "linear")
        # "none" overrules whatever else is said of scaling; without a type, scaling is linear.
        if kind not in ("none", "linear"):
            self._refuse("rope.scaling.type", _NO_SCALING)
        for key, value in self._keys.items():
            if key in _READ or value in _NEUTRAL.get(key, ()):
                continue
            if key.startswith("rope.scaling."):
                if kind == "none" or key not in ("rope.scaling.factor", "rope.scaling.attn_factor"):
                    continue
                self._refuse(key, _NO_SCALING)
            self._refuse(key, _WHY.get(key, "it may change the arithmetic, and is not supported"))

    def _head_dim(self, hidden: int, heads: int) -> int:
        key, value = self._int("attention.key_length", 0), self._int("attention.value_length", 0)
        if not key:
            if heads < 1 or hidden % heads:
                raise UnsupportedModelError(
                    f"{self._row.name}.attention.key_length is missing, and {hidden} elements cannot be "
                    "shared by "
                    f"{heads} heads"
                )
            key = hidden // heads
        if value not in (0, key):
            self._refuse("attention.value_length", f"heads of keys and values must be of one length, {key}")
        return key

    def _check_attention(self, head_dim: int) -> None:
        scale = self._float("attention.scale", 0.0)
        if scale and abs(scale * head_dim**0.5 - 1) > 1e-6:
            self._refuse("attention.scale", f"only 1/sqrt(head_dim), here {head_dim**-0.5:.6g}, is supported")
        window, context = self._int("attention.sliding_window", 0), self._int("context_length")
        if 0 < window < context:
            self._refuse(
                "attention.sliding_window",
                f"only windows as long as the context, {context}, are supported",
            )

    def _check_vocab(self, vocab: int, rows: int) -> None:
        if rows < vocab:
            raise UnsupportedModelError(
                f"token_embd.weight has {rows} rows for {vocab} tokens; expected at least one row a token"
            )
        stated = self._int("vocab_size", vocab)
        if stated not in (vocab, rows):
            self._refuse("vocab_size", f"expected the tokenizer's {vocab} or the table's {rows}")

    def _token(self, role: str, vocab: int) -> int | None:
        key = f"tokenizer.ggml.{role}_token_id"
        value = self._all.get(key)
        # Some converters write "none" as -1.
        if value is None or value in (-1, 0xFFFFFFFF):
            return None
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < vocab:
            raise UnsupportedModelError(f"{key} is {value!r}, expected an id below {vocab}")
        return value

    def _int(self, key: str, default: int | None = None) -> int:
        value = self._keys.get(key, default)
        if isinstance(value, list):
            self._refuse(key, "layers that differ from each other are not supported")
        if not isinstance(value, int) or isinstance(value, bool):
            self._missing(key, value, "an integer")
        return value

    def _float(self, key: str, default: float | None = None) -> float:
        value = self._keys.get(key, default)
        if not isinstance(value, float):
            self._missing(key, value, "a number with a fraction")
        return value

    def _missing(self, key: str, value: object, expected: str) -> NoReturn:
        found = "missing" if value is None else repr(value)
        raise UnsupportedModelError(f"{self._row.name}.{key} is {found}, expected {expected}")

    def _refuse(self, key: str, why: str) -> NoReturn:
        value = self._keys[key]
        shown = "a list" if isinstance(value, list) else repr(value)
        raise UnsupportedModelError(f"{self._row.name}.{key} is {shown}: {why}")
