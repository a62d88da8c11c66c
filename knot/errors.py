"""What can be wrong with a model file. Every message names the thing, what was expected and what was found.

Standard library only: it also runs in Workers.
"""

from __future__ import annotations


class KnotError(Exception):
    """Any refusal of this package: one sentence that a person can act on."""


class QuantError(KnotError, ValueError):
    """A tensor type that is not in the table, or a shape that the type cannot hold."""


class HeaderError(KnotError, ValueError):
    """Bytes that are no knot, or a knot whose header cannot be trusted."""


class OldLayoutError(HeaderError):
    """A knot of the old layout, whose payload starts one byte early. `knot repair` rewrites it."""


class ConfigError(HeaderError):
    """A model configuration that is incomplete, out of range, or contradicts the tensors."""


class MissingTensorError(HeaderError):
    """A tensor that a phase needs is not there.

    `phase` is one of `knot.architectures.PHASES`, "vectors" or "tables"; `layer` is None outside of layers.
    """

    def __init__(self, phase: str, layer: int | None, tensor: str) -> None:
        self.phase = phase
        self.layer = layer
        self.tensor = tensor
        where = f"phase {phase}" if layer is None else f"phase {phase} of layer {layer}"
        super().__init__(f"{where} needs the tensor {tensor}, which the file does not have")


class UnexpectedTensorError(HeaderError):
    """A tensor that no phase of the architecture reads, so that leaving it out would change the model."""


class DigestError(KnotError):
    """Bytes that do not have the digest the knot states.

    `tensor` is a tensor's or a section's name; `rows` its `[start, end)`, or None for a section.
    """

    def __init__(self, tensor: str, rows: tuple[int, int] | None, message: str) -> None:
        self.tensor = tensor
        self.rows = rows
        super().__init__(message)


class SourceError(KnotError):
    """A range source that gave fewer or more bytes than were asked for, or none at all."""


class GgufError(KnotError, ValueError):
    """A GGUF file that cannot be trusted."""


class UnsupportedModelError(KnotError):
    """A model that is well-formed and that this engine cannot run. The message says what would work."""


class OutputError(KnotError):
    """A file that could not be written, or that is there already."""


class BusyError(OutputError):
    """A file that another process is writing at this moment."""


class ModelNotFoundError(KnotError):
    """A model argument that is no file and no key."""


class FetchError(KnotError):
    """A download that did not succeed. Nothing is left under the final name."""
