"""Conversion streams: a model of any size in a few tens of MB."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from synth import make_tiny_gguf

PROGRAM = """
import resource, sys
from pathlib import Path
from knot.convert import convert
from knot.verify import verify

def peak():
    # On Linux the rusage of a process starts with what its parent took; the status file does not.
    status = Path("/proc/self/status")
    if not status.exists():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    return int(status.read_text().split("VmHWM:")[1].split()[0]) >> 10

before = peak()
path, header = convert(Path(sys.argv[1]), show_progress=False)
verify(path, show_progress=False)
print(header.file_size >> 20, before, peak())
"""


@pytest.mark.slow
def test_a_model_of_200_mb_is_converted_and_verified_in_less_than_60(tmp_path: Path) -> None:
    source = make_tiny_gguf(
        tmp_path / "big.gguf",
        layers=6,
        hidden=1024,
        ffn=8192,
        heads=16,
        kv_heads=2,
        head_dim=64,
        vocab=4096,
        types="F16",
    )
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(source)],
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        check=True,
    )
    size, before, peak = map(int, result.stdout.split())
    assert size > 200
    assert peak < 60
    # Nor does it grow with the file: little more than what the imports take.
    assert peak - before < 24
