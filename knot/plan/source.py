"""The header of a model that is to be planned for: of a knot, of a GGUF, or of a GGUF's first megabytes."""

from __future__ import annotations

from pathlib import Path

from knot.container import MAGIC as KNOT_MAGIC
from knot.convert import check_model, display_name, tensors_of, tokenizer_of
from knot.errors import ModelNotFoundError, SourceError
from knot.fetch import HELP
from knot.gguf_guard import MAGIC as GGUF_MAGIC
from knot.gguf_parts import open_gguf
from knot.header import KnotHeader, build_header
from knot.paths import find_model
from knot.reader import load_header
from knot.writer import lay_out


def model_header(model: str) -> KnotHeader:
    """What a knot of `model` states, whether or not there is one. Nothing is fetched or converted.

    Raises a `KnotError` that says what would work.
    """
    path = find_model(model)
    if path is None:
        raise ModelNotFoundError(
            f"{model} is no file here; plan for a knot, a GGUF, or the beginning of a GGUF that has its "
            f"whole header (16 MB are enough), or fetch it first: `knot fetch` takes {HELP}"
        )
    try:
        with path.open("rb") as file:
            magic = file.read(4)
    except OSError as error:
        raise SourceError(f"{path} cannot be read: {error.strerror}") from error
    if magic == KNOT_MAGIC:
        return load_header(path)
    if magic == GGUF_MAGIC:
        return header_of_gguf(path)
    raise ModelNotFoundError(
        f"{path} begins with {magic!r} and is neither a knot nor a GGUF; plan for one of those, or for the "
        "beginning of a GGUF with its whole header"
    )


def header_of_gguf(path: Path) -> KnotHeader:
    """The header that the knot of a GGUF would have, but for its digests. Its data need not be there."""
    model = open_gguf(path, header_only=True)
    tensors = tensors_of(model)
    config = check_model(model, tensors)
    kinds = {name: (tensor.type, tensor.shape) for name, tensor in tensors.items()}
    infos, sections, payload = lay_out(config, kinds, tokenizer_of(model))
    name = display_name(model)
    head = len(build_header(name, config, infos, sections))
    return KnotHeader(
        name=name,
        config=config,
        tensors={info.name: info for info in infos},
        sections=sections,
        sha256="",
        payload_offset=head,
        file_size=head + payload,
        fingerprint="",
    )
