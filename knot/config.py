"""A model's dimensions as the knot's JSON states them. Every value is checked; none is assumed.

Standard library only: it also runs in Workers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Final, cast

from knot.errors import ConfigError
from knot.strict_json import is_int, kind

ROPE_TYPES: Final = ("norm", "neox")
MAX_LAYERS: Final = 1024
MAX_DIMENSION: Final = 1 << 20
MAX_VOCAB: Final = 1 << 24
MAX_CONTEXT: Final = 1 << 31
MAX_UNUSED_RANGES: Final = 65_536

_DIMENSIONS: Final = {
    "num_layers": MAX_LAYERS,
    "hidden_size": MAX_DIMENSION,
    "ffn_size": MAX_DIMENSION,
    "num_heads": MAX_DIMENSION,
    "num_kv_heads": MAX_DIMENSION,
    "head_dim": MAX_DIMENSION,
    "vocab_size": MAX_VOCAB,
    "embedding_rows": MAX_VOCAB,
    "context_length": MAX_CONTEXT,
    "rope_dim": MAX_DIMENSION,
}


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How positions are stretched: `type` is "linear", which divides every position by `factor`."""

    type: str
    factor: float


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """What the arithmetic needs to know about a model.

    - `head_dim` may differ from hidden_size / num_heads.
    - `vocab_size`: ids the tokenizer has; `embedding_rows`: rows of the table, at least as many.
    - `rope_type`: "norm" rotates interleaved pairs, "neox" the two halves of the first `rope_dim` elements.
    - `rope_theta` and `norm_eps` are the float32 values of the source, widened.
    - `unused_token_ranges`: ids `[start, end)` that the tokenizer marks unused; they are never sampled.
    """

    architecture: str
    num_layers: int
    hidden_size: int
    ffn_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    embedding_rows: int
    context_length: int
    rope_theta: float
    rope_type: str
    rope_dim: int
    rope_scaling: RopeScaling | None
    norm_eps: float
    tie_embeddings: bool
    qkv_bias: bool
    unused_token_ranges: tuple[tuple[int, int], ...] = ()
    bos_token_id: int | None = None
    eos_token_id: int | None = None
    eot_token_id: int | None = None

    def __post_init__(self) -> None:
        for key, most in _DIMENSIONS.items():
            value = getattr(self, key)
            if not is_int(value) or not 1 <= value <= most:
                raise ConfigError(f"config.{key} is {kind(value)}, expected an integer from 1 to {most}")
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"config.num_heads is {self.num_heads}, expected a multiple of num_kv_heads, "
                f"{self.num_kv_heads}"
            )
        if self.embedding_rows < self.vocab_size:
            raise ConfigError(
                f"config.embedding_rows is {self.embedding_rows}, expected at least vocab_size, "
                f"{self.vocab_size}"
            )
        if self.rope_dim % 2 or self.rope_dim > self.head_dim:
            raise ConfigError(
                f"config.rope_dim is {self.rope_dim}, expected an even number up to head_dim, {self.head_dim}"
            )
        if self.rope_type not in ROPE_TYPES:
            raise ConfigError(
                f"config.rope_type is {kind(self.rope_type)}, expected one of {list(ROPE_TYPES)}"
            )
        # The engine takes both as float32, which must neither overflow nor vanish.
        if not 1e-30 <= self.rope_theta <= 1e30:
            raise ConfigError(
                f"config.rope_theta is {self.rope_theta!r}, expected a number from 1e-30 to 1e30"
            )
        if not 1e-30 <= self.norm_eps < 1:
            raise ConfigError(
                f"config.norm_eps is {self.norm_eps!r}, expected a number from 1e-30 to below 1"
            )
        self._check_ids()

    @property
    def q_dim(self) -> int:
        """Rows of the query projection: num_heads * head_dim."""
        return self.num_heads * self.head_dim

    @property
    def kv_dim(self) -> int:
        """Rows of the key and of the value projection: num_kv_heads * head_dim."""
        return self.num_kv_heads * self.head_dim

    def to_json(self) -> dict[str, Any]:
        """The configuration as the knot's JSON states it; `config_from_json` reads it back."""
        values = asdict(self)
        values["unused_token_ranges"] = [list(pair) for pair in self.unused_token_ranges]
        return values

    def _check_ids(self) -> None:
        for key in ("bos_token_id", "eos_token_id", "eot_token_id"):
            value = getattr(self, key)
            if value is not None and not (is_int(value) and 0 <= value < self.vocab_size):
                raise ConfigError(
                    f"config.{key} is {kind(value)}, expected null or an id below {self.vocab_size}"
                )
        if len(self.unused_token_ranges) > MAX_UNUSED_RANGES:
            raise ConfigError(
                f"config.unused_token_ranges has {len(self.unused_token_ranges)} ranges, "
                f"expected at most {MAX_UNUSED_RANGES}"
            )
        last = 0
        for start, end in self.unused_token_ranges:
            if not last <= start < end <= self.vocab_size:
                raise ConfigError(
                    f"config.unused_token_ranges has [{start}, {end}) after {last}, expected rising ranges "
                    f"that end by {self.vocab_size}"
                )
            last = end


