from __future__ import annotations

import re
import struct
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "scripts"))

import offline_pyodide  # noqa: E402
import stage  # noqa: E402
import wrangler_config  # noqa: E402
from offline_pyodide import BundleModule, OfflineError  # noqa: E402

from emulator.local import LIBRARIES  # noqa: E402
from emulator.wrangler import read_wrangler  # noqa: E402
from knot.topology import Topology, cluster_workers, split  # noqa: E402


def decoded(message: bytes) -> list[tuple[str, int, int, bytes]]:
    """A reader of the same layout, written apart: (name, type, tag, bytes) of every module."""
    segments, words = struct.unpack_from("<II", message)
    assert segments == 0
    body = message[8:]
    assert len(body) == 8 * words

    def follow(at: int) -> tuple[int, int, int]:
        low, high = struct.unpack_from("<II", body, at)
        assert low & 3 == 1
        return at + 8 + 8 * (low >> 2), high & 7, high >> 3

    assert struct.unpack_from("<IHH", body) == (0, 0, 1)
    table, size, count = follow(8)
    assert size == 7
    tag, data, pointers = struct.unpack_from("<IHH", body, table)
    assert (data, pointers, count) == (1, 3, 4 * (tag >> 2))
    found = []
    for index in range(tag >> 2):
        at = table + 8 + 32 * index
        kind, union = struct.unpack_from("<HH", body, at)
        name_at, _, name_length = follow(at + 8)
        bytes_at, _, length = follow(at + 16)
        name = body[name_at : name_at + name_length]
        assert name.endswith(b"\0")
        found.append((name[:-1].decode(), kind, union, body[bytes_at : bytes_at + length]))
    return found


def test_a_bundle_says_every_module_with_its_bytes() -> None:
    modules = [BundleModule("a:one", 0, b"text"), BundleModule("b", 1, b""), BundleModule("c", 2, b"x" * 17)]
    assert decoded(offline_pyodide.encode_bundle(modules)) == [
        ("a:one", 2, 0, b"text"),
        ("b", 2, 1, b""),
        ("c", 2, 2, b"x" * 17),
    ]


def test_glue_that_is_not_the_one_we_know_is_refused_by_name() -> None:
    with pytest.raises(OfflineError, match="_createPyodideModule"):
        offline_pyodide.patched_glue("export default 1;")


def test_a_package_of_another_version_is_refused_with_both_versions(tmp_path: Path) -> None:
    (tmp_path / "package.json").write_text('{"version": "1.2.3"}')
    with pytest.raises(OfflineError, match=r"1\.2\.3, expected 314\.0\.6"):
        offline_pyodide.pyodide_bundle(tmp_path)


def test_wrangler_toml_says_what_the_topology_says() -> None:
    assert (ROOT / "wrangler.toml").read_text() == wrangler_config.render(
        "qwen-coder-7b.knot", 28, 151_936, 2, 8
    ), "run `python scripts/wrangler_config.py`"


def test_offline_environments_differ_in_their_flags_only() -> None:
    environments = tomllib.loads((ROOT / "wrangler.toml").read_text())["env"]
    plain = [name for name in environments if not name.endswith("-offline")]
    assert len(plain) == 13
    for name in plain:
        twin = dict(environments[f"{name}-offline"])
        flags = twin.pop("compatibility_flags")
        assert set(flags) - set(environments[name]["compatibility_flags"]) == {
            "python_workers_development",
            "experimental",
        }
        assert twin == {
            key: value for key, value in environments[name].items() if key != "compatibility_flags"
        }


def test_every_environment_is_a_worker_of_the_cluster_with_its_bindings() -> None:
    topology = Topology(split(28, 2), split(151_936, 8))
    for spec in cluster_workers(28, topology, "qwen-coder-7b.knot", {}):
        found = read_wrangler(ROOT / "wrangler.toml", {"entry": ROOT / spec.folder / "entry.py"}, spec.name)
        assert found.name == f"knot-{spec.name}"
        assert dict(found.vars) == dict(spec.variables)
        assert dict(found.r2) == dict(spec.buckets)
        assert dict(found.kv) == dict(spec.key_values)
        assert {name: found.service(name).worker for name in found.services} == {
            name: f"knot-{worker}" for name, worker in spec.services.items()
        }
        for name, binding in spec.objects.items():
            script = f"knot-{binding.script or spec.name}"
            assert found.object_class(name) == (script, binding.class_name)


@pytest.mark.wasm
@pytest.mark.parametrize("folder", stage.FOLDERS)
def test_a_bundle_has_what_its_entry_imports_and_no_object_of_another_worker(folder: str) -> None:
    files = stage.bundle_files(folder)
    assert {"entry.py", "boundary.py", "boundary.js", "pipeline.wasm", "protocol/calls.py"} <= files.keys()
    objects = {name for name in files if name.startswith("durable_objects/") and name.endswith("_object.py")}
    expected = {
        "workers/station": {"durable_objects/station_object.py"},
        "workers/cobordism": {"durable_objects/shard_object.py"},
        "workers/gateway": {"durable_objects/session_object.py"},
    }
    assert objects == expected.get(folder, set())
    assert not {"knot/digests.py", "knot/convert.py", "engine/native.py", "engine/wasm.py"} & files.keys()


@pytest.mark.wasm
@pytest.mark.parametrize("folder", stage.FOLDERS)
def test_libraries_are_in_the_bundles_of_those_alone_who_import_them(folder: str) -> None:
    files = stage.bundle_files(folder)
    found = {name.partition("/")[0] for name in files} & stage.LIBRARIES.keys()
    assert found == set(LIBRARIES.get(folder, ())), "and the emulator has the same"
    assert not [name for name in files if name.endswith(".so")]


@pytest.mark.wasm
def test_an_import_that_nobody_has_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "entry.py").write_text("import numpy\n")
    monkeypatch.setattr(stage, "ROOT", tmp_path)
    with pytest.raises(stage.StageError, match="bad imports numpy"):
        stage.bundle_files("bad")


@pytest.mark.wasm
def test_staging_twice_gives_the_same_bytes_and_drops_what_is_no_longer_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stage, "BUNDLES", tmp_path)
    target = stage.stage("workers/station")
    first = {path: path.read_bytes() for path in target.rglob("*") if path.is_file()}
    (target / "stray.py").write_text("")
    assert stage.stage("workers/station") == target
    assert {path: path.read_bytes() for path in target.rglob("*") if path.is_file()} == first
    sizes = [stage.gzipped_size(stage.bundle_files("workers/station").items()) for _ in range(2)]
    assert sizes[0] == sizes[1] < stage.MOST_GZIPPED


def test_every_test_that_the_page_names_is_there() -> None:
    named = re.findall(r"`(test_\w+)`", (ROOT / "docs" / "workerd.md").read_text(encoding="utf-8"))
    assert len(named) > 10
    written = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").glob("test_*.py"))
    for name in named:
        assert f"def {name}(" in written, name
