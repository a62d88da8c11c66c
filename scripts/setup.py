"""Makes the checkout ready: `.venv` with pinned packages, the native engine in it, and the wasm modules.

Needs Python 3.11 or later and Rust. Nothing is done twice: each step is skipped while what it depends on is
unchanged. Run it by `make`; `python3 scripts/setup.py` is the same.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import venv
from collections.abc import Iterable
from pathlib import Path

from rust import RustMissing, rust_environment

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
LOCK = ROOT / "requirements.lock"
CRATE = ROOT / "rust" / "distributed-inference"


class SetupError(Exception):
    """Something is missing that this script cannot bring; the sentence says what to install."""


def say(message: str) -> None:
    """Progress, to stderr."""
    print(f"setup: {message}", file=sys.stderr, flush=True)


def run(*command: str | Path, environment_of_rust: dict[str, str] | None = None) -> None:
    """Runs a command in the checkout. Raises `SetupError` with its last words when it fails."""
    words = [str(word) for word in command]
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    environment |= environment_of_rust or {}
    # Builds call what was installed for them by name.
    environment["PATH"] = f"{VENV / 'bin'}{os.pathsep}{environment['PATH']}"
    done = subprocess.run(words, cwd=ROOT, env=environment, text=True, capture_output=True, check=False)
    if done.returncode:
        said = (done.stdout + done.stderr)[-4000:]
        raise SetupError(f"`{' '.join(words)}` failed:\n{said}")


def digest(paths: Iterable[Path]) -> str:
    """Changes whenever one of the files does, or this Python."""
    state = hashlib.sha256(sys.version.encode())
    for path in sorted(paths):
        state.update(str(path.relative_to(ROOT)).encode() + b"\0" + path.read_bytes() + b"\0")
    return state.hexdigest()


def done_already(name: str, current: str) -> bool:
    """Whether a step was done for the same inputs."""
    stamp = VENV / f"{name}.stamp"
    return stamp.exists() and stamp.read_text() == current


def note(name: str, current: str) -> None:
    """Remembers that a step was done."""
    (VENV / f"{name}.stamp").write_text(current)


def packages() -> None:
    """The virtual environment and the pinned packages."""
    current = digest([LOCK])
    if PYTHON.exists() and done_already("packages", current):
        return
    if not PYTHON.exists():
        say("making .venv")
        venv.create(VENV, with_pip=True, clear=VENV.exists())
    say("installing the pinned packages")
    run(PYTHON, "-m", "pip", "install", "--quiet", "--no-deps", "--disable-pip-version-check", "-r", LOCK)
    note("packages", current)


def native_engine() -> None:
    """The project itself, editable, with its native module."""
    sources = [*(CRATE / "src").rglob("*.rs"), CRATE / "Cargo.toml", ROOT / "Cargo.toml", ROOT / "Cargo.lock"]
    current = digest([*sources, ROOT / "pyproject.toml"])
    if done_already("native", current) and list((ROOT / "engine").glob("_native*.so")):
        return
    try:
        environment = rust_environment()
    except RustMissing as error:
        raise SetupError(str(error)) from error
    say("compiling the native engine (a minute)")
    run(
        PYTHON, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation",
        "--disable-pip-version-check", "--editable", ROOT,
        environment_of_rust=environment,
    )  # fmt: skip
    note("native", current)


def wasm_modules() -> None:
    """`build/pipeline.wasm` and its relaxed twin."""
    environment = {**os.environ, **rust_environment()}
    command = [PYTHON, ROOT / "scripts" / "build_wasm.py"]
    done = subprocess.run(command, cwd=ROOT, env=environment, check=False)
    if done.returncode:
        raise SetupError("the wasm modules could not be built; see above")


def main() -> int:
    """Does what is not done yet."""
    try:
        if sys.version_info < (3, 11):  # noqa: UP036 - this script is run by whatever Python there is
            found = ".".join(map(str, sys.version_info[:2]))
            raise SetupError(f"this is Python {found}, at least 3.11 is needed: make PYTHON=python3.11")
        packages()
        native_engine()
        wasm_modules()
    except SetupError as error:
        print(f"setup: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