def config_from_json(value: object) -> ModelConfig:
    """The configuration in a knot's JSON. Raises `ConfigError` that names the key.

    A key that is not known is refused: it may change the arithmetic.
    """
    if not isinstance(value, dict):
        raise ConfigError(f"config is {kind(value)}, expected an object")
    raw = cast(dict[str, Any], value)
    names = [field.name for field in fields(ModelConfig)]
    for key in names:
        if key not in raw:
            raise ConfigError(f"config.{key} is missing")
    for key in raw:
        if key not in names:
            raise ConfigError(
                f"config.{key} is not known to this version, and may change the model's arithmetic"
            )
    for key in ("architecture", "rope_type"):
        if not isinstance(raw[key], str):
            raise ConfigError(f"config.{key} is {kind(raw[key])}, expected a string")
    for key in ("tie_embeddings", "qkv_bias"):
        if not isinstance(raw[key], bool):
            raise ConfigError(f"config.{key} is {kind(raw[key])}, expected true or false")
    ready = dict(raw)
    for key in ("rope_theta", "norm_eps"):
        ready[key] = _number(raw, key, "config")
    ready["rope_scaling"] = rope_scaling_from_json(raw["rope_scaling"])
    ready["unused_token_ranges"] = _ranges(raw["unused_token_ranges"])
    return ModelConfig(**ready)


def rope_scaling_from_json(value: object) -> RopeScaling | None:
    """The rope scaling in a knot's JSON: null, or {type, factor}. Raises `ConfigError`."""
    if value is None:
        return None
    if not isinstance(value, dict):
        raise ConfigError(f"config.rope_scaling is {kind(value)}, expected null or an object")
    raw = cast(dict[str, Any], value)
    if raw.get("type") != "linear":
        raise ConfigError(f"config.rope_scaling.type is {kind(raw.get('type'))}, expected 'linear'")
    if set(raw) != {"type", "factor"}:
        raise ConfigError(f"config.rope_scaling has the keys {sorted(raw)}, expected 'factor' and 'type'")
    factor = _number(raw, "factor", "config.rope_scaling")
    if factor <= 0:
        raise ConfigError(f"config.rope_scaling.factor is {factor}, expected a positive number")
    return RopeScaling("linear", factor)


def _number(raw: Mapping[str, Any], key: str, where: str) -> float:
    value = raw[key]
    if not (is_int(value) or isinstance(value, float)):
        raise ConfigError(f"{where}.{key} is {kind(value)}, expected a number")
    return float(value)


def _ranges(value: object) -> tuple[tuple[int, int], ...]:
    if not isinstance(value, list):
        raise ConfigError(f"config.unused_token_ranges is {kind(value)}, expected a list")
    ranges: list[tuple[int, int]] = []
    for item in cast(list[object], value):
        pair = cast(list[Any], item) if isinstance(item, list) else []
        if len(pair) != 2 or not is_int(pair[0]) or not is_int(pair[1]):
            raise ConfigError(
                f"config.unused_token_ranges has {kind(cast(object, item))}, "
                f"expected pairs of integers [start, end]"
            )
        ranges.append((pair[0], pair[1]))
    return tuple(ranges)
