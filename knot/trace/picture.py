"""A trace as a picture: each isolate's memory over time against the 128 MB line, and two passes close by."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from engine.blocks import UnitName
from knot.header import PHASES
from knot.picture import COLOURS, GREY, MB, Axes, figure, limit_lines, save
from knot.trace.curves import Curve, Moment, fullest, passes

COLUMNS: Final = 1200
CLOSE_COLUMNS: Final = 900
STATIONS_SHOWN: Final = 4
TOP_MB: Final = 135
NAMES: Final = {
    "python": "Python and JavaScript",
    "engine": "engine: keys, values, activations, room for weights",
    "pinned": "weights that stay",
    "bodies": "bodies on their way",
    "kept": "kept: tensors, rows, answers",
    **{phase: f"weights in flight: {phase}" for phase in PHASES},
    "head": "weights in flight: head",
}


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds of the recording at which the prompt was asked for, its first token came, and the last one."""

    asked: float
    first_token: float
    ended: float


def draw(title: str, found: Mapping[str, Curve], times: Times, path: Path) -> None:
    """Draws a PNG or an SVG of every isolate in `found`. Raises `OutputError`."""
    shown = isolates_shown(found)
    close = _busiest(found)
    heights = [1.15] * len(shown) + ([1.15] if close else []) + [0.09 * len(found) + 0.2]
    picture = figure(11, 1.75 * sum(heights) + 1.2)
    grid = picture.add_gridspec(len(heights), 2, height_ratios=heights)
    picture.suptitle(title)
    first: Axes = None
    for row, (name, label) in enumerate(shown.items()):
        axes = picture.add_subplot(grid[row, :], sharex=first, sharey=first)
        first = first or axes
        _isolate(axes, label, found[name], times)
        axes.tick_params(labelbottom=row == len(shown) - 1)
        if row == len(shown) - 1:
            axes.set_xlabel("seconds since the prompt was asked for")
    if close:
        name, moments = close
        for column, (start, end, what) in enumerate(moments):
            axes = picture.add_subplot(grid[len(shown), column])
            _pass(axes, found[name], start, end)
            axes.set_title(f"{name}, {what}: weights in flight", fontsize=9, loc="left")
    _peaks(picture.add_subplot(grid[-1, :]), found)
    _legend(picture)
    save(picture, path)


def _legend(picture: Any) -> None:
    """One legend for all, in one order."""
    handles: dict[str, Any] = {}
    for axes in picture.axes:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    known = [label for label in NAMES.values() if label in handles]
    labels = [*known, *(label for label in handles if label not in known)]
    picture.legend(
        [handles[label] for label in labels], labels, loc="outside lower center", ncols=4, fontsize=8,
        frameon=False,
    )  # fmt: skip


def isolates_shown(found: Mapping[str, Curve]) -> dict[str, str]:
    """The isolates that get curves of their own, with titles: stations, and the fullest of other kinds."""
    kinds: dict[str, list[str]] = {}
    for name in found:
        kinds.setdefault(kind_of(name), []).append(name)
    shown: dict[str, str] = {}
    for kind in ("station", "shard", "warden", "gateway"):
        names = kinds.get(kind, [])
        if kind == "station" and len(names) <= STATIONS_SHOWN:
            shown |= {name: name for name in names}
        elif names:
            name = fullest([(name, found[name]) for name in names])
            more = f", the fullest of {len(names)} {kind}s" if len(names) > 1 else ""
            shown[name] = f"{name}{more}"
    return shown


def kind_of(isolate: str) -> str:
    """Station, shard, warden or gateway, by the name of its Worker."""
    if isolate.startswith("shard-"):
        return "shard"
    if isolate.endswith("-warden"):
        return "warden"
    return "gateway" if isolate == "gateway" else "station"


