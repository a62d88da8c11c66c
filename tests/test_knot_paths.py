"""What a MODEL argument means."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
from synth import make_tiny_gguf, make_tiny_knot

from knot.atomic import replacing
from knot.convert import convert
from knot.errors import GgufError, ModelNotFoundError
from knot.fetch import KEYS
from knot.paths import find_model, models_folder, resolve_model
from knot.reader import load_header


def resolved(model: Path | str) -> tuple[Path, list[str]]:
    said: list[str] = []
    return resolve_model(str(model), show_progress=False, say=said.append), said


def test_a_knot_is_itself(tmp_path: Path) -> None:
    path = make_tiny_knot(tmp_path / "x.knot")
    assert resolved(path) == (path, [])


def test_what_a_file_is_depends_on_its_first_bytes_not_its_name(tmp_path: Path) -> None:
    path = make_tiny_knot(tmp_path / "x.knot").rename(tmp_path / "model.bin")
    assert resolved(path)[0] == path


def test_a_gguf_is_converted_beside_it_once(tmp_path: Path) -> None:
    source = make_tiny_gguf(tmp_path / "x.gguf")
    path, said = resolved(source)
    assert path == tmp_path / "x.knot"
    assert said == [f"converting x.gguf to {path}"]
    made = path.stat()
    assert resolved(source) == (path, [])
    assert path.stat().st_ino == made.st_ino


@pytest.mark.parametrize("shift", [-3600, 3600])
def test_a_gguf_that_changed_is_converted_again_whether_it_is_newer_or_older(
    tmp_path: Path, shift: int
) -> None:
    source = make_tiny_gguf(tmp_path / "x.gguf")
    path, _ = resolved(source)
    stat = source.stat()
    make_tiny_gguf(source, seed=2)
    os.utime(source, ns=(stat.st_atime_ns, stat.st_mtime_ns + shift * 10**9))
    again, said = resolved(source)
    assert again == path
    assert "converting again" in said[0]
    assert load_header(path).name == "tiny qwen2 2"
    assert resolved(source) == (path, [])


def test_a_file_system_that_keeps_whole_seconds_does_not_convert_for_ever(tmp_path: Path) -> None:
    source = make_tiny_gguf(tmp_path / "x.gguf")
    path, _ = resolved(source)
    seconds = path.stat().st_mtime_ns // 10**9 * 10**9
    os.utime(path, ns=(seconds, seconds))
    assert resolved(source) == (path, [])


def test_a_knot_that_cannot_be_read_is_made_again(tmp_path: Path) -> None:
    source = make_tiny_gguf(tmp_path / "x.gguf")
    path, _ = resolved(source)
    stamp = path.stat().st_mtime_ns
    path.write_bytes(path.read_bytes()[:1000])
    os.utime(path, ns=(stamp, stamp))
    assert "converting again" in resolved(source)[1][0]
    assert load_header(path)


def test_a_bad_gguf_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    source = make_tiny_gguf(tmp_path / "x.gguf")
    os.truncate(source, 50_000)
    with pytest.raises(GgufError, match="cut short"):
        resolved(source)
    assert [path.name for path in tmp_path.iterdir()] == ["x.gguf"]


def test_one_part_of_a_split_model_stands_for_the_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = make_tiny_gguf(tmp_path / "m-00001-of-00001.gguf")
    path, _ = resolved(source)
    assert path == convert(source, force=True, show_progress=False)[0]
    assert resolved(source) == (path, [])


def test_a_gguf_in_a_folder_that_cannot_be_written_is_converted_among_the_models(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = make_tiny_gguf(tmp_path / "x.gguf")
    monkeypatch.setenv("KNOT_MODELS", str(tmp_path / "models"))
    monkeypatch.setattr("os.access", lambda path, mode: False)
    path, _ = resolved(source)
    assert path == tmp_path / "models" / "x.knot"
    assert resolved(source) == (path, [])


def test_a_second_process_waits_for_the_first_and_converts_nothing(tmp_path: Path) -> None:
    source = make_tiny_gguf(tmp_path / "x.gguf")
    target = tmp_path / "x.knot"
    ready = make_tiny_knot(tmp_path / "other.knot").read_bytes()
    said: list[str] = []
    with replacing(target, force=False) as file:
        waiting = threading.Thread(target=resolve_model, args=(str(source),), kwargs={"say": said.append})
        waiting.start()
        while not any("waiting for it" in line for line in said):
            assert waiting.is_alive()
        file.write(ready)
        file.flush()
        os.utime(file.fileno(), ns=(1, source.stat().st_mtime_ns))
    waiting.join(30)
    assert not waiting.is_alive()
    assert len(said) == 2
    assert target.read_bytes() == ready


def test_a_key_is_found_among_the_models_and_fetched_where_it_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KNOT_MODELS", str(tmp_path))
    assert find_model("smol") is None

    def fake(reference: str, folder: Path, *, show_progress: bool | None) -> Path:
        return make_tiny_gguf(folder / KEYS[reference].file)

    monkeypatch.setattr("knot.paths.fetch", fake)
    path, said = resolved("smol")
    assert path == tmp_path / "SmolLM2-135M-Instruct.Q4_1.knot"
    assert said[0] == f"fetching smol into {tmp_path}"
    monkeypatch.delattr("knot.paths.fetch")
    assert resolved("smol") == (path, [])
    # The knot alone will do.
    (tmp_path / KEYS["smol"].file).unlink()
    assert resolved("smol") == (path, [])


def test_models_lie_in_the_project_around_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KNOT_MODELS", raising=False)
    deep = tmp_path / "a" / "b"
    deep.mkdir(parents=True)
    monkeypatch.chdir(deep)
    assert models_folder() == deep / "models"
    (tmp_path / "pyproject.toml").touch()
    assert models_folder() == tmp_path / "models"
    monkeypatch.setenv("KNOT_MODELS", "/elsewhere")
    assert models_folder() == Path("/elsewhere")


def test_anything_else_is_refused_with_what_is_expected(tmp_path: Path) -> None:
    with pytest.raises(
        ModelNotFoundError, match=r"nothing is no file; expected a \.knot or \.gguf file, the key smol"
    ):
        resolved("nothing")
    (tmp_path / "x.bin").write_bytes(b"PK\3\4")
    with pytest.raises(ModelNotFoundError, match=r"x\.bin is neither a knot nor a GGUF"):
        resolved(tmp_path / "x.bin")
