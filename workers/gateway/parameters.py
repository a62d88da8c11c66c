"""What may be asked for beside the prompt, alike at both endpoints: each parameter read once and checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, cast

from protocol.fields import BadField, Fields, UnknownField
from sampling import Sampler
from shaping import Shaping

REQUEST: Final = "the request"
MAX_STOPS: Final = 16
MAX_STOP_CHARS: Final = 1024
MAX_CHOICES: Final = 128
MAX_BIASED: Final = 1024
MAX_LOGPROBS: Final = 20
MAX_TOKENS: Final = 1 << 20
SEEDS: Final = (-(1 << 63), (1 << 63) - 1)

# What clients send that says nothing about the answer. Where a tuple stands, only its values are that.
WITHOUT_EFFECT: Final[Mapping[str, tuple[Any, ...] | None]] = {
    "user": None,
    "metadata": None,
    "safety_identifier": None,
    "prompt_cache_key": None,
    "prompt_cache_retention": None,
    "service_tier": ("auto", "default"),
    "store": (False,),
}


@dataclass(frozen=True, slots=True)
class Parameters:
    """How answers are made.

    `n` of them for every prompt, of at most `max_tokens` each (None: as many as there is room for). `seed`
    None means a fresh one. `logprobs` says how many of the best ids come with each token; None: no
    log-probabilities at all.
    """

    model: str | None = None
    n: int = 1
    max_tokens: int | None = None
    sampler: Sampler = field(default_factory=lambda: Sampler(temperature=1.0))
    shaping: Shaping = field(default_factory=Shaping)
    seed: int | None = None
    stops: tuple[str, ...] = ()
    logprobs: int | None = None
    stream: bool = False
    include_usage: bool = False
    allow_degraded: bool = False
    ignore_end: bool = False
    details: bool = False

    def sampler_of(self, choice: int) -> Sampler:
        """The sampler of one choice: that of the seed so many further on, which must have been chosen."""
        assert self.seed is not None
        low, high = SEEDS
        return replace(self.sampler, seed=(self.seed + choice - low) % (high - low + 1) + low)


def read_parameters(fields: Fields, max_tokens: int | None, logprobs: int | None) -> Parameters:
    """Takes the parameters of both endpoints out of `fields`; the endpoint has read those of its own.

    Beyond OpenAI's: `top_k`, `min_p`, `repetition_penalty`, `on_shard_failure` ("refuse" or "degrade"),
    `ignore_eos`, and `details` for what the cluster did. Raises `BadField` that names the parameter.
    """
    stream = fields.flag("stream", False)
    found = Parameters(
        model=fields.text("model") if fields.has("model") else None,
        n=fields.integer("n", 1, MAX_CHOICES, 1),
        max_tokens=max_tokens,
        sampler=Sampler(
            temperature=fields.number("temperature", 0, 2, 1.0),
            top_k=fields.integer("top_k", 0, 1 << 20, 0),
            top_p=fields.number("top_p", 0, 1, 1.0),
            min_p=fields.number("min_p", 0, 1, 0.0),
        ),
        shaping=Shaping(
            presence=fields.number("presence_penalty", -2, 2, 0.0),
            frequency=fields.number("frequency_penalty", -2, 2, 0.0),
            repetition=fields.number("repetition_penalty", 0.1, 10, 1.0),
            bias=_bias(fields),
        ),
        seed=fields.integer("seed", *SEEDS) if fields.has("seed") else None,
        stops=_stops(fields),
        logprobs=logprobs,
        stream=stream,
        include_usage=_include_usage(fields, stream),
        allow_degraded=fields.choice("on_shard_failure", {"refuse": False, "degrade": True}, "refuse"),
        ignore_end=fields.flag("ignore_eos", False),
        details=fields.flag("details", False),
    )
    for name, among in WITHOUT_EFFECT.items():
        only(fields, name, among)
    return found


def only(fields: Fields, name: str, among: tuple[Any, ...] | None, what: str = REQUEST) -> None:
    """Takes a field of `what` that may be given where it changes nothing: with one of the values `among`.

    Raises `UnknownField` for a value that nobody would honour.
    """
    value = fields.raw(name)
    if value is None or among is None:
        return
    if not any(type(value) is type(one) and value == one for one in among):
        said = " or ".join(repr(one) for one in among)
        raise UnknownField(f"{what}.{name} is not served here otherwise than {said}; leave it out", name)


def read_max_tokens(fields: Fields, *names: str) -> int | None:
    """The number of tokens by any of its names; None when none is given. Raises `BadField`."""
    found = {name: fields.integer(name, 0, MAX_TOKENS) for name in names if fields.has(name)}
    if len(set(found.values())) > 1:
        said = " and ".join(f"{name} {value}" for name, value in found.items())
        raise BadField(f"{REQUEST} has {said}; give one of them", names[0])
    return next(iter(found.values()), None)


def _include_usage(fields: Fields, stream: bool) -> bool:
    if not fields.has("stream_options"):
        return False
    options = fields.object("stream_options")
    if not stream:
        raise BadField(
            f"{REQUEST}.stream_options is for streams; set stream, or leave it out", "stream_options"
        )
    found = options.flag("include_usage", False)
    # Nothing is ever padded here, so there is nothing to switch off.
    only(options, "include_obfuscation", (False,), f"{REQUEST}.stream_options")
    options.end()
    return found


def _bias(fields: Fields) -> dict[int, float]:
    name = "logit_bias"
    if not fields.has(name):
        return {}
    given = fields.raw(name)
    values = cast(dict[str, Any], given) if isinstance(given, dict) else None
    if values is None or len(values) > MAX_BIASED:
        raise BadField(f"{REQUEST}.{name} is wrong, expected an object of at most {MAX_BIASED} ids", name)
    entries = Fields(values, f"{REQUEST}.{name}")
    found: dict[int, float] = {}
    for key in values:
        if not (key.isascii() and key.isdigit() and len(key) <= 10) or (len(key) > 1 and key[0] == "0"):
            raise BadField(f'{REQUEST}.{name} has {key[:40]!r}, expected token ids such as "1734"', name)
        try:
            found[int(key)] = entries.number(key, -100, 100)
        except BadField as error:
            raise BadField(str(error), name) from None
    return found


def _stops(fields: Fields) -> tuple[str, ...]:
    value: Any = fields.raw("stop", [])
    stops: list[Any] = [value] if isinstance(value, str) else value
    if not isinstance(value, str | list):
        stops = [None]
    good = all(isinstance(stop, str) and 0 < len(stop) <= MAX_STOP_CHARS for stop in stops)
    if len(stops) > MAX_STOPS or not good:
        raise BadField(
            f"{REQUEST}.stop is wrong, expected up to {MAX_STOPS} strings of 1 to {MAX_STOP_CHARS} "
            "characters",
            "stop",
        )
    return tuple(stops)
