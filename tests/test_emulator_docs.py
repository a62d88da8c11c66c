"""What docs/emulator.md says is so."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

from emulator import Limits
from emulator.faults import KINDS
from emulator.http import MAX_BODY
from emulator.meter import BASELINE_BYTES

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "emulator.md").read_text()


def test_the_program_runs_and_counts_to_four(tmp_path: Path) -> None:
    (program,) = re.findall(r"```python\n(.*?)```\n", PAGE, re.DOTALL)
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert [line for line in result.stdout.splitlines() if line.isdigit()] == ["1", "2", "3", "4"]
    assert "Pending(requests=0, background=0, bodies=0)" in result.stdout


def test_the_limits_are_those_of_the_code() -> None:
    table = PAGE.split("## What is enforced")[1].split("## Faults")[0]
    written: dict[str, str] = {}
    for line in table.splitlines():
        if line.startswith("| `"):
            names, values = line.split("|")[1:3]
            written |= zip(
                re.findall(r"`(\w+)`", names), re.findall(r"not set|[\d,]*\d", values), strict=True
            )
    defaults = {field.name: field.default for field in fields(Limits)}
    for name, value in written.items():
        number = None if value == "not set" else int(value.replace(",", ""))
        assert defaults[name] == number, name
    assert f"{BASELINE_BYTES / 1e6:.1f} MB" in table
    assert f"{MAX_BODY >> 20} MiB" in PAGE


def test_every_kind_of_fault_is_explained() -> None:
    table = PAGE.split("## Faults")[1].split("## What differs")[0]
    assert re.findall(r"^\| `(\w+)`", table, re.MULTILINE) == list(KINDS)
