"""Runs wrangler with the Node that the project pins; environments that end in -offline need no network.

python scripts/wrangler.py dev --env entry-offline --port 8788
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import offline_pyodide

from knot.workerd import WorkerdError, node

ROOT = Path(__file__).resolve().parent.parent


def command() -> list[str]:
    """The words that start wrangler."""
    return [str(node()), str(ROOT / "node_modules" / "wrangler" / "bin" / "wrangler.js")]


def environment() -> dict[str, str]:
    """Variables under which it runs: workerd is the one that finds the Pyodide bundle on this machine."""
    return {
        **os.environ,
        "PATH": f"{node().parent}{os.pathsep}{os.environ['PATH']}",
        "WRANGLER_SEND_METRICS": "false",
        "MINIFLARE_WORKERD_PATH": str(offline_pyodide.make()),
    }


def main(words: list[str]) -> int:
    """Runs it with these words, until it ends."""
    try:
        with subprocess.Popen([*command(), *words], env=environment()) as process:

            def stop(number: int, frame: object) -> None:
                # It stops what it has started; Ctrl-C reaches it by itself.
                if number == signal.SIGTERM:
                    process.terminate()

            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, stop)
            return process.wait()
    except (WorkerdError, offline_pyodide.OfflineError) as error:
        print(f"wrangler: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
