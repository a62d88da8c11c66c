"""What `knot plan` prints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from knot.cluster_options import planned_variables
from knot.plan.cluster import ClusterPlan
from knot.plan.parts import PartPlan
from knot.plan.reads import Reads
from knot.plan.report import Found, Mode, Report
from knot.plan.speed import Cost
from knot.topology import Topology, ranges, split

PARTS_SHOWN = 12


def as_text(report: Report) -> str:
    """The report as tables for people."""
    plan, wish = report.plan, report.wish
    model = plan.header.config
    lines = [
        f"{plan.header.name}: {model.architecture}, {model.num_layers} layers, hidden {model.hidden_size}, "
        f"{model.vocab_size:,} ids; {_mb(sum(part.weights for part in plan.stations))} in layers, "
        f"{_mb(sum(part.weights for part in plan.shards))} in the head",
        "",
        f"{len(plan.stations)} stations ({_few(plan.topology.stations)}), {len(plan.shards)} shards, "
        f"{wish.residency}; keys and values as {wish.kv_type} of {plan.kv_tokens:,} tokens in all sessions "
        "together",
        "variables: " + ", ".join(f"{name}={value}" for name, value in sorted(plan.variables.items())),
        *_others(plan.variables),
        "",
        *_parts(plan),
        "",
        *_phases(plan),
        "",
        *_reading(report),
        "",
        *_modes(report),
        "",
        _search("the smallest topology that fits", report.smallest),
        _search("everything resident", report.resident),
    ]
    return "\n".join(lines)


def _others(variables: Mapping[str, str]) -> list[str]:
    """A note on variables that are for the Workers alone."""
    others = sorted(set(variables) - planned_variables())
    return [f"these change nothing that is planned here: {', '.join(others)}"] if others else []


def _parts(plan: ClusterPlan) -> list[str]:
    rows = [
        (
            "part", "range", "weights", "pinned", "in flight", "keys/logits", "activations", "peak", "rows",
            "reads a pass", "bytes a pass",
        )
    ]  # fmt: skip
    parts = list(plan.parts)
    shown = some_parts(parts)
    rows += [_part(part) for part in shown]
    gateway = sum(plan.gateway.values())
    rows.append(("gateway", "", "", "", "", "", "", _mb(gateway), "", "", ""))
    left = len(parts) - len(shown)
    more = [f"and {left} parts of the same sizes or smaller"] if left else []
    return [
        *aligned(rows),
        *more,
        f"the fullest isolate uses {_mb(plan.peak)} of 128 MB at most, Python and JavaScript included",
    ]


def _part(part: PartPlan) -> tuple[str, ...]:
    region = part.region
    warm = part.passes.warm
    return (
        part.name,
        f"{part.range[0]}-{part.range[1]}",
        _mb(part.weights),
        _mb(part.pinned),
        _mb(part.in_flight),
        _mb(region["kept"]),
        _mb(region["activations"]),
        _mb(part.peak),
        str(part.rows),
        str(warm.operations),
        _mb(warm.bytes),
    )


def some_parts(parts: Sequence[PartPlan]) -> list[PartPlan]:
    """All parts, or of many the first, the fullest and the last of each kind."""
    if len(parts) <= PARTS_SHOWN:
        return list(parts)
    found: dict[str, PartPlan] = {}
    for shards in (False, True):
        these = [part for part in parts if part.name.startswith("shard-") is shards]
        for part in (these[0], max(these, key=lambda part: part.peak), these[-1]):
            found[part.name] = part
    return list(found.values())


def _phases(plan: ClusterPlan) -> list[str]:
    sizes: dict[str, list[int]] = {}
    for part in plan.parts:
        for phase in part.phases:
            sizes.setdefault(phase.phase, []).append(phase.bytes)
    rows = [("phase", "times", "smallest", "largest", "in all")]
    rows += [
        (name, str(len(found)), _mb(min(found)), _mb(max(found)), _mb(sum(found)))
        for name, found in sizes.items()
    ]
    return aligned(rows)


def _reading(report: Report) -> list[str]:
    plan, prompt = report.plan, report.wish.prompt
    cut = plan.pieces(prompt)
    table = plan.header.embedding_tensor()
    token = plan.warm_reads() + plan.warm_head_reads()
    by = "the stations" if plan.warden is None else "the LayerWardens"
    again = (
        f"so the layers' weights are read {len(cut)} times: {_reads(plan.warm_reads() * len(cut))} by {by}"
        if plan.warm_reads().operations
        else "and the weights stay"
    )
    return [
        f"a prompt of {prompt} tokens: {len(cut)} pieces of at most {max(cut)} rows, {again}",
        f"a token: {_reads(token)} of weights once warm, and at most one read of "
        f"{_mb(table.group_rows * table.row_bytes, 2)} for its row of the embedding",
    ]


def _modes(report: Report) -> list[str]:
    currency, sessions, prompt = report.prices.currency, report.wish.sessions, report.wish.prompt
    speeds = [
        ("speed", "first token", "of the prompt", "after it", "reads a token", "bytes a token"),
        *(_speed(mode) for mode in report.modes),
    ]
    shared = f"{sessions} sessions"
    costs = [
        (
            f"{currency} for a million tokens", "in all", "storage reads", "computing", "waiting for weights",
            "session", "requests",
        ),
        *(_cost(mode.residency, mode.tokens) for mode in report.modes),
        *(_cost(f"{mode.residency}, {shared} at once", mode.shared) for mode in report.modes),
        *(_cost(f"{mode.residency}, prompts of {prompt}", mode.prompts) for mode in report.modes),
    ]  # fmt: skip
    return [
        *aligned(speeds),
        *(f"{name}: does not fit this topology: {why}" for name, why in report.missing.items()),
        f"by rates of {report.rates.measured}: {report.rates.where}",
        "",
        *aligned(costs),
        f"by prices of {report.prices.of}: {report.prices.where}",
        "computing, waiting and session are time of Durable Objects: of stations and shards while they "
        "compute and while they wait, and of the gateway's object all the while",
    ]


def _speed(mode: Mode) -> tuple[str, ...]:
    reads = mode.plan.warm_reads() + mode.plan.warm_head_reads()
    return (
        mode.residency,
        f"{mode.speed.first_token:.1f} s",
        f"{mode.speed.prefill_tokens:.1f} tokens/s",
        f"{mode.speed.decode_tokens:.2f} tokens/s",
        str(reads.operations),
        _mb(reads.bytes),
    )


def _cost(name: str, cost: Cost) -> tuple[str, ...]:
    parts = (cost.reads, cost.computing, cost.waiting, cost.session, cost.requests + cost.doors)
    shares = [f"{value:.2f} ({value / cost.total:4.0%})" for value in parts]
    return (name, f"{cost.total:.2f}", *shares)


def _search(what: str, found: Found) -> str:
    if found.topology is None:
        return f"{what}: {found.why}"
    return f"{what}: {search_line(found.topology)}"


def search_line(topology: Topology) -> str:
    """A topology as options of the command line."""
    return f"--stations {_named(topology.stations)} --shards {_named(topology.shards)}"


def _named(found: Sequence[tuple[int, int]]) -> str:
    """A number where ranges are even, else the ranges."""
    return str(len(found)) if tuple(found) == split(found[-1][1], len(found)) else ranges(found)


def _few(found: Sequence[tuple[int, int]]) -> str:
    text = ranges(found)
    return text if len(text) <= 60 else f"{ranges(found[:3])}, … {ranges(found[-1:])}"


def _reads(reads: Reads) -> str:
    return f"{reads.operations:,} reads, {_mb(reads.bytes)}"


def _mb(size: int, digits: int = 1) -> str:
    return f"{size / 1e6:,.{digits}f} MB" if size < 1e9 else f"{size / 1e9:,.2f} GB"


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows of cells as lines whose columns are straight, the first one's text to the left."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(
            cell.ljust(width) if column < 1 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