def _isolate(axes: Axes, title: str, curve: Curve, times: Times) -> None:
    """All memory of an isolate, by what it is used for."""
    start = min(times.asked, curve.moments[0].at)
    columns = _changes(curve.columns(start, times.ended, COLUMNS))
    at = [moment.at - times.asked for moment in columns]
    bottom = [0.0] * len(columns)
    for key in ("python", "engine", "pinned", *PHASES, "head", "bodies", "kept"):
        top = [low + _part(moment, key) / MB for low, moment in zip(bottom, columns, strict=True)]
        if top != bottom:
            axes.fill_between(at, bottom, top, step="post", color=COLOURS[key], linewidth=0, label=NAMES[key])
        bottom = top
    limit_lines(axes)
    if times.asked < times.first_token < times.ended:
        axes.axvline(times.first_token - times.asked, color="black", linewidth=0.8, linestyle="--")
        axes.annotate(
            "first token", (times.first_token - times.asked, 6), xytext=(3, 0), textcoords="offset points",
            fontsize=7,
        )  # fmt: skip
    flying = max(moment.transit for moment in curve.moments) / MB
    axes.set_title(
        f"{title}: at most {curve.peak.total / MB:.1f} MB"
        + (f", of weights in flight {flying:.1f} MB" if flying else ""),
        fontsize=9,
        loc="left",
    )
    axes.set_ylim(0, TOP_MB)
    axes.set_xlim(start - times.asked, times.ended - times.asked)
    axes.set_ylabel("MB")
    axes.spines[["top", "right"]].set_visible(False)


def _changes(columns: Sequence[Moment]) -> list[Moment]:
    """Columns without those that are like the ones before; the last one stays."""
    found = [columns[0]]
    for before, column in pairwise(columns):
        if replace(column, at=before.at) != before:
            found.append(column)
    return [*found, columns[-1]]


def _part(moment: Moment, key: str) -> int:
    match key:
        case "python":
            return moment.baseline
        case "engine":
            return max(0, moment.engine - moment.pinned - moment.transit)
        case "pinned":
            return moment.pinned
        case "bodies":
            return moment.bodies
        case "kept":
            return moment.kept
        case _:
            return moment.transit if moment.unit is not None and moment.unit[1] == key else 0


def _busiest(found: Mapping[str, Curve]) -> tuple[str, list[tuple[float, float, str]]] | None:
    """The station through which most weights flow, its first pass and its last; None where nothing does."""
    moving = [
        (name, curve)
        for name, curve in found.items()
        if kind_of(name) == "station" and any(moment.transit for moment in curve.moments)
    ]
    if not moving:
        return None
    name, curve = max(moving, key=lambda item: max(moment.transit for moment in item[1].moments))
    begun = passes(curve)
    close = [(*begun[0], "first pass (the prompt)")]
    if len(begun) > 1:
        close.append((*begun[-1], "last pass (a token)"))
    return name, close


def _pass(axes: Axes, curve: Curve, start: float, end: float) -> None:
    """Weights on their way during one pass, phase by phase, with the layers named."""
    width = max(end - start, 1e-6)
    columns = curve.columns(start, start + width, CLOSE_COLUMNS)
    at = [moment.at - start for moment in columns]
    for phase in PHASES:
        height = [_part(moment, phase) / MB for moment in columns]
        if any(height):
            axes.fill_between(
                at, 0, height, step="post", color=COLOURS[phase], linewidth=0, label=NAMES[phase]
            )
    layers = _layers(columns)
    wanted = max(1, -(-len(layers) // 14))
    axes.set_xticks(
        [at[first] for first, _ in layers[::wanted]], [str(layer) for _, layer in layers[::wanted]]
    )
    axes.set_xlim(0, width)
    axes.set_ylim(bottom=0)
    axes.set_xlabel(f"begin of layer; {width:.2f} s in all")
    axes.set_ylabel("MB")
    axes.spines[["top", "right"]].set_visible(False)


def _layers(columns: Sequence[Moment]) -> list[tuple[int, int]]:
    """(column, layer) where each layer begins."""
    found: list[tuple[int, int]] = []
    for index, moment in enumerate(columns):
        unit: UnitName | None = moment.unit
        if unit is not None and unit[0] is not None and (not found or found[-1][1] != unit[0]):
            found.append((index, unit[0]))
    return found


def _peaks(axes: Axes, found: Mapping[str, Curve]) -> None:
    """The peak of every isolate."""
    names = list(found)[::-1]
    peaks = [found[name].peak.total / MB for name in names]
    axes.barh(names, peaks, color=GREY)
    for name, peak in zip(names, peaks, strict=True):
        axes.text(peak - 0.5, name, f"{peak:.1f}", va="center", ha="right", fontsize=7)
    limit_lines(axes, vertical=True)
    axes.set_xlim(0, TOP_MB)
    axes.set_xlabel("MB at the fullest moment of every isolate")
    axes.tick_params(axis="y", labelsize=7)
    axes.spines[["top", "right"]].set_visible(False)
