"""Tables on stderr, for whoever watches a measurement."""

from __future__ import annotations

import sys
from collections.abc import Sequence


def say(line: str) -> None:
    """One line of progress, at once."""
    print(line, file=sys.stderr, flush=True)


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Rows under heads; the first column to the left, the others, which are figures, to the right."""
    widths = [max(len(row[i]) for row in (heads, *rows)) for i in range(len(heads))]
    lines = [
        "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in (heads, *rows)
    ]
    return "\n".join(lines)
