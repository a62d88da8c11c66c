"""A plan put together for people: the chosen topology, the three modes on it, and what a search has found."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from engine.blocks import RESIDENCIES
from engine.budget import OverBudgetError
from knot.header import KnotHeader
from knot.plan.cluster import ClusterPlan
from knot.plan.figures import Prices, Rates
from knot.plan.search import NoTopology, best_plan, resident_stations, smallest_shards, smallest_stations
from knot.plan.speed import Cost, Speed, cost_of_prompt, cost_of_tokens, speed
from knot.topology import Topology


@dataclass(frozen=True, slots=True)
class Wish:
    """What is planned for: tokens of keys and values in all sessions together, and tokens of a prompt.

    `sessions` share every pass over the weights, in one of the costs. `variables` are the user's own.
    """

    residency: str
    context: int
    prompt: int
    kv_type: str
    sessions: int
    variables: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Mode:
    """One residency on the chosen topology. Costs are in money for a million tokens."""

    residency: str
    plan: ClusterPlan
    speed: Speed
    tokens: Cost
    shared: Cost
    prompts: Cost


@dataclass(frozen=True, slots=True)
class Found:
    """A topology that was searched for, or why there is none."""

    topology: Topology | None
    why: str = ""


@dataclass(frozen=True, slots=True)
class Report:
    """Everything that `knot plan` prints and draws."""

    wish: Wish
    plan: ClusterPlan
    modes: tuple[Mode, ...]
    missing: Mapping[str, str]
    smallest: Found
    resident: Found
    rates: Rates
    prices: Prices


def smallest_topology(header: KnotHeader, wish: Wish, residency: str) -> Topology:
    """As few stations and shards as fit. Raises `NoTopology`."""
    search = resident_stations if residency == "resident" else smallest_stations
    variables = {**wish.variables, "RESIDENCY": residency}
    stations = search(header, variables, context=wish.context, kv_type=wish.kv_type)
    return Topology(stations, smallest_shards(header, variables, residency))


def make_report(header: KnotHeader, topology: Topology, wish: Wish, rates: Rates, prices: Prices) -> Report:
    """The report on a topology. Raises `OverBudgetError` when the wished residency does not fit it."""
    chosen = _plan(header, topology, wish, wish.residency)
    modes: list[Mode] = []
    missing: dict[str, str] = {}
    for residency in RESIDENCIES:
        try:
            plan = chosen if residency == wish.residency else _plan(header, topology, wish, residency)
        except OverBudgetError as error:
            missing[residency] = str(error)
            continue
        modes.append(
            Mode(
                residency,
                plan,
                speed(plan, wish.prompt, rates),
                cost_of_tokens(plan, rates, prices),
                cost_of_tokens(plan, rates, prices, wish.sessions),
                cost_of_prompt(plan, wish.prompt, rates, prices),
            )
        )
    smallest = _search(header, wish, "fluid")
    resident = _search(header, wish, "resident")
    return Report(wish, chosen, tuple(modes), missing, smallest, resident, rates, prices)


def _plan(header: KnotHeader, topology: Topology, wish: Wish, residency: str) -> ClusterPlan:
    return best_plan(
        header,
        topology,
        {**wish.variables, "RESIDENCY": residency},
        context=wish.context,
        prompt=wish.prompt,
        kv_type=wish.kv_type,
    )


def _search(header: KnotHeader, wish: Wish, residency: str) -> Found:
    try:
        return Found(smallest_topology(header, wish, residency))
    except NoTopology as error:
        return Found(None, str(error))


def as_json(report: Report) -> dict[str, Any]:
    """The report as one JSON object."""
    plan, wish = report.plan, report.wish
    cut = plan.pieces(wish.prompt)
    return {
        "model": plan.header.name,
        "topology": asdict(plan.topology),
        "residency": wish.residency,
        "variables": dict(plan.variables),
        "parts": [{**asdict(part), "peak": part.peak, "whole": part.whole} for part in plan.parts],
        "gateway": dict(plan.gateway),
        "peak_isolate_bytes": plan.peak,
        "kv_tokens": plan.kv_tokens,
        "prompt": {
            "tokens": wish.prompt,
            "pieces": cut,
            "reads": asdict(plan.warm_reads() * len(cut)),
        },
        "token": {"reads": asdict(plan.warm_reads() + plan.warm_head_reads())},
        "modes": {
            mode.residency: {
                "first_token_seconds": mode.speed.first_token,
                "prefill_tokens_per_second": mode.speed.prefill_tokens,
                "decode_tokens_per_second": mode.speed.decode_tokens,
                "reads_per_token": asdict(mode.plan.warm_reads() + mode.plan.warm_head_reads()),
                "cost_of_million_tokens": {**asdict(mode.tokens), "total": mode.tokens.total},
                f"cost_of_million_tokens_{wish.sessions}_sessions": mode.shared.total,
                "cost_of_million_prompt_tokens": mode.prompts.total,
            }
            for mode in report.modes
        },
        "does_not_fit": dict(report.missing),
        "smallest": _found(report.smallest),
        "resident": _found(report.resident),
        "rates": asdict(report.rates),
        "prices": asdict(report.prices),
    }


def _found(found: Found) -> dict[str, Any]:
    if found.topology is None:
        return {"why_not": found.why}
    return asdict(found.topology)
