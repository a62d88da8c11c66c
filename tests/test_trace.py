"""`knot trace`: curves from a recording, pictures of them, and refusals."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from core_support import grouped, header_of
from hypothesis import given
from hypothesis import strategies as st

from emulator.meter import BASELINE_BYTES
from knot.cli import main
from knot.plan.cluster import plan_cluster
from knot.topology import even_topology
from knot.trace.curves import Curve, Moment, curves, passes
from knot.trace.picture import isolates_shown
from protocol.recorder import BlobRead, BlockMoved, Event, IsolateEnded, MemoryUsed


def block(at: float, size: int, layer: int | None, phase: str, stays: bool = False) -> BlockMoved:
    return BlockMoved(at, "entry", layer, phase, f"{layer}.{phase}", size, stays)


def test_a_curve_has_every_moment_and_what_the_memory_is_for() -> None:
    found = curves(
        [
            BlobRead(0.5, "entry", "head", "a.knot", 0, 0),
            MemoryUsed(1, "entry", 100, 0, 0),
            block(2, 30, 0, "attn", stays=True),
            BlobRead(2.5, "entry", "get", "a.knot", 10, 20),
            block(3, 20, 0, "ffn_up"),
            MemoryUsed(4, "entry", 100, 7, 5),
            block(5, -20, 0, "ffn_up"),
            IsolateEnded(6, "entry"),
            MemoryUsed(6, "gateway", 1, 0, 0),
        ]
    )
    assert set(found) == {"entry", "gateway"}
    curve = found["entry"]
    assert curve.moments == [
        Moment(1, True, 100),
        Moment(2, True, 100, pinned=30),
        Moment(3, True, 100, pinned=30, transit=20, unit=(0, "ffn_up")),
        Moment(4, True, 100, 7, 5, 30, 20, (0, "ffn_up")),
        Moment(5, True, 100, 7, 5, 30),
        Moment(6),
    ]
    assert curve.peak.total == BASELINE_BYTES + 112
    assert (curve.read.operations, curve.read.bytes) == (2, 20)
    assert curve.moments[-1].total == 0, "what is gone holds nothing"


@given(
    st.lists(st.tuples(st.floats(0, 9.99), st.integers(0, 1000)), max_size=40),
    st.integers(1, 50),
)
def test_columns_never_lose_the_fullest_moment(seen: list[tuple[float, int]], count: int) -> None:
    """However coarse a picture is, its highest column is the peak, and each column is a moment of its own."""
    events: list[Event] = [MemoryUsed(at, "entry", size, 0, 0) for at, size in sorted(seen)]
    curve = curves(events).get("entry", Curve())
    columns = curve.columns(0, 10, count)
    assert [round(column.at, 6) for column in columns] == [round(10 / count * i, 6) for i in range(count)]
    assert max(column.engine for column in columns) == max((size for _, size in seen), default=0)
    before = [moment for moment in curve.moments if moment.at < 5]
    late = curve.columns(5, 10, count)
    assert late[0].total >= (before[-1].total if before else 0), "what is there when it begins is there"


def test_passes_end_where_the_layers_begin_anew() -> None:
    events: list[Event] = []
    at = 0.0
    for _ in range(3):
        for layer in (4, 5):
            for phase in ("attn", "ffn_gate", "ffn_up", "ffn_down"):
                events += [block(at, 10, layer, phase), block(at + 0.5, -10, layer, phase)]
                at += 1
    assert passes(curves(events)["entry"]) == [(0, 7.5), (8, 15.5), (16, 23.5)]
    assert passes(Curve()) == []


def test_stations_have_curves_and_of_other_kinds_the_fullest() -> None:
    def used(name: str, size: int) -> list[Event]:
        return [MemoryUsed(0, name, size, 0, 0)]

    names = {"entry": 5, "exit": 6, "shard-0": 1, "shard-1": 9, "gateway": 1, "layer-warden": 2}
    found = curves(event for name, size in names.items() for event in used(name, size))
    shown = isolates_shown(found)
    assert list(shown) == ["entry", "exit", "shard-1", "layer-warden", "gateway"]
    assert shown["shard-1"] == "shard-1, the fullest of 2 shards"
    many = curves(event for i in range(9) for event in used(f"station-{i}", i))
    assert list(isolates_shown(many).values()) == ["station-8, the fullest of 9 stations"]


def traced(tmp_path: Path, capsys: pytest.CaptureFixture[str], *more: str) -> tuple[str, dict[str, Any]]:
    options = ["--shards", "3", "--tokens", "40", "-n", "3", "--set", "BLOCK_BYTES=8192"]
    pictures = ["--picture", str(tmp_path / "a.png"), "--picture", str(tmp_path / "a.svg")]
    assert main(["trace", str(grouped()), *options, *pictures, *more, "--json"]) == 0
    *text, last = capsys.readouterr().out.splitlines()
    return "\n".join(text), json.loads(last)


@pytest.mark.wasm
@pytest.mark.parametrize("residency", ["fluid", "resident"])
def test_a_run_is_drawn_and_told_as_it_was(
    residency: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, told = traced(
        tmp_path, capsys, "--residency", residency, "--set", "USE_LAYER_WARDEN=off", "--set", "SAVE_BYTES=0"
    )
    assert len(told["prompt_ids"]) == 40
    assert len(told["ids"]) == 3
    assert f"the fullest isolate had {told['peak_isolate_bytes'] / 1e6:.1f} MB of 128 MB" in text
    header = header_of(grouped())
    plan = plan_cluster(header, even_topology(header.config, 2, 3), told["variables"], prompt=40)
    predicted = plan.part_reads(40, 3)
    for part in plan.parts:
        found = told["isolates"][part.name]
        assert found["peak_bytes"] <= part.peak
        assert found["passed_bytes"] == predicted[part.name].bytes
        assert found["pinned_bytes"] == part.weights - part.passes.warm.bytes
        assert found["most_in_flight_bytes"] <= part.in_flight
    height = struct.unpack(">2I", (tmp_path / "a.png").read_bytes()[16:24])[1]
    assert height > 800
    drawn = " ".join(ElementTree.parse(tmp_path / "a.svg").getroot().itertext())
    for words in (
        "limit, 128 MB",
        "entry",
        "exit",
        "shards",
        "gateway",
        "first token",
        "Python and JavaScript",
    ):
        assert words in drawn
    assert ("weights in flight: ffn_down" in drawn) == (residency == "fluid")
    assert ("weights that stay" in drawn) == (residency == "resident")


@pytest.mark.wasm
def test_text_is_traced_too_and_the_default_is_a_picture_in_this_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert (
        main(["trace", str(grouped()), "-p", "def add", "-n", "1", "--shards", "1", "--stations", "1"]) == 0
    )
    assert "drawn: trace.png" in capsys.readouterr().out
    assert (tmp_path / "trace.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--picture", "a.gif"], "name a file that ends in .png or .svg"),
        (["-n", "0"], "--max-tokens is 0, expected at least 1"),
        (["--tokens", "0"], "--tokens is 0, expected 1 to"),
        (["--ids", "a,b"], "expected numbers such as"),
        (["--stations", "9"], "9 stations cannot share 3 layers; take from 1 to 3"),
        (["--set", "BLOCK"], "expected NAME=VALUE"),
        (["--context", "0"], "--context is 0, expected at least 1"),
        (
            ["--context", "9000000"],
            "take more stations, fewer tokens (--context) or smaller keys and values (--kv f16 or q8_0). "
            "`knot plan` says which topology would do",
        ),
    ],
)
def test_what_cannot_be_traced_is_refused_before_anything_runs(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["trace", str(grouped()), *arguments]) == 1
    assert words in capsys.readouterr().err
