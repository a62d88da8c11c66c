"""Modules of an isolate: private, complete for those who look at them, and poorer than CPython's."""

from __future__ import annotations

import os
import pickle
import random
import sys
import typing
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from emulator import EmulatorError, WorkerConfig, bundle
from emulator.loader import BundleError, ModuleSpace

pytestmark = pytest.mark.filterwarnings("error")

Make = Any


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    spaces: list[ModuleSpace] = []

    def space(files: dict[str, str], given: dict[str, ModuleType] | None = None) -> ModuleSpace:
        paths: dict[str, Path] = {}
        for name, source in files.items():
            path = tmp_path / (name.replace(".", "/") + ".py")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(source)
            paths[name] = path
        spaces.append(ModuleSpace("Worker w", paths, given or {}))
        return spaces[-1]

    yield space
    for each in spaces:
        each.close()


def test_the_same_file_is_another_module_in_another_isolate(make: Make) -> None:
    first, second = make({"a": "values = []"}), make({"a": "values = []"})
    first.load("a").values.append(1)
    assert first.load("a").values == [1]
    assert second.load("a").values == []


def test_imports_are_absolute_relative_and_of_whole_packages(make: Make) -> None:
    files = {
        "entry": "import p.q.deep\nfrom p import side\nfrom p.q import deep as again\n"
        "import p.side as s\nx = p.q.deep.x",
        "p.side": "y = 2",
        "p.q.deep": "from ..side import y\nfrom . import near\nfrom .near import z\nx = (y, z, near.z)",
        "p.q.near": "z = 3",
    }
    entry = make(files).load("entry")
    assert entry.x == (2, 3, 3)
    assert entry.again is entry.p.q.deep
    assert entry.side is entry.s


def test_modules_may_import_each_other(make: Make) -> None:
    files = {"a": "import b\nx = 1\ndef f(): return b.y", "b": "import a\ny = 2\ndef g(): return a.x"}
    module = make(files).load("a")
    assert (module.f(), module.b.g()) == (2, 1)


def test_a_module_that_fails_is_run_again_the_next_time(make: Make) -> None:
    space = make({"a": "import b", "b": "raise ValueError('broken')"})
    for _ in range(2):
        with pytest.raises(ValueError, match="broken"):
            space.load("a")


def test_a_bundle_does_not_see_the_projects_or_the_tests_own_modules(make: Make) -> None:
    with pytest.raises(BundleError, match=r"'protocol'.*nothing else"):
        make({"a": "import protocol.calls"}).load("a")
    with pytest.raises(BundleError, match="'emulator_support'"):
        make({"a": "import emulator_support"}).load("a")


@pytest.mark.parametrize(
    "name", ["numpy", "httpx", "ctypes", "sqlite3", "subprocess", "multiprocessing", "ssl", "js"]
)
def test_what_a_worker_does_not_have_is_refused_by_name(make: Make, name: str) -> None:
    with pytest.raises(BundleError, match=f"Worker w imports '{name}': ") as caught:
        make({"a": f"import {name}"}).load("a")
    assert isinstance(caught.value, ImportError)


def test_a_module_that_is_missing_from_a_package_is_an_import_error(make: Make) -> None:
    with pytest.raises(BundleError, match=r"no module 'p\.other'"):
        make({"a": "import p.other", "p.side": ""}).load("a")
    with pytest.raises(ImportError, match="other"):
        make({"a": "from p import other", "p.side": ""}).load("a")


def test_an_import_of_what_is_optional_falls_back(make: Make) -> None:
    module = make({"a": "try:\n    import numpy\nexcept ImportError:\n    numpy = None"}).load("a")
    assert module.numpy is None


def test_the_standard_library_is_the_real_one(make: Make) -> None:
    import json

    module = make({"a": "import json, asyncio, os.path\nfrom collections.abc import Mapping"}).load("a")
    assert module.json is json


def test_dataclasses_enums_hints_and_pickle_find_their_modules(make: Make) -> None:
    source = """
from __future__ import annotations
from dataclasses import dataclass, field
from enum import Enum
from typing import ClassVar

class Colour(Enum):
    RED = 1

@dataclass(frozen=True, slots=True)
class Point:
    x: int
    c: Colour = Colour.RED
    n: ClassVar[int] = 3
"""
    module = make({"p.shapes": source, "p.other": ""}).load("p.shapes")
    point = module.Point(1)
    assert pickle.loads(pickle.dumps(point)) == point
    assert typing.get_type_hints(module.Point)["c"] is module.Colour
    assert sys.modules[module.Point.__module__] is module


def test_a_closed_isolate_leaves_no_modules_behind(make: Make) -> None:
    space = make({"p.a": "x = 1"})
    name = space.load("p.a").__name__
    assert name in sys.modules
    space.close()
    assert not [module for module in sys.modules if module.startswith(name.partition(".")[0])]


@pytest.mark.parametrize(
    ("statement", "call"),
    [
        ("import os", "os.urandom(4)"),
        ("import random", "random.random()"),
        ("import random", "random.shuffle([1])"),
        ("from random import randint", "randint(1, 2)"),
        ("import uuid", "uuid.uuid4()"),
        ("import secrets", "secrets.token_hex()"),
        ("import time", "time.sleep(0)"),
        ("import asyncio", "asyncio.create_task(None)"),
        ("import socket", "socket.create_connection(('127.0.0.1', 1))"),
    ],
)
def test_entropy_timers_and_connections_fail_at_top_level(make: Make, statement: str, call: str) -> None:
    with pytest.raises(RuntimeError, match=r"module a calls .* at top level"):
        make({"a": f"{statement}\n{call}"}).load("a")


def test_what_was_imported_at_top_level_works_later(make: Make) -> None:
    module = make({"a": "from os import urandom\nfrom random import random\nfrom uuid import uuid4"}).load(
        "a"
    )
    assert len(module.urandom(3)) == 3
    assert 0 <= module.random() < 1
    assert module.uuid4()


def test_the_guards_are_gone_when_nothing_is_being_loaded(make: Make) -> None:
    before = (os.urandom, random.random)
    make({"a": "import b", "b": "x = 1"}).load("a")
    with pytest.raises(ZeroDivisionError):
        make({"a": "import b", "b": "1 / 0"}).load("a")
    assert (os.urandom, random.random) == before


def test_a_traceback_names_the_real_file(make: Make, tmp_path: Path) -> None:
    module = make({"a": "def f():\n    raise ValueError('x')"}).load("a")
    with pytest.raises(ValueError, match="x") as caught:
        module.f()
    assert str(tmp_path / "a.py") in str(caught.traceback[-1].path)


def test_a_bundle_is_made_of_folders_and_packages(tmp_path: Path) -> None:
    for name in ("w/entry.py", "w/core.py", "w/data.txt", "p/__init__.py", "p/a.py", "p/b.py", "p/q/c.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    whole = bundle(tmp_path / "w", packages={"p": tmp_path / "p"})
    assert sorted(whole) == ["core", "entry", "p", "p.a", "p.b", "p.q.c"]
    some = bundle(tmp_path / "w", packages={"p": tmp_path / "p"}, only={"p": ["b"]})
    assert sorted(some) == ["core", "entry", "p", "p.b"]
    with pytest.raises(EmulatorError, match="has no module nothing"):
        bundle(packages={"p": tmp_path / "p"}, only={"p": ["nothing"]})
    with pytest.raises(EmulatorError, match="is no folder"):
        bundle(tmp_path / "nowhere")
    with pytest.raises(EmulatorError, match="'entry' is not in its bundle, which has a"):
        WorkerConfig("w", {"a": tmp_path / "p" / "a.py"})
