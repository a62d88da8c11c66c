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
# Every check has a Worker, stores and objects of its own; as many as fit run in one workerd.
AT_ONCE = 16

pytestmark = pytest.mark.workerd


@cache
def outcomes() -> dict[tuple[str, str], str]:
    """What became of every check: "ok", or what the Worker said."""
    groups = [CHECKS[at : at + AT_ONCE] for at in range(0, len(CHECKS), AT_ONCE)]
    return {key: said for group in groups for key, said in asyncio.run(ask(group)).items()}


async def ask(group: list[tuple[str, str]]) -> dict[tuple[str, str], str]:
    specs, modules = list[WorkerSpec](), dict[str, dict[str, str]]()
    for number, (file, _) in enumerate(group):
        name = f"probe-{number}"
        modules[name] = {
            "check_entry.py": str(FOLDER / "check_entry.py"),
            "check_support.py": str(FOLDER / "check_support.py"),
            "checks.py": str(FOLDER / f"{file}.py"),
        }
        specs.append(
            WorkerSpec(
                name,
                "",
                {},
                {"BUCKET": f"bucket-{number}"},
                {"CACHE": f"cache-{number}"},
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
            for number, key in enumerate(group):
                before = len(log)
                try:
                    said = (await client.get(f"{addresses[f'probe-{number}']}/{key[1]}")).text
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
