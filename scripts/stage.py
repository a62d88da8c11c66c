"""Lays out the bundles of the Workers under `build/bundles`, and the SDK under `python_modules`.

A bundle is what is uploaded: whatever the Worker's entry imports of its own folder and of the packages, the
one boundary to JavaScript, and the engine's WebAssembly. The same sources give the same bytes. Wrangler runs
this as its custom build.

    python scripts/stage.py [FOLDER ...]    for example workers/station; all of them unless given
"""

from __future__ import annotations

import ast
import contextlib
import gzip
import importlib.util
import io
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parent.parent
BUNDLES: Final = ROOT / "build" / "bundles"
SDK: Final = ROOT / "python_modules"
SDK_VERSION: Final = "1.9.5"
FOLDERS: Final = tuple(
    f"workers/{name}" for name in ("station", "cobordism", "layer_warden", "cobordism_warden", "gateway")
)
PACKAGES: Final = ("protocol", "durable_objects", "engine", "knot")
# Libraries of the environment that a bundle takes along whole when something in it imports them. They are of
# Python alone: what they have in C, they can do without.
LIBRARIES: Final[dict[str, tuple[str, ...]]] = {"jinja2": ("markupsafe",), "markupsafe": ()}
# Modules that the platform and the SDK bring.
PLATFORM: Final = ("workers", "pyodide", "pyodide_js")
BOUNDARY: Final = "workers/boundary.py"
OTHERS: Final = ("workers/boundary.js", "build/pipeline.wasm", "build/pipeline-relaxed.wasm")
MOST_GZIPPED: Final = 10_000_000


class StageError(Exception):
    """A bundle that cannot be laid out; the sentence says what is missing."""


def bundle_files(folder: str) -> dict[str, Path]:
    """The files of a Worker's bundle: path in the bundle → file. Raises `StageError`.

    They are what its entry imports, directly or not, and nothing else.
    """
    found: dict[str, Path] = {}
    script = ROOT / folder / "entry.js"
    if script.is_file():
        return {"entry.js": script, "pipeline.wasm": _made("build/pipeline.wasm")}
    waiting = ["boundary", "entry"]
    while waiting:
        module = waiting.pop()
        library = module.partition(".")[0]
        if library in LIBRARIES:
            found.update(library_files(library))
            waiting += [name for name in LIBRARIES[library] if f"{name}/__init__.py" not in found]
            continue
        path = _file_of(module, folder)
        if path is None:
            continue
        inside = module.partition(".")[0] in PACKAGES
        name = str(path.relative_to(ROOT)) if inside else path.name
        if name not in found:
            found[name] = path
            waiting += _imports(path)
    for other in OTHERS:
        found[Path(other).name] = _made(other)
    return dict(sorted(found.items()))


def library_files(name: str) -> dict[str, Path]:
    """A library's Python files: path in the bundle → file. Raises `StageError`."""
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        raise StageError(f"{name} is missing: run `make setup`, and this with .venv/bin/python")
    folder = Path(spec.origin).parent
    return {f"{name}/{path.relative_to(folder)}": path for path in sorted(folder.rglob("*.py"))}


def _made(name: str) -> Path:
    path = ROOT / name
    if not path.is_file():
        raise StageError(f"{name} is missing: run `make setup`")
    return path


def _file_of(module: str, folder: str) -> Path | None:
    """Where a module is; None when the platform has it. Raises `StageError` when nobody does."""
    first = module.partition(".")[0]
    if first in PACKAGES:
        path = ROOT / module.replace(".", "/")
        candidates = (path / "__init__.py", path.with_suffix(".py"))
    elif module == "boundary":
        candidates = (ROOT / BOUNDARY,)
    else:
        candidates = (ROOT / folder / f"{module}.py",)
    for candidate in candidates:
        if candidate.is_file():
            return candidate
    if first in PLATFORM or first in sys.stdlib_module_names:
        return None
    raise StageError(f"{folder} imports {module}, which neither its bundle nor the platform has")


