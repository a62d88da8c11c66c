"""The command line: what it prints, where, and with which exit code."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from knot_bytes import as_old
from synth import make_tiny_gguf, make_tiny_knot

from knot.cli import main
from knot.reader import load_header

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_knot(tmp_path_factory.mktemp("knot") / "tiny.knot")


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    code = main([str(argument) for argument in arguments])
    found = capsys.readouterr()
    return code, found.out, found.err


def test_convert_says_what_it_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = make_tiny_gguf(tmp_path / "x.gguf")
    code, out, err = run(capsys, "convert", source)
    header = load_header(tmp_path / "x.knot")
    assert (code, err) == (0, "")
    assert out == f"{tmp_path / 'x.knot'}: {header.file_size} bytes, 39 tensors, {header.fingerprint[:16]}\n"
    code, out, err = run(capsys, "convert", source)
    assert (code, out) == (1, "")
    assert err == f"knot: {tmp_path / 'x.knot'} exists; add --force to replace it\n"
    assert run(capsys, "convert", source, "--force", "-o", tmp_path / "y.knot")[0] == 0
    assert (tmp_path / "y.knot").read_bytes() == (tmp_path / "x.knot").read_bytes()


def test_convert_shows_progress_only_when_asked_or_on_a_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = make_tiny_gguf(tmp_path / "x.gguf")
    assert run(capsys, "convert", source)[2] == ""
    assert "x.knot" in run(capsys, "convert", source, "-f", "--progress")[2]
    assert run(capsys, "convert", source, "-f", "--no-progress")[2] == ""


def test_inspect_json_has_the_facts(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "inspect", tiny, "--json")
    assert code == 0
    facts = json.loads(out)
    header = load_header(tiny)
    assert facts["fingerprint"] == header.fingerprint
    assert facts["config"] == header.config.to_json()
    assert facts["tensors"] == sum(entry["tensors"] for entry in facts["types"].values()) == 39
    whole = sum(entry["bytes"] for entry in facts["types"].values())
    assert whole + sum(entry["bytes"] for entry in facts["sections"].values()) == (
        header.file_size - header.payload_offset
    )
    for phase, entry in facts["phases"].items():
        lengths = [header.phase_range(layer, phase).length for layer in range(3)]
        assert (entry["smallest"]["bytes"], entry["largest"]["bytes"]) == (min(lengths), max(lengths))
        assert lengths[entry["largest"]["layer"]] == max(lengths)


def test_inspect_prints_a_table_for_people(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "inspect", tiny)
    assert code == 0
    for part in (
        "tiny qwen2 1",
        load_header(tiny).fingerprint,
        "head_dim",
        "Q5_K",
        "ffn_down",
        "tokenizer",
        "digests",
    ):
        assert part in out
    assert max(map(len, out.splitlines())) <= 100


def test_verify_says_sound_or_where_not(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = run(capsys, "verify", tiny)
    assert (code, err) == (0, "")
    assert "sound; 39 tensors in 57 row groups" in out
    assert "a tokenizer of 300 tokens" in out
    data = bytearray(tiny.read_bytes())
    header = load_header(tiny)
    data[header.file_offset(header.head_tensor().offset)] ^= 1
    (tmp_path / "bad.knot").write_bytes(data)
    code, out, err = run(capsys, "verify", tmp_path / "bad.knot")
    assert (code, out) == (1, "")
    assert err.startswith("knot: tensor output_weight, rows [0, 300): the digest is ")


def test_repair_says_what_it_found_and_what_is_lacking(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old = tmp_path / "old.knot"
    old.write_bytes(as_old(tiny.read_bytes()))
    code, out, err = run(capsys, "verify", old)
    assert (code, out) == (1, "")
    assert "run `knot repair` on it" in err
    code, out, err = run(capsys, "repair", old)
    assert (code, err) == (0, "")
    assert "the payload started one byte early" in out
    assert "it has no tokenizer" in out
    code, out, _ = run(capsys, "repair", old, "--tokenizer-from", tiny.with_suffix(".gguf"), "--force")
    assert code == 0
    assert "tokenizer" not in out
    assert (tmp_path / "old.repaired.knot").read_bytes() == tiny.read_bytes()


@pytest.mark.parametrize(
    "arguments",
    [
        ("verify", "/nowhere/x.knot"),
        ("inspect", "/nowhere/x.knot"),
        ("inspect", "/"),
        ("repair", "/nowhere/x.knot"),
        ("convert", "/nowhere/x.gguf"),
        ("fetch", "nothing"),
    ],
)
def test_a_refusal_is_one_sentence_on_stderr_and_exit_code_1(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...]
) -> None:
    code, out, err = run(capsys, *arguments)
    assert (code, out) == (1, "")
    assert err.startswith("knot: ")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    "arguments", [(), ("dance",), ("convert",), ("verify", "a", "b"), ("inspect", "--yaml", "x")]
)
def test_wrong_usage_is_exit_code_2(capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert "usage: knot" in capsys.readouterr().err


def test_help_names_the_commands_and_only_the_model_meant_for_people(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--help"])
    assert caught.value.code == 0
    out = capsys.readouterr().out
    assert all(name in out for name in ("convert", "inspect", "verify", "repair", "fetch"))
    with pytest.raises(SystemExit):
        main(["fetch", "--help"])
    out = capsys.readouterr().out
    assert "smol" in out
    assert "q05" not in out


def test_output_cut_short_by_its_reader_is_no_error(tiny: Path) -> None:
    command = f"{sys.executable} -m knot.cli inspect {tiny} | true"
    result = subprocess.run(
        ["bash", "-o", "pipefail", "-c", command], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (result.returncode, result.stderr) == (0, "")


def test_a_name_the_terminal_cannot_show_is_no_error(tmp_path: Path) -> None:
    path = make_tiny_knot(tmp_path / "x.knot", extra={"general.name": "gewölbe 歪"})
    result = subprocess.run(
        [sys.executable, "-m", "knot.cli", "inspect", str(path)],
        cwd=ROOT,
        env={"PYTHONIOENCODING": "ascii"},
        capture_output=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert b"gew\\xf6lbe \\u6b6a" in result.stdout
