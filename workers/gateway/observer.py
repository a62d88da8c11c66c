"""What a whole cluster is doing, in one place: the gateway's own counts and those of every part.

`metrics` is in Prometheus' text format, version 0.0.4. Parts are asked when somebody asks the gateway; one
that does not answer in time is down, and that is a figure too.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from lanes import Wire
from protocol.calls import Call
from protocol.deadlines import DeadlineExceeded, within
from protocol.ports import Peer, PeerLost
from shared import Shared
from telemetry import QUANTILES, Window

SECONDS: Final = 5.0
CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts of a cluster, in the order of their ranges."""

    stations: Sequence[Peer]
    shards: Sequence[Peer]


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric: name, type, what it says, and samples by labels."""

    name: str
    kind: str
    help: str
    samples: Sequence[tuple[Mapping[str, str], float]]


class Observer:
    """Says how a cluster is. `isolate` is what can be seen of this isolate's memory, in bytes."""

    def __init__(
        self, shared: Shared, wire: Wire, parts: Parts, isolate: Callable[[], dict[str, int]] = dict
    ) -> None:
        self._shared = shared
        self._wire = wire
        self._parts = parts
        self._isolate = isolate
        self._peak: dict[str, int] = {}

    def memory(self) -> dict[str, Any]:
        """This isolate's memory: what can be seen of it, and what it is reckoned to take by purpose."""
        budget = self._shared.memory
        return {
            "isolate": self._isolate(),
            "budget": {"ceiling": budget.ceiling, "total": budget.total, **budget.table()},
        }

    async def metrics(self) -> str:
        """Everything, as text."""
        stations, shards = self._shared.route.stations, self._shared.route.shards
        names = [
            *(f"station {start}-{end}" for start, end in (hop.layers for hop in stations)),
            *(f"shard {start}-{end}" for start, end in (hop.ids for hop in shards)),
        ]
        found = await asyncio.gather(*map(self._asked, names, [*self._parts.stations, *self._parts.shards]))
        said = dict(zip(names, found, strict=True))
        return "".join(map(_text, [*self._own(), *_of_parts(said)]))

    async def _asked(self, name: str, peer: Peer) -> dict[str, Any] | None:
        """A part's counts and memory; None when it does not say."""
        try:
            answers: dict[str, Any] = {}
            for path in ("/metrics", "/memory"):
                await self._wire.turns.call()
                call = Call("GET", path, headers=self._wire.headers)
                reply = await within(SECONDS, peer.call(call), name, self._wire.background)
                if not reply.ok:
                    return None
                answers[path] = reply.json()
        except (PeerLost, DeadlineExceeded, ValueError):
            return None
        return answers

    def _own(self) -> Iterable[Metric]:
        shared, telemetry = self._shared, self._shared.telemetry
        admission, rounds, turns = shared.admission, shared.rounds.counts, self._wire.turns.counts
        yield _gauge("sessions_active", "Sessions that are being served.", admission.active)
        yield _gauge("sessions_waiting", "Sessions that wait for their turn.", admission.waiting)
        yield _gauge("sessions_writing", "Sessions that are writing.", shared.rounds.writers)
        yield _gauge("kv_tokens_reserved", "Tokens that sessions have room for.", admission.used)
        yield _gauge("kv_tokens", "Tokens that there is room for.", admission.tokens)
        yield _by("generations_total", "counter", "Generations by how they ended.", "end", telemetry.ended)
        yield _by("requests_refused_total", "counter", "Requests refused.", "kind", telemetry.refused)
        yield _counter("prompt_tokens_total", "Tokens of prompts.", telemetry.prompt_tokens)
        yield _counter("cached_tokens_total", "Prompts' tokens that were not read.", telemetry.cached_tokens)
        yield _counter("written_tokens_total", "Tokens written.", telemetry.written_tokens)
        yield _counter("step_retries_total", "Steps that were sent again.", telemetry.retries)
        yield _counter("replays_total", "Attempts after the first.", telemetry.replays)
        yield _counter("preemptions_total", "Attempts that made room for others.", telemetry.preempted)
        yield _counter("rounds_total", "Groups of steps that set out together.", rounds.rounds)
        yield _counter("round_steps_total", "Steps in them.", rounds.steps)
        yield _gauge("round_steps_peak", "Most steps in one.", rounds.steps_peak)
        yield _counter("turns_total", "Events of the session object.", turns.turns)
        yield _counter("calls_total", "Calls of other parts.", turns.calls)
        yield _gauge("turn_calls_peak", "Most calls of other parts in one event.", turns.calls_peak)
        yield _window("queue_seconds", "Waiting for a place.", [({}, telemetry.waiting)])
        yield _window("ttft_seconds", "From the request to the first token.", [({}, telemetry.first_token)])
        yield _window("prefill_tokens_per_second", "Reading of prompts.", [({}, telemetry.prefill_rate)])
        yield _window("decode_tokens_per_second", "Writing, by session.", [({}, telemetry.decode_rate)])
        hops = [({"part": part, "path": path}, hop) for (part, path), hop in telemetry.hops.items()]
        yield _window("hop_seconds", "Calls of parts.", [(labels, hop.seconds) for labels, hop in hops])
        for name, help_text, values in (
            ("hop_failed_total", "Calls that failed.", [hop.failed for _, hop in hops]),
            ("hop_steps_total", "Steps in calls.", [hop.steps for _, hop in hops]),
            ("seam_sent_bytes_total", "Bytes of frames sent.", [hop.sent for _, hop in hops]),
            ("seam_received_bytes_total", "Bytes of frames received.", [hop.received for _, hop in hops]),
        ):
            samples = [(labels, value) for (labels, _), value in zip(hops, values, strict=True)]
            yield Metric(name, "counter", help_text, samples)
        budget = shared.memory
        yield _gauge("gateway_budget_bytes", "What the gateway's isolate is reckoned to take.", budget.total)
        seen = self._isolate()
        self._peak = {name: max(size, self._peak.get(name, 0)) for name, size in seen.items()}
        yield _by("gateway_memory_bytes", "gauge", "What is seen of the gateway's memory.", "what", seen)
        yield _by(
            "gateway_memory_peak_bytes",
            "gauge",
            "Most that was seen when somebody asked.",
            "what",
            self._peak,
        )


