"""Everything durable of a cluster, under one folder that one cluster has at a time."""

from __future__ import annotations

import contextlib
import hashlib
import re
from pathlib import Path
from typing import Any

from emulator.errors import EmulatorError
from emulator.kv import KVStore
from emulator.limits import Limits
from emulator.r2 import Bucket
from emulator.storage import ClassStore


class Stores:
    """Buckets, key-value namespaces and the storage of objects, opened when they are first used.

    Raises `EmulatorError` when another cluster has the folder.
    """

    def __init__(self, folder: Path, limits: Limits, keep_previous: bool) -> None:
        self._folder = folder
        self._limits = limits
        self._keep_previous = keep_previous
        self._buckets: dict[str, Bucket] = {}
        self._namespaces: dict[str, KVStore] = {}
        self._classes: dict[tuple[str, str], ClassStore] = {}
        folder.mkdir(parents=True, exist_ok=True)
        self._lock = _lock(folder)

    def bucket(self, name: str) -> Bucket:
        """An R2 bucket."""
        if name not in self._buckets:
            self._buckets[name] = Bucket(self._folder / "r2" / _file_name(name), self._limits)
        return self._buckets[name]

    def key_values(self, name: str) -> KVStore:
        """A KV namespace."""
        if name not in self._namespaces:
            path = self._folder / "kv" / f"{_file_name(name)}.sqlite"
            self._namespaces[name] = KVStore(path, self._keep_previous)
        return self._namespaces[name]

    def of_class(self, script: str, class_name: str) -> ClassStore:
        """The storage of a class of objects."""
        key = (script, class_name)
        if key not in self._classes:
            self._classes[key] = ClassStore(self._class_path(script, class_name))
        return self._classes[key]

    def has_class(self, script: str, class_name: str) -> bool:
        """Whether an object of that class ever stored anything."""
        return self._class_path(script, class_name).exists()

    def close(self) -> None:
        """Closes all of them, and lets another cluster have the folder."""
        for store in (*self._buckets.values(), *self._namespaces.values(), *self._classes.values()):
            store.close()
        self._lock.close()

    def _class_path(self, script: str, class_name: str) -> Path:
        return self._folder / "objects" / f"{_file_name(script)}.{_file_name(class_name)}.sqlite"


def _file_name(name: str) -> str:
    """A name as part of a file's name, and never the same for two names."""
    if re.fullmatch(r"[A-Za-z0-9_-]{1,64}", name):
        return name
    return f"{re.sub(r'[^A-Za-z0-9_-]', '_', name)[:40]}-{hashlib.sha256(name.encode()).hexdigest()[:12]}"


def _lock(folder: Path) -> Any:
    """Keeps a second cluster away: an object lives once."""
    try:
        import fcntl
    except ImportError:
        return contextlib.ExitStack()
    file = (folder / "lock").open("w")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        raise EmulatorError(
            f"{folder} is in use by another cluster; stop it, or take another folder"
        ) from None
    return file
