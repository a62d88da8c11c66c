"""The tests for ARM: how they are run, and what is said where they cannot be."""

from __future__ import annotations

import importlib
import stat
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"


def nothing(_: object) -> None:
    """There is none."""


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setattr(sys, "path", [str(SCRIPTS), *sys.path])
    monkeypatch.setattr(sys, "argv", ["test_arm.py", "kernels"])
    module = importlib.import_module("test_arm")
    monkeypatch.setattr(module, "install_debian_packages", nothing)
    return module


def test_cargo_is_told_how_to_link_and_how_to_run(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    cargo = tmp_path / "cargo"
    cargo.write_text(
        "#!/bin/sh\n"
        f'echo "$*" > {tmp_path}/arguments\n'
        f'echo "$CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUNNER" > {tmp_path}/runner\n'
        f'echo "$CARGO_ENCODED_RUSTFLAGS" > {tmp_path}/flags\n'
        "exit 7\n"
    )
    cargo.chmod(cargo.stat().st_mode | stat.S_IXUSR)
    fake = script.Toolchain("fake", str(cargo), {}, ("--sysroot=/nowhere",))
    monkeypatch.setattr(script, "toolchain", lambda: fake)
    assert script.main() == 7
    arguments = (tmp_path / "arguments").read_text().split()
    assert arguments[0] == "test"
    assert arguments[-1] == "kernels"
    assert "aarch64-unknown-linux-gnu" in arguments
    assert (tmp_path / "runner").read_text().startswith("qemu-aarch64 -L ")
    assert (tmp_path / "flags").read_text() == "--sysroot=/nowhere\x1f-Clinker=aarch64-linux-gnu-gcc\n"


@pytest.mark.parametrize("tools", [True, False])
def test_what_is_missing_is_named(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tools: bool
) -> None:
    monkeypatch.setattr(script, "tools_are_there", lambda: tools)
    monkeypatch.setattr(script, "rustup_toolchain", nothing)
    monkeypatch.setattr(script, "debian_toolchain", nothing)
    assert script.main() == 1
    complaint = capsys.readouterr().err
    assert "apt-get install rustc-web cargo-web rust-web-src qemu-user gcc-aarch64-linux-gnu" in complaint
    assert "rustup target add aarch64-unknown-linux-gnu" in complaint
