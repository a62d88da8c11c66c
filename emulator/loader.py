"""Modules of one isolate: private copies of a bundle's files, and the standard library that Workers have.

On Workers an entrypoint and all objects of one Worker share one isolate and its module globals, and share
nothing with any other Worker. Here many isolates live in one process, so each loads its bundle under names of
its own. Dataclasses, enums, type hints and pickle find the modules by those names.
"""

from __future__ import annotations

import asyncio
import builtins
import contextlib
import contextvars
import itertools
import os
import random
import re
import secrets
import socket
import sys
import threading
import time
import types
import uuid
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from functools import wraps
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any, Final

# Modules of CPython that Pyodide leaves out or that do nothing there.
MISSING: Final = frozenset(
    (
        "_ctypes", "_curses", "_sqlite3", "_ssl", "_tkinter", "ctypes", "curses", "dbm", "ensurepip", "fcntl",
        "grp", "idlelib", "lib2to3", "mmap", "msvcrt", "multiprocessing", "nis", "posixshmem", "pty", "pwd",
        "readline", "resource", "spwd", "sqlite3", "ssl", "subprocess", "syslog", "termios", "tkinter", "tty",
        "turtle", "turtledemo", "venv", "winreg", "winsound",
    )
)  # fmt: skip
_numbers = itertools.count(1)
_loading: contextvars.ContextVar[str | None] = contextvars.ContextVar("emulator_loading", default=None)
# A file's code, by path and time of change: a dozen isolates run the same files.
_compiled: dict[tuple[Path, int], types.CodeType] = {}


class BundleError(ImportError):
    """A bundle imports what a Worker does not have; the sentence says what would serve."""


class ModuleSpace:
    """The modules of one isolate.

    `files` maps names such as `protocol.calls` to files; `given` are modules made elsewhere; `trusted` are
    files, by module name, whose own imports may reach anything, since they belong to the emulator.
    """

    def __init__(
        self,
        owner: str,
        files: Mapping[str, Path],
        given: Mapping[str, types.ModuleType],
        trusted: Mapping[str, Path] | None = None,
    ) -> None:
        self._owner = owner
        self._files = {**files, **(trusted or {})}
        self._given = dict(given)
        self._trusted = frozenset(trusted or ())
        self._packages = {parent for name in self._files for parent in _parents(name)}
        self._tops = {name.partition(".")[0] for name in (*self._files, *self._given)}
        self._root = f"isolate_{next(_numbers)}_{re.sub(r'[^0-9A-Za-z]', '_', owner)}"
        root = types.ModuleType(self._root)
        root.__path__ = []
        sys.modules[self._root] = root
        for name, module in self._given.items():
            sys.modules[f"{self._root}.{name}"] = module

    def load(self, name: str) -> types.ModuleType:
        """The bundle's module of that name. Raises what its code raises, and `BundleError`."""
        parent = name.rpartition(".")[0]
        if parent:
            self.load(parent)
        found = sys.modules.get(f"{self._root}.{name}")
        if found is None:
            if name not in self._files and name not in self._packages:
                raise BundleError(
                    f"{self._owner}: the bundle has no module {name!r}; it has "
                    f"{', '.join(sorted(self._files)) or 'none'}"
                )
            found = self._execute(name)
        if parent:
            setattr(sys.modules[f"{self._root}.{parent}"], name.rpartition(".")[2], found)
        return found

    def given(self, name: str) -> types.ModuleType:
        """A module that was made elsewhere."""
        return self._given[name]

    def close(self) -> None:
        """Forgets all modules."""
        for name in [name for name in sys.modules if name == self._root or name.startswith(f"{self._root}.")]:
            del sys.modules[name]

    def _execute(self, name: str) -> types.ModuleType:
        full = f"{self._root}.{name}"
        path = self._files.get(name)
        module = types.ModuleType(full)
        is_package = name in self._packages or (path is not None and path.name == "__init__.py")
        module.__spec__ = ModuleSpec(full, None, origin=str(path), is_package=is_package)
        module.__package__ = full if is_package else full.rpartition(".")[0]
        if is_package:
            module.__path__ = []
        sys.modules[full] = module
        if path is None:
            return module
        module.__file__ = str(path)
        module.__dict__["__builtins__"] = {
            **builtins.__dict__,
            "__import__": self._importer(name in self._trusted),
        }
        try:
            with _top_level(f"{self._owner}, module {name}"):
                exec(_code(path), module.__dict__)
        except BaseException:
            del sys.modules[full]
            raise
        return module

    def _importer(self, trusted: bool) -> Callable[..., types.ModuleType]:
        def find(
            name: str,
            globals: Mapping[str, Any] | None = None,
            locals: Mapping[str, Any] | None = None,
            fromlist: Sequence[str] | None = (),
            level: int = 0,
        ) -> types.ModuleType:
            own = self._absolute(name, (globals or {}).get("__package__", ""), level) if level else name
            top = own.partition(".")[0]
            if top not in self._tops:
                if not trusted:
                    self._check_outside(top)
                return builtins.__import__(own, globals, locals, fromlist or (), 0)
            module = self.load(own)
            if not fromlist:
                return self.load(top)
            for item in fromlist:
                child = f"{own}.{item}"
                if not hasattr(module, item) and (child in self._files or child in self._packages):
                    self.load(child)
            return module

        return find

    def _absolute(self, name: str, package: str, level: int) -> str:
        parts = package.split(".")[1:]
        if level - 1 > len(parts):
            raise ImportError(f"{self._owner}: attempted relative import beyond the bundle")
        kept = parts[: len(parts) - (level - 1)]
        return ".".join([*kept, *([name] if name else [])])

    def _check_outside(self, top: str) -> None:
        if top in sys.stdlib_module_names and top not in MISSING:
            return
        if top in ("js", "pyodide", "pyodide_js"):
            reason = "JavaScript is touched by the module `boundary` alone, and there is none here"
        elif top in MISSING:
            reason = "Python on Workers is built without it"
        else:
            reason = "a Worker has its bundle and the standard library, nothing else"
        raise BundleError(f"{self._owner} imports {top!r}: {reason}", name=top)


