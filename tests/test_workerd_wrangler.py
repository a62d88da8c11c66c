"""wrangler itself, without a network: what it would upload, and what its `dev` answers."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from core_support import header_of, knot_of

from knot.workerd import free_ports, node

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "scripts"))

import offline_pyodide  # noqa: E402
import stage  # noqa: E402

from knot.topology import Topology, cluster_workers, split  # noqa: E402

pytestmark = [pytest.mark.workerd, pytest.mark.wasm]
SPECS = cluster_workers(28, Topology(split(28, 2), split(151_936, 8)), "qwen-coder-7b.knot", {})
SECRET = "a secret of the tests"


def wrangler() -> tuple[list[str], dict[str, str]]:
    environment = {
        **os.environ,
        "PATH": f"{node().parent}:{os.environ['PATH']}",
        "CI": "1",
        "WRANGLER_SEND_METRICS": "false",
        "MINIFLARE_WORKERD_PATH": str(offline_pyodide.make()),
    }
    return [str(node()), str(ROOT / "node_modules" / "wrangler" / "bin" / "wrangler.js")], environment


def ask_wrangler(*words: str | Path) -> str:
    command, environment = wrangler()
    done = subprocess.run(
        [*command, *map(str, words)],
        cwd=ROOT,
        env=environment,
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


@contextmanager
def dev(environment_name: str, state: Path, **variables: str) -> Iterator[str]:
    """`wrangler dev` for one Worker; yields its address once it answers."""
    [port] = free_ports(1)
    command, environment = wrangler()
    words = [f"{name}:{value}" for name, value in {**variables, "CLUSTER_SECRET": SECRET}.items()]
    log = (state / "log").open("w+")
    process = subprocess.Popen(
        [
            *command, "dev", "--env", environment_name, "--port", str(port), "--ip", "127.0.0.1",
            "--persist-to", str(state), *(part for word in words for part in ("--var", word)),
        ],
        cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
    )  # fmt: skip
    address = f"http://127.0.0.1:{port}"
    try:
        end = time.monotonic() + 120
        while True:
            try:
                httpx.get(f"{address}/health", timeout=60)
                break
            except httpx.HTTPError:
                assert process.poll() is None, (state / "log").read_text()
                assert time.monotonic() < end, (state / "log").read_text()
                time.sleep(0.3)
        yield address
    finally:
        os.killpg(process.pid, signal.SIGINT)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        log.close()


def upload(knot: Path, state: Path, environment_name: str) -> None:
    ask_wrangler(
        "r2", "object", "put", f"knots/{knot.name}", "--file", knot, "--local",
        "--persist-to", state, "--env", environment_name,
    )  # fmt: skip


def curl(*words: str) -> str:
    return subprocess.run(["curl", "-s", *words], text=True, capture_output=True, check=True).stdout


def test_wrangler_dev_answers_forward_for_a_station_without_its_warden(tmp_path: Path) -> None:
    knot = knot_of("qwen2")
    hidden = header_of(knot).config.hidden_size
    upload(knot, tmp_path, "entry-offline")
    with dev("entry-offline", tmp_path, KNOT_KEY=knot.name, SPECIALIZATION_END_LAYER="2") as address:
        assert httpx.get(f"{address}/health").status_code == 401
        row = [0.25] * hidden
        said = curl(f"{address}/forward", "-H", f"X-Knot-Secret: {SECRET}", "-d", f'{{"hidden": [{row}]}}')
        assert '"status":"ok"' in said
        assert '"cache_length":1' in said


def test_wrangler_dev_answers_embed_for_a_shard(tmp_path: Path) -> None:
    knot = knot_of("qwen2")
    upload(knot, tmp_path, "shard-0-offline")
    with dev("shard-0-offline", tmp_path, KNOT_KEY=knot.name, VOCAB_END="100") as address:
        said = curl(f"{address}/embed", "-H", f"X-Knot-Secret: {SECRET}", "-d", '{"tokens": [1, 2, 299]}')
        assert '"positions":[0,1]' in said
        assert '"status":"ok"' in said
