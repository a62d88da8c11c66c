"""`knot verify` finds any changed byte and says where it is."""

from __future__ import annotations

from pathlib import Path

import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from knot_bytes import join_knot, split_knot
from synth import make_tiny_knot

from knot.errors import DigestError, HeaderError, SourceError
from knot.header import KnotHeader
from knot.reader import load_header
from knot.verify import read_tokenizer, verify


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, KnotHeader]:
    path = make_tiny_knot(tmp_path_factory.mktemp("knot") / "tiny.knot")
    return path, load_header(path)


def flipped(path: Path, target: Path, position: int) -> Path:
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    target.write_bytes(data)
    return target


def test_a_sound_knot_is_sound(tiny: tuple[Path, KnotHeader]) -> None:
    found = verify(tiny[0], show_progress=False)
    assert found.header == tiny[1]
    assert found.tensors == 39
    assert found.groups == 38 + -(-300 // 16)
    assert found.tokenizer is not None
    assert found.tokenizer.n_tokens == 300


@pytest.mark.parametrize("row", [0, 15, 16, 255, 299])
def test_a_bad_row_of_the_table_is_found_to_its_sixteen(
    tiny: tuple[Path, KnotHeader], tmp_path: Path, row: int
) -> None:
    path, header = tiny
    table = header.embedding_tensor()
    bad = flipped(path, tmp_path / "bad.knot", header.file_offset(table.row_range(row, row + 1)[0]) + 3)
    with pytest.raises(DigestError) as caught:
        verify(bad, show_progress=False)
    start = row // 16 * 16
    assert (caught.value.tensor, caught.value.rows) == ("token_embd_weight", (start, min(start + 16, 300)))
    assert f"token_embd_weight, rows [{start}, " in str(caught.value)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_bit_of_any_tensor_is_found_in_that_tensor(
    tiny: tuple[Path, KnotHeader], tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    path, header = tiny
    info = data.draw(st.sampled_from(list(header.tensors.values())))
    byte = data.draw(st.integers(0, info.length - 1))
    bad = flipped(path, tmp_path_factory.getbasetemp() / "bad.knot", header.file_offset(info.offset + byte))
    with pytest.raises(DigestError) as caught:
        verify(bad, show_progress=False)
    assert caught.value.tensor == info.name
    rows = caught.value.rows
    assert rows is not None
    assert rows[0] <= byte // info.row_bytes < rows[1]


@pytest.mark.parametrize("section", ["tokenizer", "digests"])
def test_a_bad_section_is_named(tiny: tuple[Path, KnotHeader], tmp_path: Path, section: str) -> None:
    path, header = tiny
    bad = flipped(path, tmp_path / "bad.knot", header.file_offset(header.sections[section].end - 1))
    with pytest.raises(DigestError, match=f"section {section}"):
        verify(bad, show_progress=False)


def test_bytes_and_digests_changed_together_are_found_by_the_sha256(
    tiny: tuple[Path, KnotHeader], tmp_path: Path
) -> None:
    path, header = tiny
    meta, payload = split_knot(path.read_bytes())
    norm, digests = header.output_norm(), header.digests
    forged = bytearray(payload)
    forged[norm.offset] ^= 1
    at = digests.offset + norm.first_digest * 8
    forged[at : at + 8] = xxhash.xxh3_64_intdigest(forged[norm.offset : norm.end]).to_bytes(8, "little")
    meta["sections"]["digests"]["digest"] = xxhash.xxh3_64_hexdigest(bytes(forged[digests.offset :]))
    bad = tmp_path / "bad.knot"
    bad.write_bytes(join_knot(meta, bytes(forged)))
    with pytest.raises(DigestError, match="the payload's SHA-256 is"):
        verify(bad, show_progress=False)


def test_a_tokenizer_that_does_not_fit_the_configuration_is_refused(
    tiny: tuple[Path, KnotHeader], tmp_path: Path
) -> None:
    meta, payload = split_knot(tiny[0].read_bytes())
    bad = tmp_path / "bad.knot"
    for key, value in (("vocab_size", 299), ("unused_token_ranges", [])):
        changed = {**meta, "config": {**meta["config"], "unused_token_ranges": [[297, 299]], key: value}}
        bad.write_bytes(join_knot(changed, payload))
        with pytest.raises(HeaderError, match=f"section tokenizer.*config.{key}"):
            verify(bad, show_progress=False)


def test_the_tokenizer_is_read_with_its_digest_checked(tiny: tuple[Path, KnotHeader], tmp_path: Path) -> None:
    path, header = tiny
    section = read_tokenizer(path, header)
    assert section is not None
    assert section.startswith(b"KTOK")
    assert header.tokenizer is not None
    bad = flipped(path, tmp_path / "bad.knot", header.file_offset(header.tokenizer.offset) + 40)
    with pytest.raises(DigestError, match="section tokenizer"):
        read_tokenizer(bad, header)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"none\.knot cannot be read"):
        verify(tmp_path / "none.knot")
