"""What options of measurements are made of."""

from __future__ import annotations

import argparse


def count(text: str) -> int:
    """A whole number of at least 1. Raises `argparse.ArgumentTypeError`, which the parser tells."""
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r}, expected a whole number of at least 1")
    return number
