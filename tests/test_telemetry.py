"""What a gateway counts, and how it says so."""

from __future__ import annotations

import asyncio
import re

import pytest
from fake_cluster import FakeCluster
from generation_support import COUNT, PROMPT, case, generate

import observer as observer_module
from observer import Metric, Observer, Parts, _text
from protocol.calls import Call, Reply
from telemetry import WINDOW, Telemetry, Window

LINE = re.compile(r'^knot_[a-z0-9_]+(\{[a-z_]+="[^"\n]*"(,[a-z_]+="[^"\n]*")*\})? -?[0-9.e+-]+$')


def observer(cluster: FakeCluster) -> Observer:
    return Observer(cluster.shared, cluster.wire, Parts(cluster.station_peers, cluster.shard_peers))


def figures(text: str) -> dict[str, float]:
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    assert all(LINE.match(line) for line in lines), [line for line in lines if not LINE.match(line)]
    found = dict(line.rsplit(" ", 1) for line in lines)
    assert len(found) == len(lines), "no sample is said twice"
    return {name: float(value) for name, value in found.items()}


def test_quantiles_are_those_of_the_newest_by_nearest_rank() -> None:
    window = Window()
    assert window.quantiles() == []
    for value in range(1, 101):
        window.add(value)
    assert window.quantiles((0.01, 0.5, 0.95, 1.0)) == [1, 50, 95, 100]
    for _ in range(WINDOW):
        window.add(7)
    assert window.quantiles((0.01, 1.0)) == [7, 7]
    assert (window.count, window.sum) == (100 + WINDOW, 5050 + 7 * WINDOW)


def test_calls_are_counted_by_part_and_path_with_their_bytes_and_steps() -> None:
    telemetry = Telemetry()
    telemetry.observe("station 0-2", "/forward", 0.5, 100, 90, 3, True)
    telemetry.observe("station 0-2", "/forward", 1.5, 10, 0, 1, False)
    hop = telemetry.hops["station 0-2", "/forward"]
    assert (hop.calls, hop.failed, hop.steps, hop.steps_peak, hop.sent, hop.received) == (2, 1, 4, 3, 110, 90)
    assert hop.seconds.quantiles() == [0.5, 1.5]


def test_a_label_cannot_break_out_of_its_line() -> None:
    text = _text(Metric("a-b", "gauge", "Help.", [({"part": 'x"}\n\\'}, 1.5)]))
    assert text.splitlines()[2] == 'knot_a_b{part="x\\"}\\n\\\\"} 1.5'


def test_metrics_have_the_gateways_counts_and_every_parts_own() -> None:
    async def body(cluster: FakeCluster) -> None:
        before = figures(await observer(cluster).metrics())
        assert before["knot_written_tokens_total"] == 0
        await generate(cluster)
        found = figures(await observer(cluster).metrics())
        assert found["knot_written_tokens_total"] == COUNT
        assert found["knot_prompt_tokens_total"] == len(PROMPT)
        assert found['knot_generations_total{end="ended"}'] == 1
        assert found["knot_sessions_active"] == 0
        assert found["knot_ttft_seconds_count"] == 1
        for number, api in enumerate(cluster.stations):
            start, end = api.station.layers
            label = f'{{part="station {start}-{end}"}}'
            assert found[f"knot_part_up{label}"] == 1
            assert found[f"knot_part_metrics_batches_rows{label}"] == len(PROMPT) + COUNT - 1
            assert found[f"knot_part_memory_sessions{label}"] == 0
            sent = found[f'knot_hop_steps_total{{part="station {start}-{end}",path="/forward"}}']
            assert sent == sum(call.path == "/forward" for call in cluster.station_peers[number].calls)
        assert sum(name.startswith("knot_part_up{") for name in found) == 5

    case(body)


def test_a_part_that_is_dead_or_hangs_is_down_and_others_are_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(observer_module, "SECONDS", 1.0)

    async def body(cluster: FakeCluster) -> None:
        cluster.station_peers[0].dead = True
        cluster.shard_peers[1].hang.append("/metrics")
        found = figures(await observer(cluster).metrics())
        up = {name: value for name, value in found.items() if name.startswith("knot_part_up{")}
        assert sorted(up.values()) == [0, 0, 1, 1, 1]
        cluster.station_peers[0].dead = False

    case(body)


def test_a_part_that_answers_nonsense_is_down() -> None:
    async def nonsense(call: Call) -> Reply:
        await asyncio.sleep(0)
        return Reply(200, b"\xff[")

    async def body(cluster: FakeCluster) -> None:
        answer, cluster.station_peers[1].answer = cluster.station_peers[1].answer, nonsense
        found = figures(await observer(cluster).metrics())
        cluster.station_peers[1].answer = answer
        assert sorted(value for name, value in found.items() if name.startswith("knot_part_up{"))[0] == 0

    case(body)
