"""Measured rates and published prices, each a file with its date."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final, TypeVar, cast

from knot.errors import ConfigError

HERE: Final = Path(__file__).resolve().parent
F = TypeVar("F", "Rates", "Prices")


@dataclass(frozen=True, slots=True)
class Rates:
    """How fast things go, as measured on the day `measured`. Per second, or in seconds.

    - `prefill_flops`, `decode_flops`: multiplications and additions of the engine, for many rows and for one.
    - `read_bytes`: bytes that one long read brings; `read_seconds`: until its first one. `overlap`: the share
      of the shorter of computing and reading that hides behind the longer.
    - `block_seconds`: beside its arithmetic, for every block; `call_seconds`: for every call between parts;
      `door_cpu_seconds`: CPU of the gateway's Worker for a request, which it hands on to its object.
    """

    measured: str
    where: str
    prefill_flops: float
    decode_flops: float
    read_bytes: float
    read_seconds: float
    overlap: float
    block_seconds: float
    call_seconds: float
    door_cpu_seconds: float


@dataclass(frozen=True, slots=True)
class Prices:
    """What things cost, as published by the day `of`: for one operation, request, GB-second, second of CPU.

    `object_gb` is the memory that a Durable Object is billed for, however much it uses.
    """

    of: str
    where: str
    currency: str
    bucket_reads: float
    object_requests: float
    object_gb_seconds: float
    object_gb: float
    cpu_seconds: float


def rates(path: Path | None = None) -> Rates:
    """The project's rates, or those in a file. Raises `ConfigError` that names what is wrong with it."""
    return _read(path or HERE / "rates.json", Rates)


def prices(path: Path | None = None) -> Prices:
    """The project's prices, or those in a file. Raises `ConfigError` likewise."""
    return _read(path or HERE / "prices.json", Prices)


def _read(path: Path, kind: type[F]) -> F:
    try:
        found: Any = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from None
    kinds = {field.name: field.type for field in fields(kind)}
    if not isinstance(found, dict) or set(cast(dict[str, Any], found)) != set(kinds):
        raise ConfigError(f"{path} must be an object of {', '.join(kinds)}")
    values = cast(dict[str, Any], found)
    for name, value in values.items():
        if kinds[name] == "str":
            right = isinstance(value, str)
        else:
            right = isinstance(value, int | float) and not isinstance(value, bool) and value >= 0
        if not right:
            raise ConfigError(
                f"{path}: {name} is {value!r}, expected {'a text' if kinds[name] == 'str' else 'a number'}"
            )
    return kind(**values)
