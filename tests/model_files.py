"""Where tests find real models, and the founders' data; and plain words where they are missing.

Models lie in `models/` or in $KNOT_MODELS; `make test` fetches them. The founders' data is a folder `shared`
beside the checkout, which only they have.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest

from knot.paths import find_model, resolve_model

ROOT = Path(__file__).resolve().parent.parent
SHARED = ROOT.parent / "shared"


def model_file(key: str) -> Path:
    """The GGUF of a model by its key. Fails, with the command to run, where it is missing."""
    found = find_model(key)
    if found is None or found.suffix != ".gguf":
        pytest.fail(f"the model {key} is not in models/ nor in $KNOT_MODELS; run `knot fetch {key}`")
    return found


@functools.cache
def model_knot(key: str) -> Path:
    """The knot of a model, converted beside its GGUF once."""
    return resolve_model(str(model_file(key)))


def shared_file(name: str) -> Path:
    """A file of the founders' data; skips where they are not."""
    if not SHARED.is_dir():
        pytest.skip(f"the founders' data ({name}) is only beside the founders' own checkouts")
    return SHARED / name


def goldens(name: str) -> list[dict[str, Any]]:
    """Prompts and what llama.cpp continues them with."""
    lines = shared_file(f"goldens/{name}.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]
