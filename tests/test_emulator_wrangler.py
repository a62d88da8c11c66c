"""Workers from wrangler's own configuration."""

from __future__ import annotations

from pathlib import Path

import pytest

from emulator import EmulatorError, ObjectBinding, ServiceBinding
from emulator.wrangler import read_wrangler

TOML = """
name = "knot"
main = "src/entry.py"
compatibility_date = "2026-09-08"
compatibility_flags = ["python_workers"]
vars = { ROLE = "top" }

[[r2_buckets]]
binding = "BUCKET"
bucket_name = "top"

[env.exit]
vars = { ROLE = "exit", START = "14" }
limits = { cpu_ms = 300000 }

[[env.exit.r2_buckets]]
binding = "BUCKET"
bucket_name = "knots"

[[env.exit.kv_namespaces]]
binding = "CACHE"
id = "abc"

[[env.exit.services]]
binding = "SHARD"
service = "knot-shard"

[[env.exit.services]]
binding = "ADMIN"
service = "knot-shard"
entrypoint = "Admin"

[env.exit.durable_objects]
bindings = [
  { name = "STATION", class_name = "Station" },
  { name = "WARDEN", class_name = "LayerWarden", script_name = "knot-warden" },
]

[[env.exit.migrations]]
tag = "v1"
new_sqlite_classes = ["Station"]

[env.named]
name = "a-name-of-its-own"
main = "other/door.py"
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "wrangler.toml").write_text(TOML)
    return tmp_path / "wrangler.toml"


MODULES = {"entry": Path("entry.py"), "door": Path("door.py")}


def test_an_environment_has_its_own_bindings_and_variables(path: Path) -> None:
    found = read_wrangler(path, MODULES, "exit", {"SECRET": "s"})
    assert (found.name, found.entry, found.modules) == ("knot-exit", "entry", MODULES)
    assert found.vars == {"ROLE": "exit", "START": "14", "SECRET": "s"}
    assert (found.r2, found.kv) == ({"BUCKET": "knots"}, {"CACHE": "abc"})
    assert found.services == {
        "SHARD": ServiceBinding("knot-shard"),
        "ADMIN": ServiceBinding("knot-shard", "Admin"),
    }
    assert found.objects == {
        "STATION": ObjectBinding("Station"),
        "WARDEN": ObjectBinding("LayerWarden", "knot-warden"),
    }
    assert found.object_class("STATION") == ("knot-exit", "Station")
    assert found.object_class("WARDEN") == ("knot-warden", "LayerWarden")


def test_the_top_level_is_a_worker_too_and_an_environment_may_name_itself(path: Path) -> None:
    top = read_wrangler(path, MODULES)
    assert (top.name, top.vars, top.r2) == ("knot", {"ROLE": "top"}, {"BUCKET": "top"})
    named = read_wrangler(path, MODULES, "named")
    assert (named.name, named.entry, named.vars) == ("a-name-of-its-own", "door", {})


@pytest.mark.parametrize(
    ("text", "env", "sentence"),
    [
        ("name = ", None, "no TOML"),
        ("main = 'entry.py'", None, "name is None, expected a text"),
        ("name = 'a'", None, "main is None, expected a text"),
        (TOML, "nothing", "no environment 'nothing'; it has exit, named"),
        ("name = 'a'\nmain = 'entry.py'\nd1_databases = []", None, "d1_databases, which is not emulated"),
        ("name = 'a'\nmain = 'entry.py'\nvars = 3", None, "vars is 3, expected a table"),
        ("name = 'a'\nmain = 'entry.py'\nservices = [1]", None, "expected a list of tables"),
        ("name = 'a'\nmain = 'entry.py'\n[[r2_buckets]]\nbinding = 'B'", None, "bucket_name is None"),
        ("name = 'a'\nmain = 'gone.py'", None, "entry module 'gone' is not in its bundle"),
    ],
)
def test_what_is_wrong_is_named(path: Path, text: str, env: str | None, sentence: str) -> None:
    path.write_text(text)
    with pytest.raises(EmulatorError, match=sentence):
        read_wrangler(path, MODULES, env)


def test_a_file_that_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(EmulatorError, match=r"nowhere\.toml does not exist"):
        read_wrangler(tmp_path / "nowhere.toml", MODULES)
