"""`knot plan`: topologies that fit, refusals that say what would work, tables, pictures, configurations."""

from __future__ import annotations

import json
import struct
import tomllib
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from core_support import grouped, header_of, knot_of
from synth import make_tiny_gguf

from bench.synthetic import SHAPES, write_synthetic_header
from engine.budget import CEILING_BYTES, OverBudgetError
from knot.cli import main
from knot.errors import ConfigError, ModelNotFoundError
from knot.header import KnotHeader
from knot.plan.cluster import plan_cluster
from knot.plan.figures import Prices, Rates, prices, rates
from knot.plan.parts import plan_station
from knot.plan.reads import Reads
from knot.plan.report import Wish, make_report, smallest_topology
from knot.plan.search import NoTopology, best_plan, resident_stations, smallest_shards, smallest_stations
from knot.plan.source import model_header
from knot.plan.speed import cost_of_prompt, cost_of_tokens, pass_seconds, speed, token_seconds
from knot.topology import Topology, even_topology, topology_of

LIMIT = 128_000_000


@cache
def shape_file(folder: Path, name: str) -> Path:
    """The header of a model of real shapes, but for its vocabulary, which would take long to read."""
    shape = SHAPES[name]
    few = replace(shape, vocab=min(shape.vocab, 4096), rows=min(shape.rows, 4224))
    return write_synthetic_header(folder / f"{name}.gguf", few)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("headers")


@cache
def header(folder: Path, name: str) -> KnotHeader:
    return model_header(str(shape_file(folder, name)))


