"""Behaviours of the platform's parts, each checked by code that runs inside a Worker."""

from __future__ import annotations

from pathlib import Path

import pytest
from emulator_support import checks_in, get, run, running, worker

from emulator import ServiceBinding

FILES = ("checks_r2", "checks_kv", "checks_objects", "checks_messages", "checks_flow", "checks_limits")

pytestmark = pytest.mark.filterwarnings("error")


@pytest.mark.parametrize(("file", "check"), [(file, check) for file in FILES for check in checks_in(file)])
def test_the_platform_does_what_it_does(file: str, check: str, tmp_path: Path) -> None:
    config = worker(
        "probe",
        "check_entry",
        "check_support",
        r2={"BUCKET": "bucket"},
        kv={"CACHE": "cache"},
        services={"SELF": "probe", "OTHER": ServiceBinding("probe", "Other")},
        objects={"NOTES": "Notes"},
    )
    config.modules["checks"] = Path(__file__).parent / "workers_for_tests" / f"{file}.py"  # type: ignore[index]

    async def scenario() -> None:
        async with running(tmp_path, config) as cluster:
            reply = await get(cluster, f"/{check}")
            assert reply.bytes() == b"ok"

    run(scenario)
