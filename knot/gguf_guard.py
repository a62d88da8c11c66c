"""Reads the header of a GGUF file that may have been made to harm: versions 2 and 3, little-endian.

Nothing is allocated from a count in the file before the file is known to be long enough for it, so a
hostile header costs no more memory or time than an honest one of its length. Format: `ggml/docs/gguf.md`.
"""

from __future__ import annotations

import hashlib
import os
import stat
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

from knot.errors import GgufError, QuantError
from knot.quants import tensor_bytes, type_name

MAGIC: Final = b"GGUF"
VERSIONS: Final = (2, 3)
MAX_KEYS: Final = 65_536
MAX_TENSORS: Final = 65_536
MAX_DIMENSIONS: Final = 4
MAX_KEY_BYTES: Final = 65_535
MAX_NAME_BYTES: Final = 63
MAX_METADATA: Final = 64 << 20
MAX_ELEMENTS: Final = 1 << 22
DEFAULT_ALIGNMENT: Final = 32
MAX_ALIGNMENT: Final = 65_536

_STRING, _ARRAY, _BOOL = 8, 9, 7
_SCALARS: Final = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 10: "Q", 11: "q", 12: "d"}
_KINDS: Final = {
    **{number: struct.Struct("<" + code) for number, code in _SCALARS.items()},
    _BOOL: struct.Struct("<B"),
}
_U32: Final = struct.Struct("<I")
_U64: Final = struct.Struct("<Q")
# The fewest bytes that a key, a tensor or a string can take.
_LEAST_KEY, _LEAST_TENSOR, _LEAST_STRING = 8 + 1 + 4 + 1, 8 + 1 + 4 + 8 + 4 + 8, 8


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """A tensor in a GGUF file.

    `shape` is (rows, cols), or (n,) — GGUF's own order reversed. `offset` counts from the file's first byte.
    """

    name: str
    type: str
    shape: tuple[int, ...]
    offset: int
    length: int
    path: Path


@dataclass(frozen=True, slots=True)
class GgufFile:
    """A GGUF file's header. `metadata` has Python values: numbers, booleans, strings, and lists of them.

    `types` has the GGUF type number of every key. `header_bytes` is where the tensor table ends,
    `data_offset` where the data begins.
    """

    path: Path
    version: int
    metadata: dict[str, object]
    types: dict[str, int]
    tensors: dict[str, GgufTensor]
    header_bytes: int
    data_offset: int
    size: int


def read_gguf(path: Path, *, header_only: bool = False) -> GgufFile:
    """Reads and checks the header of a GGUF file. Raises `GgufError`, naming the key or tensor.

    With `header_only`, the tensors' data need not be there: for planning with the beginning of a file.
    """
    try:
        # Opening a pipe would wait for somebody to write to it.
        if not stat.S_ISREG(path.stat().st_mode):
            raise GgufError("this is no regular file")
        with path.open("rb") as file:
            return parse_gguf(file, path, os.fstat(file.fileno()).st_size, header_only=header_only)
    except OSError as error:
        raise GgufError(f"{path} cannot be read: {error.strerror}") from error
    except GgufError as error:
        raise GgufError(f"{path}: {error}") from None


