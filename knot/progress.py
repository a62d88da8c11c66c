"""A progress bar on stderr: on a terminal, or when asked for."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager

from tqdm import tqdm


@contextmanager
def progress_bar(
    total: int | None, label: str, show: bool | None = None
) -> Generator[Callable[[int], object]]:
    """A function to call with every number of bytes done. `show` None means: on a terminal."""
    wanted = sys.stderr.isatty() if show is None else show
    with tqdm(
        total=total, desc=label, unit="B", unit_scale=True, file=sys.stderr, disable=not wanted, leave=False
    ) as bar:
        yield bar.update
