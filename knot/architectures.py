"""Which tensors each architecture has: one row a tensor, with its phase and its shape.

A model is a stack of layers, each of four phases. A row says where a tensor belongs and what shape it must
have for a given configuration; nothing else in the project names an architecture's tensors. Names are GGUF's
with "_" for ".". Standard library only: it also runs in Workers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from knot.config import ModelConfig
from knot.errors import ConfigError, MissingTensorError, UnexpectedTensorError

PHASES: Final = ("attn", "ffn_gate", "ffn_up", "ffn_down")
VECTORS: Final = "vectors"
TABLES: Final = "tables"

TOKEN_EMBD: Final = "token_embd_weight"
OUTPUT: Final = "output_weight"
OUTPUT_NORM: Final = "output_norm_weight"
ROPE_FREQS: Final = "rope_freqs_weight"

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TensorRule:
    """One tensor of a layer, or of the model: its name (within a layer), its phase, and its shape.

    `phase` is one of `PHASES`, or `VECTORS`, or `TABLES`. `when` says for which configurations the tensor
    exists. An `optional` tensor may be left out.
    """

    name: str
    phase: str
    shape: Callable[[ModelConfig], Shape]
    when: Callable[[ModelConfig], bool] = lambda config: True
    optional: bool = False


@dataclass(frozen=True, slots=True)
class Architecture:
    """A row of the table: how an architecture turns, and its tensors in payload order."""

    name: str
    rope_type: str
    bias: str  # "always", "optional" or "never": the biases of q, k and v
    qk_norm: bool  # whether each head of q and k is normalised before it is turned
    before: tuple[TensorRule, ...]
    layer: tuple[TensorRule, ...]
    after: tuple[TensorRule, ...]


_LAYER: Final = (
    TensorRule("attn_norm_weight", VECTORS, lambda c: (c.hidden_size,)),
    TensorRule("attn_q_bias", VECTORS, lambda c: (c.q_dim,), lambda c: c.qkv_bias),
    TensorRule("attn_k_bias", VECTORS, lambda c: (c.kv_dim,), lambda c: c.qkv_bias),
    TensorRule("attn_v_bias", VECTORS, lambda c: (c.kv_dim,), lambda c: c.qkv_bias),
    TensorRule("attn_q_norm_weight", VECTORS, lambda c: (c.head_dim,), lambda c: has_qk_norm(c)),
    TensorRule("attn_k_norm_weight", VECTORS, lambda c: (c.head_dim,), lambda c: has_qk_norm(c)),
    TensorRule("ffn_norm_weight", VECTORS, lambda c: (c.hidden_size,)),
    TensorRule("attn_q_weight", "attn", lambda c: (c.q_dim, c.hidden_size)),
    TensorRule("attn_k_weight", "attn", lambda c: (c.kv_dim, c.hidden_size)),
    TensorRule("attn_v_weight", "attn", lambda c: (c.kv_dim, c.hidden_size)),
    TensorRule("attn_output_weight", "attn", lambda c: (c.hidden_size, c.q_dim)),
    TensorRule("ffn_gate_weight", "ffn_gate", lambda c: (c.ffn_size, c.hidden_size)),
    TensorRule("ffn_up_weight", "ffn_up", lambda c: (c.ffn_size, c.hidden_size)),
    TensorRule("ffn_down_weight", "ffn_down", lambda c: (c.hidden_size, c.ffn_size)),
)
_ROPE_FREQS: Final = TensorRule(ROPE_FREQS, VECTORS, lambda c: (c.rope_dim // 2,), optional=True)
_AFTER: Final = (
    TensorRule(OUTPUT_NORM, VECTORS, lambda c: (c.hidden_size,)),
    TensorRule(TOKEN_EMBD, TABLES, lambda c: (c.embedding_rows, c.hidden_size)),
    TensorRule(OUTPUT, TABLES, lambda c: (c.embedding_rows, c.hidden_size), lambda c: not c.tie_embeddings),
)

ARCHITECTURES: Final[Mapping[str, Architecture]] = {
    "llama": Architecture("llama", "norm", "optional", False, (_ROPE_FREQS,), _LAYER, _AFTER),
    "qwen2": Architecture("qwen2", "neox", "always", False, (), _LAYER, _AFTER),
    "qwen3": Architecture("qwen3", "neox", "never", True, (), _LAYER, _AFTER),
}


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """A tensor that a model has, or may have: full name, phase, layer (None outside of layers), shape."""

    name: str
    phase: str
    layer: int | None
    shape: Shape
    optional: bool


def architecture(config: ModelConfig) -> Architecture:
    """The table's row for a configuration. Raises `ConfigError` when there is none or the two disagree."""
    row = ARCHITECTURES.get(config.architecture)
    if row is None:
        raise ConfigError(
            f"config.architecture is {config.architecture!r}; the supported ones are "
            f"{', '.join(ARCHITECTURES)}"
        )
    if config.rope_type != row.rope_type:
        raise ConfigError(
            f"config.rope_type is {config.rope_type!r}, expected {row.rope_type!r} for {config.architecture}"
        )
    if row.bias == "always" and not config.qkv_bias:
        raise ConfigError(f"config.qkv_bias is false, but {config.architecture} has biases on q, k and v")
    if row.bias == "never" and config.qkv_bias:
        raise ConfigError(f"config.qkv_bias is true, but {config.architecture} has no biases on q, k and v")
    return row


