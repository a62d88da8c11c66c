"""Makes what real workerd needs to run Python Workers without a network, out of npm packages alone.

`build/workerd/pyodide_dev.capnp.bin` is the Pyodide bundle that workerd looks for under the name `dev`, which
the compatibility flags `python_workers_development` and `experimental` choose and whose checksum is not
compared. `build/workerd/workerd` is the binary with that folder on its command line; Miniflare and wrangler
start it when MINIFLARE_WORKERD_PATH names it.

    python scripts/offline_pyodide.py
"""

from __future__ import annotations

import json
import platform
import stat
import struct
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parent.parent
FOLDER: Final = ROOT / "build" / "workerd"
BUNDLE: Final = "pyodide_dev.capnp.bin"
WRAPPER: Final = "workerd"
PYODIDE: Final = "314.0.6"

# What workerd forbids and its own module provides. The names after `import` are that module's.
PRELUDE: Final = """import {
  addEventListener, getRandomValues, location, monotonicDateNow, newWasmModule, patchedApplyFunc,
  wasmInstantiate,
} from "pyodide-internal:builtin_wrappers";
"""
# Text of the glue, what stands in its place, and how often it is there at least.
PATCHES: Final = (
    ("async function _createPyodideModule(", "export async function _createPyodideModule(", 1),
    ("new WebAssembly.Module(", "newWasmModule(", 3),
    ("WebAssembly.instantiate(", "wasmInstantiate(", 2),
    ("Date.now", "monotonicDateNow", 2),
    ("crypto.getRandomValues(view)", "getRandomValues(Module,view)", 1),
    ("Function.prototype.apply.apply(func,[this_,args])", "patchedApplyFunc(API,func,this_,args)", 1),
    ("export default _createPyodideModule;", "", 1),
)

SOURCE, WASM, DATA = 0, 1, 2
INTERNAL = 2


class OfflineError(Exception):
    """Something is missing or other than expected; the sentence says what to do."""


@dataclass(frozen=True, slots=True)
class BundleModule:
    """A module of the bundle: its name, which member of the union it is, and its bytes."""

    name: str
    kind: int
    data: bytes


def encode_bundle(modules: Sequence[BundleModule]) -> bytes:
    """A Cap'n Proto message of one segment: a struct with one list of modules.

    A module is a struct of one data word (type, then the union's tag, 16 bits each) and three pointers (name,
    bytes, and a declaration that stays null). Raises nothing; see capnproto.org/encoding.html for the layout.
    """
    blobs: list[bytes] = []
    table = bytearray()
    words_of_table = 4 * len(modules)
    # Word 0 is the root pointer, word 1 the struct's only pointer, word 2 the list's tag.
    free = 3 + words_of_table
    for index, module in enumerate(modules):
        at = 3 + 4 * index
        table += struct.pack("<HHI", INTERNAL, module.kind, 0)
        for slot, data in ((1, module.name.encode() + b"\0"), (2, module.data)):
            table += _list_pointer(free - (at + slot) - 1, 2, len(data))
            padded = data + bytes(-len(data) % 8)
            blobs.append(padded)
            free += len(padded) // 8
        table += bytes(8)
    segment = b"".join(
        (
            struct.pack("<IHH", 0, 0, 1),
            _list_pointer(0, 7, words_of_table),
            struct.pack("<IHH", len(modules) << 2, 1, 3),
            table,
            *blobs,
        )
    )
    return struct.pack("<II", 0, len(segment) // 8) + segment


def _list_pointer(offset: int, size: int, count: int) -> bytes:
    return struct.pack("<II", offset << 2 | 1, count << 3 | size)


def patched_glue(source: str) -> str:
    """Pyodide's glue as workerd can load it. Raises `OfflineError` when it is not the glue we know."""
    for found, instead, least in PATCHES:
        count = source.count(found)
        if count < least:
            raise OfflineError(
                f"pyodide.asm.mjs has {found!r} {count} times, expected {least} at least: the patches in "
                f"{Path(__file__).name} are for pyodide {PYODIDE}"
            )
        source = source.replace(found, instead)
    return PRELUDE + source


def pyodide_bundle(package: Path) -> bytes:
    """The bundle, from the npm package `pyodide`."""
    manifest = package / "package.json"
    if not manifest.exists():
        raise OfflineError(f"{package} is missing: run `npm ci`")
    version = json.loads(manifest.read_text())["version"]
    if version != PYODIDE:
        raise OfflineError(f"{package} is pyodide {version}, expected {PYODIDE}: run `npm ci`")
    glue = patched_glue((package / "pyodide.asm.mjs").read_text())
    return encode_bundle(
        [
            BundleModule("pyodideRuntime-internal:pyodide.asm", SOURCE, glue.encode()),
            BundleModule(
                "pyodideRuntime-internal:pyodide.asm.wasm", WASM, (package / "pyodide.asm.wasm").read_bytes()
            ),
            BundleModule(
                "pyodideRuntime-internal:python_stdlib.zip",
                DATA,
                (package / "python_stdlib.zip").read_bytes(),
            ),
        ]
    )


def workerd_binary(modules: Path) -> Path:
    """The binary that the npm package `workerd` brought for this machine."""
    system = {"Linux": "linux", "Darwin": "darwin"}.get(platform.system(), "")
    machine = {"x86_64": "64", "aarch64": "arm64", "arm64": "arm64"}.get(platform.machine(), "")
    path = modules / "@cloudflare" / f"workerd-{system}-{machine}" / "bin" / "workerd"
    if not path.exists():
        raise OfflineError(f"{path} is missing: run `npm ci` on Linux or macOS, x86-64 or arm64")
    return path


# workerd takes the flags after `serve`; whatever else it is asked for passes through.
WRAPPER_TEXT: Final = """#!/bin/sh
# Starts workerd with the Pyodide bundle beside this file, and with a snapshot where KNOT_SNAPSHOT says so.
folder=$(cd "$(dirname "$0")" && pwd)
if [ "$1" = serve ]; then
  shift
  case "$KNOT_SNAPSHOT" in
    save) set -- --python-save-snapshot --python-snapshot-dir="$KNOT_SNAPSHOT_DIR" "$@" ;;
    load) set -- --python-load-snapshot="snapshot.bin" --python-snapshot-dir="$KNOT_SNAPSHOT_DIR" "$@" ;;
  esac
  exec "%s" serve --pyodide-bundle-disk-cache-dir="$folder" "$@"
fi
exec "%s" "$@"
"""


def make(modules: Path = ROOT / "node_modules", folder: Path = FOLDER) -> Path:
    """Makes bundle and wrapper in `folder`, unless they are there already; returns the wrapper."""
    binary = workerd_binary(modules)
    folder.mkdir(parents=True, exist_ok=True)
    stamp = folder / "stamp"
    current = f"{PYODIDE} {Path(__file__).stat().st_mtime_ns} {binary}"
    wrapper = folder / WRAPPER
    if stamp.exists() and stamp.read_text() == current:
        return wrapper
    (folder / BUNDLE).write_bytes(pyodide_bundle(modules / "pyodide"))
    wrapper.write_text(WRAPPER_TEXT % (binary, binary))
    wrapper.chmod(wrapper.stat().st_mode | stat.S_IXUSR | stat.S_IXGRP | stat.S_IXOTH)
    stamp.write_text(current)
    return wrapper


def main() -> int:
    """Makes them, and says where."""
    try:
        print(make())
    except OfflineError as error:
        print(f"offline_pyodide: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