def parse_gguf(file: BinaryIO, path: Path, size: int, *, header_only: bool = False) -> GgufFile:
    """`read_gguf` for an open file of `size` bytes; `path` is only noted."""
    cursor = _Cursor(file, size)
    magic = cursor.take(4, "the magic")
    if magic != MAGIC:
        raise GgufError(f"this is no GGUF file: it begins with {magic!r}, expected {MAGIC!r}")
    version = cursor.u32("the version")
    if version not in VERSIONS:
        if int.from_bytes(version.to_bytes(4, "little"), "big") in VERSIONS:
            raise GgufError("the file is big-endian; convert a little-endian one")
        raise GgufError(f"the file has GGUF version {version}, expected one of {list(VERSIONS)}")
    n_tensors = cursor.count("tensors", MAX_TENSORS, _LEAST_TENSOR)
    n_keys = cursor.count("metadata keys", MAX_KEYS, _LEAST_KEY)
    metadata: dict[str, object] = {}
    types: dict[str, int] = {}
    for _ in range(n_keys):
        key = cursor.name("a metadata key", MAX_KEY_BYTES)
        if key in metadata:
            raise GgufError(f"the metadata key {key!r} is there twice")
        types[key] = cursor.u32(f"the type of {key}")
        metadata[key] = cursor.value(types[key], key)
    alignment = _alignment(metadata, types)
    stubs = [_tensor(cursor, path) for _ in range(n_tensors)]
    header_bytes = cursor.position
    data_offset = -(-header_bytes // alignment) * alignment
    tensors: dict[str, GgufTensor] = {}
    for stub in stubs:
        if stub.name in tensors:
            raise GgufError(f"the tensor {stub.name!r} is there twice")
        if stub.offset % alignment:
            raise GgufError(
                f"tensor {stub.name} is at {stub.offset} in the data, expected a multiple of {alignment}"
            )
        tensors[stub.name] = GgufTensor(
            stub.name, stub.type, stub.shape, data_offset + stub.offset, stub.length, path
        )
    _check_ranges(tensors, None if header_only else size)
    return GgufFile(path, version, metadata, types, tensors, header_bytes, data_offset, size)


def header_sha256(file: GgufFile) -> str:
    """SHA-256 of a file's header, without its data: 64 hexadecimal digits."""
    with file.path.open("rb") as stream:
        return hashlib.sha256(stream.read(file.header_bytes)).hexdigest()


class _Cursor:
    """Reads forward through a file of known size, and never more than is there."""

    def __init__(self, file: BinaryIO, size: int) -> None:
        self._read = file.read
        self._limit = min(size, MAX_METADATA)
        self._size = size
        self.position = 0
        self._elements = 0

    def take(self, length: int, what: str) -> bytes:
        if length > self._limit - self.position:
            self._refuse(length, what)
        self.position += length
        data = self._read(length)
        if len(data) != length:
            raise GgufError(
                f"{what} ends after {len(data)} of {length} bytes; the file changed while being read"
            )
        return data

    def u32(self, what: str) -> int:
        return _U32.unpack(self.take(4, what))[0]

    def u64(self, what: str) -> int:
        return _U64.unpack(self.take(8, what))[0]

    def count(self, what: str, most: int, least_bytes: int) -> int:
        """A number of things, of which each takes at least `least_bytes` of what is left of the file."""
        number = self.u64(f"the number of {what}")
        left = self._size - self.position
        if number > most:
            raise GgufError(f"the file states {number} {what}, expected at most {most}")
        if number * least_bytes > left:
            raise GgufError(
                f"the file states {number} {what}, which take at least {number * least_bytes} bytes, "
                f"but {left} are left; it is cut short or damaged"
            )
        return number

    def name(self, what: str, most: int) -> str:
        length = self.u64(f"the length of {what}")
        if not 1 <= length <= most:
            raise GgufError(f"{what} is {length} bytes long, expected 1 to {most}")
        data = self.take(length, what)
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError:
            raise GgufError(f"{what} is not UTF-8: {data[:80]!r}") from None

    def value(self, kind: int, key: str) -> object:
        if kind == _STRING:
            data = self.take(self.u64(f"the length of {key}"), key)
            return self._text(data, key)
        if kind == _ARRAY:
            return self._array(key)
        form = _KINDS.get(kind)
        if form is None:
            raise GgufError(f"{key} has the type {kind}, expected one of GGUF's 0 to 12")
        number = form.unpack(self.take(form.size, key))[0]
        if kind != _BOOL:
            return number
        if number > 1:
            raise GgufError(f"{key} is a boolean with the value {number}, expected 0 or 1")
        return bool(number)

    def _array(self, key: str) -> list[object]:
        kind = self.u32(f"the element type of {key}")
        length = self.u64(f"the length of {key}")
        form = _KINDS.get(kind)
        if form is None and kind != _STRING:
            found = "arrays" if kind == _ARRAY else f"elements of type {kind}"
            raise GgufError(f"{key} is an array of {found}, expected numbers, booleans or strings")
        least = _LEAST_STRING if form is None else form.size
        left = self._limit - self.position
        if length * least > left:
            raise GgufError(
                f"{key} states {length} elements, which take at least {length * least} bytes, but {left} "
                "are left; "
                f"the file is cut short or damaged"
            )
        self._elements += length
        if self._elements > MAX_ELEMENTS:
            raise GgufError(
                f"{key} brings the file's arrays to {self._elements} elements, expected at most "
                f"{MAX_ELEMENTS}"
            )
        if form is None:
            return self._strings(length, key)
        values = list(struct.unpack(f"<{length}{form.format[1:]}", self.take(length * form.size, key)))
        if kind == _BOOL:
            if any(value > 1 for value in values):
                raise GgufError(f"{key} has a boolean that is neither 0 nor 1")
            return [bool(value) for value in values]
        return values

    def _strings(self, count: int, key: str) -> list[object]:
        # Vocabularies have hundreds of thousands of these: the loop is kept bare.
        read, limit, position = self._read, self._limit, self.position
        values: list[object] = []
        add = values.append
        from_bytes = int.from_bytes
        for number in range(count):
            position += 8
            length = from_bytes(read(8), "little") if position <= limit else limit
            position += length
            if position > limit:
                raise GgufError(
                    f"{key}[{number}] ends at byte {position}, past the {limit} that may be read; "
                    f"the file is cut short or damaged"
                )
            data = read(length)
            try:
                add(data.decode("utf-8"))
            except UnicodeDecodeError:
                add(self._text(data, f"{key}[{number}]"))
        self.position = position
        return values

    @staticmethod
    def _text(data: bytes, key: str) -> str:
        """Free text may be sloppy; what the tokenizer is made of may not."""
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError:
            if key.startswith("tokenizer."):
                raise GgufError(f"{key} is not UTF-8: {data[:80]!r}") from None
            return data.decode("utf-8", "replace")

    def _refuse(self, length: int, what: str) -> None:
        if self.position + length > self._size:
            raise GgufError(
                f"{what} is stated to take {length} bytes, but the file ends {self._size - self.position} "
                "bytes on; "
                f"it is cut short or damaged"
            )
        raise GgufError(f"{what} brings the header to over {MAX_METADATA} bytes, the most that is read")


def _alignment(metadata: dict[str, object], types: dict[str, int]) -> int:
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    kind = types.get("general.alignment", 4)
    if kind != 4 or not isinstance(alignment, int):
        raise GgufError(f"general.alignment has the type {kind}, expected 4 (u32)")
    if not 8 <= alignment <= MAX_ALIGNMENT or alignment & (alignment - 1):
        raise GgufError(
            f"general.alignment is {alignment}, expected a power of two from 8 to {MAX_ALIGNMENT}"
        )
    return alignment


def _tensor(cursor: _Cursor, path: Path) -> GgufTensor:
    """The next entry of the tensor table; its offset still counts from the data's first byte."""
    name = cursor.name("a tensor's name", MAX_NAME_BYTES)
    n_dimensions = cursor.u32(f"the dimensions of tensor {name}")
    if not 1 <= n_dimensions <= MAX_DIMENSIONS:
        raise GgufError(f"tensor {name} has {n_dimensions} dimensions, expected 1 to {MAX_DIMENSIONS}")
    sizes = struct.unpack(f"<{n_dimensions}Q", cursor.take(8 * n_dimensions, f"the shape of tensor {name}"))
    kind = cursor.u32(f"the type of tensor {name}")
    offset = cursor.u64(f"the offset of tensor {name}")
    shape = tuple(reversed(sizes))
    if 0 in shape:
        raise GgufError(f"tensor {name} has the shape {list(shape)}; every dimension must be at least 1")
    try:
        type = type_name(kind)
        length = tensor_bytes(type, shape)
    except QuantError as error:
        raise GgufError(f"tensor {name}: {error}") from None
    if max(length, offset) >= 1 << 62:
        raise GgufError(f"tensor {name} of shape {list(shape)} at {offset} would be {length} bytes long")
    return GgufTensor(name, type, shape, offset, length, path)


def _check_ranges(tensors: dict[str, GgufTensor], size: int | None) -> None:
    end, before = 0, ""
    for tensor in sorted(tensors.values(), key=lambda tensor: tensor.offset):
        if tensor.offset < end:
            raise GgufError(f"tensor {tensor.name} begins at byte {tensor.offset}, inside {before}")
        end, before = tensor.offset + tensor.length, tensor.name
        if size is not None and end > size:
            raise GgufError(
                f"tensor {tensor.name} ends at byte {end}, but the file has {size}; it is cut short or "
                "damaged"
            )
