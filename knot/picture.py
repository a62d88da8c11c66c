"""What pictures share: a figure, its colours, and a file to keep it in."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final, TypeAlias

import matplotlib as mpl
from matplotlib.figure import Figure

from engine.budget import CEILING_BYTES, ISOLATE_BYTES
from knot.errors import OutputError

# matplotlib's Axes, whose own types leave all keyword arguments unknown.
Axes: TypeAlias = Any

FORMATS: Final = (".png", ".svg")
MB: Final = 1e6

# Colours that people with any colour vision can tell apart (Okabe and Ito).
GREY: Final = "#bbbbbb"
SAND: Final = "#dddddd"
COLOURS: Final = {
    "python": GREY,
    "javascript": SAND,
    "attn": "#0072b2",
    "ffn_gate": "#e69f00",
    "ffn_up": "#009e73",
    "ffn_down": "#d55e00",
    "head": "#cc79a7",
    "pinned": "#f0e442",
    "engine": "#9ecae1",
    "bodies": "#8856a7",
    "kept": "#8c6d31",
}


def figure(width: float, height: float) -> Any:
    """A figure of so many inches."""
    return Figure(figsize=(width, height), layout="constrained")


def limit_lines(axes: Axes, *, vertical: bool = False) -> None:
    """The 128 MB that an isolate has, and what we let it use."""
    draw = axes.axvline if vertical else axes.axhline
    draw(ISOLATE_BYTES / MB, color="#b2182b", linewidth=1.5, label="limit, 128 MB")
    draw(CEILING_BYTES / MB, color="#b2182b", linewidth=1, linestyle=":", label="our ceiling, 120 MB")


def save(picture: Any, path: Path) -> None:
    """Writes a PNG or an SVG, whichever the name says. Raises `OutputError`."""
    if path.suffix not in FORMATS:
        raise OutputError(f"{path} is neither {' nor '.join(FORMATS)}; name a file that ends in one of them")
    styles: Any = mpl
    with styles.rc_context({"svg.fonttype": "none"}):  # text that can be searched
        picture.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else {})
