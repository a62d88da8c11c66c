"""wrangler itself, without a network: what it would upload, and what its `dev` answers."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from core_support import header_of, knot_of

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "scripts"))

import stage  # noqa: E402
import wrangler  # noqa: E402

from knot.topology import Topology, cluster_workers, split  # noqa: E402

pytestmark = [pytest.mark.workerd, pytest.mark.wasm]
SPECS = cluster_workers(28, Topology(split(28, 2), split(151_936, 8)), "qwen-coder-7b.knot", {})
PAGE = (ROOT / "docs" / "workerd.md").read_text(encoding="utf-8")


def free_ports(count: int) -> list[int]:
    """Ports of this machine that nobody listens on."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


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


def test_a_station_and_a_shard_answer_by_curl_as_the_page_shows(tmp_path: Path) -> None:
    """Each in a `wrangler dev` of its own, without wardens: bindings to Workers that are not there."""
    (script,) = re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL)
    knot = knot_of("qwen2")
    shutil.copy(knot, tmp_path / "model.knot")
    ports = dict(zip(("8788", "8789", "9230", "9231"), map(str, free_ports(4)), strict=True))
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
    for shown, instead in changes.items():
        assert shown in script, shown
        script = script.replace(shown, instead)
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script],
        cwd=tmp_path,
        env={**os.environ, "CI": "1"},
        stdin=subprocess.DEVNULL,
        text=True,
        capture_output=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    embedded = json.loads((tmp_path / "embeddings.json").read_text())
    assert (embedded["status"], embedded["positions"]) == ("ok", [0, 2])
    forwarded = json.loads(done.stdout.splitlines()[-1])
    assert (forwarded["status"], forwarded["cache_length"]) == ("ok", 2)
    assert len(forwarded["hidden"][0]) == header_of(knot).config.hidden_size
    for port in list(ports.values())[:2]:
        with socket.socket() as probe:
            assert probe.connect_ex(("127.0.0.1", int(port))) != 0, "and nothing is left running"
