"""A plan as a picture: memory of each isolate, bytes of each layer, and what a million tokens cost."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from engine.fit import PIECES, PROMPTS
from knot.picture import COLOURS, GREY, MB, SAND, Axes, figure, limit_lines, save
from knot.plan.cluster import ClusterPlan
from knot.plan.parts import PartPlan
from knot.plan.report import Report
from knot.plan.table import some_parts

PHASE_COLOURS: Final = ("attn", "ffn_gate", "ffn_up", "ffn_down")
COSTS: Final = (
    ("storage operations", "#d55e00"),
    ("CPU: stations and shards computing", "#56b4e9"),
    ("waiting for weights", "#e69f00"),
    ("the session's object", "#f0e442"),
    ("requests to objects", GREY),
)


def draw(report: Report, path: Path) -> None:
    """Draws a PNG or an SVG. Raises `OutputError`."""
    picture = figure(11, 13)
    memory, layers, costs = picture.subplots(3, 1, height_ratios=(1.3, 0.9, 1))
    plan = report.plan
    counts = f"{len(plan.stations)} stations, {len(plan.shards)} shards"
    picture.suptitle(f"{plan.header.name}: {counts}, {report.wish.residency}")
    _memory(memory, plan)
    _layers(layers, plan)
    _costs(costs, report)
    save(picture, path)


def _memory(axes: Axes, plan: ClusterPlan) -> None:
    """Each isolate's memory by purpose, against the limit."""
    parts = some_parts(plan.parts)
    stacks = [
        ("gateway", _of_gateway(plan.gateway)),
        *((part.name, _of_part(part)) for part in reversed(parts)),
    ]
    seen: set[str] = set()
    for name, stack in stacks:
        left = 0.0
        for label, size, colour in stack:
            shown = label if label not in seen else None
            seen.add(label)
            axes.barh(name, size / MB, left=left, color=colour, label=shown, edgecolor="white", linewidth=0.4)
            left += size / MB
    limit_lines(axes, vertical=True)
    axes.set_xlabel("MB an isolate uses at most")
    axes.set_xlim(0, 135)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.12), ncol=5, fontsize=7, frameon=False)


def _of_part(part: PartPlan) -> list[tuple[str, int, str]]:
    memory = dict(part.memory)
    region = part.region
    python = memory.pop("python")
    base = [
        ("Python", python, COLOURS["python"]),
        ("JavaScript and streams", memory.pop("javascript") + memory.pop("streams"), SAND),
    ]
    beside = memory.pop("engine") - sum(region.values())
    engine = [
        ("keys and values, kept logits", region["kept"], "#009e73"),
        ("activations", region["activations"], "#56b4e9"),
        ("pinned weights", region["pinned"], COLOURS["pinned"]),
        ("two blocks in flight", region["in flight"], COLOURS["ffn_down"]),
        ("rest of the engine", beside + region["spare"], COLOURS["engine"]),
    ]
    return [*base, *engine, ("frames, answers, saved pages", sum(memory.values()), COLOURS["head"])]


def _of_gateway(memory: Mapping[str, int]) -> list[tuple[str, int, str]]:
    base = memory["javascript"] + memory["streams"]
    return [
        ("Python", memory["python"], COLOURS["python"]),
        ("JavaScript and streams", base, SAND),
        ("rest of the engine", memory["engine"], COLOURS["engine"]),
        ("prompts", memory[PROMPTS] + memory[PIECES], COLOURS["bodies"]),
    ]


def _layers(axes: Axes, plan: ClusterPlan) -> None:
    """Bytes of every layer by phase, and which station owns it."""
    sizes: dict[str, dict[int, int]] = {phase: {} for phase in PHASE_COLOURS}
    for part in plan.stations:
        for phase in part.phases:
            assert phase.layer is not None
            sizes[phase.phase][phase.layer] = phase.bytes
    layers = range(plan.header.config.num_layers)
    bottom = [0.0] * len(layers)
    for phase in PHASE_COLOURS:
        heights = [sizes[phase][layer] / MB for layer in layers]
        axes.bar(layers, heights, bottom=bottom, color=COLOURS[phase], width=0.9, label=phase)
        bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    for part in plan.stations[1:]:
        axes.axvline(part.range[0] - 0.5, color="black", linewidth=0.8)
    block = max(part.in_flight for part in plan.stations) / MB
    if block:
        axes.axhline(block, color="black", linestyle="--", linewidth=1, label="what is held of it at a time")
    axes.set_xlabel("layer (lines part stations)")
    axes.set_ylabel("MB of weights")
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.15), ncol=5, fontsize=7, frameon=False)


def _costs(axes: Axes, report: Report) -> None:
    """Shares of the cost of a million tokens, with the cost itself beside them."""
    sessions = report.wish.sessions
    bars = [
        (f"{mode.residency},\n{count} session{'s' if count > 1 else ''}", cost)
        for mode in report.modes
        for count, cost in ((1, mode.tokens), (sessions, mode.shared))[: 1 + (sessions > 1)]
    ]
    seen: set[str] = set()
    for name, cost in reversed(bars):
        values = (cost.reads, cost.computing, cost.waiting, cost.session, cost.requests + cost.doors)
        left = 0.0
        for (label, colour), value in zip(COSTS, values, strict=True):
            share = 100 * value / cost.total
            axes.barh(name, share, left=left, color=colour, label=label if label not in seen else None)
            if share >= 8:
                axes.text(left + share / 2, name, f"{share:.0f} %", ha="center", va="center", fontsize=7)
            seen.add(label)
            left += share
        axes.text(101, name, f"{cost.total:.2f} {report.prices.currency}", va="center", fontsize=9)
    axes.tick_params(axis="y", labelsize=8)
    axes.set_xlim(0, 115)
    axes.set_xlabel(f"what a million tokens cost, share of each, % (prices of {report.prices.of})")
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.2), ncol=5, fontsize=7, frameon=False)
