"""Steps: values that say what a part is asked to do, and what it answers. HTTP, RPC and gRPC can carry them.

A step names everything its receiver must agree with (model, range, epoch, cache length), so that nothing is
guessed: what cannot be proved compatible is refused by a `Refusal` of one of the kinds below.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final

from protocol.fields import BadField, Fields

VERSION: Final = 1
MAX_ID: Final = 128
MAX_POSITION: Final = 1 << 31
MAX_ROWS: Final = 1 << 16
MAX_TOP_K: Final = 1 << 20
MAX_LISTED: Final = 1 << 14
# What tells pages of tokens apart, in bytes.
DIGEST_BYTES: Final = 16
TOKEN: Final = (0, (1 << 31) - 1)


class Phase(StrEnum):
    """What a forward step is part of."""

    PREFILL = "prefill"
    DECODE = "decode"
    OPEN = "open"
    RELEASE = "release"
    CANCEL = "cancel"

    @property
    def has_rows(self) -> bool:
        """Whether rows pass the layers; the others are about the session itself."""
        return self in (Phase.PREFILL, Phase.DECODE)


class Rows(StrEnum):
    """Which normalised rows the exit station returns."""

    NONE = "none"
    LAST = "last"
    ALL = "all"


class RefusalKind(StrEnum):
    """Why a step was not done. After the first three, replaying from token zero on a fresh epoch may help."""

    CACHE_MISS = "cache_miss"
    STALE_EPOCH = "stale_epoch"
    LOST = "lost"
    UNAVAILABLE = "unavailable"
    BUSY = "busy"
    OVER_BUDGET = "over_budget"
    WRONG_MODEL = "wrong_model"
    WRONG_RANGE = "wrong_range"
    BAD_FRAME = "bad_frame"
    NON_FINITE = "non_finite"
    BAD_WEIGHTS = "bad_weights"
    CANNOT_START = "cannot_start"
    CANCELLED = "cancelled"
    INTERNAL = "internal"


class Refusal(Exception):
    """A typed refusal: its kind for programs, a sentence for people, and when to come back if that helps."""

    def __init__(self, kind: RefusalKind, detail: str, retry_after_ms: int | None = None) -> None:
        self.kind = kind
        self.detail = detail
        self.retry_after_ms = retry_after_ms
        super().__init__(f"{kind}: {detail}")

    def to_json(self) -> dict[str, Any]:
        """The refusal as an answer's envelope states it."""
        retry = {} if self.retry_after_ms is None else {"retry_after_ms": self.retry_after_ms}
        return {"status": str(self.kind), "detail": self.detail, **retry}


@dataclass(frozen=True, slots=True)
class Envelope:
    """What every step carries. `range` is [start, end) of layers or of vocabulary ids."""

    request: str
    session: str
    epoch: int
    model: str
    range: tuple[int, int]
    step: str

    def to_json(self) -> dict[str, Any]:
        """The fields that all kinds of step share."""
        return {
            "version": VERSION,
            "request": self.request,
            "session": self.session,
            "epoch": self.epoch,
            "model": self.model,
            "range": list(self.range),
            "step": self.step,
        }

    def check(self, model: str, range: tuple[int, int]) -> None:
        """Raises a `Refusal` unless the step means this model and this range."""
        if self.model != model:
            raise Refusal(
                RefusalKind.WRONG_MODEL,
                f"the step is for the model {self.model}, here is {model}; ask /health",
            )
        if self.range != range:
            raise Refusal(
                RefusalKind.WRONG_RANGE,
                f"the step is for [{self.range[0]}, {self.range[1]}), here is [{range[0]}, {range[1]})",
            )


