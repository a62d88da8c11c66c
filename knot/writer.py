"""Writes a knot from tensors that lie in other files, in one pass and in a few MB of memory."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from io import FileIO
from pathlib import Path
from typing import BinaryIO, Final

from knot.architectures import check_tensors
from knot.atomic import replacing
from knot.config import ModelConfig
from knot.digests import GroupDigests, digest
from knot.errors import OutputError, SourceError
from knot.header import (
    DIGEST_BYTES,
    NO_DIGEST,
    KnotHeader,
    Section,
    TensorInfo,
    build_header,
    group_rows,
)
from knot.parse import parse_header
from knot.progress import progress_bar
from knot.quants import tensor_bytes

CHUNK: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class TensorSource:
    """Where a tensor's bytes lie: `offset` in the file at `path`."""

    type: str
    shape: tuple[int, ...]
    path: Path
    offset: int


@dataclass(frozen=True, slots=True)
class _Layout:
    tensors: tuple[TensorInfo, ...]
    sections: dict[str, Section]
    payload: int


def write_knot(
    target: Path,
    name: str,
    config: ModelConfig,
    sources: Mapping[str, TensorSource],
    tokenizer: bytes | None,
    *,
    force: bool = False,
    show_progress: bool | None = None,
    modified_ns: int | None = None,
    before_rename: Callable[[], None] = lambda: None,
) -> KnotHeader:
    """Writes the knot of a model whose tensors are in `sources`, by their knot names; returns its header.

    The file appears whole under `target` or not at all. `modified_ns` becomes its time of modification;
    `before_rename` may still raise to refuse it. Raises `OutputError`, `SourceError`, and what
    `check_tensors` raises for a tensor set that is not the configuration's.
    """
    layout = _plan(config, sources, tokenizer)
    head = build_header(name, config, layout.tensors, layout.sections)
    size = len(head) + layout.payload
    with replacing(target, force=force, size=size) as file, ExitStack() as stack:
        opened = {
            path: stack.enter_context(_open(path)) for path in {source.path for source in sources.values()}
        }
        advance = stack.enter_context(progress_bar(size, target.name, show_progress))
        file.write(head)
        advance(len(head))
        sections, sha256 = _write_payload(file, layout, sources, opened, tokenizer, advance)
        final = build_header(name, config, layout.tensors, sections, sha256)
        if len(final) != len(head):
            raise OutputError(f"the header of {target} was {len(head)} bytes and became {len(final)}")
        # Whatever is written here, the reader must accept: better no file than one that is refused later.
        header = parse_header(final, size)
        file.seek(0)
        file.write(final)
        file.flush()
        if os.fstat(file.fileno()).st_size != size:
            raise OutputError(f"{target} has become {os.fstat(file.fileno()).st_size} bytes, expected {size}")
        if modified_ns is not None:
            os.utime(file.fileno(), ns=(modified_ns, modified_ns))
        before_rename()
    return header


def lay_out(
    config: ModelConfig, kinds: Mapping[str, tuple[str, tuple[int, ...]]], tokenizer: bytes | None
) -> tuple[tuple[TensorInfo, ...], dict[str, Section], int]:
    """Where everything lies in the payload: tensors, sections, and how many bytes they are together.

    `kinds` has every tensor's type and shape. Raises what `check_tensors` raises.
    """
    tensors: list[TensorInfo] = []
    offset = digests = 0
    for place in check_tensors(config, {name: shape for name, (_, shape) in kinds.items()}):
        kind, shape = kinds[place.name]
        length = tensor_bytes(kind, shape)
        rows = group_rows(place.name, kind, shape)
        info = TensorInfo(place.name, kind, shape, offset, length, rows, digests)
        tensors.append(info)
        offset, digests = info.end, digests + info.group_count
    sections: dict[str, Section] = {}
    if tokenizer is not None:
        sections["tokenizer"] = Section(offset, len(tokenizer), digest((tokenizer,)))
        offset += len(tokenizer)
    sections["digests"] = Section(offset, digests * DIGEST_BYTES, NO_DIGEST)
    return tuple(tensors), sections, offset + digests * DIGEST_BYTES


def _plan(config: ModelConfig, sources: Mapping[str, TensorSource], tokenizer: bytes | None) -> _Layout:
    kinds = {name: (source.type, source.shape) for name, source in sources.items()}
    return _Layout(*lay_out(config, kinds, tokenizer))


def _write_payload(
    file: BinaryIO,
    layout: _Layout,
    sources: Mapping[str, TensorSource],
    opened: Mapping[Path, FileIO],
    tokenizer: bytes | None,
    advance: Callable[[int], object],
) -> tuple[dict[str, Section], str]:
    """Writes the payload; returns the sections with their digests, and the payload's SHA-256."""
    sha256 = hashlib.sha256()
    buffer = bytearray(CHUNK)
    view = memoryview(buffer)
    digests = bytearray()
    for info in layout.tensors:
        source = sources[info.name]
        reader = opened[source.path]
        reader.seek(source.offset)
        groups = GroupDigests(info)
        left = info.length
        while left:
            piece = view[: min(left, CHUNK)]
            _fill(reader, piece, f"tensor {info.name} in {source.path}")
            groups.feed(piece)
            sha256.update(piece)
            file.write(piece)
            advance(len(piece))
            left -= len(piece)
        digests += groups.made
    for part in (tokenizer or b"", bytes(digests)):
        sha256.update(part)
        file.write(part)
        advance(len(part))
    stated = layout.sections["digests"]
    sections = {**layout.sections, "digests": replace(stated, digest=digest((digests,)))}
    return sections, sha256.hexdigest()


def _open(path: Path) -> FileIO:
    try:
        return path.open("rb", buffering=0)
    except OSError as error:
        raise SourceError(f"{path} cannot be read: {error.strerror}") from error


def _fill(reader: FileIO, piece: memoryview, what: str) -> None:
    """Reads exactly `piece`; a raw file may give less at a time."""
    done = 0
    while done < len(piece):
        try:
            got = reader.readinto(piece[done:])
        except OSError as error:
            raise SourceError(f"{what} cannot be read: {error.strerror}") from error
        if not got:
            raise SourceError(
                f"{what} ends {len(piece) - done} bytes early; the file was cut while being read"
            )
        done += got
