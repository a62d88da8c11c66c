"""What a Worker is made of: its bundle, its variables and its bindings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from emulator.errors import EmulatorError


@dataclass(frozen=True, slots=True)
class ServiceBinding:
    """Another Worker of the cluster, and which of its entrypoints."""

    worker: str
    entrypoint: str = "Default"


@dataclass(frozen=True, slots=True)
class ObjectBinding:
    """A class of Durable Objects; `script` names the Worker that defines it, this one if None."""

    class_name: str
    script: str | None = None


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """One Worker.

    `modules` maps module names to files (see `bundle`); `entry` is the module with the classes. Bindings
    are by the name that they have in `env`: buckets and key-value namespaces map to their names in the
    cluster.
    """

    name: str
    modules: Mapping[str, Path]
    entry: str = "entry"
    vars: Mapping[str, Any] = field(default_factory=dict[str, Any])
    r2: Mapping[str, str] = field(default_factory=dict[str, str])
    kv: Mapping[str, str] = field(default_factory=dict[str, str])
    services: Mapping[str, ServiceBinding | str] = field(default_factory=dict[str, "ServiceBinding | str"])
    objects: Mapping[str, ObjectBinding | str] = field(default_factory=dict[str, "ObjectBinding | str"])

    def __post_init__(self) -> None:
        if self.entry not in self.modules:
            raise EmulatorError(
                f"Worker {self.name}: its entry module {self.entry!r} is not in its bundle, which has "
                f"{', '.join(sorted(self.modules)) or 'no modules'}"
            )
        seen: dict[str, str] = {}
        for kind in ("vars", "r2", "kv", "services", "objects"):
            for name in getattr(self, kind):
                if name in seen:
                    raise EmulatorError(
                        f"Worker {self.name}: {name} is both in {seen[name]} and in {kind}; rename one"
                    )
                seen[name] = kind

    def service(self, binding: str) -> ServiceBinding:
        """A service binding, written out."""
        found = self.services[binding]
        return ServiceBinding(found) if isinstance(found, str) else found

    def object_class(self, binding: str) -> tuple[str, str]:
        """The Worker and the class that an object binding means."""
        found = self.objects[binding]
        if isinstance(found, str):
            return self.name, found
        return found.script or self.name, found.class_name


def bundle(
    *folders: Path,
    packages: Mapping[str, Path] | None = None,
    only: Mapping[str, Sequence[str]] | None = None,
) -> dict[str, Path]:
    """A bundle's modules: the files of `folders` at its root, and whole packages by name.

    `only` narrows a package to the modules named. Raises `EmulatorError` for what is not there.
    """
    found: dict[str, Path] = {}
    for folder in folders:
        for path in _python_files(folder):
            found[path.stem] = path
    for package, folder in (packages or {}).items():
        wanted = (only or {}).get(package)
        for path in _python_files(folder, deep=True):
            module = ".".join((package, *path.relative_to(folder).with_suffix("").parts))
            module = module.removesuffix(".__init__")
            if wanted is None or module == package or module.removeprefix(f"{package}.") in wanted:
                found[module] = path
        for name in wanted or ():
            if f"{package}.{name}" not in found:
                raise EmulatorError(f"package {package} in {folder} has no module {name}")
    return found


def _python_files(folder: Path, deep: bool = False) -> list[Path]:
    if not folder.is_dir():
        raise EmulatorError(f"{folder} is no folder; a bundle is made of folders with Python files")
    return sorted(path for path in (folder.rglob("*.py") if deep else folder.glob("*.py")))