@dataclass(frozen=True, slots=True)
class ForwardStep:
    """Rows of one session through a station's layers; or the session's beginning or end.

    Tensors: `hidden`, f32 [count, hidden_size]. `cache_length` is what the station's cache must hold before;
    a cache that holds more is cut to it. The answer has `hidden`, or from the exit station, as `rows` says,
    `normed`, f32 [rows, hidden_size].

    `open` begins a session with at most `position` tokens that the station has already: those of the session
    `source`, exactly, or as many whole pages as it knows by `digests`, u8 [pages, DIGEST_BYTES], one of all
    tokens up to the end of each page. The answer's `cache_length` says how many. With `claims` the digests
    are those of the session's own tokens, for others to begin with. `release` may carry `digests` too: then
    the pages they name are kept for whoever begins like that later.
    """

    envelope: Envelope
    phase: Phase
    position: int
    count: int
    cache_length: int
    rows: Rows = Rows.NONE
    source: str | None = None
    claims: bool = False

    def to_json(self) -> dict[str, Any]:
        """The step's envelope."""
        opening = {"source": self.source, "claims": self.claims} if self.phase is Phase.OPEN else {}
        return {
            **self.envelope.to_json(),
            "phase": str(self.phase),
            "position": self.position,
            "count": self.count,
            "cache_length": self.cache_length,
            "rows": str(self.rows),
            **opening,
        }


@dataclass(frozen=True, slots=True)
class EmbedStep:
    """Tokens to look up. Tensors: `tokens`, i32 [count].

    The answer is sparse: `positions`, i32 [owned], and `rows`, f32 [owned, hidden_size].
    """

    envelope: Envelope

    def to_json(self) -> dict[str, Any]:
        """The step's envelope."""
        return self.envelope.to_json()


@dataclass(frozen=True, slots=True)
class Adjustment:
    """How one id's logit changes: (raw > 0 ? raw / multiply : raw * multiply) + add."""

    id: int
    multiply: float = 1.0
    add: float = 0.0


