"""The platform's limits, and what a request has spent of them.

The numbers are those of the paid plan, from the platform's published limits.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Final

from emulator.errors import LimitExceeded

MIB: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Limits:
    """What Workers may use. Sizes in bytes, times in seconds."""

    memory_bytes: int = 128_000_000
    subrequests: int = 10_000
    connections: int = 6
    # Documented as 32 for one request; counted always, refused only where a number is set.
    worker_invocations: int | None = None
    wait_until_seconds: float = 30.0
    rpc_value_bytes: int = 32 * MIB

    kv_key_bytes: int = 512
    kv_value_bytes: int = 25 * MIB
    kv_metadata_bytes: int = 1024
    kv_ttl_seconds: int = 60

    object_value_bytes: int = 2 * MIB
    # An object that nothing happens in is evicted; measured on workerd.
    object_idle_seconds: float = 12.0
    block_concurrency_seconds: float = 30.0
    alarm_retries: int = 6
    alarm_retry_seconds: float = 2.0

    r2_key_bytes: int = 1024
    r2_metadata_bytes: int = 8192
    r2_put_bytes: int = 5_000_000_000
    r2_part_bytes: int = 5 * MIB
    r2_parts: int = 10_000


@dataclass(slots=True)
class Spending:
    """What one request has used. An object's requests share one, which each new event sets back."""

    limits: Limits
    subrequests: int = 0
    invocations: int = 0
    connecting: asyncio.Semaphore = field(init=False)

    def __post_init__(self) -> None:
        # One more than these waits for a turn; it is not refused.
        self.connecting = asyncio.Semaphore(self.limits.connections)

    def reset(self) -> None:
        """Begins a new event of a Durable Object."""
        self.subrequests = self.invocations = 0

    def subrequest(self) -> None:
        """Counts one call that leaves the isolate. Raises `LimitExceeded`."""
        self.subrequests += 1
        if self.subrequests > self.limits.subrequests:
            raise LimitExceeded(
                f"Too many subrequests: a request may make {self.limits.subrequests}, this was one more"
            )

    def invocation(self) -> None:
        """Counts one call of another Worker or object. Raises `LimitExceeded`."""
        self.subrequest()
        self.invocations += 1
        most = self.limits.worker_invocations
        if most is not None and self.invocations > most:
            raise LimitExceeded(f"Too many Worker invocations: a request may make {most}, this was one more")