def _of_parts(said: Mapping[str, Mapping[str, Any] | None]) -> Iterable[Metric]:
    """The parts' own figures, one metric for each number that they say."""
    yield Metric(
        "part_up", "gauge", "Whether a part answers.",
        [({"part": name}, float(answers is not None)) for name, answers in said.items()],
    )  # fmt: skip
    found: dict[str, list[tuple[Mapping[str, str], float]]] = {}
    for part, answers in said.items():
        for path, answer in (answers or {}).items():
            for name, value in _numbers(path.strip("/"), answer):
                found.setdefault(f"part_{name}", []).append(({"part": part}, value))
    for name, samples in sorted(found.items()):
        yield Metric(name, "untyped", f"{name.removeprefix('part_')}, as the part says it.", samples)


def _numbers(prefix: str, value: Any) -> Iterable[tuple[str, float]]:
    """The numbers in nested objects, by their path. What is by session has no end, and is left out."""
    if isinstance(value, bool):
        return
    if isinstance(value, int | float):
        yield prefix, float(value)
    elif isinstance(value, Mapping):
        for name, inner in value.items():  # pyright: ignore[reportUnknownVariableType]
            if (prefix, name) == ("memory", "sessions"):
                yield f"{prefix}_sessions", float(len(inner))  # pyright: ignore[reportUnknownArgumentType]
            else:
                yield from _numbers(f"{prefix}_{name}", inner)


def _gauge(name: str, help_text: str, value: float) -> Metric:
    return Metric(name, "gauge", help_text, [({}, value)])


def _counter(name: str, help_text: str, value: float) -> Metric:
    return Metric(name, "counter", help_text, [({}, value)])


def _by(name: str, kind: str, help_text: str, label: str, values: Mapping[str, float]) -> Metric:
    return Metric(name, kind, help_text, [({label: key}, value) for key, value in values.items()])


def _window(name: str, help_text: str, windows: Sequence[tuple[Mapping[str, str], Window]]) -> Metric:
    samples: list[tuple[Mapping[str, str], float]] = []
    for labels, window in windows:
        for quantile, value in zip(QUANTILES, window.quantiles(), strict=False):
            samples.append(({**labels, "quantile": str(quantile)}, value))
        samples += [({**labels, "": "sum"}, window.sum), ({**labels, "": "count"}, window.count)]
    return Metric(name, "summary", help_text, samples)


def _text(metric: Metric) -> str:
    """A metric in Prometheus' text format. The label "" is the end of a sample's name."""
    name = "knot_" + "".join(letter if letter.isalnum() else "_" for letter in metric.name)
    lines = [f"# HELP {name} {metric.help}", f"# TYPE {name} {metric.kind}"]
    for labels, value in metric.samples:
        suffix = f"_{labels['']}" if "" in labels else ""
        shown = ",".join(f'{label}="{_escaped(text)}"' for label, text in labels.items() if label)
        lines.append(f"{name}{suffix}{f'{{{shown}}}' if shown else ''} {_number(value)}")
    return "\n".join(lines) + "\n"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _number(value: float) -> str:
    return str(int(value)) if value == int(value) else repr(float(value))