@dataclass(frozen=True, slots=True)
class Choice:
    """What is wanted of one row of logits.

    The best `top_k` ids after adjustments and `temperature` (0: greedy); with a `seed`, ranked by adjusted
    logit plus Gumbel noise that depends on seed and id alone; and the ids in `wanted`, whatever their rank.
    """

    top_k: int = 1
    temperature: float = 0.0
    seed: int | None = None
    adjustments: tuple[Adjustment, ...] = ()
    wanted: tuple[int, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """The choice as JSON."""
        return {
            "top_k": self.top_k,
            "temperature": self.temperature,
            **({} if self.seed is None else {"seed": self.seed}),
            "adjustments": [[entry.id, entry.multiply, entry.add] for entry in self.adjustments],
            "wanted": list(self.wanted),
        }

    @classmethod
    def from_fields(cls, fields: Fields) -> Choice:
        """Reads a choice. Raises `BadField`."""
        adjustments = fields.array("adjustments", MAX_LISTED, [])
        choice = cls(
            top_k=fields.integer("top_k", 0, MAX_TOP_K, 1),
            temperature=fields.number("temperature", 0.0, 1e6, 0.0),
            seed=fields.integer("seed", 0, (1 << 63) - 1) if fields.has("seed") else None,
            adjustments=tuple(_adjustment(entry) for entry in adjustments),
            wanted=tuple(fields.integers("wanted", MAX_LISTED, *TOKEN, default=[])),
        )
        fields.end()
        return choice


@dataclass(frozen=True, slots=True)
class LogitsStep:
    """One row against a shard's slice of the head. Tensors: `normed`, f32 [1, hidden_size].

    With `again` there is no tensor: the slice that the same step id left behind is chosen from once more.
    """

    envelope: Envelope
    choice: Choice
    again: bool = False

    def to_json(self) -> dict[str, Any]:
        """The step's envelope."""
        return {**self.envelope.to_json(), "choice": self.choice.to_json(), "again": self.again}


@dataclass(frozen=True, slots=True)
class Ranked:
    """One id of a slice: its logit, the adjusted one, and what it was ranked by."""

    id: int
    raw: float
    adjusted: float
    key: float


@dataclass(frozen=True, slots=True)
class Slice:
    """A shard's answer for one row: log-sum-exps over its slice, the best ids in order, the wanted ids."""

    lse_raw: float
    lse_adjusted: float
    candidates: Sequence[Ranked]
    wanted: Sequence[Ranked] = field(default=())


def forward_step(values: Mapping[str, Any]) -> ForwardStep:
    """Reads a forward step. Raises `BadField`."""
    fields = Fields(values, "the step")
    step = ForwardStep(
        _envelope(fields),
        fields.choice("phase", {str(phase): phase for phase in Phase}),
        fields.integer("position", 0, MAX_POSITION),
        fields.integer("count", 0, MAX_ROWS),
        fields.integer("cache_length", 0, MAX_POSITION),
        fields.choice("rows", {str(rows): rows for rows in Rows}, "none"),
        fields.text("source", longest=MAX_ID) if fields.has("source") else None,
        fields.flag("claims", False),
    )
    fields.end()
    if (step.count > 0) != step.phase.has_rows:
        expected = "at least 1" if step.phase.has_rows else "0"
        raise BadField(f"the step.count is {step.count}, expected {expected} to {step.phase}")
    if (step.source is not None or step.claims) and step.phase is not Phase.OPEN:
        raise BadField(
            f"the step.source and step.claims are for steps that open, this one is to {step.phase}"
        )
    if step.position != step.cache_length:
        raise BadField(
            f"the step.position is {step.position}, expected its cache_length, {step.cache_length}: "
            "rows are appended"
        )
    return step


def embed_step(values: Mapping[str, Any]) -> EmbedStep:
    """Reads an embed step. Raises `BadField`."""
    fields = Fields(values, "the step")
    step = EmbedStep(_envelope(fields))
    fields.end()
    return step


def logits_step(values: Mapping[str, Any]) -> LogitsStep:
    """Reads a logits step. Raises `BadField`."""
    fields = Fields(values, "the step")
    step = LogitsStep(
        _envelope(fields), Choice.from_fields(fields.object("choice")), fields.flag("again", False)
    )
    fields.end()
    return step


def raise_refusal(envelope: Mapping[str, Any], by: str = "") -> None:
    """Raises the `Refusal` that an answer's envelope states, naming whom it is `by`; nothing for "ok"."""
    status = envelope.get("status")
    if status == "ok":
        return
    try:
        kind = RefusalKind(str(status))
    except ValueError:
        kind = RefusalKind.INTERNAL
    retry = envelope.get("retry_after_ms")
    detail = str(envelope.get("detail", "no reason was given"))
    raise Refusal(kind, f"{by}: {detail}" if by else detail, retry if type(retry) is int else None)


def _envelope(fields: Fields) -> Envelope:
    fields.integer("version", VERSION, VERSION)
    start, end = _pair(fields)
    return Envelope(
        fields.text("request", longest=MAX_ID),
        fields.text("session", longest=MAX_ID),
        fields.integer("epoch", 0, MAX_POSITION),
        fields.text("model", longest=MAX_ID),
        (start, end),
        fields.text("step", longest=MAX_ID),
    )


def _pair(fields: Fields) -> tuple[int, int]:
    values = fields.integers("range", 2, *TOKEN)
    if len(values) != 2:
        raise BadField(f"the step.range is {values}, expected [start, end]")
    return values[0], values[1]


def _adjustment(entry: object) -> Adjustment:
    values: Any = entry
    if not isinstance(entry, list) or len(values) != 3:
        raise BadField("an adjustment is not a list of id, multiply and add")
    fields = Fields(dict(zip(("id", "multiply", "add"), values, strict=True)), "an adjustment")
    return Adjustment(
        fields.integer("id", *TOKEN), fields.number("multiply", 1e-6, 1e6), fields.number("add", -1e9, 1e9)
    )