def has_qk_norm(config: ModelConfig) -> bool:
    """Whether each head of queries and keys is normalised before it is turned."""
    row = ARCHITECTURES.get(config.architecture)
    return row is not None and row.qk_norm


def layer_tensor(layer: int, name: str) -> str:
    """The full name of a layer's tensor: `layer_tensor(3, "attn_q_weight")` is "blk_3_attn_q_weight"."""
    return f"blk_{layer}_{name}"


def payload_order(config: ModelConfig) -> Iterator[TensorPlace]:
    """Every tensor of the model in the order the payload has them.

    Vectors first, by layer, then output_norm; then the matrices, by layer and phase; then the tables. So a
    phase, the vectors of consecutive layers, and consecutive rows of a table are each one contiguous range.
    """
    row = architecture(config)

    def places(phases: tuple[str, ...]) -> Iterator[TensorPlace]:
        yield from _places(row.before, phases, None, config)
        for number in range(config.num_layers):
            yield from _places(row.layer, phases, number, config)
        yield from _places(row.after, phases, None, config)

    yield from places((VECTORS,))
    yield from places(PHASES)
    yield from places((TABLES,))


def phase_names(config: ModelConfig, layer: int, phase: str) -> tuple[str, ...]:
    """The names of a phase's tensors, in the order the engine takes them. Raises `ConfigError` off range."""
    if phase not in PHASES:
        raise ConfigError(f"phase {phase!r} does not exist; the phases are {', '.join(PHASES)}")
    if not 0 <= layer < config.num_layers:
        raise ConfigError(f"layer {layer} does not exist; the model has {config.num_layers}")
    return tuple(place.name for place in _places(architecture(config).layer, (phase,), layer, config))


def vector_names(config: ModelConfig, layer: int) -> tuple[str, ...]:
    """The names of a layer's small vectors (norms and biases), in payload order."""
    return tuple(place.name for place in _places(architecture(config).layer, (VECTORS,), layer, config))


def check_tensors(config: ModelConfig, shapes: Mapping[str, Shape]) -> list[TensorPlace]:
    """The model's tensors in payload order, of which `shapes` states names and shapes.

    Raises `MissingTensorError`, `UnexpectedTensorError`, or `ConfigError` for a shape that the configuration
    contradicts.
    """
    found: list[TensorPlace] = []
    known: set[str] = set()
    for place in payload_order(config):
        known.add(place.name)
        shape = shapes.get(place.name)
        if shape is None:
            if place.optional:
                continue
            raise MissingTensorError(place.phase, place.layer, place.name)
        if shape != place.shape:
            raise ConfigError(
                f"tensor {place.name} has the shape {list(shape)}, but the configuration makes it "
                f"{list(place.shape)}"
            )
        found.append(place)
    for name in shapes:
        if name not in known:
            raise UnexpectedTensorError(
                f"tensor {name} is none that {config.architecture} has with this configuration "
                f"({config.num_layers} layers, qkv_bias {str(config.qkv_bias).lower()}, "
                f"tie_embeddings {str(config.tie_embeddings).lower()}); leaving it out would change the model"
            )
    return found


def _places(
    rules: tuple[TensorRule, ...], phases: tuple[str, ...], layer: int | None, config: ModelConfig
) -> Iterator[TensorPlace]:
    # Phase by phase, whatever the order of the rules.
    for phase in phases:
        for rule in rules:
            if rule.phase == phase and rule.when(config):
                name = rule.name if layer is None else layer_tensor(layer, rule.name)
                yield TensorPlace(name, phase, layer, rule.shape(config), rule.optional)
