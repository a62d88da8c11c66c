"""Every command and every program in docs/knot-format.md does what the page says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from knot_bytes import as_old
from synth import make_tiny_gguf, make_tiny_knot

from knot.config import ModelConfig

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "knot-format.md").read_text()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with `model.gguf` and `old.knot`, and a `knot` command that needs no installation."""
    make_tiny_gguf(tmp_path / "model.gguf")
    (tmp_path / "old.knot").write_bytes(as_old(make_tiny_knot(tmp_path / "fresh.knot").read_bytes()))
    command = tmp_path / "bin" / "knot"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m knot.cli "$@"\n')
    command.chmod(0o755)
    return tmp_path


def run(folder: Path, *command: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PATH": f"{folder / 'bin'}:{os.environ['PATH']}"}
    result = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_the_commands_run_in_order(folder: Path) -> None:
    blocks = re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL)
    assert len(blocks) == 2
    printed = run(folder, "sh", "-e", "-c", "\n".join(blocks))
    assert "sound; 39 tensors" in printed
    assert (folder / "old.repaired.knot").read_bytes() == (folder / "model.knot").read_bytes()


def test_the_program_runs(folder: Path) -> None:
    run(folder, "knot", "convert", "model.gguf")
    (program,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    printed = run(folder, sys.executable, "-c", program).splitlines()
    assert "blk_1_attn_output_weight" in printed[0]
    assert printed[2].startswith("16 48 ")


def test_every_key_of_the_configuration_is_explained() -> None:
    table = PAGE.split("### `config`")[1].split("## Payload")[0]
    explained = set(re.findall(r"`(\w+)`", table))
    assert explained > set(ModelConfig.__slots__)
