"""What a MODEL argument means: a knot, a GGUF (converted beside it, once), or something to fetch."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from knot.container import MAGIC as KNOT_MAGIC
from knot.convert import convert
from knot.errors import BusyError, KnotError, ModelNotFoundError, SourceError
from knot.fetch import HELP, fetch, fetched_path, is_reference
from knot.gguf_guard import MAGIC as GGUF_MAGIC
from knot.gguf_parts import model_stem, part_paths
from knot.reader import load_header

MODELS_VARIABLE: Final = "KNOT_MODELS"


def _say(line: str) -> None:
    print(line, file=sys.stderr)


def models_folder() -> Path:
    """Where fetched models lie: $KNOT_MODELS, or `models` in the project around the current folder."""
    chosen = os.environ.get(MODELS_VARIABLE)
    if chosen:
        return Path(chosen)
    here = Path.cwd()
    project = next((folder for folder in (here, *here.parents) if (folder / "pyproject.toml").exists()), here)
    return project / "models"


def find_model(model: str) -> Path | None:
    """The file that `model` stands for, knot or GGUF, if it is there without fetching; else None."""
    path = Path(model)
    if path.is_file():
        return path
    if is_reference(model):
        fetched = fetched_path(model, models_folder())
        return next((found for found in (fetched, fetched.with_suffix(".knot")) if found.is_file()), None)
    return None


def resolve_model(
    model: str, *, show_progress: bool | None = None, say: Callable[[str], object] = _say
) -> Path:
    """The knot that `model` stands for. Fetches and converts where that has not been done.

    `say` gets a line before anything that takes time. Raises a `KnotError`.
    """
    path = find_model(model)
    if path is None:
        if not is_reference(model):
            raise ModelNotFoundError(f"{model} is no file; expected a .knot or .gguf file, {HELP}")
        say(f"fetching {model} into {models_folder()}")
        path = fetch(model, models_folder(), show_progress=show_progress)
    magic = _magic(path)
    if magic == KNOT_MAGIC:
        return path
    if magic == GGUF_MAGIC:
        return _converted(path, show_progress, say)
    raise ModelNotFoundError(f"{path} is neither a knot nor a GGUF: it begins with {magic!r}")


def _converted(gguf: Path, show_progress: bool | None, tell: Callable[[str], object]) -> Path:
    waited = False
    while True:
        knot, fresh = _state(gguf)
        if fresh:
            return knot
        if knot.exists():
            tell(f"{knot} does not match {gguf.name} (or this version): converting again")
        else:
            tell(f"converting {gguf.name} to {knot}")
        try:
            knot.parent.mkdir(parents=True, exist_ok=True)
            return convert(gguf, knot, force=True, show_progress=show_progress)[0]
        except BusyError:
            if not waited:
                tell(f"another process is converting {gguf.name}: waiting for it")
            waited = True
            time.sleep(0.2)


def _state(gguf: Path) -> tuple[Path, bool]:
    """Where the knot of a GGUF lies, and whether it is there, readable, and made of the GGUF as it is now."""
    parts = part_paths(gguf)
    knot = gguf.with_name(model_stem(gguf) + ".knot")
    if not knot.exists() and not os.access(knot.parent, os.W_OK):
        knot = models_folder() / knot.name
    try:
        source = max(part.stat().st_mtime_ns for part in parts)
        if not knot.exists():
            return knot, False
        made = knot.stat().st_mtime_ns
        # A conversion takes its source's time; some file systems keep whole seconds only.
        if made not in (source, source // 10**9 * 10**9):
            return knot, False
        load_header(knot)
    except OSError as error:
        raise SourceError(f"{error.filename} cannot be read: {error.strerror}") from error
    except KnotError:
        return knot, False
    return knot, True


def _magic(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(4)
    except OSError as error:
        raise SourceError(f"{path} cannot be read: {error.strerror}") from error
