"""Serves one Worker on a free port until it is interrupted; run as a process of its own."""

import asyncio
import sys
from pathlib import Path

from emulator_support import worker

from emulator import Cluster
from emulator.http import HttpFront, interruption


async def serve() -> None:
    # A busy machine is no fault: only what is left unfinished may be said on stderr.
    asyncio.get_running_loop().slow_callback_duration = 60
    with interruption() as interrupted:
        async with (
            Cluster([worker("probe", "http_entry")], Path(sys.argv[1]), log=lambda line: None) as cluster,
            HttpFront(cluster, {"probe": 0}) as front,
        ):
            print(front.addresses["probe"], flush=True)
            await interrupted.wait()
    assert not cluster.pending()
    print("stopped", flush=True)


asyncio.run(serve(), debug=True)
