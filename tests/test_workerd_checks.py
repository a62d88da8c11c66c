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
# The checks of the first use no objects, so that those of a file share a Worker; stores are always their own.
TOGETHER = ("checks_r2", "checks_kv", "checks_messages")
FILES = (*TOGETHER, "checks_objects", "checks_flow")
CHECKS = [(file, check) for file in FILES for check in checks_in(file)]
# As many Workers as fit run in one workerd.
AT_ONCE = 16

pytestmark = pytest.mark.workerd


@cache
def outcomes() -> dict[tuple[str, str], str]:
    """What became of every check: "ok", or what the Worker said."""
    workers = [[key for key in CHECKS if key[0] == file] for file in TOGETHER]
    workers += [[key] for key in CHECKS if key[0] not in TOGETHER]
    groups = [workers[at : at + AT_ONCE] for at in range(0, len(workers), AT_ONCE)]
    return {key: said for group in groups for key, said in asyncio.run(ask(group)).items()}


async def ask(group: list[list[tuple[str, str]]]) -> dict[tuple[str, str], str]:
    """Runs Workers beside each other, each with its checks of one file."""
    specs, modules = list[WorkerSpec](), dict[str, dict[str, str]]()
    for worker, checks in enumerate(group):
        name = f"probe-{worker}"
        modules[name] = {
            "check_entry.py": str(FOLDER / "check_entry.py"),
            "check_support.py": str(FOLDER / "check_support.py"),
            "checks.py": str(FOLDER / f"{checks[0][0]}.py"),
        }
        numbers = range(1, len(checks) + 1)
        specs.append(
            WorkerSpec(
                name,
                "",
                {},
                {f"BUCKET_{number}": f"bucket-{worker}-{number}" for number in numbers},
                {f"CACHE_{number}": f"cache-{worker}-{number}" for number in numbers},
                {"SELF": name, "OTHER": f"{name}#Other"},
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
            for worker, number, key in (
                (worker, number, key)
                for worker, checks in enumerate(group)
                for number, key in enumerate(checks, 1)
            ):
                before = len(log)
                try:
                    said = (await client.get(f"{addresses[f'probe-{worker}']}/{key[1]}?{number}")).text
                except httpx.HTTPError as error:
                    said = repr(error)
                if said != "ok":
                    await asyncio.sleep(0.2)
                    said += "\n" + "\n".join(log[before:])
                found[key] = said
    return found


@pytest.mark.parametrize(("file", "check"), CHECKS)
def test_workerd_does_what_the_emulator_says_it_does(file: str, check: str) -> None:
    assert outcomes()[file, check] == "ok"


def test_the_suite_has_at_least_the_checks_that_were_promised() -> None:
    assert len(CHECKS) >= 150
