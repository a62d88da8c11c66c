"""Writes `wrangler.toml` from `knot.topology`: an environment for every Worker, and its offline variant.

A Worker is described once; a test holds the file against this. The default is the seed's cluster: two
stations and eight shards of a model with 28 layers and 151,936 ids.

    python scripts/wrangler_config.py [--knot KEY --layers N --vocab N --stations N --shards N]

`knot plan MODEL --write-wrangler FILE` writes the one of a model and a topology that were planned.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parent.parent
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))

from knot import wrangler_file  # noqa: E402
from knot.topology import Topology, cluster_workers, split  # noqa: E402

MADE_BY: Final = "scripts/wrangler_config.py; a test holds it against knot/topology.py"


def render(knot_key: str, layers: int, vocab: int, stations: int, shards: int) -> str:
    """The whole file."""
    topology = Topology(split(layers, stations), split(vocab, shards))
    return wrangler_file.render(cluster_workers(layers, topology, knot_key, {}), MADE_BY)


def main(argv: Sequence[str] | None = None) -> int:
    """Writes the file."""
    parser = argparse.ArgumentParser(description="Writes wrangler.toml for a cluster.")
    parser.add_argument("--knot", default="qwen-coder-7b.knot", help="the knot's key in the bucket")
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--vocab", type=int, default=151_936)
    parser.add_argument("--stations", type=int, default=2)
    parser.add_argument("--shards", type=int, default=8)
    parser.add_argument("--output", type=Path, default=ROOT / "wrangler.toml")
    given = parser.parse_args(argv)
    given.output.write_text(render(given.knot, given.layers, given.vocab, given.stations, given.shards))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
