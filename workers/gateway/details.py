"""What a request took, on request: the extension `knot` of an answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from answers import Written
from generation import Report


def details(report: Report, written: Written, prompt: Sequence[int], seed: int | None) -> dict[str, Any]:
    """What the cluster did for one choice."""
    return {
        **asdict(report),
        **degradation(report),
        "timings": report.timings(),
        "prompt_ids": list(prompt),
        "ids": written.ids,
        "seed": seed,
    }


def degradation(report: Report) -> dict[str, Any]:
    """Which shards did not take part and how many tokens that touched; false if all did."""
    found = report.degraded
    return {"degraded": {"shards": found.shards, "tokens": found.tokens} if found else False}
