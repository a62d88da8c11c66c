"""Workers from a `wrangler.toml`, so that what is deployed is what is tried."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from emulator.config import ObjectBinding, ServiceBinding, WorkerConfig
from emulator.errors import EmulatorError

# What a Worker can do without while it is emulated.
_IGNORED = frozenset(
    (
        "$schema", "account_id", "assets", "build", "compatibility_date", "compatibility_flags", "dev", "env",
        "keep_vars", "limits", "logpush", "main", "migrations", "minify", "name", "no_bundle",
        "observability", "placement", "preview_urls", "route", "routes", "rules", "send_metrics", "triggers",
        "upload_source_maps", "workers_dev",
    )
)  # fmt: skip
_BINDINGS = frozenset(("vars", "r2_buckets", "kv_namespaces", "services", "durable_objects"))


def read_wrangler(
    path: Path,
    modules: Mapping[str, Path],
    env: str | None = None,
    secrets: Mapping[str, str] | None = None,
) -> WorkerConfig:
    """One environment of a wrangler file as a Worker; the top level when `env` is None.

    `modules` is its bundle (see `emulator.bundle`), since wrangler knows only the file to begin with.
    Bindings are not inherited by environments, as with wrangler. Raises `EmulatorError`.
    """
    try:
        with path.open("rb") as file:
            top = tomllib.load(file)
    except FileNotFoundError:
        raise EmulatorError(f"{path} does not exist") from None
    except tomllib.TOMLDecodeError as error:
        raise EmulatorError(f"{path} is no TOML: {error}") from error
    reader = _Reader(path, env)
    table = top
    if env is not None:
        environments = reader.table(top, "env")
        if env not in environments:
            raise EmulatorError(
                f"{path} has no environment {env!r}; it has {', '.join(environments) or 'none'}"
            )
        table = reader.table(environments, env)
    unknown = (top.keys() | table.keys()) - _IGNORED - _BINDINGS
    if unknown:
        raise EmulatorError(f"{reader.where} has {', '.join(sorted(unknown))}, which is not emulated")
    name = table.get("name") or (f"{reader.text(top, 'name')}-{env}" if env else reader.text(top, "name"))
    main = reader.text({**top, **table}, "main")
    objects = reader.table(table, "durable_objects")
    return WorkerConfig(
        name=str(name),
        modules=modules,
        entry=Path(main).stem,
        vars={**reader.table(table, "vars"), **(secrets or {})},
        r2={
            reader.text(each, "binding"): reader.text(each, "bucket_name")
            for each in reader.tables(table, "r2_buckets")
        },
        kv={
            reader.text(each, "binding"): reader.text(each, "id")
            for each in reader.tables(table, "kv_namespaces")
        },
        services={
            reader.text(each, "binding"): ServiceBinding(
                reader.text(each, "service"), each.get("entrypoint") or "Default"
            )
            for each in reader.tables(table, "services")
        },
        objects={
            reader.text(each, "name"): ObjectBinding(reader.text(each, "class_name"), each.get("script_name"))
            for each in reader.tables(objects, "bindings")
        },
    )


class _Reader:
    def __init__(self, path: Path, env: str | None) -> None:
        self.where = f"{path}" + (f", environment {env}" if env else "")

    def text(self, table: Mapping[str, Any], name: str) -> str:
        value = table.get(name)
        if not isinstance(value, str) or not value:
            raise EmulatorError(f"{self.where}: {name} is {value!r}, expected a text")
        return value

    def table(self, table: Mapping[str, Any], name: str) -> dict[str, Any]:
        value = table.get(name, {})
        if not isinstance(value, dict):
            raise EmulatorError(f"{self.where}: {name} is {value!r:.80}, expected a table")
        return cast(dict[str, Any], value)

    def tables(self, table: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
        value = table.get(name, [])
        if not isinstance(value, list) or not all(isinstance(each, dict) for each in cast(list[Any], value)):
            raise EmulatorError(f"{self.where}: {name} is {value!r:.80}, expected a list of tables")
        return cast(list[dict[str, Any]], value)
