"""GGUF files of the Hugging Face hub ($HF_ENDPOINT), each checked before it has its name."""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path
from typing import Any, Final

from knot.errors import FetchError, GgufError
from knot.gguf_guard import read_gguf
from knot.retry import FinalError, clear, retried

CHUNK: Final = 1 << 20
_PART: Final = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")
_SHA256: Final = re.compile("[0-9a-f]{64}")


def fetch_from_hub(repo: str, file: str, folder: Path) -> Path:
    """Brings a file of a repository into `folder/repo`, unless it is there; a split model whole.

    Returns the path, of the first part where there are several. Raises `FetchError`.
    """
    paths = [_fetch_file(repo, part, folder) for part in _parts(file)]
    if (staging := _staging(repo, folder)).exists():
        clear(staging)
    return paths[0]


def first_part(name: str) -> str:
    """The name of the first part of the split model that `name` is a part of; else `name`."""
    return _PART.sub(lambda match: f"-00001-of-{match[2]}.gguf", name)


def _parts(file: str) -> list[str]:
    match = _PART.search(file)
    count = int(match[2]) if match else 1
    if match is None or not 1 <= count <= 1000:
        return [file]
    stem = file[: match.start()]
    return [f"{stem}-{number:05}-of-{count:05}.gguf" for number in range(1, count + 1)]


def _staging(repo: str, folder: Path) -> Path:
    return folder / ".fetch" / repo.replace("/", "--")


def _fetch_file(repo: str, file: str, folder: Path) -> Path:
    target = folder / repo / file
    if target.exists():
        return target
    staging = _staging(repo, folder)
    downloaded = retried(f"{file} of {repo} could not be fetched", lambda: _download(repo, file, staging))
    try:
        read_gguf(downloaded)
    except GgufError as error:
        downloaded.unlink()
        raise FetchError(f"{file} of {repo} is no sound GGUF: {error}") from error
    target.parent.mkdir(parents=True, exist_ok=True)
    downloaded.replace(target)
    return target


def _download(repo: str, file: str, staging: Path) -> Path:
    """The file in `staging`; half of one from an earlier try is gone on with."""
    # A slow import, and most commands do without.
    import huggingface_hub
    from huggingface_hub.errors import EntryNotFoundError, GatedRepoError, RepositoryNotFoundError

    hub: Any = huggingface_hub
    # The endpoint is given at each call: the library reads the variable only once, when imported.
    endpoint = os.environ.get("HF_ENDPOINT") or None
    try:
        # Asked first, and once: the library itself would wait long for a hub that is not there.
        stated = hub.get_hf_file_metadata(hub.hf_hub_url(repo, file, endpoint=endpoint), endpoint=endpoint)
        path = Path(
            hub.hf_hub_download(repo, file, revision=stated.commit_hash, local_dir=staging, endpoint=endpoint)
        )
    except GatedRepoError as error:
        raise FinalError(
            f"{repo} wants its terms accepted first; do so on its page and set HF_TOKEN"
        ) from error
    except RepositoryNotFoundError as error:
        raise FinalError(f"the hub has no repository {repo}, or not for you") from error
    except EntryNotFoundError as error:
        raise FinalError(f"{repo} has no file {file}") from error
    _check_sha256(path, stated.etag)
    return path


def _check_sha256(path: Path, etag: str | None) -> None:
    """The hub's tag of a large file is its SHA-256."""
    if etag is None or not _SHA256.fullmatch(etag):
        return
    sha256 = hashlib.sha256()
    with path.open("rb") as file:
        while data := file.read(CHUNK):
            sha256.update(data)
    if sha256.hexdigest() != etag:
        path.unlink()
        raise FetchError(f"{path.name} has SHA-256 {sha256.hexdigest()}, expected {etag}")
