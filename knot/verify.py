"""Checks every byte of a knot against what its header says."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Final

from knot.config import ModelConfig
from knot.digests import GroupDigests, digest
from knot.errors import DigestError, HeaderError, SourceError
from knot.header import DIGEST_BYTES, KnotHeader, Section
from knot.progress import progress_bar
from knot.reader import load_header
from knot.tokenizer_section import TokenizerInfo, TokenizerSectionError, read_section_info

CHUNK: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Verified:
    """What was checked: header, numbers of tensors, row groups and payload bytes, tokenizer if any."""

    header: KnotHeader
    tensors: int
    groups: int
    payload_bytes: int
    tokenizer: TokenizerInfo | None


def verify(path: Path, *, show_progress: bool | None = None) -> Verified:
    """Checks a knot's header, every row group's digest, its sections, and the SHA-256 of its payload.

    Raises `DigestError` at the first bad group, naming tensor and rows, a `HeaderError`, or `SourceError`.
    """
    with _reading(path) as file:
        header = load_header(path)
        payload = header.file_size - header.payload_offset
        digests = _section(file, header, "digests", header.digests)
        file.seek(header.payload_offset)
        sha256 = hashlib.sha256()
        with progress_bar(payload, path.name, show_progress) as advance:
            for info in header.tensors.values():
                first = info.first_digest * DIGEST_BYTES
                groups = GroupDigests(info, digests[first : first + info.group_count * DIGEST_BYTES])

                def take(data: memoryview, groups: GroupDigests = groups) -> None:
                    sha256.update(data)
                    groups.feed(data)
                    advance(len(data))

                _stream(file, info.length, take, path)
        tokenizer = (
            None if header.tokenizer is None else _section(file, header, "tokenizer", header.tokenizer)
        )
        sha256.update(tokenizer or b"")
        sha256.update(digests)
        if sha256.hexdigest() != header.sha256:
            raise DigestError(
                "payload", None, f"the payload's SHA-256 is {sha256.hexdigest()}, expected {header.sha256}"
            )
    info = None if tokenizer is None else check_tokenizer(tokenizer, header.config)
    return Verified(header, len(header.tensors), len(digests) // DIGEST_BYTES, payload, info)


def check_tokenizer(section: bytes, config: ModelConfig) -> TokenizerInfo:
    """What a tokenizer section says, once it is known to fit the configuration. Raises `HeaderError`."""
    info = tokenizer_info(section)
    if info.n_tokens != config.vocab_size:
        raise HeaderError(
            f"section tokenizer has {info.n_tokens} tokens, but config.vocab_size is {config.vocab_size}"
        )
    if tuple(info.unused) != config.unused_token_ranges:
        raise HeaderError("section tokenizer marks other ids as unused than config.unused_token_ranges")
    return info


def tokenizer_info(section: bytes) -> TokenizerInfo:
    """What a tokenizer section says besides its vocabulary. Raises `HeaderError`."""
    try:
        return read_section_info(section)
    except TokenizerSectionError as error:
        raise HeaderError(f"section tokenizer: {error}") from error


def read_tokenizer(path: Path, header: KnotHeader) -> bytes | None:
    """The tokenizer section of a knot, its digest checked; None where it has none. Raises `DigestError`."""
    if header.tokenizer is None:
        return None
    with _reading(path) as file:
        return _section(file, header, "tokenizer", header.tokenizer)


@contextmanager
def _reading(path: Path) -> Generator[FileIO]:
    try:
        with path.open("rb", buffering=0) as file:
            yield file
    except OSError as error:
        raise SourceError(f"{path} cannot be read: {error.strerror}") from error


def _section(file: FileIO, header: KnotHeader, name: str, section: Section) -> bytes:
    file.seek(header.file_offset(section.offset))
    parts: list[bytes] = []
    _stream(file, section.length, lambda data: parts.append(bytes(data)), name)
    found = digest(parts)
    if found != section.digest:
        raise DigestError(
            name,
            None,
            f"section {name}: the digest is {found}, expected {section.digest}; fetch the file again",
        )
    return b"".join(parts)


def _stream(file: FileIO, length: int, take: Callable[[memoryview], object], what: object) -> None:
    view = memoryview(bytearray(min(CHUNK, length)))
    left = length
    while left:
        got = file.readinto(view[: min(len(view), left)])
        if not got:
            raise SourceError(f"{what} ends {left} bytes early; the file was cut while being read")
        take(view[:got])
        left -= got
