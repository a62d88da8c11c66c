"""What parts must agree on before they work together: said by each of itself, and compared field by field.

The knot's fingerprint alone would tell whether two parts serve the same model; the other fields tell what is
different where they do not.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.host import ABI_VERSION
from knot.header import KnotHeader


def agreement(header: KnotHeader) -> dict[str, Any]:
    """The fields, as values of JSON: the engine's ABI, and everything of a model that changes arithmetic."""
    config, tokenizer = header.config, header.tokenizer
    scaling = config.rope_scaling
    return {
        "abi": ABI_VERSION,
        "architecture": config.architecture,
        "num_layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "ffn_size": config.ffn_size,
        "heads": [config.num_heads, config.num_kv_heads, config.head_dim],
        "vocab_size": config.vocab_size,
        "rope": [
            config.rope_type,
            config.rope_dim,
            config.rope_theta,
            None if scaling is None else [scaling.type, scaling.factor],
        ],
        "norm_eps": config.norm_eps,
        "quants": sorted({tensor.type for tensor in header.tensors.values()}),
        "tokenizer": None if tokenizer is None else tokenizer.digest,
        "model": header.fingerprint,
    }


def disagreement(said: Mapping[str, Any], expected: Mapping[str, Any]) -> str | None:
    """The first field that is not as expected, with both values; None when all agree."""
    for field, value in expected.items():
        if said.get(field) != value:
            return f"{field} {said.get(field)!r}, expected {value!r}"
    return None
