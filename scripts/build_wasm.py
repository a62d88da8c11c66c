"""Builds the engine as WebAssembly: `build/pipeline.wasm` and `build/pipeline-relaxed.wasm`.

The toolchain is chosen here, in this order:

1. rustup's own `wasm32-unknown-unknown` target, when it is installed;
2. the same, after `rustup target add`;
3. Debian's `rustc-web`, `cargo-web`, `rust-web-src` and `lld-19`, with which the standard library
   is compiled once and kept under the user's cache.

When none of them works the error says what to install. Nothing is rebuilt while the crate's sources,
the toolchain and this script are unchanged.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CRATE = ROOT / "rust" / "distributed-inference"
OUT = ROOT / "build"
# Half of what the linker gives: an isolate's memory is dear, and the deepest calls need some tens of KB.
STACK_BYTES = 512 << 10
MODULES = {"pipeline": "+simd128", "pipeline-relaxed": "+simd128,+relaxed-simd"}


class ToolchainError(Exception):
    """No toolchain here can compile for the platform."""


@dataclass(frozen=True)
class Platform:
    """What to compile for, and what Debian's compiler takes for it."""

    name: str
    target: str
    crates: str
    """Of the standard library."""
    linker: str
    packages: tuple[str, ...]


WASM = Platform(
    "wasm", "wasm32-unknown-unknown", "std,panic_abort", "wasm-ld-19",
    ("rustc-web", "cargo-web", "rust-web-src", "lld-19"),
)  # fmt: skip


@dataclass(frozen=True)
class Toolchain:
    """How to call a compiler that has a standard library for the platform."""

    name: str
    cargo: str
    env: dict[str, str]
    rustflags: tuple[str, ...]


