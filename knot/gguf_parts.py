"""One model out of one or several GGUF files: `NAME-00001-of-00003.gguf` and its fellows, in order."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from knot.errors import GgufError
from knot.gguf_guard import GgufFile, GgufTensor, read_gguf

_PART: Final = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
MAX_PARTS: Final = 1000


@dataclass(frozen=True, slots=True)
class GgufModel:
    """A model's metadata and tensors, whatever number of files they lie in.

    `files` are in order; `name` is the file name without extension and part number.
    """

    name: str
    files: tuple[GgufFile, ...]
    metadata: dict[str, object]
    tensors: dict[str, GgufTensor]


def part_paths(path: Path) -> list[Path]:
    """The files of the model that `path` belongs to, in order: itself, or every part of a split model.

    Raises `GgufError` that names a part which is not there.
    """
    match = _PART.fullmatch(path.name)
    if match is None:
        return [path]
    count = int(match["count"])
    if not 1 <= int(match["number"]) <= count <= MAX_PARTS:
        raise GgufError(
            f"{path.name} is named as part {int(match['number'])} of {count}, expected 1 to {count}"
        )
    parts = [
        path.with_name(f"{match['stem']}-{number:05}-of-{count:05}.gguf") for number in range(1, count + 1)
    ]
    for part in parts:
        if not part.exists():
            raise GgufError(f"{path.name} is one of {count} parts, but {part.name} is not beside it")
    return parts


def open_gguf(paths: Path | Sequence[Path], *, header_only: bool = False) -> GgufModel:
    """The model in a file, in the split files that it is one of, or in the files given in any order.

    Parts are ordered by `split.no`, which counts from 0, and must all be there; where names count (from
    1), they must say the same. Raises `GgufError`.
    """
    chosen = part_paths(paths) if isinstance(paths, Path) else list(paths)
    files = [read_gguf(path, header_only=header_only) for path in chosen]
    if not files:
        raise GgufError("no GGUF file was given")
    counts = [_split(file, "count", 1) for file in files]
    if len(files) == 1 and counts[0] == 1:
        file = files[0]
        return GgufModel(model_stem(file.path), (file,), file.metadata, file.tensors)
    files.sort(key=lambda file: _split(file, "no", 0))
    tensors: dict[str, GgufTensor] = {}
    for index, file in enumerate(files):
        _check_part(file, index, len(files))
        for name, tensor in file.tensors.items():
            if name in tensors:
                raise GgufError(
                    f"the tensor {name!r} is both in {tensors[name].path.name} and in {file.path.name}"
                )
            tensors[name] = tensor
    stated = _split(files[0], "tensors.count", len(tensors))
    if stated != len(tensors):
        raise GgufError(
            f"{files[0].path.name} states {stated} tensors in all parts, but they have {len(tensors)}"
        )
    return GgufModel(model_stem(files[0].path), tuple(files), files[0].metadata, tensors)


def _check_part(file: GgufFile, index: int, given: int) -> None:
    count, number = _split(file, "count", 1), _split(file, "no", 0)
    name = file.path.name
    if count != given:
        raise GgufError(f"{name} is one of {count} parts, but {given} were given; give all of them")
    if number != index:
        raise GgufError(f"{name} has split.no {number}, expected {index}: a part is missing or given twice")
    match = _PART.fullmatch(name)
    if match is not None and (int(match["number"]) != number + 1 or int(match["count"]) != count):
        raise GgufError(
            f"{name} has split.no {number} of {count}, so its name should say {number + 1:05}-of-{count:05}; "
            f"the parts have been renamed"
        )


def _split(file: GgufFile, key: str, default: int) -> int:
    value = file.metadata.get(f"split.{key}", default)
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise GgufError(f"{file.path.name}: split.{key} is {value!r}, expected a number")
    return value


def model_stem(path: Path) -> str:
    """A GGUF's file name without extension and part number."""
    match = _PART.fullmatch(path.name)
    return match["stem"] if match else path.stem
