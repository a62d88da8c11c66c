"""Workers as wrangler's configuration: an environment for each, and its offline variant."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from knot.topology import WorkerSpec

PREFIX: Final = "knot-"
COMPATIBILITY_DATE: Final = "2026-09-08"
FLAGS: Final = ("python_workers",)
OFFLINE_FLAGS: Final = ("python_workers", "python_workers_development", "experimental")
# A prefill of 512 tokens takes about 50 s of CPU a station.
CPU_MS: Final = 300_000
NOTES: Final = """\
# `CLUSTER_SECRET` is a secret: `wrangler secret put CLUSTER_SECRET --env entry`, and so on for each one.
# Environments that end in -offline differ in their flags only; docs/workerd.md says what they are for.
"""


def render(specs: Sequence[WorkerSpec], made_by: str) -> str:
    """The whole file; `made_by` says by what, in a comment at its head."""
    lines = [
        f"# Made by {made_by}.\n{NOTES}",
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
