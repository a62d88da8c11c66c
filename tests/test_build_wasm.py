"""The build of the wasm modules: what makes it run again, and what it says when it cannot."""

from __future__ import annotations

import importlib.util
import stat
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).resolve().parent.parent / "scripts" / "build_wasm.py"


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The build script at work on a crate of two files, with a toolchain that only writes down its calls."""
    spec = importlib.util.spec_from_file_location("build_wasm_under_test", SCRIPT)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    crate = tmp_path / "rust" / "distributed-inference"
    (crate / "src" / "deep").mkdir(parents=True)
    (tmp_path / "Cargo.toml").write_text("[workspace]\n")
    (tmp_path / "Cargo.lock").write_text("")
    (crate / "Cargo.toml").write_text("[package]\n")
    (crate / "src" / "lib.rs").write_text("mod deep;\n")
    (crate / "src" / "deep" / "mod.rs").write_text("")
    (tmp_path / "scripts").mkdir()
    copy = tmp_path / "scripts" / "build_wasm.py"
    copy.write_bytes(SCRIPT.read_bytes())
    monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setattr(module, "CRATE", crate)
    monkeypatch.setattr(module, "OUT", tmp_path / "build")
    monkeypatch.setattr(module, "__file__", str(copy))
    cargo = tmp_path / "cargo"
    cargo.write_text(
        "#!/bin/sh\n"
        f'echo "$CARGO_ENCODED_RUSTFLAGS" >> {tmp_path}/calls\n'
        'while [ "$1" != --target-dir ]; do shift; done\n'
        'mkdir -p "$2/wasm32-unknown-unknown/wasm"\n'
        'echo "$CARGO_ENCODED_RUSTFLAGS" > "$2/wasm32-unknown-unknown/wasm/distributed_inference.wasm"\n'
    )
    cargo.chmod(cargo.stat().st_mode | stat.S_IXUSR)
    fake = module.Toolchain("fake", str(cargo), {}, ("--sysroot=/nowhere",))
    monkeypatch.setattr(module, "TOOLCHAINS", {"fake": lambda: fake})
    return module


def calls(script: ModuleType) -> int:
    path = script.ROOT / "calls"
    return len(path.read_text().splitlines()) if path.exists() else 0


def test_both_modules_are_built_with_their_own_features(script: ModuleType) -> None:
    built = script.build()
    assert sorted(built) == ["pipeline", "pipeline-relaxed"]
    plain, relaxed = (built[name].read_text() for name in ("pipeline", "pipeline-relaxed"))
    assert "+simd128" in plain
    assert "relaxed-simd" not in plain
    assert "+simd128,+relaxed-simd" in relaxed
    assert "--sysroot=/nowhere" in plain
    assert not list(script.OUT.glob("*.partial"))


def test_nothing_is_built_again_while_nothing_changed(script: ModuleType) -> None:
    script.build()
    script.build()
    assert calls(script) == 2
    script.build(force=True)
    assert calls(script) == 4


@pytest.mark.parametrize(
    "name",
    [
        "rust/distributed-inference/src/deep/mod.rs",
        "rust/distributed-inference/Cargo.toml",
        "Cargo.toml",
        "Cargo.lock",
        "scripts/build_wasm.py",
    ],
)
def test_a_change_of_any_source_builds_again(script: ModuleType, name: str) -> None:
    script.build()
    before = script.fingerprint()
    path = script.ROOT / name
    path.write_text(path.read_text() + "\n# changed\n")
    assert script.fingerprint() != before
    script.build()
    assert calls(script) == 4


def test_a_source_that_appears_or_moves_changes_the_fingerprint(script: ModuleType) -> None:
    seen = {script.fingerprint()}
    new = script.CRATE / "src" / "new.rs"
    new.write_text("")
    seen.add(script.fingerprint())
    new.rename(new.with_name("other.rs"))
    seen.add(script.fingerprint())
    assert len(seen) == 3


def test_a_module_that_was_deleted_is_built_again(script: ModuleType) -> None:
    built = script.build()
    built["pipeline-relaxed"].unlink()
    script.build()
    assert built["pipeline-relaxed"].exists()


def test_a_failed_compilation_leaves_the_old_stamp_and_says_what_failed(script: ModuleType) -> None:
    script.build()
    stamp = (script.OUT / "pipeline.stamp").read_text()
    (script.ROOT / "Cargo.toml").write_text("[workspace] # changed\n")
    (script.ROOT / "cargo").write_text("#!/bin/sh\necho 'error: it does not compile' >&2\nexit 101\n")
    with pytest.raises(script.ToolchainError, match="it does not compile"):
        script.build()
    assert (script.OUT / "pipeline.stamp").read_text() == stamp != script.fingerprint()


def test_without_a_toolchain_the_error_has_both_commands(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(script, "TOOLCHAINS", {"rustup": lambda: None, "debian": lambda: None})
    monkeypatch.setattr(sys, "argv", ["build_wasm.py"])
    assert script.main() == 1
    complaint = capsys.readouterr().err
    assert "rustup target add wasm32-unknown-unknown" in complaint
    assert "apt-get install rustc-web cargo-web rust-web-src lld-19" in complaint


def test_a_machine_without_rustup_or_debian_has_no_toolchain(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script.shutil, "which", lambda _: None)
    assert script.rustup_toolchain() is None
    assert script.debian_library() is None