def plan(*arguments: str, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """What `knot plan --json` says."""
    assert main(["plan", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def refused(*arguments: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["plan", *arguments]) == 1
    said = capsys.readouterr()
    assert said.err.startswith("knot: ")
    return said.err


@pytest.mark.parametrize("arch", ["qwen2", "llama"])
def test_a_gguf_is_planned_for_as_the_knot_that_it_would_become(arch: str, tmp_path: Path) -> None:
    path = make_tiny_gguf(tmp_path / "tiny.gguf", arch=arch)
    knot = header_of(knot_of(arch))
    found = model_header(str(path))
    assert found.config == knot.config
    assert dict(found.tensors) == dict(knot.tensors)
    assert (found.payload_offset, found.file_size) == (knot.payload_offset, knot.file_size)
    cut = tmp_path / "beginning.gguf"
    cut.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    assert model_header(str(cut)).tensors == found.tensors, "its data need not be there"


def test_what_cannot_be_planned_for_is_refused_with_what_can(tmp_path: Path) -> None:
    with pytest.raises(
        ModelNotFoundError, match="is no file here; plan for a knot, a GGUF, or the beginning"
    ):
        model_header(str(tmp_path / "nothing.knot"))
    (tmp_path / "model.bin").write_bytes(b"PK\3\4 and so on")
    with pytest.raises(ModelNotFoundError, match="is neither a knot nor a GGUF"):
        model_header(str(tmp_path / "model.bin"))


@pytest.mark.parametrize(("name", "kv_type"), [("7b", "f32"), ("7b", "f16"), ("70b", "f16"), ("70b", "q8_0")])
def test_the_smallest_topology_fits_and_one_part_fewer_does_not(
    name: str, kv_type: str, folder: Path
) -> None:
    found = header(folder, name)
    stations = smallest_stations(found, {}, context=1024, kv_type=kv_type)
    shards = smallest_shards(found, {}, "fluid")
    whole = best_plan(
        found, Topology(stations, shards), {"RESIDENCY": "fluid"}, context=1024, prompt=512, kv_type=kv_type
    )
    assert whole.kv_tokens >= 1024
    assert all(part.peak <= CEILING_BYTES < LIMIT for part in whole.parts)
    assert sum(whole.gateway.values()) < LIMIT
    assert all(part.in_flight <= 16_000_000 for part in whole.parts)
    if len(stations) > 1:
        fewer = even_topology(found.config, len(stations) - 1, len(shards))
        wished = {"RESIDENCY": "fluid", "BLOCK_BYTES": str(1 << 20)}
        try:
            less = best_plan(found, fewer, wished, context=1024, prompt=512, kv_type=kv_type)
        except OverBudgetError:
            return
        assert min(part.rows for part in less.stations) < 8, "not even a tile of rows"


def test_what_holds_everything_resident_is_found_where_it_exists(folder: Path) -> None:
    small = header(folder, "small")
    stations = resident_stations(small, {"ENGINE_BYTES": str(6 << 20)}, context=64, kv_type="f32")
    assert [end for _, end in stations[:-1]] == [start for start, _ in stations[1:]]
    assert len(stations) == 2, "each takes as many layers as fit"
    shards = smallest_shards(small, {"ENGINE_BYTES": str(6 << 20), "KEPT_LOGITS_BYTES": "0"}, "resident")
    variables = {"ENGINE_BYTES": str(6 << 20), "KEPT_LOGITS_BYTES": "0", "RESIDENCY": "resident"}
    whole = best_plan(small, Topology(stations, shards), variables, context=64, prompt=32)
    assert whole.resident
    assert whole.warm_reads() == whole.warm_head_reads() == Reads()
    with pytest.raises(
        NoTopology, match=r"no topology holds all of synthetic resident: layer 0 alone: .* 149\.1 MB for all"
    ):
        resident_stations(header(folder, "7b"), {}, context=64, kv_type="f32")


def test_a_cluster_of_70b_shapes_streams_every_phase_through_two_small_blocks(folder: Path) -> None:
    found = header(folder, "70b")
    topology = smallest_topology(found, Wish("fluid", 1024, 512, "f16", 8, {}), "fluid")
    wished = {"RESIDENCY": "fluid", "USE_LAYER_WARDEN": "off"}
    whole = best_plan(found, topology, wished, context=1024, prompt=512, kv_type="f16")
    sizes = {phase.phase: phase.bytes for part in whole.stations for phase in part.phases}
    assert max(phase.bytes for part in whole.stations for phase in part.phases) == 192_675_840, (
        "ffn_down in Q6_K"
    )
    assert set(sizes) == {"attn", "ffn_gate", "ffn_up", "ffn_down"}
    assert sum(part.weights for part in whole.stations) > 40e9
    assert whole.warm_reads().operations == 80 * 4
    assert whole.warm_reads().bytes == sum(part.weights for part in whole.stations)


def test_smaller_blocks_are_taken_where_they_cut_a_prompt_into_fewer_pieces(folder: Path) -> None:
    found = header(folder, "7b")
    topology = even_topology(found.config, 2, 8)
    wished = {"RESIDENCY": "fluid"}
    best = best_plan(found, topology, wished, context=528, prompt=512, kv_type="f16")
    by_size = {
        size: len(
            best_plan(
                found,
                topology,
                {**wished, "BLOCK_BYTES": str(size << 20)},
                context=528,
                prompt=512,
                kv_type="f16",
            ).pieces(512)
        )
        for size in (1, 2, 4)
    }
    assert len(best.pieces(512)) == min(by_size.values()) < max(by_size.values())
    short = best_plan(found, topology, wished, context=528, prompt=16, kv_type="f16")
    assert short.variables["BLOCK_BYTES"] == str(4 << 20), "of those that do equally well the largest"


def test_uneven_ranges_and_numbers_name_topologies_and_anything_else_is_told_what_would() -> None:
    model = header_of(grouped()).config
    assert topology_of(model, "2", "0-1, 1-300") == Topology(((0, 1), (1, 3)), ((0, 1), (1, 300)))
    assert topology_of(model, "0-3", "3").stations == ((0, 3),)
    for stations, words in (
        ("0", "take from 1 to 3"),
        ("4", "4 stations cannot share 3 layers; take from 1 to 3"),
        ("two", "take a number of stations, or ranges of layers such as 0-1,1-3"),
        ("1-3", "begin at 0 and meet end to end"),
        ("0-2,1-3", "where a range from 2 on was expected, such as 2-3"),
        ("0-0,0-3", "where a range from 0 on was expected"),
        ("0-2", "ends at 2, but the model has 3 layers; end it there"),
        ("0-4", "ends at 4, but the model has 3 layers"),
        ("0-99999999999", "take a number of stations"),
        ("²", "take a number"),
    ):
        with pytest.raises(ConfigError, match=words.replace("(", r"\(")):
            topology_of(model, stations, "1")


def test_what_does_not_fit_is_refused_with_the_figures_and_with_what_does(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    seven = str(shape_file(folder, "7b"))
    said = refused(seven, "--stations", "1", "--shards", "8", capsys=capsys)
    assert "a station of layers [0, 28) needs" in said
    assert "What would work: --residency pinned-prefix --stations 4 --shards 1" in said
    said = refused(seven, "--residency", "resident", capsys=capsys)
    assert "layer 0 alone" in said
    assert "What would work: --residency pinned-prefix --stations 4 --shards 1" in said
    said = refused(seven, "--context", "9000000", capsys=capsys)
    assert "no number of stations has room for 9000000 tokens" in said
    assert "keys and values of 9000000 tokens in 1 layers are" in said
    for arguments, words in (
        (["--prompt", "2000"], "leaves no token of --context 1024"),
        (["--prompt", "0"], "--prompt is 0, expected at least 1"),
        (["--set", "BLOCK"], "expected NAME=VALUE"),
        (["--set", "BLOKC_BYTES=1"], "BLOKC_BYTES, which no Worker knows; did you mean BLOCK_BYTES?"),
        (["--set", "RESIDENCY=fluid"], "has an option of its own: --residency"),
        (["--set", "MAX_BATCH_ROWS=0", "--stations", "2"], "MAX_BATCH_ROWS is '0', expected a whole number"),
        (
            ["--set", "MAX_BATCH_ROWS=x", "--stations", "2", "--shards", "2"],
            "MAX_BATCH_ROWS is 'x', expected",
        ),
        (["--stations", "29"], "29 stations cannot share 28 layers; take from 1 to 28"),
        (["--picture", "a.gif"], "name a file that ends in .png or .svg"),
    ):
        assert words in refused(seven, *arguments, capsys=capsys)


def test_the_command_says_what_the_planner_found(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = plan(
        str(shape_file(folder, "7b")), "--stations", "2", "--shards", "8", "--kv", "f16", "--context", "528",
        "--residency", "fluid", "--set", "USE_LAYER_WARDEN=off", capsys=capsys,
    )  # fmt: skip
    assert told["token"]["reads"]["operations"] == 2 * 14 * 4 + 8
    assert told["peak_isolate_bytes"] <= 120_000_000
    assert told["prompt"]["reads"]["operations"] == 112 * len(told["prompt"]["pieces"])
    assert sum(told["prompt"]["pieces"]) == 512
    assert set(told["modes"]) == {"fluid", "pinned-prefix"}
    assert "for all weights" in told["does_not_fit"]["resident"]
    assert told["resident"]["why_not"].startswith("no topology holds all")
    assert told["smallest"]["stations"] == [[0, 28]]
    cost = told["modes"]["fluid"]["cost_of_million_tokens"]
    assert cost["reads"] == pytest.approx(120 * 0.36)
    assert cost["total"] == pytest.approx(sum(value for name, value in cost.items() if name != "total"))


def test_storage_is_what_fluid_memory_pays_for_and_computing_what_resident_does(folder: Path) -> None:
    small = header(folder, "small")
    topology = even_topology(small.config, 2, 2)
    fluid, resident = (
        best_plan(small, topology, {"RESIDENCY": mode, "USE_LAYER_WARDEN": "off"}, context=64, prompt=32)
        for mode in ("fluid", "resident")
    )
    bill = cost_of_tokens(fluid, rates(), prices())
    assert bill.reads > bill.computing
    kept = cost_of_tokens(resident, rates(), prices())
    assert (kept.reads, kept.waiting) == (0, 0)
    assert kept.computing == pytest.approx(bill.computing)
    shared = cost_of_tokens(fluid, rates(), prices(), sessions=8)
    assert shared.reads == pytest.approx(bill.reads / 8), "eight sessions pay for one read"


def test_speeds_and_costs_follow_from_the_rates_by_hand(folder: Path) -> None:
    small = header(folder, "small")
    made = best_plan(
        small, even_topology(small.config, 2, 1), {"RESIDENCY": "fluid", "USE_LAYER_WARDEN": "off"},
        context=64, prompt=32,
    )  # fmt: skip
    rate = Rates("today", "here", 8e6, 2e6, 1e6, 0.5, 0.25, 0.01, 0.1, 0.2)
    one = made.stations[0]
    seconds = pass_seconds(one, 1, rate)
    computing = 2 * one.elements / 2e6 + one.blocks * 0.01
    reading = one.weights / 1e6
    assert seconds.computing == pytest.approx(computing)
    assert seconds.waiting == pytest.approx(reading - 0.25 * min(computing, reading) + 8 * 0.5)
    assert pass_seconds(one, 16, rate).computing == pytest.approx(
        2 * 16 * one.elements / 8e6 + one.blocks * 0.01
    )
    through = [pass_seconds(part, 32, rate).total for part in made.stations]
    head = pass_seconds(made.shards[0], 1, rate).total + 0.1
    found = speed(made, 32, rate)
    assert len(made.pieces(32)) == 1
    assert found.first_token == pytest.approx(sum(through) + 3 * 0.1 + head)
    tokens = sum(pass_seconds(part, 1, rate).total for part in made.stations) + 3 * 0.1 + head
    assert found.decode_tokens == pytest.approx(1 / tokens) == pytest.approx(1 / token_seconds(made, rate))
    price = Prices("today", "here", "X", 1.0, 10.0, 100.0, 0.5, 1000.0)
    bill = cost_of_tokens(made, rate, price)
    assert bill.reads == pytest.approx(1e6 * 17)
    # Two stations, a shard for the row and again for the logits, and the row's warden.
    assert bill.requests == pytest.approx(1e6 * 5 * 10)
    assert bill.doors == 0
    assert bill.session == pytest.approx(1e6 * tokens * 50)
    shared = cost_of_tokens(made, rate, price, sessions=4)
    assert (4 * shared.reads, 4 * shared.requests) == pytest.approx((bill.reads, bill.requests))
    assert shared.session < bill.session, "one object waits for all"
    prompts = cost_of_prompt(made, 32, rate, price)
    assert prompts.reads == pytest.approx(1e6 / 32 * 16)
    assert prompts.requests == pytest.approx(1e6 / 32 * (2 + 2 + 1) * 10)
    assert prompts.doors == pytest.approx(1e6 / 32 * 0.2 * 1000)


def test_figures_are_files_with_a_date_and_a_wrong_one_is_named(tmp_path: Path) -> None:
    assert rates().measured > "2026"
    assert prices().of > "2026"
    path = tmp_path / "prices.json"
    for text, words in (
        ("{", "is not JSON"),
        ("[]", "must be an object of of, where"),
        ('{"of": "2026"}', "must be an object"),
        (
            json.dumps(
                {
                    **json.loads((Path(__file__).parent.parent / "knot/plan/prices.json").read_text()),
                    "cpu_seconds": -1,
                }
            ),
            "cpu_seconds is -1, expected a number",
        ),
        (
            json.dumps(
                {
                    **json.loads((Path(__file__).parent.parent / "knot/plan/prices.json").read_text()),
                    "where": 5,
                }
            ),
            "where is 5, expected a text",
        ),
    ):
        path.write_text(text)
        with pytest.raises(ConfigError, match=words):
            prices(path)


@pytest.mark.parametrize("residency", ["fluid", "resident"])
def test_a_plan_is_drawn_as_png_and_svg(
    residency: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = str(shape_file(folder, "small"))
    names = [tmp_path / name for name in ("a.png", "a.svg")]
    options = [option for name in names for option in ("--picture", str(name))]
    plan(small, "--stations", "2", "--shards", "2", "--residency", residency, *options, capsys=capsys)
    assert names[0].read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">2I", names[0].read_bytes()[16:24])
    assert width > 1000
    assert height > 1000
    svg = ElementTree.parse(names[1]).getroot()
    text = " ".join(svg.itertext())
    for word in ("limit, 128 MB", "entry", "shard-1", "gateway", "ffn_down", "storage operations", "USD"):
        assert word in text


def test_wranglers_environments_are_written_with_what_was_planned(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "wrangler.toml"
    told = plan(
        str(shape_file(folder, "7b")), "--stations", "0-10,10-19,19-28", "--shards", "2", "--kv", "f16",
        "--write-wrangler", str(path), "--knot-key", "seven.knot", capsys=capsys,
    )  # fmt: skip
    written = tomllib.loads(path.read_text())
    environments = written["env"]
    assert {name for name in environments if not name.endswith("-offline")} == {
        "station-0", "station-1", "station-2", "shard-0", "shard-1", "layer-warden", "cobordism-warden",
        "gateway",
    }  # fmt: skip
    variables = environments["station-1"]["vars"]
    assert (variables["SPECIALIZATION_START_LAYER"], variables["SPECIALIZATION_END_LAYER"]) == ("10", "19")
    assert variables["KNOT_KEY"] == "seven.knot"
    assert all(variables[name] == value for name, value in told["variables"].items())
    assert environments["gateway"]["vars"]["STATION_RANGES"] == "0-10,10-19,19-28"


def test_the_table_names_every_kind_of_part_and_both_searches(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--stations", "14", "--kv", "f16", "--set", "STEP_DEADLINE_SECONDS=300"]
    assert main(["plan", str(shape_file(folder, "7b")), *words]) == 0
    text = capsys.readouterr().out
    for words in (
        "14 stations (0-2,2-4,4-6, … 26-28), 1 shards, pinned-prefix",
        "1,040 tokens in all sessions together",
        "and 12 parts of the same sizes or smaller",
        "ffn_down     28",
        "a prompt of 512 tokens: 4 pieces of at most 128 rows, so the layers' weights are read 4 times",
        "the smallest topology that fits: --stations 2 --shards 1",
        "everything resident: no topology holds all",
        "by prices of 2026-",
        "these change nothing that is planned here: STEP_DEADLINE_SECONDS",
    ):
        assert words in text, text


def test_a_plan_that_keeps_its_promise_is_never_over_the_limit(folder: Path) -> None:
    """Whatever the topology: parts fit, cover everything once, and their rows are in whole tiles."""
    found = header(folder, "7b")
    for stations, shards in ((4, 3), (7, 10), (28, 32)):
        topology = even_topology(found.config, stations, shards)
        whole = best_plan(found, topology, {}, context=1024, prompt=512)
        assert whole.peak <= CEILING_BYTES
        for kind in (whole.stations, whole.shards):
            assert all(before.range[1] == after.range[0] for before, after in pairwise(kind))
        assert all(part.rows % 8 == 0 for part in whole.stations)


def test_a_station_of_the_planner_is_the_station_that_boots(folder: Path) -> None:
    from engine.fit import StationMemory
    from protocol.settings import Settings

    small = header(folder, "small")
    memory = StationMemory.of(Settings({"RESIDENCY": "resident"}.get))
    one = plan_station(small, "s", (0, 4), memory)
    assert one.plan.whole
    assert one.plan.pinned == one.plan.region["pinned"]
    assert sum(one.plan.region.values()) + (3 << 19) == one.plan.memory["engine"]
    report = make_report(
        small, even_topology(small.config, 1, 1), Wish("resident", 64, 32, "f32", 8, {}), rates(), prices()
    )
    assert [mode.residency for mode in report.modes] == ["fluid", "pinned-prefix", "resident"]
    assert plan_cluster(small, even_topology(small.config, 1, 1), {}, prompt=32).parts[0].whole
