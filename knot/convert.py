"""GGUF → knot: the same tensor bytes in another order, with their digests."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from knot.architectures import check_tensors
from knot.config import ModelConfig
from knot.errors import OutputError, SourceError, UnsupportedModelError
from knot.gguf_config import config_from_gguf, knot_name
from knot.gguf_guard import GgufTensor
from knot.gguf_parts import GgufModel, open_gguf
from knot.header import KnotHeader
from knot.quants import ENGINE_TYPES
from knot.tokenizer_section import TokenizerSectionError, build_section
from knot.writer import TensorSource, write_knot


def convert(
    source: Path | Sequence[Path],
    target: Path | None = None,
    *,
    force: bool = False,
    show_progress: bool | None = None,
) -> tuple[Path, KnotHeader]:
    """Converts a GGUF file (or one of a split model, or all its parts); returns the knot's path and header.

    Without `target`, the knot lies beside the source under the same name. It takes the source's time of
    modification, by which `knot.paths` tells whether the source has changed. Raises a `KnotError`; nothing
    half-written is ever found under the final name.
    """
    model = open_gguf(source)
    target = target or knot_path(model)
    if target.exists() and not force:
        raise OutputError(f"{target} exists; add --force to replace it")
    if target.exists() and any(target.samefile(file.path) for file in model.files):
        raise OutputError(f"{target} is the file that is to be converted; choose another name")
    stamps = _stamps(model)
    tensors = tensors_of(model)
    config = check_model(model, tensors)
    tokenizer = tokenizer_of(model)
    # The vocabulary as Python strings is by far the most of what is in memory, and done with.
    for key in [key for key in model.metadata if key.startswith("tokenizer.")]:
        del model.metadata[key]

    def unchanged() -> None:
        if _stamps(model) != stamps:
            raise SourceError(f"{model.files[0].path} changed while it was converted; convert it again")

    header = write_knot(
        target,
        display_name(model),
        config,
        {
            name: TensorSource(tensor.type, tensor.shape, tensor.path, tensor.offset)
            for name, tensor in tensors.items()
        },
        tokenizer,
        force=force,
        show_progress=show_progress,
        modified_ns=max(stamp for _, stamp in stamps),
        before_rename=unchanged,
    )
    return target, header


def knot_path(model: GgufModel) -> Path:
    """Where the knot of a GGUF lies unless told otherwise: beside it."""
    return model.files[0].path.with_name(model.name + ".knot")


def tensors_of(model: GgufModel) -> dict[str, GgufTensor]:
    """A model's tensors by their names in a knot. Raises `UnsupportedModelError` where two become one."""
    tensors: dict[str, GgufTensor] = {}
    for tensor in model.tensors.values():
        name = knot_name(tensor.name)
        if name in tensors:
            raise UnsupportedModelError(
                f"the tensors {tensors[name].name!r} and {tensor.name!r} would both be {name!r} in a knot"
            )
        tensors[name] = tensor
    return tensors


def check_model(model: GgufModel, tensors: dict[str, GgufTensor]) -> ModelConfig:
    """The model's configuration, once everything in it is known to be supported.

    Raises `UnsupportedModelError`, `MissingTensorError`, `UnexpectedTensorError` or `ConfigError`.
    """
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    config = config_from_gguf(model.metadata, shapes)
    for place in check_tensors(config, shapes):
        tensor = tensors[place.name]
        if len(place.shape) == 1 and tensor.type != "F32":
            raise UnsupportedModelError(f"tensor {tensor.name} is {tensor.type}, expected F32 for a vector")
        if tensor.type not in ENGINE_TYPES:
            raise UnsupportedModelError(
                f"tensor {tensor.name} is {tensor.type}, which the engine cannot compute; it can compute "
                f"{', '.join(sorted(ENGINE_TYPES))} (a Q4_K_M or Q8_0 file of the model would do)"
            )
    return config


def tokenizer_of(model: GgufModel) -> bytes:
    """The tokenizer section of a model. Raises `UnsupportedModelError`."""
    try:
        return build_section(model.metadata)
    except TokenizerSectionError as error:
        raise UnsupportedModelError(f"the tokenizer cannot be carried over: {error}") from error


def display_name(model: GgufModel) -> str:
    """The model's own name, made printable; the file's where it has none."""
    own = model.metadata.get("general.name")
    for text in (own if isinstance(own, str) else "", model.name):
        name = "".join(char if char.isprintable() else " " for char in text).strip()[:256]
        if name:
            return name
    return "model"


def _stamps(model: GgufModel) -> list[tuple[int, int]]:
    """(size, time of modification) of every file of the model."""
    try:
        stats = [file.path.stat() for file in model.files]
    except OSError as error:
        raise SourceError(f"{error.filename} cannot be read: {error.strerror}") from error
    return [(stat.st_size, stat.st_mtime_ns) for stat in stats]
