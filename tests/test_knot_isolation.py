"""The parts of `knot` that run inside Workers import nothing but the standard library and each other."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "knot"
IN_WORKERS = {
    "errors",
    "quants",
    "strict_json",
    "config",
    "container",
    "architectures",
    "header",
    "parse",
    "reader",
    "tokenizer_layout",
}
# On the platform's Python these are missing, or of no use.
MISSING = {"ctypes", "fcntl", "mmap", "multiprocessing", "socket", "ssl", "subprocess", "threading"}


def imported(module: str) -> set[str]:
    """The first names of all imports in a module, wherever in it they are."""
    names: set[str] = set()
    for node in ast.walk(ast.parse((FOLDER / f"{module}.py").read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0
            names.add(node.module or "")
    return names


@pytest.mark.parametrize("module", sorted(IN_WORKERS))
def test_a_module_that_runs_in_workers_imports_the_standard_library_and_its_like_only(module: str) -> None:
    for name in imported(module):
        package, _, rest = name.partition(".")
        if package == "knot":
            assert rest in IN_WORKERS, name
        else:
            assert package in sys.stdlib_module_names, name
            assert package not in MISSING, name


def test_the_package_itself_imports_nothing() -> None:
    assert imported("__init__") <= {"__future__"}