def _code(path: Path) -> types.CodeType:
    key = (path, path.stat().st_mtime_ns)
    found = _compiled.get(key)
    if found is None:
        source = path.read_bytes()
        found = _compiled[key] = compile(source, str(path), "exec", dont_inherit=True)
    return found


def _parents(name: str) -> Iterator[str]:
    while name := name.rpartition(".")[0]:
        yield name


# What needs entropy, time or a connection, and so fails at top level.
_GUARDED: Final[tuple[tuple[types.ModuleType, tuple[str, ...]], ...]] = (
    (os, ("urandom", "getrandom")),
    (
        random,
        (
            "betavariate", "choice", "choices", "gauss", "getrandbits", "normalvariate", "randbytes",
            "randint", "random", "randrange", "sample", "seed", "shuffle", "triangular", "uniform",
        ),
    ),
    (secrets, ("choice", "randbelow", "randbits", "token_bytes", "token_hex", "token_urlsafe")),
    (uuid, ("uuid1", "uuid4")),
    (asyncio, ("create_task", "ensure_future")),
    (time, ("sleep",)),
    (socket, ("create_connection", "getaddrinfo", "gethostbyname", "socketpair")),
)  # fmt: skip
_guards = threading.RLock()


def loading() -> str | None:
    """What is being loaded, if a bundle's top level is running."""
    return _loading.get()


@contextlib.contextmanager
def _top_level(where: str) -> Generator[None, None, None]:
    """Makes calls that Workers refuse at top level fail while a bundle's module is run."""
    outermost = _loading.get() is None
    token = _loading.set(where)
    with _guards:
        saved = _install() if outermost else []
        try:
            yield
        finally:
            for module, name, function in saved:
                setattr(module, name, function)
            _loading.reset(token)


def _install() -> list[tuple[types.ModuleType, str, Callable[..., Any]]]:
    saved: list[tuple[types.ModuleType, str, Callable[..., Any]]] = []
    for module, names in _GUARDED:
        for name in names:
            function = getattr(module, name, None)
            if function is not None:
                saved.append((module, name, function))
                setattr(module, name, _guarded(function, f"{module.__name__}.{name}"))
    return saved


def _guarded(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """A function that fails at top level. It looks for itself: a module may take it now and call it later."""

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        where = _loading.get()
        if where is not None:
            raise RuntimeError(
                f"{where} calls {name} at top level; Workers have entropy, timers and I/O only while a "
                "request is handled: call it there"
            )
        return function(*args, **kwargs)

    return call
