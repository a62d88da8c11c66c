"""How long a prompt and a token would take, and what they would cost: counts times measured rates."""

from __future__ import annotations

from dataclasses import dataclass

from knot.plan.cluster import ClusterPlan
from knot.plan.figures import Prices, Rates
from knot.plan.parts import PartPlan

ROWS_OF_PREFILL = 8


@dataclass(frozen=True, slots=True)
class Seconds:
    """What a pass of a part takes: to compute, and what it waits for weights beside that."""

    computing: float
    waiting: float

    @property
    def total(self) -> float:
        """Both."""
        return self.computing + self.waiting


@dataclass(frozen=True, slots=True)
class Speed:
    """Seconds until the first token, tokens a second while a prompt is read, and after the first one."""

    first_token: float
    prefill_tokens: float
    decode_tokens: float


@dataclass(frozen=True, slots=True)
class Cost:
    """What a million tokens cost, by what is paid for.

    `reads`: operations on the bucket. `computing`, `waiting`: object-time of stations and shards while they
    compute, and while they wait for weights. `session`: object-time of the gateway's object, which waits for
    them all. `requests` to objects, `doors`: CPU of the gateway's Worker before them.
    """

    reads: float
    computing: float
    waiting: float
    session: float
    requests: float
    doors: float

    @property
    def total(self) -> float:
        """All of it."""
        return self.reads + self.computing + self.waiting + self.session + self.requests + self.doors


def pass_seconds(part: PartPlan, rows: int, rates: Rates) -> Seconds:
    """One warm pass of a part with so many rows."""
    flops = rates.prefill_flops if rows >= ROWS_OF_PREFILL else rates.decode_flops
    computing = 2 * part.elements * rows / flops + part.blocks * rates.block_seconds
    reads = part.passes.warm
    reading = reads.bytes / rates.read_bytes
    hidden = rates.overlap * min(computing, reading)
    return Seconds(computing, reading - hidden + reads.operations * rates.read_seconds)


def speed(plan: ClusterPlan, prompt: int, rates: Rates) -> Speed:
    """What one session sees of a warm cluster."""
    cut = plan.pieces(prompt)
    through = [pass_seconds(part, cut[0], rates).total for part in plan.stations]
    # The first piece passes every station, the others follow at the pace of the slowest.
    prefill = sum(through) + (len(cut) - 1) * max(through) + (len(plan.stations) + 1) * rates.call_seconds
    return Speed(
        first_token=prefill + _head(plan, rates),
        prefill_tokens=prompt / prefill,
        decode_tokens=1 / token_seconds(plan, rates),
    )


def token_seconds(plan: ClusterPlan, rates: Rates) -> float:
    """From one token to the next: its row, all stations one after the other, and the head at once."""
    through = sum(pass_seconds(part, 1, rates).total for part in plan.stations)
    return through + (len(plan.stations) + 1) * rates.call_seconds + _head(plan, rates)


def cost_of_tokens(plan: ClusterPlan, rates: Rates, prices: Prices, sessions: int = 1) -> Cost:
    """What a million tokens cost when so many sessions share every pass over the weights.

    They share its reads, its calls and the object that waits for it; every session's row is computed.
    """
    passes = [pass_seconds(part, sessions, rates) for part in plan.parts]
    through = sum(pass_seconds(part, sessions, rates).total for part in plan.stations)
    head = max(pass_seconds(part, sessions, rates).total for part in plan.shards)
    wall = through + head + (len(plan.stations) + 2) * rates.call_seconds
    object_second = prices.object_gb * prices.object_gb_seconds
    # A token's row is in its warden, or is read once. Whoever has it is asked, and asks the warden.
    embeddings = 2 * min(sessions, len(plan.shards))
    calls = len(plan.stations) + len(plan.shards) + embeddings + _warden_calls(plan)
    reads = plan.warm_reads() + plan.warm_head_reads()
    a_pass = Cost(
        reads=reads.operations * prices.bucket_reads,
        computing=sum(found.computing for found in passes) * object_second,
        waiting=sum(found.waiting for found in passes) * object_second,
        session=wall * object_second,
        requests=calls * prices.object_requests,
        doors=0.0,
    )
    return _times(a_pass, 1e6 / sessions)


def cost_of_prompt(plan: ClusterPlan, prompt: int, rates: Rates, prices: Prices) -> Cost:
    """What a million tokens of prompts cost, of which each has `prompt` tokens."""
    cut = plan.pieces(prompt)
    passes = [pass_seconds(part, rows, rates) for part in plan.stations for rows in cut]
    calls = (len(plan.stations) + _warden_calls(plan)) * len(cut) + 2 * len(plan.shards) + 1
    object_second = prices.object_gb * prices.object_gb_seconds
    a_prompt = Cost(
        reads=plan.warm_reads().operations * len(cut) * prices.bucket_reads,
        computing=sum(found.computing for found in passes) * object_second,
        waiting=sum(found.waiting for found in passes) * object_second,
        session=prompt / speed(plan, prompt, rates).prefill_tokens * object_second,
        requests=calls * prices.object_requests,
        doors=rates.door_cpu_seconds * prices.cpu_seconds,
    )
    return _times(a_prompt, 1e6 / prompt)


def _warden_calls(plan: ClusterPlan) -> int:
    """Calls of LayerWardens in one pass."""
    return 0 if plan.warden is None else sum(part.passes.warm.operations for part in plan.stations)


def _head(plan: ClusterPlan, rates: Rates) -> float:
    return max(pass_seconds(part, 1, rates).total for part in plan.shards) + rates.call_seconds


def _times(cost: Cost, factor: float) -> Cost:
    return Cost(
        cost.reads * factor,
        cost.computing * factor,
        cost.waiting * factor,
        cost.session * factor,
        cost.requests * factor,
        cost.doors * factor,
    )
