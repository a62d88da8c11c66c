"""Finds a Rust that works here, and runs a command with it: `python3 scripts/rust.py cargo test`.

In this order: cargo as it is on the PATH; the same with the toolchains beside it, when rustup cannot find any
(as with a HOME that is not the one it was installed for); a toolchain that rustup installs now; Debian's
`rustc-web` and `cargo-web`, which also compile for this machine.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

LEAST = (1, 89)
HELP = (
    f"no Rust of at least {LEAST[0]}.{LEAST[1]} works here. Install it with rustup, open a new shell; or:\n"
    "  apt-get install rustc-web cargo-web"
)


class RustMissing(Exception):
    """No usable Rust; the sentence says how to get one."""


@lru_cache(maxsize=1)
def rust_environment() -> dict[str, str]:
    """What to add to the environment so that cargo works. Raises `RustMissing`."""
    for addition in _candidates():
        if _works({**os.environ, **addition}):
            return addition
    raise RustMissing(HELP)


def _candidates() -> Iterator[dict[str, str]]:
    yield {}
    cargo = shutil.which("cargo")
    if cargo is not None:
        beside = Path(cargo).parent.parent.parent / ".rustup"
        if (beside / "toolchains").is_dir():
            yield {"RUSTUP_HOME": str(beside)}
    if shutil.which("rustup"):
        install = ["rustup", "toolchain", "install", "stable", "--profile", "minimal"]
        try:
            subprocess.run(
                [*install, "--component", "rustfmt", "--component", "clippy"],
                capture_output=True, timeout=600, check=True,
            )  # fmt: skip
            yield {"RUSTUP_TOOLCHAIN": "stable"}
        except (OSError, subprocess.SubprocessError):
            pass
    if Path("/usr/bin/cargo").exists():
        yield {"PATH": f"/usr/bin{os.pathsep}{os.environ.get('PATH', '')}", "RUSTC": "/usr/bin/rustc"}


def _works(environment: dict[str, str]) -> bool:
    try:
        done = subprocess.run(
            ["cargo", "--version"], env=environment, capture_output=True, text=True, timeout=60, check=False
        )
    except (OSError, subprocess.SubprocessError):
        return False
    version = re.match(r"cargo (\d+)\.(\d+)", done.stdout)
    return done.returncode == 0 and version is not None and (int(version[1]), int(version[2])) >= LEAST


def main() -> int:
    """Runs the command line with a Rust that works."""
    try:
        addition = rust_environment()
    except RustMissing as error:
        print(f"rust: {error}", file=sys.stderr)
        return 1
    environment = {**os.environ, **addition}
    program = shutil.which(sys.argv[1], path=environment["PATH"]) if len(sys.argv) > 1 else None
    if program is None:
        print("usage: rust.py COMMAND [ARGUMENT ...]", file=sys.stderr)
        return 2
    os.execve(program, sys.argv[1:], environment)
    return 1


if __name__ == "__main__":
    raise SystemExit(main())
