"""Runs the crate's tests for 64-bit ARM, on a processor that QEMU plays. On ARM itself `cargo test` will do.

The compiler is rustup's, when it has the `aarch64-unknown-linux-gnu` target or can add it, else Debian's;
linker and QEMU are Debian's. What is missing is installed when that needs no password, otherwise the error
says what to install. The tests are those of the optimised crate, which is what hosts run.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

from build_wasm import (
    CRATE,
    ROOT,
    Platform,
    Toolchain,
    ToolchainError,
    debian_toolchain,
    install_debian_packages,
    rustup_toolchain,
)

EMULATOR = "qemu-aarch64"
LIBRARIES = "/usr/aarch64-linux-gnu"
TOOLS = ("qemu-user", "gcc-aarch64-linux-gnu")
ARM = Platform(
    "arm", "aarch64-unknown-linux-gnu", "std,panic_unwind,test", "aarch64-linux-gnu-gcc",
    ("rustc-web", "cargo-web", "rust-web-src", *TOOLS),
)  # fmt: skip


def toolchain() -> Toolchain:
    """A compiler for ARM, with linker and emulator beside it."""
    if not tools_are_there():
        install_debian_packages(TOOLS)
    found = (rustup_toolchain(ARM) or debian_toolchain(ARM)) if tools_are_there() else None
    if found is None:
        raise ToolchainError(
            "the tests for ARM need a compiler, a linker and QEMU. Install them and run this again:\n"
            f"  apt-get install {' '.join(ARM.packages)}\n"
            f"With rustup, `rustup target add {ARM.target}` and {' '.join(TOOLS)} will do."
        )
    return found


def tools_are_there() -> bool:
    """Whether linker and emulator are installed."""
    return all(shutil.which(tool) for tool in (ARM.linker, EMULATOR))


def main() -> int:
    """Runs the tests, with further arguments for `cargo test`; returns what it returned."""
    try:
        chosen = toolchain()
    except ToolchainError as error:
        print(f"test_arm: {error}", file=sys.stderr)
        return 1
    runner = f"CARGO_TARGET_{ARM.target.upper().replace('-', '_')}_RUNNER"
    environment = {
        **os.environ,
        **chosen.env,
        runner: f"{EMULATOR} -L {LIBRARIES}",
        "CARGO_ENCODED_RUSTFLAGS": "\x1f".join((*chosen.rustflags, f"-Clinker={ARM.linker}")),
    }
    command = [
        chosen.cargo, "test", "--quiet", "--release", "--lib", "--tests", "--target", ARM.target,
        "--target-dir", str(ROOT / "target" / f"arm-{chosen.name.split()[0].lower()}"), *sys.argv[1:],
    ]  # fmt: skip
    return subprocess.run(command, cwd=CRATE, env=environment, check=False).returncode


if __name__ == "__main__":
    raise SystemExit(main())