def run(*command: str, env: dict[str, str] | None = None, cwd: Path | None = None) -> str:
    """Runs a command; returns what it printed, or raises with what it complained about."""
    done = subprocess.run(
        command, cwd=cwd, env={**os.environ, **(env or {})}, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise ToolchainError(f"{' '.join(command)} failed:\n{done.stderr[-4000:]}")
    return done.stdout


def rustup_toolchain(platform: Platform = WASM) -> Toolchain | None:
    """rustup's toolchain, when it has the target or can still add it."""
    if not shutil.which("rustup"):
        return None
    toolchain = Toolchain("rustup", "cargo", {}, ())
    if platform.target in run("rustup", "target", "list", "--installed").split():
        return toolchain
    try:
        # Without a network this may hang on retries; a minute is plenty for a download that works.
        subprocess.run(
            ["rustup", "target", "add", platform.target],
            env={**os.environ, "RUSTUP_MAX_RETRIES": "0"},
            capture_output=True,
            timeout=60,
            check=True,
        )
    except (subprocess.SubprocessError, OSError):
        return None
    return toolchain


def debian_toolchain(platform: Platform = WASM) -> Toolchain | None:
    """Debian's compiler and its standard library, compiled once for the platform and cached."""
    rustc, cargo, linker = Path("/usr/bin/rustc"), Path("/usr/bin/cargo"), shutil.which(platform.linker)
    if not (rustc.exists() and cargo.exists() and linker and debian_library()):
        install_debian_packages(platform.packages)
        linker = shutil.which(platform.linker)
    library = debian_library()
    if not (rustc.exists() and cargo.exists() and linker and library):
        return None
    sysroot = compile_standard_library(rustc, cargo, library, platform)
    return Toolchain(
        "Debian rustc-web",
        str(cargo),
        {"RUSTC": str(rustc)},
        (f"--sysroot={sysroot}", f"-Clinker={linker}"),
    )


def debian_library() -> Path | None:
    """The sources of the standard library that `rust-web-src` installs."""
    if not shutil.which("dpkg"):
        return None
    listed = subprocess.run(["dpkg", "-L", "rust-web-src"], capture_output=True, text=True, check=False)
    found = [Path(line).parent for line in listed.stdout.splitlines() if line.endswith("/library/vendor")]
    return found[0] if found else None


def install_debian_packages(packages: Sequence[str]) -> None:
    """Installs the Debian packages when that needs no password; otherwise leaves things as they are."""
    if not shutil.which("apt-get") or os.geteuid() != 0:
        return
    say("installing " + " ".join(packages))
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    subprocess.run(["apt-get", "update", "-qq"], env=environment, check=False)
    subprocess.run(
        ["apt-get", "install", "-y", "-qq", *packages],
        env=environment,
        stdout=subprocess.DEVNULL,
        check=False,
    )


def compile_standard_library(rustc: Path, cargo: Path, library: Path, platform: Platform) -> Path:
    """Compiles core, alloc and std for the platform from Debian's sources; returns the sysroot."""
    version = run(str(rustc), "-vV")
    key = hashlib.sha256(version.encode()).hexdigest()[:16]
    caches = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "knot"
    cache = caches / f"{platform.name}-sysroot-{key}"
    if (cache / "complete").exists():
        return cache
    say(f"compiling the standard library for {platform.name} (about two minutes, once)")
    work = cache.with_name(cache.name + ".partial")
    shutil.rmtree(work, ignore_errors=True)
    (work / "src").mkdir(parents=True)
    (work / "src" / "lib.rs").write_text("#![no_std]\n")
    (work / "Cargo.toml").write_text(
        '[package]\nname = "empty"\nversion = "0.0.0"\nedition = "2021"\n\n[workspace]\n'
    )
    # Debian's packages ship the standard library's own dependencies beside it; the replacement of
    # the registry holds for this one build and never for the crate.
    run(
        str(cargo), "build", "--release", "--offline", "--target", platform.target,
        "-Z", f"build-std={platform.crates}",
        "--config", "source.crates-io.replace-with='v'",
        "--config", f"source.v.directory='{library / 'vendor'}'",
        env={"RUSTC": str(rustc), "RUSTC_BOOTSTRAP": "1", "RUSTFLAGS": "-Cembed-bitcode=yes"},
        cwd=work,
    )  # fmt: skip
    rlibs = work / "lib" / "rustlib" / platform.target / "lib"
    rlibs.mkdir(parents=True)
    for rlib in (work / "target" / platform.target / "release" / "deps").glob("*.rlib"):
        if not rlib.name.startswith("libempty"):
            shutil.copy2(rlib, rlibs)
    shutil.rmtree(work / "target")
    (work / "complete").touch()
    shutil.rmtree(cache, ignore_errors=True)
    work.rename(cache)
    return cache


TOOLCHAINS = {"rustup": rustup_toolchain, "debian": debian_toolchain}


def toolchain(wanted: str) -> Toolchain:
    """The first toolchain that can compile to wasm, or the one named."""
    choices = TOOLCHAINS.values() if wanted == "auto" else [TOOLCHAINS[wanted]]
    found = next((toolchain for choose in choices if (toolchain := choose())), None)
    if found is None:
        raise ToolchainError(
            f"no Rust toolchain here compiles to {WASM.target}. Install one of them and run this again:\n"
            f"  rustup target add {WASM.target}\n"
            f"  apt-get install {' '.join(WASM.packages)}"
        )
    return found


def fingerprint() -> str:
    """Changes whenever a source of the module changes."""
    digest = hashlib.sha256()
    sources = [ROOT / "Cargo.toml", ROOT / "Cargo.lock", CRATE / "Cargo.toml", Path(__file__)]
    for path in sorted([*sources, *(CRATE / "src").rglob("*.rs")]):
        if path.exists():
            digest.update(str(path.relative_to(ROOT)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def build(force: bool = False, wanted: str = "auto") -> dict[str, Path]:
    """Builds every module that is out of date; returns name → path."""
    outputs = {name: OUT / f"{name}.wasm" for name in MODULES}
    stamp, current = OUT / "pipeline.stamp", fingerprint()
    if (
        not force
        and stamp.exists()
        and stamp.read_text() == current
        and all(p.exists() for p in outputs.values())
    ):
        return outputs
    chosen = toolchain(wanted)
    work = ROOT / "target" / f"wasm-{chosen.name.split()[0].lower()}"
    OUT.mkdir(exist_ok=True)
    for name, features in MODULES.items():
        say(f"compiling {name}.wasm with {chosen.name}")
        flags = (*chosen.rustflags, f"-Ctarget-feature={features}", f"-Clink-arg=-zstack-size={STACK_BYTES}")
        run(
            chosen.cargo, "rustc", "--profile", "wasm", "--lib", "--crate-type", "cdylib",
            "--target", WASM.target, "--target-dir", str(work / name),
            env={**chosen.env, "CARGO_ENCODED_RUSTFLAGS": "\x1f".join(flags)},
            cwd=CRATE,
        )  # fmt: skip
        made = work / name / WASM.target / "wasm" / "distributed_inference.wasm"
        partial = outputs[name].with_suffix(".wasm.partial")
        shutil.copy2(made, partial)
        partial.rename(outputs[name])
    stamp.write_text(current)
    return outputs


def say(message: str) -> None:
    """Progress, to stderr."""
    print(f"{Path(sys.argv[0]).stem}: {message}", file=sys.stderr, flush=True)


def main() -> int:
    """Builds and prints the sizes."""
    parser = argparse.ArgumentParser(description="Build the engine as WebAssembly.")
    parser.add_argument("--force", action="store_true", help="rebuild even when nothing changed")
    parser.add_argument("--toolchain", choices=["auto", *TOOLCHAINS], default="auto", help="which to use")
    options = parser.parse_args()
    try:
        outputs = build(options.force, options.toolchain)
    except ToolchainError as error:
        print(f"build_wasm: {error}", file=sys.stderr)
        return 1
    for name, path in outputs.items():
        say(f"{name}.wasm: {path.stat().st_size / 1024:.0f} KB")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
