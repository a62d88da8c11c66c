"""wrangler itself, without a network: what it would upload, and what its `dev` answers."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from core_support import header_of, knot_of
from test_commands import free_ports

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "scripts"))

import stage  # noqa: E402
import wrangler  # noqa: E402

from knot.topology import Topology, cluster_workers, split  # noqa: E402

pytestmark = [pytest.mark.workerd, pytest.mark.wasm]
SPECS = cluster_workers(28, Topology(split(28, 2), split(151_936, 8)), "qwen-coder-7b.knot", {})
PAGE = (ROOT / "docs" / "workerd.md").read_text(encoding="utf-8")


def ask_wrangler(*words: str | Path) -> str:
    done = subprocess.run(
        [*wrangler.command(), *map(str, words)],
        cwd=ROOT,
        env={**wrangler.environment(), "CI": "1"},
        text=True,
        capture_output=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.mark.parametrize("spec", SPECS, ids=[spec.name for spec in SPECS])
def test_a_deployment_would_upload_the_bundle_with_its_bindings_and_stay_far_below_the_limit(
    spec: object, tmp_path: Path
) -> None:
    found = next(one for one in SPECS if one is spec)
    said = ask_wrangler("deploy", "--dry-run", "--outdir", tmp_path, "--env", found.name)
    files = stage.bundle_files(found.folder)
    for name, path in files.items():
        uploaded = tmp_path / name
        assert uploaded.exists(), f"{name} would not be uploaded"
        assert uploaded.read_bytes() == path.read_bytes()
    assert (tmp_path / "python_modules" / "workers" / "__init__.py").exists()
    for name, kind in (
        ("pipeline.wasm", "compiled-wasm"),
        ("boundary.js", "esm"),
        ("boundary.py", "python"),
        ("protocol/calls.py", "python"),
    ):
        assert re.search(rf"{re.escape(name)}\s*│\s*{kind}", said), f"{name} is no {kind}:\n{said}"
    gzipped = re.search(r"gzip: ([0-9.]+) KiB", said)
    assert gzipped
    assert float(gzipped[1]) * 1024 < stage.MOST_GZIPPED / 10
    for binding in (*found.buckets, *found.key_values, *found.services, *found.objects, *found.variables):
        assert f"env.{binding} " in said


def stop_group(group: int, patience: float) -> bool:
    """Kills a group of processes; whether any was left after so many seconds."""
    with contextlib.suppress(ProcessLookupError):
        for _ in range(int(patience / 0.1)):
            os.killpg(group, 0)
            time.sleep(0.1)
        os.killpg(group, signal.SIGKILL)
        return True
    return False


def test_a_station_and_a_shard_answer_by_curl_as_the_page_shows(tmp_path: Path) -> None:
    """Each in a `wrangler dev` of its own, without wardens: bindings to Workers that are not there."""
    (script,) = re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL)
    knot = knot_of("qwen2")
    shutil.copy(knot, tmp_path / "model.knot")
    first = free_ports(4)
    ports = {shown: str(first + index) for index, shown in enumerate(("8788", "8789", "9230", "9231"))}
    # The tiny model has fewer layers and ids than the one of the page.
    changes = {
        **ports,
        ".venv/bin/python scripts/wrangler.py": f"{sys.executable} {ROOT / 'scripts' / 'wrangler.py'}",
        "--env": f"--cwd {ROOT} --persist-to {tmp_path} --env",
        "--file model.knot": f"--file {tmp_path / 'model.knot'}",
        "LAYER:15": "LAYER:2",
        "VOCAB_END:6144": "VOCAB_END:100",
        "504, 3575": "5, 299, 7",
    }
    for shown in changes:
        assert shown in script, shown
    # All in one pass: what one has put in may hold another's text.
    script = re.sub("|".join(map(re.escape, changes)), lambda found: changes[found[0]], script)
    said, logs = tmp_path / "said.txt", tmp_path / "logs"
    with (
        said.open("w") as stdout,
        (tmp_path / "errors.txt").open("w") as stderr,
        subprocess.Popen(
            ["bash", "-euo", "pipefail", "-c", script],
            cwd=tmp_path,
            env={**os.environ, "CI": "1", "WRANGLER_LOG_PATH": str(logs)},
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,
        ) as shell,
    ):
        try:
            shell.wait(timeout=240)
        finally:
            left = stop_group(shell.pid, 10 if shell.returncode == 0 else 0)
    told = (*tmp_path.glob("*.txt"), *tmp_path.glob("*.log"), *sorted(logs.rglob("*.log")))
    assert shell.returncode == 0, "\n".join(f"{path.name}:\n{path.read_text()[-4000:]}" for path in told)
    assert not left, "nothing is left running"
    embedded = json.loads((tmp_path / "embeddings.json").read_text())
    assert (embedded["status"], embedded["positions"]) == ("ok", [0, 2])
    forwarded = json.loads(said.read_text().splitlines()[-1])
    assert (forwarded["status"], forwarded["cache_length"]) == ("ok", 2)
    assert len(forwarded["hidden"][0]) == header_of(knot).config.hidden_size
    for port in list(ports.values())[:2]:
        with socket.socket() as probe:
            assert probe.connect_ex(("127.0.0.1", int(port))) != 0, "and nothing is left running"
