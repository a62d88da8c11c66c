"""The same behaviours that the emulator is held to, asked of real workerd."""

from __future__ import annotations

import asyncio
import tempfile
from functools import cache
from pathlib import Path

import httpx
import pytest
from emulator_support import checks_in

from knot.topology import ObjectBinding, WorkerSpec
from knot.workerd import run_workers

FOLDER = Path(__file__).parent / "workers_for_tests"
FILES = ("checks_r2", "checks_kv", "checks_objects", "checks_messages", "checks_flow")
CHECKS = [(file, check) for file in FILES for check in checks_in(file)]

pytestmark = pytest.mark.workerd


@cache
def outcomes() -> dict[tuple[str, str], str]:
    """What became of every check: "ok", or what the Worker said."""
    return asyncio.run(ask_all())


async def ask_all() -> dict[tuple[str, str], str]:
    """Runs one Worker for each file; a check in it has stores and objects of its own."""
    specs, modules = list[WorkerSpec](), dict[str, dict[str, str]]()
    for file in FILES:
        modules[file] = {
            "check_entry.py": str(FOLDER / "check_entry.py"),
            "check_support.py": str(FOLDER / "check_support.py"),
            "checks.py": str(FOLDER / f"{file}.py"),
        }
        numbers = range(1, len(checks_in(file)) + 1)
        specs.append(
            WorkerSpec(
                file,
                "",
                {},
                {f"BUCKET_{number}": f"{file}-{number}" for number in numbers},
                {f"CACHE_{number}": f"{file}-{number}" for number in numbers},
                {"SELF": file, "OTHER": f"{file}#Other"},
                {"NOTES": ObjectBinding("Notes")},
            )
        )
    log: list[str] = []
    found: dict[tuple[str, str], str] = {}
    with tempfile.TemporaryDirectory() as data:
        async with (
            run_workers(specs, Path(data), log=log.append, modules=modules) as (addresses, _),
            httpx.AsyncClient(timeout=30) as client,
        ):
            for file in FILES:
                for number, check in enumerate(checks_in(file), 1):
                    before = len(log)
                    try:
                        said = (await client.get(f"{addresses[file]}/{check}?{number}")).text
                    except httpx.HTTPError as error:
                        said = repr(error)
                    if said != "ok":
                        await asyncio.sleep(0.2)
                        said += "\n" + "\n".join(log[before:])
                    found[file, check] = said
    return found


@pytest.mark.parametrize(("file", "check"), CHECKS)
def test_workerd_does_what_the_emulator_says_it_does(file: str, check: str) -> None:
    assert outcomes()[file, check] == "ok"


def test_the_suite_has_at_least_the_checks_that_were_promised() -> None:
    assert len(CHECKS) >= 150
