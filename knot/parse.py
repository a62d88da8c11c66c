"""From a knot's bytes to its `KnotHeader`, trusting nothing.

Standard library only: it also runs in Workers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final, cast

from knot.architectures import check_tensors
from knot.config import config_from_json
from knot.container import PREFIX, Frame, read_frame
from knot.errors import ConfigError, HeaderError, QuantError
from knot.header import ALGORITHM, DIGEST_BYTES, KnotHeader, Section, TensorInfo, fingerprint
from knot.quants import check_bytes
from knot.strict_json import is_int, kind, parse_object

MAX_SIZE: Final = 1 << 52
_SHA256: Final = re.compile("[0-9a-f]{64}")
_DIGEST: Final = re.compile("[0-9a-f]{16}")
_SECTIONS: Final = ("tokenizer", "digests")


def parse_header(data: bytes, file_size: int) -> KnotHeader:
    """The header of a knot of `file_size` bytes, of which `data` has at least the header.

    Raises a subclass of `HeaderError` for anything that is not as `docs/knot-format.md` says, by name and
    number.
    """
    frame = read_frame(data, file_size)
    meta = parse_object(bytes(data[PREFIX.size : PREFIX.size + frame.meta_length]), "the knot's metadata")
    name = parse_name(meta)
    raw = parse_tensors(meta)
    sections = parse_sections(meta)
    check_ranges(raw, sections, frame, file_size)
    if "digests" not in sections:
        raise HeaderError("the knot has no section of digests; run `knot repair` on it")
    if "config" not in meta:
        raise ConfigError("the knot has no config; convert the model again")
    config = config_from_json(meta["config"])
    places = check_tensors(config, {key: info.shape for key, info in raw.items()})
    tensors: dict[str, TensorInfo] = {}
    offset = digest = 0
    for place in places:
        info = raw[place.name]
        if len(info.shape) == 1 and info.type != "F32":
            raise HeaderError(f"tensor {info.name} is {info.type}, expected F32 for a vector")
        if info.offset != offset:
            raise HeaderError(
                f"tensor {info.name} is at {info.offset} in the payload, expected {offset}: the tensors "
                "are not in "
                f"the order that makes each phase one range; run `knot repair`"
            )
        tensors[place.name] = with_digest(info, digest)
        offset, digest = info.end, digest + tensors[place.name].group_count
    _check_sections(sections, offset, digest)
    return KnotHeader(
        name=name,
        config=config,
        tensors=tensors,
        sections=sections,
        sha256=_text(meta, "sha256", _SHA256, "64 hexadecimal digits", "the knot"),
        payload_offset=frame.payload_offset,
        file_size=file_size,
        fingerprint=fingerprint(bytes(data[: frame.payload_offset])),
    )


def parse_name(meta: Mapping[str, Any]) -> str:
    """The model's name: printable, at most 256 characters."""
    name = meta.get("name")
    if not isinstance(name, str) or not name or not name.isprintable() or len(name) > 256:
        raise HeaderError(f"name is {kind(name)}, expected a printable string of 1 to 256 characters")
    return name


def parse_tensors(meta: Mapping[str, Any], *, old: bool = False) -> dict[str, TensorInfo]:
    """The tensor table, each entry checked by itself: type, shape and byte length agree.

    `old` tables have no `group_rows`. `first_digest` is not known yet and 0.
    """
    tensors: object = meta.get("tensors")
    if not isinstance(tensors, dict) or not tensors:
        raise HeaderError(
            f"tensors is {kind(cast(object, tensors))}, expected an object with at least one tensor"
        )
    return {name: _tensor(name, entry, old) for name, entry in cast(dict[str, object], tensors).items()}


def _tensor(name: str, value: object, old: bool) -> TensorInfo:
    what = f"tensor {name[:80]!r}"
    if not name or not name.isascii() or not name.isprintable() or len(name) > 80:
        raise HeaderError(f"{what} has a name that is not 1 to 80 printable ASCII characters")
    if not isinstance(value, dict):
        raise HeaderError(f"{what} is {kind(value)}, expected an object")
    entry = cast(dict[str, Any], value)
    # Encoders have called this field by two names. One that is missing must never read as "no type".
    types = [entry[key] for key in ("type", "tensor_type") if key in entry]
    if not types or not isinstance(types[0], str) or any(other != types[0] for other in types):
        found = "missing" if not types else " and ".join(kind(found) for found in types)
        raise HeaderError(f"{what}: its type (or tensor_type) is {found}, expected the name of a ggml type")
    shape: object = entry.get("shape")
    sizes = cast(list[Any], shape) if isinstance(shape, list) else []
    if not 1 <= len(sizes) <= 2 or not all(is_int(size) and 1 <= size < 1 << 40 for size in sizes):
        raise HeaderError(f"{what}: its shape is {_short(cast(object, shape))}, expected [rows, cols] or [n]")
    offset = _integer(entry, "offset", 0, what)
    length = _integer(entry, "length", 1, what)
    group_rows = 1 if old else _integer(entry, "group_rows", 1, what)
    try:
        check_bytes(types[0], sizes, length)
    except QuantError as error:
        raise HeaderError(f"{what}: {error}") from None
    return TensorInfo(name, types[0], tuple(sizes), offset, length, group_rows, 0)


