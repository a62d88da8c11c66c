"""What the project says of itself in several places is the same in all of them."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def pinned() -> dict[str, str]:
    lines = (ROOT / "requirements.lock").read_text(encoding="utf-8").splitlines()
    pins = (line.split("==") for line in lines if line and not line.startswith("#"))
    return {normal(name): version for name, version in pins}


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_every_dependency_is_pinned_and_the_lock_has_the_same_version():
    project = PROJECT["project"]
    wanted = [*project["dependencies"], *project["optional-dependencies"]["dev"]]
    assert wanted
    locked = pinned()
    for requirement in wanted:
        name, version = requirement.split("==")
        assert locked.get(normal(name)) == version, requirement


def test_the_readme_shows_the_two_commands_that_ci_runs():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    ci = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    for target in ("demo", "test"):
        assert f"```\nmake {target}\n```" in readme
        assert re.search(rf"^{target}:", makefile, re.MULTILINE)
    assert "make test" in ci


def test_no_place_of_the_project_names_a_registrys_host():
    hosts = re.compile(r"pypi\.org|files\.pythonhosted|registry\.npmjs|static\.crates\.io|deb\.debian\.org")
    for path in [*ROOT.glob("*"), *ROOT.glob("scripts/*"), *ROOT.glob("knot/*.py"), *ROOT.glob("docs/*")]:
        if path.is_file() and path.suffix not in (".wasm", ".so", ".gguf", ".knot"):
            found = hosts.search(path.read_text(encoding="utf-8", errors="ignore"))
            assert not found, f"{path.name} names {found and found.group()}"
