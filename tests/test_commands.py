"""`knot run` and `knot serve` as people meet them: real processes, real HTTP, and the README's own lines."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from synth import make_tiny_knot

pytestmark = pytest.mark.wasm

ROOT = Path(__file__).resolve().parent.parent
KNOT = [sys.executable, "-m", "knot.cli"]
README = (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def knot(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_knot(tmp_path_factory.mktemp("model") / "tiny.knot")


def run_knot(*arguments: str | Path, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*KNOT, *map(str, arguments)], cwd=cwd, capture_output=True, text=True, timeout=120, check=False
    )


def free_ports(count: int) -> int:
    """The first of `count` ports in a row that nobody listens on.

    They are below those that the system gives to outgoing connections, and those of processes that run beside
    each other, whose numbers follow each other, are far apart.
    """
    for first in range(20_000 + os.getpid() * 64 % 10_000, 32_000, count):
        try:
            for port in range(first, first + count):
                with socket.socket() as probe:
                    probe.bind(("127.0.0.1", port))
            return first
        except OSError:
            continue
    raise AssertionError("no free ports")


@contextmanager
def serving(
    knot: Path, data: Path, *arguments: str
) -> Iterator[tuple[subprocess.Popen[str], dict[str, Any]]]:
    """A running `knot serve`, and the line of JSON that it printed when it was ready."""
    port = free_ports(14)
    command = [*KNOT, "serve", str(knot), "--port", str(port), "--data", str(data), *arguments]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, process.stderr.read() if process.stderr else ""
        yield process, json.loads(line)
    finally:
        process.kill()
        process.wait()


def test_run_prints_the_text_and_a_line_of_json_with_all_figures(knot: Path):
    done = run_knot("run", knot, "-p", "def add", "-n", "6", "--temperature", "0", "--json")
    assert done.returncode == 0, done.stderr
    *text, last = done.stdout.splitlines()
    answer = json.loads(last)
    assert "\n".join(text).startswith(answer["text"].splitlines()[0] if answer["text"] else "")
    expected = {
        "prompt_ids", "ids", "text", "finish_reason", "ttft_ms", "prefill_tok_s", "decode_tok_s",
        "stations", "shards", "degraded", "peak_isolate_bytes",
    }  # fmt: skip
    assert expected <= answer.keys()
    assert (answer["stations"], answer["shards"], answer["degraded"]) == (2, 8, False)
    assert 60_000_000 < answer["peak_isolate_bytes"] < 120_000_000


def test_ids_do_not_depend_on_engine_topology_or_residency(knot: Path):
    found = set()
    for options in (
        [],
        ["--engine", "native"],
        ["--stations", "1", "--shards", "1"],
        ["--stations", "3", "--shards", "5", "--residency", "fluid"],
        ["--residency", "resident"],
    ):
        done = run_knot("run", knot, "--ids", "40,41,42,43", "-n", "8", "--json", *options)
        assert done.returncode == 0, done.stderr
        found.add(tuple(json.loads(done.stdout.splitlines()[-1])["ids"]))
    assert len(found) == 1


def test_a_seed_makes_sampling_repeatable(knot: Path):
    command = ["run", knot, "-p", "for", "-n", "8", "--temperature", "1.2", "--seed", "7", "--json"]
    first, second, other = (
        json.loads(run_knot(*arguments).stdout.splitlines()[-1])["ids"]
        for arguments in (command, command, [*command[:-2], "8", "--json"])
    )
    assert first == second != other


def test_chat_puts_the_prompt_in_the_models_own_form(knot: Path):
    done = run_knot("run", knot, "-p", "the fox", "--chat", "-n", "2", "--json")
    assert done.returncode == 0, done.stderr
    ids = json.loads(done.stdout.splitlines()[-1])["prompt_ids"]
    plain = run_knot("run", knot, "-p", "the fox", "-n", "2", "--json")
    assert len(ids) > len(json.loads(plain.stdout.splitlines()[-1])["prompt_ids"])


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["nowhere.gguf", "-p", "x"], "nowhere.gguf is no file"),
        (["KNOT", "--ids", "1,two"], "--ids is"),
        (["KNOT", "--ids", "999999"], "token id 999999 does not exist"),
        (["KNOT", "--ids", "1", "-n", "100000"], "max_tokens"),
        (["KNOT", "-p", "x", "--stations", "99"], "99 stations cannot share"),
        (["KNOT", "-p", "x", "--shards", "0"], "0 shards cannot share"),
        (["KNOT", "-p", ""], "is empty"),
        (["KNOT", "--ids", "1", "--chat"], "--chat takes a message"),
        (["KNOT", "-p", "x", "--temperature", "9"], "temperature"),
        (["KNOT", "-p", "x", "--top-p", "2"], "top_p"),
    ],
)
def test_wrong_input_is_answered_by_one_sentence(knot: Path, arguments: list[str], expected: str):
    done = run_knot("run", *(str(knot) if word == "KNOT" else word for word in arguments))
    assert done.returncode == 1
    assert expected in done.stderr
    assert "Traceback" not in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_a_knot_that_is_damaged_inside_names_the_tensor_and_the_rows(knot: Path, tmp_path: Path):
    data = bytearray(knot.read_bytes())
    data[len(data) // 3] ^= 1
    damaged = tmp_path / "damaged.knot"
    damaged.write_bytes(data)
    done = run_knot("run", damaged, "-p", "def add", "-n", "4", cwd=tmp_path)
    assert done.returncode == 1
    assert "the digest is wrong" in done.stderr
    assert re.search(r"tensor \w+", done.stderr)


@pytest.mark.parametrize("seconds", [0.3, 1.0, 2.0, 3.5])
def test_ctrl_c_stops_a_run_cleanly_at_any_moment(knot: Path, seconds: float):
    command = [*KNOT, "run", str(knot), "-p", "the", "-n", "480", "--ignore-eos", "--residency", "fluid"]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    time.sleep(seconds)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=20)
    assert process.returncode == 130
    assert errors == ""


def test_serve_stops_on_ctrl_c_and_starts_again_where_it_was(knot: Path, tmp_path: Path):
    secrets = []
    for _ in range(2):
        with serving(knot, tmp_path / "data") as (process, ready):
            secrets.append(ready["secret"])
            answer = httpx.get(f"{ready['gateway']}/health", headers=bearer(ready), timeout=60)
            assert answer.json()["status"] == "ok"
            process.send_signal(signal.SIGINT)
            assert process.wait(20) == 0
            assert process.stderr is not None
            assert "Traceback" not in process.stderr.read()
    assert secrets[0] == secrets[1]
    assert (tmp_path / "data" / "secret").stat().st_mode & 0o077 == 0


def bearer(ready: dict[str, Any]) -> dict[str, str]:
    return {"authorization": f"Bearer {ready['secret']}"}


def test_nobody_without_the_secret_is_answered(knot: Path, tmp_path: Path):
    with serving(knot, tmp_path / "data") as (_, ready):
        for name, address in ready.items():
            if not str(address).startswith("http"):
                continue
            path = "/v1/models" if name == "gateway" else "/health"
            answer = httpx.get(address + path, timeout=60)
            assert answer.status_code in (400, 401), name
            assert ready["secret"] not in answer.text


def test_a_port_that_is_taken_is_named(knot: Path, tmp_path: Path):
    port = free_ports(14)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", port))
        taken.listen()
        done = run_knot("serve", knot, "--port", str(port), "--data", tmp_path / "data")
    assert done.returncode == 1
    assert str(port) in done.stderr
    assert "Traceback" not in done.stderr


def test_the_readmes_curl_lines_are_answered(knot: Path, tmp_path: Path):
    block = re.search(r"```bash\n(.*?)```", README, re.DOTALL)
    assert block
    lines = block.group(1).strip().splitlines()
    assert [re.search(r"/(v1/completions|health|embed|forward)", line) is not None for line in lines].count(
        True
    ) == 4
    with serving(knot, tmp_path / "data") as (_, ready):
        ports = {"8080": "gateway", "8081": "entry", "8083": "shard-0"}
        script = block.group(1)
        for port, name in ports.items():
            script = script.replace(f"localhost:{port}", ready[name].removeprefix("http://"))
        # The tiny model has fewer ids than the one that the README serves.
        script = script.replace("504, 3575", "5, 7")
        outputs = []
        for line in script.strip().splitlines():
            done = subprocess.run(
                ["bash", "-euo", "pipefail", "-c", line],
                cwd=tmp_path, env={**os.environ, "SECRET": ready["secret"]},
                capture_output=True, text=True, timeout=120, check=True,
            )  # fmt: skip
            outputs.append(done.stdout)
    completion, health, _, _, forward = outputs
    assert json.loads(completion)["choices"][0]["finish_reason"] in ("length", "stop")
    assert json.loads(health)["status"] == "ok"
    hidden = json.loads(forward)
    assert hidden["status"] == "ok"
    rows = json.loads((tmp_path / "hidden.json").read_text())["hidden"]
    assert len(hidden["hidden"]) == len(rows) == 2
    assert hidden["hidden"] != rows
