"""Rewrites a knot that today's reader refuses: the old layout, or tensors in another order, or no digests.

The old encoder padded its JSON with spaces, counted them into metaLen, and so put the payload one byte
before where readers look. Such a knot has `tensor_type` or `type` in its table and neither sections nor
digests. Its tensor bytes are sound; they are copied into the order of today, and everything else is made
anew.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final, cast

from knot.architectures import ARCHITECTURES, OUTPUT, TOKEN_EMBD, layer_tensor
from knot.config import ModelConfig, config_from_json
from knot.container import PREFIX, Frame, header_bytes, read_frame
from knot.convert import tokenizer_of
from knot.errors import ConfigError, HeaderError, OutputError, SourceError
from knot.gguf_config import config_from_gguf
from knot.gguf_parts import open_gguf
from knot.header import KnotHeader, Section, TensorInfo
from knot.parse import check_ranges, parse_header, parse_name, parse_sections, parse_tensors
from knot.strict_json import kind, parse_object
from knot.verify import check_tokenizer, tokenizer_info
from knot.writer import TensorSource, write_knot

ASSUMED_CONTEXT: Final = 2048


@dataclass(frozen=True, slots=True)
class Repaired:
    """The repaired knot, and in sentences what was found and what could not be mended."""

    path: Path
    header: KnotHeader
    notes: tuple[str, ...]


def repair(
    source: Path,
    target: Path | None = None,
    *,
    tokenizer_from: Path | None = None,
    force: bool = False,
    show_progress: bool | None = None,
) -> Repaired:
    """Rewrites `source` as a knot of today, under `target` or beside it as `NAME.repaired.knot`.

    `tokenizer_from`: a GGUF of the same model, for the tokenizer and for what the old configuration leaves
    out. Raises `HeaderError` for what cannot be mended (and for a knot that is sound), `OutputError`,
    `SourceError`.
    """
    target = target or source.with_name(source.stem + ".repaired.knot")
    if target.exists() and not force:
        raise OutputError(f"{target} exists; add --force to replace it")
    data, size = _header_data(source)
    frame = read_frame(data, size, allow_old=True)
    if not frame.old:
        _refuse_sound(data, size, source)
    meta = parse_object(data[PREFIX.size : PREFIX.size + frame.meta_length], "the knot's metadata")
    tensors = parse_tensors(meta, old=True)
    sections = parse_sections(meta, old=True)
    check_ranges(tensors, sections, frame, size)
    notes = ["the payload started one byte early (the old layout)"] if frame.old else []
    if "digests" not in sections:
        notes.append("there were no digests")
    shapes = {name: info.shape for name, info in tensors.items()}
    tokenizer: bytes | None = None
    if tokenizer_from is not None:
        model = open_gguf(tokenizer_from, header_only=True)
        config = config_from_gguf(model.metadata, shapes)
        _check_same_model(meta.get("config"), config, tokenizer_from)
        tokenizer = tokenizer_of(model)
    else:
        tokenizer = _old_tokenizer(source, sections.get("tokenizer"), frame)
        config = _old_config(meta.get("config"), shapes, tokenizer, notes)
    if tokenizer is None:
        notes.append(
            "it has no tokenizer: the repaired knot serves token ids only; --tokenizer-from GGUF adds one"
        )
    else:
        check_tokenizer(tokenizer, config)
    header = write_knot(
        target,
        parse_name({"name": source.stem, **meta}),
        config,
        _sources(source, tensors, frame),
        tokenizer,
        force=force,
        show_progress=show_progress,
    )
    return Repaired(target, header, tuple(notes))


def _header_data(source: Path) -> tuple[bytes, int]:
    try:
        size = source.stat().st_size
        with source.open("rb") as file:
            prefix = file.read(PREFIX.size)
            return prefix + file.read(header_bytes(prefix, size) - PREFIX.size), size
    except OSError as error:
        raise SourceError(f"{source} cannot be read: {error.strerror}") from error


def _refuse_sound(data: bytes, size: int, source: Path) -> None:
    try:
        parse_header(data, size)
    except HeaderError:
        return
    raise HeaderError(f"{source} needs no repair: its header is sound; `knot verify` checks its bytes")


def _sources(source: Path, tensors: Mapping[str, TensorInfo], frame: Frame) -> dict[str, TensorSource]:
    return {
        name: TensorSource(info.type, info.shape, source, frame.payload_offset + info.offset)
        for name, info in tensors.items()
    }


def _old_tokenizer(source: Path, section: Section | None, frame: Frame) -> bytes | None:
    if section is None:
        return None
    with source.open("rb") as file:
        file.seek(frame.payload_offset + section.offset)
        return file.read(section.length)


def _check_same_model(value: object, config: ModelConfig, gguf: Path) -> None:
    """The old configuration may leave out what the GGUF knows; it may not say otherwise."""
    old = cast(dict[str, Any], value) if isinstance(value, dict) else {}
    stated = config.to_json()
    for key, found in old.items():
        if key in ("vocab_size", "unused_token_ranges") or key not in stated:
            continue
        expected = stated[key]
        same = (
            abs(found - expected) <= 1e-6 * abs(expected)
            if _both_real(found, expected)
            else found == expected
        )
        if not same:
            raise ConfigError(
                f"the knot's config.{key} is {kind(found)}, but {gguf.name} says {expected!r}; "
                f"they are not of the same model"
            )


def _both_real(left: object, right: object) -> bool:
    return isinstance(left, (int, float)) and isinstance(right, float)


def _old_config(
    value: object, shapes: Mapping[str, tuple[int, ...]], tokenizer: bytes | None, notes: list[str]
) -> ModelConfig:
    """The configuration of an old knot; what it leaves out follows from the tensors, or is noted."""
    if not isinstance(value, dict):
        raise ConfigError(f"config is {kind(value)}, expected an object; --tokenizer-from GGUF replaces it")
    raw = dict(cast(dict[str, Any], value))
    known = {field.name for field in fields(ModelConfig)}
    for key in [key for key in raw if key not in known]:
        notes.append(f"config.{key} ({kind(raw.pop(key))}) is not known and was left out")
    row = ARCHITECTURES.get(raw["architecture"]) if isinstance(raw.get("architecture"), str) else None
    table = shapes.get(TOKEN_EMBD, ())
    derived: dict[str, Any] = {
        "embedding_rows": table[0] if table else None,
        "rope_type": row.rope_type if row else None,
        "rope_dim": raw.get("head_dim"),
        "rope_scaling": None,
        "tie_embeddings": OUTPUT not in shapes,
        "qkv_bias": layer_tensor(0, "attn_q_bias") in shapes,
        "unused_token_ranges": [],
        "bos_token_id": None,
        "eos_token_id": None,
        "eot_token_id": None,
    }
    if "context_length" not in raw:
        notes.append(f"config.context_length is missing; {ASSUMED_CONTEXT} is assumed")
        derived["context_length"] = ASSUMED_CONTEXT
    if tokenizer is not None:
        derived["unused_token_ranges"] = [list(pair) for pair in tokenizer_info(tokenizer).unused]
    elif "unused_token_ranges" not in raw:
        notes.append("which token ids are unused is not known, so that they may be sampled")
    return config_from_json({**derived, **raw})
