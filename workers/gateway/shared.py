"""What all sessions of a gateway share: the route, who may use it, when they step, and what is counted."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final

from admission import Admission, Place, Pool
from engine.budget import Budget
from engine.fit import PIECES, give_prompt, take_prompt
from hops import LayerHop, VocabularyHop
from protocol.pieces import piece_rows
from protocol.ports import Background, Clock
from protocol.serving import no_room
from protocol.steps import Refusal, RefusalKind
from rounds import GAP, Rounds
from telemetry import Telemetry

F32: Final = 4
# Embedded rows of a prompt that are in memory besides those that are on their way through the stations.
EMBED_BYTES: Final = 2 << 20


@dataclass(frozen=True, slots=True)
class Route:
    """An ordered list of hops that covers the layers once, and the shards that cover the vocabulary.

    `max_rows` is what every station takes in one step, `max_tokens` what every shard embeds in one;
    `resident` says whether all weights stay in memory, `kv_tokens` how many tokens the sessions' caches hold.
    """

    model: str
    hidden_size: int
    stations: Sequence[LayerHop]
    shards: Sequence[VocabularyHop]
    max_rows: int
    resident: bool = False
    max_tokens: int = 1 << 31
    kv_tokens: int = 1 << 31

    def chunk(self, rows: int) -> int:
        """Rows of a piece of a prompt that has the stations for itself."""
        return piece_rows(rows, len(self.stations), min(self.max_rows, self.max_tokens), self.resident)

    @property
    def groups(self) -> int:
        """Groups of steps that may be under way at once."""
        return len(self.stations) if self.resident else 1


# After these the route is not what it was: another knot was uploaded, or a part serves something else.
OTHER_ROUTE: Final = frozenset(
    (RefusalKind.WRONG_MODEL, RefusalKind.WRONG_RANGE, RefusalKind.BAD_WEIGHTS, RefusalKind.NON_FINITE)
)


@dataclass(frozen=True, slots=True)
class Sharing:
    """How sessions share a route.

    At most `sessions` are served at once and `waiting` wait; a writer's step takes at most `gap` times as
    long because of prompts that are read beside it; `prefixes` says whether sessions begin with what others
    have, `pipeline` whether pieces of one prompt are at several stations at once.
    """

    sessions: int = 64
    waiting: int = 64
    gap: float = GAP
    prefixes: bool = True
    pipeline: bool = True


def no_log(message: str, **fields: Any) -> None:
    """Logs nothing."""


class Shared:
    """The sessions' common state over one route. `memory` is the isolate's, of which prompts take some.

    `log` takes a message and fields, and bounds both. `stale` is set when a part proves to serve something
    else than the route says: then nothing new should begin on it.
    """

    def __init__(
        self,
        route: Route,
        clock: Clock,
        background: Background,
        memory: Budget | None = None,
        *,
        sharing: Sharing | None = None,
        telemetry: Telemetry | None = None,
        log: Callable[..., None] = no_log,
    ) -> None:
        self.route = route
        self.clock = clock
        self.background = background
        self.memory = memory or Budget()
        self.sharing = sharing or Sharing()
        self.telemetry = telemetry or Telemetry()
        self.log = log
        self.stale = False
        self.rounds = Rounds(route.groups, route.max_rows, clock, self.sharing.gap)
        self.admission = Admission(self.sharing.sessions, self.sharing.waiting, route.kv_tokens)
        # Rows of prompts at each station: so many as go through in one pass.
        self.at_station = [Pool(route.max_rows) for _ in route.stations]
        self._reading = 0
        self._door = asyncio.Lock()
        self._freed = asyncio.Event()

    @property
    def at_rest(self) -> bool:
        """Whether no session is served or waits."""
        return not self.admission.active and not self.admission.waiting

    def enter(self, request: str, count: int, prompt: int, most: int) -> list[Place]:
        """Places for `count` sessions of one request. Raises `Refusal` at once when there is no room.

        Each place is its generation's; `Place.leave` gives one back that nobody will use.
        """
        try:
            return self.admission.enter(count, prompt, most)
        except Refusal as refusal:
            self.telemetry.request_refused(refusal)
            self.log("refused", request=request, kind=str(refusal.kind), detail=refusal.detail)
            raise

    def lost(self, refusal: Refusal) -> None:
        """Takes note of what a part said to a session."""
        self.stale = self.stale or refusal.kind in OTHER_ROUTE

    @asynccontextmanager
    async def prompt(self, rows: int) -> AsyncGenerator[int]:
        """Room for reading a prompt in pieces of at most `rows`; yields how many may be under way at once.

        Waits for those that came before. Raises `Refusal` when there is no room even for it alone.
        """
        row = F32 * self.route.hidden_size
        pieces = await self._room(row, rows)
        try:
            yield pieces if self.sharing.pipeline else 1
        finally:
            self._reading -= 1
            give_prompt(self.memory, row, rows, pieces)
            self._freed.set()

    async def _room(self, row: int, rows: int) -> int:
        async with self._door:  # in the order they came
            while not (pieces := take_prompt(self.memory, row, rows, len(self.route.stations) + 1)):
                if not self._reading:
                    raise no_room(self.memory, PIECES, row * rows)
                self._freed.clear()
                await self._freed.wait()
            self._reading += 1
            return pieces
