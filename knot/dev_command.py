"""`knot dev`: the whole cluster on real workerd, on this machine, until it is interrupted.

Imports of what runs a cluster are inside the functions: every other command starts without them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from knot.paths import resolve_model

if TYPE_CHECKING:
    from knot.cli import Commands

RESIDENCIES = ("fluid", "pinned-prefix", "resident")


def add_commands(commands: Commands) -> None:
    """Adds `dev` to the command line."""
    dev = commands.add_parser("dev", help="run a cluster on real workerd")
    dev.add_argument("model", help="a knot, a GGUF, or a model to fetch, such as smol")
    dev.add_argument("--port", type=int, default=8787, help="the gateway's port; the others follow (8787)")
    dev.add_argument("--stations", type=int, default=2, help="layer stations (2)")
    dev.add_argument("--shards", type=int, default=8, help="vocabulary shards (8)")
    dev.add_argument("--residency", choices=RESIDENCIES, default="pinned-prefix", help="what stays in memory")
    dev.add_argument(
        "--data", type=Path, help="where R2, KV and objects are kept; .knot/workerd unless given"
    )
    dev.add_argument("--secret", help="the secret that the parts share; made at the first start unless given")
    dev.set_defaults(command=dev_command)


def dev_command(arguments: argparse.Namespace) -> int:
    """`knot dev`."""
    knot = resolve_model(arguments.model)
    try:
        return asyncio.run(_dev(knot, arguments))
    except asyncio.CancelledError:
        return 130


async def _dev(knot: Path, arguments: argparse.Namespace) -> int:
    from knot.reader import load_header
    from knot.run_command import clients_keys, curl_lines, kept_secret
    from knot.topology import even_topology, station_names
    from knot.workerd import workerd_cluster

    task = asyncio.current_task()
    assert task is not None
    for number in (signal.SIGINT, signal.SIGTERM):
        # Whatever it waits for is given up, and what was started is ended in order.
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    data: Path = arguments.data or Path(".knot") / "workerd"
    secret: str = arguments.secret or kept_secret(data)
    topology = even_topology(load_header(knot).config, arguments.stations, arguments.shards)
    names = [
        "gateway",
        *station_names(topology),
        *(f"shard-{i}" for i in range(len(topology.shards))),
        "layer-warden",
        "cobordism-warden",
    ]
    ports = {name: arguments.port + i for i, name in enumerate(names)}
    started = time.monotonic()
    async with workerd_cluster(
        knot,
        data,
        topology=topology,
        variables={"RESIDENCY": arguments.residency, **clients_keys()},
        secret=secret,
        ports=ports,
    ) as cluster:
        await cluster.wait_until_healthy()
        seconds = round(time.monotonic() - started, 1)
        print(
            json.dumps({"ready": True, "seconds": seconds, "secret": secret, **cluster.addresses}), flush=True
        )
        print(curl_lines(dict(cluster.addresses), secret), file=sys.stderr, flush=True)
        await asyncio.Event().wait()
    return 0
