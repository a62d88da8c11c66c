"""Which sessions a station knows, what their caches hold, and which steps they have taken.

Nothing here computes: keys and values are the engine's, by slot. A step is admitted in one of three ways: it
continues the cache; it repeats a step whose answer is remembered; or it repeats one whose answer is gone, and
is computed again on a fork of the cache, so that a late duplicate disturbs nothing. A step that comes after
its session was ended is refused: it would open the session anew, and nobody would end it.

A session may begin with what another one has, and leave behind what others may begin with (`prefixes`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

from engine.errors import EngineError
from prefixes import Holder, Prefixes, Slots
from protocol.frames import Part
from protocol.ports import Clock
from protocol.steps import ForwardStep, Refusal, RefusalKind
from session import Admitted, Session, Taken

__all__ = ["Admitted", "Session", "Sessions"]

MAX_STEPS_REMEMBERED: Final = 4096
MAX_ENDS_REMEMBERED: Final = 4096


class Sessions:
    """The sessions of one station. `answer_bytes` bounds all remembered answers together."""

    def __init__(
        self,
        slots: Slots,
        clock: Clock,
        *,
        max_sessions: int,
        ttl: float,
        idle: float,
        answer_bytes: int,
        max_prefixes: int = 0,
        held: Callable[[int], None] = lambda delta: None,
    ) -> None:
        self._slots = slots
        self._clock = clock
        self._max_sessions = max_sessions
        self.ttl = ttl
        self.on_close: Callable[[Session], None] | None = None
        self._idle = idle
        self._answer_bytes = answer_bytes
        self._remembered = 0
        self._held = held
        self.prefixes = Prefixes(slots, max_prefixes)
        self._sessions: OrderedDict[str, Session] = OrderedDict()
        self._ends: OrderedDict[str, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._sessions)

    @property
    def remembered_bytes(self) -> int:
        """Bytes of answers that are kept for repeated steps."""
        return self._remembered

    def lengths(self) -> dict[str, int]:
        """Session id → tokens in its cache."""
        return {session.id: session.length for session in self._sessions.values()}

    def answer_to(self, step: ForwardStep, checksum: int) -> Part | None:
        """The remembered answer to a repeated step, or None; `Refusal` for an id used otherwise."""
        session = self._sessions.get(step.envelope.session)
        if session is None or session.epoch != step.envelope.epoch:
            return None
        taken = session.taken.get(step.envelope.step)
        if taken is None:
            return None
        if taken != Taken(step.position, step.count, checksum, step.rows):
            raise Refusal(
                RefusalKind.BAD_FRAME,
                f"step id {step.envelope.step} was used for {taken.count} rows at {taken.position} before, "
                f"now for {step.count} at {step.position}, other rows or another answer; every step needs "
                "an id of its own",
            )
        session.used = self._clock()
        return session.answers.get(step.envelope.step)

    def begin(self, step: ForwardStep, digests: Sequence[bytes]) -> int:
        """Opens a session with what another one has; returns how many tokens that is. Raises `Refusal`.

        By `digests` it is as much as is known, perhaps nothing; of a named source it is all or a refusal.
        """
        self.expire()
        envelope = step.envelope
        found = self._sessions.get(envelope.session)
        if found is not None and found.epoch == envelope.epoch:
            return found.begun  # an answer was lost
        self._check_new(envelope.session, envelope.epoch, found)
        if found is not None:
            self._close(found)
        if step.source is not None:
            holder, length = self._source(step.source, step.position), step.position
        else:
            self.prefixes.counts.asked += 1
            holder, length = self.prefixes.longest(digests, step.position) or (None, 0)
        self._make_place(holder)
        slot = self._begin_with(holder, length)
        if slot is None:
            if step.source is not None:
                raise Refusal(
                    RefusalKind.OVER_BUDGET,
                    f"session {step.source} cannot be shared: no page of keys and values is free",
                    1000,
                )
            holder, length, slot = None, 0, self._slots.kv_open()
        if holder is not None and step.source is None:
            self.prefixes.counts.hits += 1
            self.prefixes.counts.tokens += length
            self.prefixes.used(holder)
        claimed = tuple(digests) if step.claims else ()
        opened = Session(
            envelope.session, envelope.epoch, slot, self._clock(), length, begun=length, digests=claimed
        )
        self._sessions[opened.id] = opened
        self.prefixes.claim(opened)
        return length

    def admit(self, step: ForwardStep, checksum: int) -> Admitted:
        """Finds or opens the step's session and cuts its cache to what the step expects. Raises `Refusal`."""
        self.expire()
        session = self._find(step)
        session.used = self._clock()
        self._sessions.move_to_end(session.id)
        taken = session.taken
        repeated = taken.get(step.envelope.step)
        if repeated is not None and repeated.void:
            raise Refusal(
                RefusalKind.CACHE_MISS,
                f"session {session.id} was cut to less than the {step.position} tokens that step "
                f"{step.envelope.step} began with; replay from token zero on a fresh epoch",
            )
        if repeated is not None and step.envelope.step != next(reversed(taken)):
            slot = self._fork(session, step.position)
            session.busy = True
            return Admitted(session, slot, True)
        if step.cache_length > session.length:
            raise Refusal(
                RefusalKind.CACHE_MISS,
                f"session {session.id} has {session.length} tokens here, the step expects "
                f"{step.cache_length}; replay from token zero on a fresh epoch",
            )
        if step.cache_length < session.length:
            self._slots.kv_truncate(session.slot, step.cache_length)
            session.length = step.cache_length
            session.saved = min(session.saved, step.cache_length)
            for name, before in taken.items():
                if before.position > step.cache_length:
                    taken[name] = replace(before, void=True)
        taken[step.envelope.step] = Taken(step.position, step.count, checksum, step.rows)
        while len(taken) > MAX_STEPS_REMEMBERED:
            taken.popitem(last=False)
        session.busy = True
        return Admitted(session, session.slot, False)

    def done(self, admitted: Admitted, step: ForwardStep, answer: Part) -> None:
        """Takes note of a step that ran, and remembers its answer as long as there is room."""
        session = admitted.session
        self._leave(admitted)
        if session.ended:
            return
        if not admitted.forked:
            session.length = step.position + step.count
        self._forget_answers(session)
        size = _size(answer)
        if size <= self._answer_bytes:
            session.answers[step.envelope.step] = answer
            self._count(size)
            self._trim()

    def failed(self, admitted: Admitted, step: ForwardStep) -> None:
        """Takes back a step that did not run: what its cache held before the step is there as before."""
        self._leave(admitted)
        if not admitted.forked:
            admitted.session.taken.pop(step.envelope.step, None)

    def end(self, session_id: str, epoch: int, kept: Sequence[bytes] = ()) -> bool:
        """Ends a session by release or cancel; False when it is not here. Raises `Refusal` if stale.

        Steps of this epoch that come later are refused. A step that is running keeps its slot until it ends.
        The pages that `kept` are the digests of stay for others to begin with.
        """
        session = self._sessions.get(session_id)
        if session is not None and epoch < session.epoch:
            raise _stale(session, epoch)
        self._ends[session_id] = max(epoch, self._ends.pop(session_id, 0))
        while len(self._ends) > MAX_ENDS_REMEMBERED:
            self._ends.popitem(last=False)
        if session is None:
            return False
        session.kept = tuple(kept) if session.epoch == epoch else ()
        self._close(session)
        return True

    def expire(self) -> None:
        """Ends sessions that have not been used for their time to live."""
        now = self._clock()
        for session in [s for s in self._sessions.values() if not s.busy and now - s.used > self.ttl]:
            self._close(session)

    def make_room(self, spare: str | None = None, holder: Holder | None = None) -> bool:
        """Gives up what is kept for others, or ends a session that is idle; whether there was one.

        Never the session `spare`, nor what `holder` has.
        """
        return self.prefixes.evict(holder) or self.evict_idle(spare, holder)

    def evict_idle(self, spare: str | None = None, holder: Holder | None = None) -> bool:
        """Ends the session idle for longest, if it has been so for a while; never `spare` or `holder`.

        Returns whether there was one.
        """
        now = self._clock()
        for session in self._sessions.values():
            spared = session.id == spare or session is holder
            if not spared and not session.busy and now - session.used >= self._idle:
                self._close(session)
                return True
        return False

    def is_missing(self, step: ForwardStep) -> bool:
        """Whether a step continues a session that is not here, and that nobody has ended."""
        envelope = step.envelope
        session = self._sessions.get(envelope.session)
        newest = -1 if session is None else session.epoch
        ended = self._ends.get(envelope.session, -1)
        return step.cache_length > 0 and envelope.epoch > max(newest, ended)

    def to_be_cut(self, step: ForwardStep) -> Session | None:
        """The session that a step will cut to less than it has, if that is what the step will do."""
        session = self._sessions.get(step.envelope.session)
        if session is None or session.epoch != step.envelope.epoch or step.cache_length >= session.length:
            return None
        repeated = step.envelope.step in session.taken
        return None if repeated and step.envelope.step != next(reversed(session.taken)) else session

    def adopt(self, id: str, epoch: int, slot: int, length: int, checks: Sequence[int]) -> None:
        """Takes in a session that was read back from storage."""
        if id in self._sessions:
            self._close(self._sessions[id])
        opened = Session(id, epoch, slot, self._clock(), length, saved=length, checks=list(checks))
        self._sessions[id] = opened

    def idle(self) -> list[Session]:
        """The sessions of which no step is running."""
        return [session for session in self._sessions.values() if not session.busy]

    def clear(self) -> None:
        """Ends every session here; what was saved of them stays. No batch may be open."""
        self.prefixes.clear()
        self.on_close = None
        for session in list(self._sessions.values()):
            session.busy = False
            self._close(session)

    def _find(self, step: ForwardStep) -> Session:
        envelope = step.envelope
        session = self._sessions.get(envelope.session)
        if session is not None and envelope.epoch == session.epoch:
            return session
        self._check_new(envelope.session, envelope.epoch, session)
        if step.cache_length:
            raise Refusal(
                RefusalKind.CACHE_MISS,
                f"session {envelope.session} of epoch {envelope.epoch} is not here, the step expects "
                f"{step.cache_length} tokens; replay from token zero on a fresh epoch",
            )
        if session is not None:
            self._close(session)
        self._make_place()
        opened = Session(envelope.session, envelope.epoch, self._slots.kv_open(), self._clock())
        self._sessions[opened.id] = opened
        return opened

    def _check_new(self, name: str, epoch: int, session: Session | None) -> None:
        """Raises a `Refusal` unless a session may begin at this epoch."""
        if session is not None and epoch < session.epoch:
            raise _stale(session, epoch)
        if epoch <= self._ends.get(name, -1):
            raise Refusal(
                RefusalKind.CANCELLED,
                f"session {name} was ended at epoch {self._ends[name]}; begin it anew on a fresh one",
            )

    def _make_place(self, holder: Holder | None = None) -> None:
        """Sees to it that one more session can be opened. Raises `Refusal`."""
        while len(self._sessions) + len(self.prefixes) >= self._max_sessions:
            if not self.make_room(holder=holder):
                raise Refusal(
                    RefusalKind.OVER_BUDGET,
                    f"{self._max_sessions} sessions are open and none is idle; come back later",
                    1000,
                )

    def _source(self, name: str, length: int) -> Session:
        source = self._sessions.get(name)
        if source is None or source.length < length:
            raise Refusal(
                RefusalKind.CACHE_MISS,
                f"session {name} has {source.length if source else 0} tokens here, {length} were to be "
                "shared; replay from token zero",
            )
        return source

    def _begin_with(self, holder: Holder | None, length: int) -> int | None:
        """A slot that begins with what a holder has; None when there is no room even for that."""
        while holder is not None:
            try:
                return self._slots.kv_fork(holder.slot, length)
            except EngineError:
                if not self.make_room(holder=holder):
                    return None
        return self._slots.kv_open()

    def _fork(self, session: Session, length: int) -> int:
        while True:
            try:
                return self._slots.kv_fork(session.slot, length)
            except Exception as error:
                if not self.make_room(session.id):
                    raise Refusal(
                        RefusalKind.OVER_BUDGET, f"a repeated step cannot be computed again: {error}", 1000
                    ) from error

    def _leave(self, admitted: Admitted) -> None:
        session = admitted.session
        session.busy = False
        if admitted.forked:
            self._slots.kv_close(admitted.slot)
        if session.ended:
            self._leave_behind(session)

    def _close(self, session: Session) -> None:
        self._forget_answers(session)
        del self._sessions[session.id]
        session.ended = True
        self.prefixes.forget(session)
        if self.on_close is not None:
            self.on_close(session)
        if not session.busy:
            self._leave_behind(session)

    def _leave_behind(self, session: Session) -> None:
        if session.kept:
            self.prefixes.keep(session.slot, session.length, session.kept)
        else:
            self._slots.kv_close(session.slot)

    def _forget_answers(self, session: Session) -> None:
        self._count(-sum(map(_size, session.answers.values())))
        session.answers.clear()

    def _trim(self) -> None:
        for session in self._sessions.values():
            if self._remembered <= self._answer_bytes:
                return
            self._forget_answers(session)

    def _count(self, delta: int) -> None:
        self._remembered += delta
        self._held(delta)


def _stale(session: Session, epoch: int) -> Refusal:
    return Refusal(
        RefusalKind.STALE_EPOCH, f"session {session.id} is at epoch {session.epoch}, the step is of {epoch}"
    )


def _size(part: Part) -> int:
    return sum(len(tensor.data) for tensor in part.tensors.values())
