"""Who may use the cluster, and who waits or is sent away: so many sessions, within their pages.

A session holds room for its prompt and some tokens more, and asks for more as it writes. When there is none,
the session that came last makes room: it ends its attempt, and goes on where it was when there is room again.
The one that came first is never asked to, so somebody always gets on. Beyond the sessions and those that may
wait, a request is refused at once.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Final

from engine.values import KV_PAGE_TOKENS
from protocol.steps import Refusal, RefusalKind

# Tokens that a session gets room for at a time.
STRIDE: Final = 4 * KV_PAGE_TOKENS
BUSY_MS: Final = 1000


class MadeRoom(Exception):
    """The session is to end its attempt, since an older one needs its room."""


class Place:
    """One session's place. `reserved` is the tokens it has room for."""

    def __init__(self, admission: Admission, prompt: int, most: int) -> None:
        self._admission = admission
        self.whole = prompt + most
        self.needed = prompt
        self.reserved = 0
        self.to_make_room = False
        self.turn: asyncio.Future[None] | None = None

    @property
    def served(self) -> bool:
        """Whether it is the session's turn."""
        return self.reserved > 0

    @property
    def first(self) -> int:
        """Tokens that it needs room for to begin."""
        return _pages(min(self.needed + STRIDE, self.whole))

    async def admitted(self) -> None:
        """Waits for the session's turn."""
        await self._admission.wait(self)

    async def hold(self, tokens: int) -> None:
        """Sees to it that there is room for so many tokens. Raises `MadeRoom`."""
        self.needed = max(self.needed, tokens)
        await self._admission.grow(self, tokens)

    def pause(self) -> None:
        """Gives the room back; `admitted` waits for it again, before all who have not begun."""
        self._admission.leave(self, again=True)

    def leave(self) -> None:
        """Gives everything back; a second time does nothing."""
        self._admission.leave(self)


class Admission:
    """At most `sessions` at once, with room for `tokens` together, and at most `waiting` who wait."""

    def __init__(self, sessions: int, waiting: int, tokens: int) -> None:
        self._sessions = sessions
        self._most_waiting = waiting
        self._tokens = tokens
        self._active: list[Place] = []
        self._queue: deque[Place] = deque()
        self._used = 0
        self._wanting: set[Place] = set()
        self._freed = asyncio.Event()
        self.refused = 0
        self.preempted = 0

    @property
    def active(self) -> int:
        """Sessions that are being served."""
        return len(self._active)

    @property
    def waiting(self) -> int:
        """Sessions that wait for their turn."""
        return len(self._queue)

    @property
    def used(self) -> int:
        """Tokens that room is held for."""
        return self._used

    @property
    def tokens(self) -> int:
        """Tokens that there is room for."""
        return self._tokens

    def enter(self, count: int, prompt: int, most: int) -> list[Place]:
        """Places for `count` sessions of a prompt and at most so many tokens more. Raises `Refusal`.

        It is `busy` when others are in the way, `over_budget` when the prompt would not fit even alone.
        """
        if prompt > self._tokens:
            raise Refusal(
                RefusalKind.OVER_BUDGET,
                f"the prompt has {prompt} tokens, and a station's keys and values have room for "
                f"{self._tokens}; send a shorter one, or raise KV_BYTES or the number of stations",
            )
        places = [Place(self, prompt, most) for _ in range(count)]
        self._queue.extend(places)
        self._admit()
        if len(self._queue) > self._most_waiting and places[-1].turn is None:
            for place in places:
                self.leave(place)
            self.refused += 1
            raise Refusal(
                RefusalKind.BUSY,
                f"{self.active} sessions are being served and {self.waiting} are waiting; come back later",
                BUSY_MS,
            )
        return places

    async def wait(self, place: Place) -> None:
        """Waits until a place is among those that are served."""
        if place in self._active:
            return
        if place not in self._queue:
            raise Refusal(RefusalKind.CANCELLED, "the session has given its place up")
        turn = place.turn = place.turn or asyncio.get_running_loop().create_future()
        await turn

    async def grow(self, place: Place, tokens: int) -> None:
        """Holds room for so many tokens, at the cost of sessions that came later. Raises `MadeRoom`."""
        try:
            while not self._grown(place, tokens):
                self._wanting.add(place)
                self._ask_for_room()
                self._freed.clear()
                if not place.to_make_room:
                    await self._freed.wait()
        finally:
            self._wanting.discard(place)
            self._admit()

    def _grown(self, place: Place, tokens: int) -> bool:
        if place.to_make_room:
            raise MadeRoom
        if tokens <= place.reserved:
            return True
        alone = self._active == [place]
        for wanted in (_pages(min(tokens + STRIDE, place.whole)), _pages(tokens)):
            more = max(wanted, tokens) - place.reserved
            if self._used + more <= self._tokens or alone:
                self._used += more
                place.reserved += more
                return True
        return False

    def leave(self, place: Place, *, again: bool = False) -> None:
        """Gives a place's room back."""
        if place in self._active:
            self._active.remove(place)
            self._used -= place.reserved
            place.reserved = 0
        elif place in self._queue:
            self._queue.remove(place)
        place.to_make_room = False
        place.turn = None
        if again:
            self._queue.appendleft(place)
        self._admit()
        self._freed.set()

    def _admit(self) -> None:
        while self._queue and len(self._active) < self._sessions:
            place = self._queue[0]
            # Room that somebody wants who is being served is not for another one.
            if self._active and (self._wanting or self._used + place.first > self._tokens):
                return
            self._queue.popleft()
            self._active.append(place)
            place.reserved = place.first
            self._used += place.reserved
            place.turn = place.turn or asyncio.get_running_loop().create_future()
            if not place.turn.done():
                place.turn.set_result(None)

    def _ask_for_room(self) -> None:
        """Has the session that came last make room, unless one is doing so already."""
        if not any(place.to_make_room for place in self._active):
            self._active[-1].to_make_room = True
            self.preempted += 1
            self._freed.set()  # it may be waiting for room itself


class Pool:
    """An amount of something, of which each takes some and gives it back, in the order they came."""

    def __init__(self, size: int) -> None:
        self._left = self._size = size
        self._queue: deque[tuple[int, asyncio.Future[None]]] = deque()

    @asynccontextmanager
    async def take(self, amount: int) -> AsyncGenerator[None]:
        """Has `amount` as long as the block runs; all there is, if that is less."""
        amount = min(amount, self._size)
        if self._queue or amount > self._left:
            turn = asyncio.get_running_loop().create_future()
            self._queue.append((amount, turn))
            try:
                await turn
            except asyncio.CancelledError:
                if turn.done() and not turn.cancelled():
                    self._give(amount)
                elif (amount, turn) in self._queue:
                    self._queue.remove((amount, turn))
                    self._give(0)
                raise
        else:
            self._left -= amount
        try:
            yield
        finally:
            self._give(amount)

    def _give(self, amount: int) -> None:
        self._left += amount
        while self._queue and self._queue[0][0] <= self._left:
            wanted, turn = self._queue.popleft()
            if not turn.cancelled():
                self._left -= wanted
                turn.set_result(None)


def _pages(tokens: int) -> int:
    """Tokens that whole pages have room for."""
    return -(-tokens // KV_PAGE_TOKENS) * KV_PAGE_TOKENS
