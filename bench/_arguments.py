"""What options of measurements are made of."""

from __future__ import annotations

import argparse
from pathlib import Path


def count(text: str) -> int:
    """A whole number of at least 1. Raises `argparse.ArgumentTypeError`, which the parser tells."""
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r}, expected a whole number of at least 1")
    return number


def llama_cpp(text: str) -> Path:
    """A folder with llama-cpp-python, as `pip install --target` makes one. Raises as `count` does."""
    folder = Path(text)
    if not (folder / "llama_cpp").is_dir():
        raise argparse.ArgumentTypeError(
            f"{text} has no llama_cpp: run `pip install --target {text} llama-cpp-python`"
        )
    return folder
