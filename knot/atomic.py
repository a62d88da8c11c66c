"""A file that appears whole or not at all: written beside its place, synced, then renamed."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from knot.errors import BusyError, OutputError


def partial_path(target: Path) -> Path:
    """Where `target` is written before it is whole."""
    return target.with_name(target.name + ".partial")


@contextmanager
def replacing(target: Path, *, force: bool, size: int | None = None) -> Generator[BinaryIO]:
    """A file to write, which becomes `target` when the block ends without an exception.

    What an earlier, interrupted run left half-written is replaced. Raises `OutputError` when `target`
    exists and `force` is not set, when another process is writing it, and when the disk is full (before
    starting, where `size` is given).
    """
    if target.exists() and not force:
        raise OutputError(f"{target} exists; add --force to replace it")
    if target.is_dir():
        raise OutputError(f"{target} is a folder")
    partial = partial_path(target)
    try:
        file = _locked(partial, target)
    except OSError as error:
        raise _refusal(target, error, size) from error
    try:
        with file:
            if size is not None and (free := shutil.disk_usage(target.parent).free) < size:
                raise OutputError(f"{target} needs {size} bytes, but its disk has {free} left")
            yield file
            file.flush()
            os.fsync(file.fileno())
            partial.replace(target)
            _sync_folder(target.parent)
    except BaseException as error:
        partial.unlink(missing_ok=True)
        # Only what happened to this file: a source's trouble is another's to tell.
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise _refusal(target, error, size) from error
        raise


def _locked(partial: Path, target: Path) -> BinaryIO:
    """The partial file, empty, open and locked, so that two processes never write into one another's."""
    while True:
        file = os.fdopen(os.open(partial, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666), "r+b")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            raise BusyError(f"another process is writing {target}; wait for it, then try again") from None
        # Whoever held the lock before may have renamed or removed the file that was just opened.
        if partial.exists() and os.path.samestat(os.fstat(file.fileno()), partial.stat()):
            file.truncate(0)
            return file
        file.close()


def _refusal(target: Path, error: OSError, size: int | None) -> OutputError:
    needed = f"; it needs {size} bytes" if size is not None and error.errno == errno.ENOSPC else ""
    return OutputError(f"{target} cannot be written: {error.strerror}{needed}")


def _sync_folder(folder: Path) -> None:
    """Makes the rename itself survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
