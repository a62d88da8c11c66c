"""What a request took, on request: the extension `knot` of an answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from answers import Written
from generation import Report


def timings(report: Report, prompt: int) -> dict[str, Any]:
    """Times of one generation in milliseconds, and tokens per second; null where nothing was done.

    `ttft_ms` runs from the request to its first token, `waiting_ms` of it until the session's turn came.
    Prefill counts the tokens that were read, which those that a cache had are not among.
    """
    read = prompt - report.cached_tokens
    return {
        "ttft_ms": _ms(report.first_token_seconds),
        "waiting_ms": _ms(report.waiting_seconds),
        "prefill_ms": _ms(report.prefill_seconds),
        "prefill_tokens_per_second": _rate(read, report.prefill_seconds),
        "decode_ms": _ms(report.decode_seconds),
        "decode_tokens_per_second": _rate(report.decoded, report.decode_seconds),
        "cached_tokens": report.cached_tokens,
    }


def details(report: Report, written: Written, prompt: Sequence[int], seed: int | None) -> dict[str, Any]:
    """What the cluster did for one choice."""
    return {
        **asdict(report),
        **degradation(report),
        "timings": timings(report, len(prompt)),
        "prompt_ids": list(prompt),
        "ids": written.ids,
        "seed": seed,
    }


def degradation(report: Report) -> dict[str, Any]:
    """Which shards did not take part and how many tokens that touched; false if all did."""
    found = report.degraded
    return {"degraded": {"shards": found.shards, "tokens": found.tokens} if found else False}


def _ms(seconds: float) -> float | None:
    return round(1000 * seconds, 3) if seconds else None


def _rate(tokens: int, seconds: float) -> float | None:
    return round(tokens / seconds, 2) if tokens and seconds else None
