"""Split GGUF files: put in order by what they say, or refused by name."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from gguf_bytes import I32, STRING, U16, gguf_bytes, pair, tensor
from synth import make_tiny_gguf

from knot.convert import convert
from knot.errors import GgufError
from knot.gguf_guard import read_gguf
from knot.gguf_parts import open_gguf, part_paths


def part(folder: Path, number: int, count: int, *, no: int | None = None, name: str | None = None) -> Path:
    """Part `number`, from 1, of `count`: one tensor each; the first has the metadata."""
    pairs = [
        pair("split.no", U16, number - 1 if no is None else no),
        pair("split.count", U16, count),
        pair("split.tensors.count", I32, count),
    ]
    if number == 1:
        pairs.append(pair("general.architecture", STRING, "qwen2"))
    path = folder / (name or f"m-{number:05}-of-{count:05}.gguf")
    path.write_bytes(gguf_bytes(pairs, [tensor(f"t{number}", (1,))], bytes([number]) * 4))
    return path


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_parts_given_in_any_order_are_put_in_order(tmp_path: Path, order: tuple[int, ...]) -> None:
    parts = [part(tmp_path, number, 3) for number in (1, 2, 3)]
    model = open_gguf([parts[index] for index in order])
    assert [file.path for file in model.files] == parts
    assert model.metadata["general.architecture"] == "qwen2"
    assert list(model.tensors) == ["t1", "t2", "t3"]
    assert model.name == "m"


@pytest.mark.parametrize("given", [1, 2, 3])
def test_any_one_part_brings_the_others_beside_it(tmp_path: Path, given: int) -> None:
    parts = [part(tmp_path, number, 3) for number in (1, 2, 3)]
    assert part_paths(parts[given - 1]) == parts
    assert list(open_gguf(parts[given - 1]).tensors) == ["t1", "t2", "t3"]


def test_each_tensor_is_read_from_its_own_file(tmp_path: Path) -> None:
    model = open_gguf([part(tmp_path, number, 2) for number in (2, 1)])
    for number in (1, 2):
        found = model.tensors[f"t{number}"]
        assert found.path.read_bytes()[found.offset :][:4] == bytes([number]) * 4


def test_parts_with_other_names_are_ordered_by_what_they_say(tmp_path: Path) -> None:
    parts = [part(tmp_path, 2, 2, name="aaa.gguf"), part(tmp_path, 1, 2, name="bbb.gguf")]
    assert [file.path.name for file in open_gguf(parts).files] == ["bbb.gguf", "aaa.gguf"]


def test_a_part_that_is_not_there_is_named(tmp_path: Path) -> None:
    first = part(tmp_path, 1, 2)
    with pytest.raises(GgufError, match=r"m-00002-of-00002\.gguf is not beside it"):
        open_gguf(first)
    with pytest.raises(GgufError, match="one of 2 parts, but 1 were given"):
        open_gguf([first])


def test_a_part_given_twice_is_refused(tmp_path: Path) -> None:
    first, second, _ = (part(tmp_path, number, 3) for number in (1, 2, 3))
    with pytest.raises(GgufError, match=r"missing or given twice|both in"):
        open_gguf([first, second, second])


def test_a_part_whose_name_counts_from_0_is_refused_with_the_name_it_should_have(tmp_path: Path) -> None:
    # As if names counted from 0, like split.no does: part 1's content under part 2's name.
    part(tmp_path, 1, 2, no=1)
    part(tmp_path, 2, 2, no=0)
    with pytest.raises(GgufError, match="its name should say 00001-of-00002"):
        open_gguf(tmp_path / "m-00001-of-00002.gguf")


def test_a_single_file_that_says_it_is_a_part_is_refused(tmp_path: Path) -> None:
    with pytest.raises(GgufError, match="one of 4 parts, but 1 were given"):
        open_gguf(part(tmp_path, 1, 4, name="lone.gguf"))


def test_a_count_of_tensors_that_is_not_what_the_parts_have_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "m-00001-of-00002.gguf"
    part(tmp_path, 1, 2)
    part(tmp_path, 2, 2)
    path.write_bytes(
        path.read_bytes().replace(b"split.tensors.count\5\0\0\0\2", b"split.tensors.count\5\0\0\0\7")
    )
    with pytest.raises(GgufError, match="states 7 tensors in all parts, but they have 2"):
        open_gguf(path)


def test_the_same_tensor_in_two_parts_is_refused_by_both_names(tmp_path: Path) -> None:
    part(tmp_path, 1, 2)
    path = part(tmp_path, 2, 2)
    path.write_bytes(path.read_bytes().replace(b"t2", b"t1"))
    with pytest.raises(
        GgufError, match=r"'t1' is both in m-00001-of-00002\.gguf and in m-00002-of-00002\.gguf"
    ):
        open_gguf(path)


def test_a_split_model_converts_to_the_knot_of_the_whole_one(tmp_path: Path) -> None:
    whole = make_tiny_gguf(tmp_path / "whole.gguf")
    paths = split(whole, tmp_path)
    expected, _ = convert(whole)
    found, _ = convert(paths[1])
    assert found == tmp_path / "m.knot"
    assert found.read_bytes() == expected.read_bytes()


def split(whole: Path, folder: Path) -> list[Path]:
    """A GGUF in two: all metadata and half of the tensors in the first."""
    file, data = read_gguf(whole), whole.read_bytes()
    names = list(file.tensors)
    half = len(names) // 2
    start = data.index(b"GGUF") + 24
    # The metadata ends where the tensor table begins: at the first tensor's name.
    metadata = data[start : data.rindex(len(names[0]).to_bytes(8, "little") + names[0].encode())]
    paths: list[Path] = []
    for number, chosen in enumerate((names[:half], names[half:])):
        pairs = [
            pair("split.no", U16, number),
            pair("split.count", U16, 2),
            pair("split.tensors.count", I32, len(names)),
        ]
        table: list[bytes] = []
        body = b""
        for name in chosen:
            info = file.tensors[name]
            entry = data[data.index(len(name).to_bytes(8, "little") + name.encode(), len(metadata) + start) :]
            fixed = 8 + len(name) + 4 + 8 * len(info.shape) + 4
            table.append(entry[:fixed] + len(body).to_bytes(8, "little"))
            piece = data[info.offset : info.offset + info.length]
            body += piece + b"\0" * (-len(piece) % 32)
        extra = [metadata] if number == 0 else []
        count = len(pairs) + (len(file.metadata) if number == 0 else 0)
        path = folder / f"m-{number + 1:05}-of-00002.gguf"
        path.write_bytes(gguf_bytes([*pairs, *extra], table, body, n_pairs=count))
        paths.append(path)
    return paths