def parse_sections(meta: Mapping[str, Any], *, old: bool = False) -> dict[str, Section]:
    """The sections, each entry checked by itself; only known ones are let in."""
    sections = meta.get("sections", {})
    if not isinstance(sections, dict):
        raise HeaderError(f"sections is {kind(sections)}, expected an object")
    found: dict[str, Section] = {}
    for name, value in cast(dict[str, object], sections).items():
        what = f"section {name[:80]!r}"
        if name not in _SECTIONS:
            raise HeaderError(f"{what} is not known to this version, which knows {', '.join(_SECTIONS)}")
        if not isinstance(value, dict):
            raise HeaderError(f"{what} is {kind(value)}, expected an object")
        entry = cast(dict[str, Any], value)
        if name == "digests" and entry.get("algorithm") != ALGORITHM:
            raise HeaderError(
                f"{what} has the algorithm {kind(entry.get('algorithm'))}, expected {ALGORITHM!r}"
            )
        digest = "" if old else _text(entry, "digest", _DIGEST, "16 hexadecimal digits", what)
        found[name] = Section(_integer(entry, "offset", 0, what), _integer(entry, "length", 1, what), digest)
    return found


def check_ranges(
    tensors: Mapping[str, TensorInfo], sections: Mapping[str, Section], frame: Frame, file_size: int
) -> None:
    """Raises `HeaderError` where ranges overlap, leave the file, or end elsewhere than the file does."""
    payload = file_size - frame.payload_offset
    ranges = [(info.offset, info.end, f"tensor {name}") for name, info in tensors.items()]
    ranges += [(section.offset, section.end, f"section {name}") for name, section in sections.items()]
    ranges.sort()
    last_end, last_what = 0, ""
    for start, end, what in ranges:
        if end > payload:
            raise HeaderError(
                f"{what} is at [{start}, {end}), but the payload has {payload} bytes; the file is cut "
                "short or damaged"
            )
        if start < last_end:
            raise HeaderError(f"{what} begins at {start}, inside {last_what}, which ends at {last_end}")
        last_end, last_what = end, what
    if last_end != payload:
        raise HeaderError(
            f"the payload has {payload} bytes, but its last part, {last_what}, ends at {last_end}"
        )


def with_digest(info: TensorInfo, first_digest: int) -> TensorInfo:
    """`info` with its place in the digests section."""
    return TensorInfo(
        info.name, info.type, info.shape, info.offset, info.length, info.group_rows, first_digest
    )


def _check_sections(sections: Mapping[str, Section], offset: int, digests: int) -> None:
    for name in _SECTIONS:
        section = sections.get(name)
        if section is None:
            continue
        if section.offset != offset:
            raise HeaderError(f"section {name} is at {section.offset} in the payload, expected {offset}")
        offset = section.end
    length = sections["digests"].length
    if length != digests * DIGEST_BYTES:
        raise HeaderError(
            f"section digests is {length} bytes, expected {digests * DIGEST_BYTES} for {digests} row groups"
        )


def _integer(entry: Mapping[str, Any], key: str, least: int, what: str) -> int:
    value = entry.get(key)
    if not is_int(value) or not least <= cast(int, value) < MAX_SIZE:
        found = kind(value) if key in entry else "missing"
        raise HeaderError(f"{what}: its {key} is {found}, expected an integer from {least} to 2^52")
    return cast(int, value)


def _text(entry: Mapping[str, Any], key: str, pattern: re.Pattern[str], expected: str, what: str) -> str:
    value = entry.get(key)
    if not isinstance(value, str) or not pattern.fullmatch(value):
        found = kind(value) if key in entry else "missing"
        raise HeaderError(f"{what}: its {key} is {found}, expected {expected}")
    return value


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
