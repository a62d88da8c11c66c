"""Writes `wrangler.toml` from `knot.topology`: an environment for every Worker, and its offline variant.

A Worker is described once; a test holds the file against this. The default is the seed's cluster: two
stations and eight shards of a model with 28 layers and 151,936 ids.

    python scripts/wrangler_config.py [--knot KEY --layers N --vocab N --stations N --shards N]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parent.parent
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))

from knot.topology import Topology, WorkerSpec, cluster_workers, split  # noqa: E402

PREFIX: Final = "knot-"
COMPATIBILITY_DATE: Final = "2026-09-08"
FLAGS: Final = ("python_workers",)
OFFLINE_FLAGS: Final = ("python_workers", "python_workers_development", "experimental")
# A prefill of 512 tokens takes about 50 s of CPU a station.
CPU_MS: Final = 300_000
HEAD: Final = """# Made by scripts/wrangler_config.py; a test holds it against knot/topology.py.
# `CLUSTER_SECRET` is a secret: `wrangler secret put CLUSTER_SECRET --env entry`, and so on for each one.
# Environments that end in -offline differ in their flags only; docs/workerd.md says what they are for.
"""


def render(knot_key: str, layers: int, vocab: int, stations: int, shards: int) -> str:
    """The whole file."""
    topology = Topology(split(layers, stations), split(vocab, shards))
    specs = cluster_workers(layers, topology, knot_key, {})
    lines = [
        HEAD,
        *_pairs(
            name="knot",
            main="build/bundles/station/entry.py",
            compatibility_date=COMPATIBILITY_DATE,
            compatibility_flags=FLAGS,
            workers_dev=False,
        ),
        "",
        "[build]",
        *_pairs(command=".venv/bin/python scripts/stage.py"),
        "",
        "[[rules]]",
        *_pairs(type="ESModule", globs=("**/*.js",), fallthrough=True),
    ]
    for spec in specs:
        lines += _environment(spec, spec.name, FLAGS)
        lines += _environment(spec, f"{spec.name}-offline", OFFLINE_FLAGS)
    return "\n".join(lines) + "\n"


def _environment(spec: WorkerSpec, name: str, flags: Sequence[str]) -> list[str]:
    at = f"env.{name}"
    lines = [
        "",
        f"[{at}]",
        *_pairs(
            name=PREFIX + spec.name,
            main=f"build/bundles/{Path(spec.folder).name}/entry.py",
            compatibility_flags=flags,
        ),
        f"[{at}.vars]",
        *_pairs(**spec.variables),
        f"[{at}.limits]",
        *_pairs(cpu_ms=CPU_MS),
    ]
    for binding, bucket in spec.buckets.items():
        lines += [f"[[{at}.r2_buckets]]", *_pairs(binding=binding, bucket_name=bucket)]
    for binding, namespace in spec.key_values.items():
        lines += [f"[[{at}.kv_namespaces]]", *_pairs(binding=binding, id=namespace)]
    for binding, worker in spec.services.items():
        lines += [f"[[{at}.services]]", *_pairs(binding=binding, service=PREFIX + worker)]
    for binding, found in spec.objects.items():
        script = {"script_name": PREFIX + found.script} if found.script else {}
        lines += [
            f"[[{at}.durable_objects.bindings]]",
            *_pairs(name=binding, class_name=found.class_name, **script),
        ]
    own = [found.class_name for found in spec.objects.values() if found.script is None]
    lines += [f"[[{at}.migrations]]", *_pairs(tag="v1", new_sqlite_classes=own)]
    return lines


def _pairs(**values: Any) -> list[str]:
    return [f"{name} = {_toml(value)}" for name, value in values.items()]


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int):
        return str(value)
    if isinstance(value, str):
        escaped = value.replace("\\", "\\\\").replace('"', '\\"')
        return f'"{escaped}"'
    return "[" + ", ".join(map(_toml, value)) + "]"


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