@cache
def _imports(path: Path) -> tuple[str, ...]:
    """The modules that a file imports. Names taken from a package may be modules of it."""
    found: list[str] = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.append(node.module)
            package = ROOT / node.module.replace(".", "/")
            if node.module.partition(".")[0] in PACKAGES and package.is_dir():
                found += [
                    f"{node.module}.{alias.name}"
                    for alias in node.names
                    if (package / f"{alias.name}.py").is_file()
                ]
    packages = [name.partition(".")[0] for name in found if "." in name]
    return tuple(dict.fromkeys([*found, *(name for name in packages if name in PACKAGES)]))


def bundle_path(folder: str) -> Path:
    """Where a Worker's bundle is laid out."""
    return BUNDLES / Path(folder).name


def stage(folder: str) -> Path:
    """Lays out one bundle; files that are as they should be stay untouched."""
    target = bundle_path(folder)
    files = bundle_files(folder)
    for path in [path for path in target.rglob("*") if path.is_file()]:
        # One that begins with a point is another build's, on its way.
        if not path.name.startswith(".") and str(path.relative_to(target)) not in files:
            path.unlink(missing_ok=True)
    for name, source in files.items():
        copy = target / name
        data = source.read_bytes()
        if not copy.exists() or copy.read_bytes() != data:
            copy.parent.mkdir(parents=True, exist_ok=True)
            # Two builds may run at once.
            partial = copy.with_name(f".{copy.name}.{os.getpid()}")
            partial.write_bytes(data)
            partial.replace(copy)
    return target


def vendor_sdk() -> Path:
    """Installs the Workers SDK for Pyodide's platform into `python_modules`, unless it is there."""
    stamp = SDK / f"workers_runtime_sdk-{SDK_VERSION}.dist-info"
    if stamp.exists():
        return SDK
    # Two builds may run at once: what is not whole has another name.
    partial = SDK.with_name(f".{SDK.name}.{os.getpid()}")
    command = [
        sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps",
        "--no-compile", "--target", str(partial), "--platform", "pyemscripten_2026_0_wasm32",
        "--platform", "any", "--python-version", "3.14", "--implementation", "cp", "--abi", "cp314",
        "--abi", "none", "--only-binary=:all:", f"workers-runtime-sdk=={SDK_VERSION}",
    ]  # fmt: skip
    try:
        done = subprocess.run(command, text=True, capture_output=True, check=False)
        if done.returncode:
            raise StageError(f"the Workers SDK could not be installed:\n{done.stderr[-2000:]}")
        if not stamp.exists():
            shutil.rmtree(SDK, ignore_errors=True)
            with contextlib.suppress(OSError):  # another build's is as good
                partial.rename(SDK)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return SDK


def sdk_files() -> dict[str, Path]:
    """The SDK's files as a bundle has them."""
    return {
        f"python_modules/{path.relative_to(SDK)}": path
        for path in sorted(SDK.rglob("*"))
        if path.is_file() and path.suffix in (".py", ".js", ".pth")
    }


def gzipped_size(files: Iterable[tuple[str, Path]]) -> int:
    """Bytes of the files in one gzipped archive, which is how limits on uploads are counted."""
    packed = io.BytesIO()
    with (
        gzip.GzipFile(fileobj=packed, mode="wb", mtime=0) as stream,
        tarfile.open(fileobj=stream, mode="w") as archive,
    ):
        for name, path in files:
            entry = tarfile.TarInfo(name)
            entry.size = path.stat().st_size
            with path.open("rb") as file:
                archive.addfile(entry, file)
    return packed.tell()


def main(folders: list[str]) -> int:
    """Stages what is asked for, and says how large it is."""
    try:
        vendor_sdk()
        for folder in folders or FOLDERS:
            target = stage(folder)
            size = gzipped_size([*bundle_files(folder).items(), *sdk_files().items()])
            print(f"{target.relative_to(ROOT)}: {size / 1e6:.2f} MB gzipped of {MOST_GZIPPED / 1e6:.0f}")
    except StageError as error:
        print(f"stage: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
