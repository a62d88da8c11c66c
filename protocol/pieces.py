"""How a prompt is cut: the gateway does it, and the planner reckons with it."""

from __future__ import annotations

from typing import Final

# Kernels take rows in tiles of as many.
TILE_ROWS: Final = 8


def piece_rows(rows: int, stations: int, most: int, resident: bool) -> int:
    """Rows of a piece of a prompt of `rows`, of which no part takes more than `most` at a time.

    Where weights stay in memory, pieces are as many as stations, so that all have work. Where they are read
    for every piece, there are as few pieces as can be, of about the same size and in whole tiles.
    """
    if resident:
        return min(max(1, rows // stations), most)
    size = -(-rows // -(-rows // most))
    return min(size + -size % TILE_ROWS, most)


def pieces(rows: int, stations: int, most: int, resident: bool) -> list[int]:
    """Rows of every piece."""
    size = piece_rows(rows, stations, most, resident)
    return [min(size, rows - start) for start in range(0, rows, size)]
