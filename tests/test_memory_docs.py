"""Every command in docs/fluid-memory.md and docs/plan.md does what the page says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from synth import make_tiny_gguf

pytestmark = pytest.mark.wasm

ROOT = Path(__file__).parents[1]


def commands_of(page: str) -> list[str]:
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    return [line for block in re.findall(r"```sh\n(.*?)```", text, re.DOTALL) for line in block.splitlines()]


def run(folder: Path, command: str) -> str:
    program, *words = command.split()
    assert program == "knot"
    done = subprocess.run(
        [sys.executable, "-m", "knot.cli", *words], cwd=folder, capture_output=True, text=True, timeout=120,
        env={**os.environ, "PYTHONPATH": str(ROOT)}, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(("page", "words", "files"), [
    ("fluid-memory.md", ["never more than two blocks of one phase"], ["trace.png", "trace.svg"]),
    ("plan.md", ["everything resident: --stations 1 --shards 1", "written: wrangler.toml"],
     ["plan.png", "wrangler.toml"]),
])  # fmt: skip
def test_the_pages_commands_run(page: str, words: list[str], files: list[str], tmp_path: Path) -> None:
    make_tiny_gguf(tmp_path / "model.gguf")
    commands = commands_of(page)
    assert commands
    printed = "".join(run(tmp_path, command) for command in commands)
    for expected in words:
        assert expected in printed
    assert all((tmp_path / name).stat().st_size > 1000 for name in files)
