"""The merged choice has the distribution of one softmax over the whole vocabulary, however it is spread."""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Coroutine, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np
import pytest
from engine_support import make_host
from gguf.constants import GGMLQuantizationType as Kind
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.client import Adjust, ShardConfig, ShardEngine
from knot.topology import split
from protocol.steps import MAX_TOP_K, Adjustment, Choice, Ranked, Slice
from sampling import (
    FIRST_CANDIDATES,
    NotEnough,
    Sampler,
    logsumexp,
    noise_seed,
    sample,
    truncate,
    uniform,
)
from shaping import Shaper, Shaping

T = TypeVar("T")
VOCAB = 200


def now(coroutine: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine that waits for nothing: a loop for each would be most of the time."""
    try:
        coroutine.send(None)
    except StopIteration as done:
        return done.value
    raise AssertionError("it waits for something")


class Heads:
    """Shards of a head whose rows are the unit vectors, so that the logits are what was sent in."""

    def __init__(self, logits: np.ndarray, shards: int, banned: Sequence[tuple[int, int]] = ()) -> None:
        self.ranges = split(len(logits), shards)
        self.sizes = [end - start for start, end in self.ranges]
        self.rounds = 0
        self.engines: list[ShardEngine] = []
        size = len(logits)
        for start, end in self.ranges:
            engine = ShardEngine(make_host("native", 1 << 22))
            engine.shard_configure(ShardConfig(size, start, end, 1, 1, 1 << 19))
            at = engine.arena_at
            engine.host.write(at, logits.astype("<f4").tobytes())
            engine.logits_begin([0], at)
            weights = np.eye(size, dtype="<f4")[start:end]
            engine.host.write(at, weights.tobytes())
            now(engine.logits_block(int(Kind.F32), 0, end - start, at, weights.nbytes))
            engine.logits_end()
            for one in banned:
                engine.shard_ban(*one)
            self.engines.append(engine)

    def slices(self, choice: Choice) -> list[Slice]:
        self.rounds += 1
        found: list[Slice] = []
        for engine in self.engines:
            answer = now(
                engine.select(
                    0,
                    top_k=choice.top_k,
                    temperature=choice.temperature,
                    seed=choice.seed,
                    adjust=[Adjust(one.id, one.multiply, one.add) for one in choice.adjustments],
                    workspace=(engine.arena_at, 1 << 19),
                )
            )
            entries = tuple(Ranked(*entry) for entry in answer.candidates)
            found.append(Slice(answer.lse_raw, answer.lse_adjusted, entries))
        return found

    def kept(self, sampler: Sampler, adjustments: tuple[Adjustment, ...] = ()) -> list[Ranked]:
        """What truncation leaves, asking for more as a generation does."""
        choice = replace(sampler.first_choice(0), adjustments=adjustments)
        while True:
            slices = self.slices(choice)
            try:
                lse = logsumexp(part.lse_adjusted for part in slices)
                return truncate(sampler, slices, self.sizes, choice.top_k, lse)
            except NotEnough as more:
                choice = replace(choice, top_k=more.top_k)

    def draw(self, sampler: Sampler, position: int) -> tuple[int, float, float]:
        choice = sampler.first_choice(position)
        while True:
            try:
                found = sample(sampler, self.slices(choice), self.sizes, choice.top_k, position)
                return found.id, found.logprob, found.adjusted_logprob
            except NotEnough as more:
                choice = Choice(top_k=more.top_k, temperature=choice.temperature)


def exact(
    logits: np.ndarray, sampler: Sampler, banned: Sequence[tuple[int, int]] = ()
) -> tuple[list[int], np.ndarray]:
    """(ids that are kept, best first; their probabilities), by one softmax over everything."""
    scaled = (logits.astype("<f4") / np.float32(sampler.temperature)).astype("<f4").astype(np.float64)
    for start, end in banned:
        scaled[start:end] = -np.inf
    order = [int(i) for i in np.argsort(-scaled, kind="stable") if scaled[i] > -np.inf]
    if sampler.top_k:
        order = order[: sampler.top_k]
    values = np.exp(scaled[order] - scaled[order[0]])
    shares = values / values.sum()
    keep = 1
    while keep < len(order):
        if sampler.top_p < 1 and math.fsum(shares[:keep]) >= sampler.top_p - 1e-9:
            break
        if sampler.min_p and scaled[order[keep]] < scaled[order[0]] + math.log(sampler.min_p):
            break
        keep += 1
    return order[:keep], shares[:keep] / shares[:keep].sum()


def normal(seed: int, scale: float = 3.0, size: int = VOCAB) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(size) * scale).astype("<f4")


SHAPES: dict[str, np.ndarray] = {
    "peaked": normal(1, 6.0),
    "ordinary": normal(2, 2.0),
    "flat": np.zeros(VOCAB, "<f4"),
    "nearly flat": normal(3, 0.01),
    "steps": np.repeat(np.arange(10, dtype="<f4"), VOCAB // 10),
    "two heights": np.where(np.arange(VOCAB) % 3, 1.0, 0.0).astype("<f4"),
}


@functools.cache
def heads_of(shape: str, shards: int, banned: tuple[tuple[int, int], ...] = ()) -> Heads:
    """Heads with the logits of a shape, made once."""
    return Heads(SHAPES[shape], shards, banned)


SAMPLERS = [
    Sampler(temperature=0.7, top_k=1 + 39),
    Sampler(temperature=1.0, top_k=500),
    Sampler(temperature=1.0, top_p=0.9),
    Sampler(temperature=1.0, top_p=0.5),
    Sampler(temperature=2.0, top_p=0.999999),
    Sampler(temperature=1.0, top_p=0.0),
    Sampler(temperature=0.5, min_p=0.05),
    Sampler(temperature=1.0, min_p=1e-12),
    Sampler(temperature=1.0, min_p=1.0),
    Sampler(temperature=0.8, top_k=50, top_p=0.8),
    Sampler(temperature=0.8, top_k=50, min_p=0.02),
    Sampler(temperature=1.2, top_p=0.95, min_p=0.01),
    Sampler(temperature=1.2, top_k=70, top_p=0.95, min_p=0.001),
]
NAMES = [f"t{s.temperature} k{s.top_k} p{s.top_p} m{s.min_p}" for s in SAMPLERS]


@pytest.mark.parametrize("sampler", SAMPLERS, ids=NAMES)
@pytest.mark.parametrize("banned", [(), ((10, 30), (190, 200))], ids=["all", "some banned"])
def test_truncation_keeps_exactly_the_ids_of_one_softmax_with_their_probabilities(
    sampler: Sampler, banned: tuple[tuple[int, int], ...]
) -> None:
    for name, logits in SHAPES.items():
        ids, shares = exact(logits, sampler, banned)
        for shards in (1, 3, 8):
            kept = heads_of(name, shards, banned).kept(sampler)
            assert [candidate.id for candidate in kept] == ids, (name, shards)
            total = logsumexp(candidate.adjusted for candidate in kept)
            found = [math.exp(candidate.adjusted - total) for candidate in kept]
            assert found == pytest.approx(list(shares), abs=1e-12), (name, shards)


PROMPT, WRITTEN = (0, 3, 70, 70, 199), (3, 80, 80, 80, 199, 12)
SHAPINGS = [
    Shaping(bias={0: 100.0, 70: -100.0, 199: 3.5}),
    Shaping(presence=1.5),
    Shaping(frequency=-0.75),
    Shaping(repetition=1.3),
    Shaping(presence=-2.0, frequency=0.5, repetition=0.4, bias={id: id / 50 - 2 for id in range(VOCAB)}),
]


def shaped(logits: np.ndarray, shaping: Shaping) -> np.ndarray:
    """Logits after bias and penalties, id by id, as docs/api.md says them."""
    found = logits.astype("<f4").copy()
    for id in range(VOCAB):
        value = found[id]
        if shaping.repetition != 1 and id in (*PROMPT, *WRITTEN):
            by = np.float32(shaping.repetition)
            value = value / by if value > 0 else value * by
        count = WRITTEN.count(id)
        add = shaping.bias.get(id, 0.0) - shaping.presence * (count > 0) - shaping.frequency * count
        found[id] = value + np.float32(add)
    return found


@pytest.mark.parametrize("shaping", SHAPINGS, ids=["bias", "presence", "frequency", "repetition", "all"])
@pytest.mark.parametrize("sampler", SAMPLERS, ids=NAMES)
def test_penalties_and_bias_come_before_truncation_and_change_the_whole_distribution(
    sampler: Sampler, shaping: Shaping
) -> None:
    shaper = Shaper(shaping, PROMPT)
    for token in WRITTEN:
        shaper.wrote(token)
    for name, logits in SHAPES.items():
        ids, shares = exact(shaped(logits, shaping), sampler)
        for shards in (1, 3, 8):
            kept = heads_of(name, shards).kept(sampler, shaper.adjustments())
            assert [candidate.id for candidate in kept] == ids, (name, shards)
            total = logsumexp(candidate.adjusted for candidate in kept)
            found = [math.exp(candidate.adjusted - total) for candidate in kept]
            assert found == pytest.approx(list(shares), abs=1e-12), (name, shards)


@settings(max_examples=25, deadline=None)
@given(
    st.integers(0, 1000),
    st.sampled_from([0.0, 0.05, 1.0, 5.0]),
    st.floats(0.1, 3),
    st.integers(0, 80).filter(lambda k: k != 1),
    st.floats(0, 1),
    st.sampled_from([0.0, 1e-6, 0.1, 1.0]),
    st.integers(1, 9),
)
def test_whatever_the_parameters_the_kept_ids_do_not_depend_on_the_shards(
    seed: int, scale: float, temperature: float, top_k: int, top_p: float, min_p: float, shards: int
) -> None:
    # Rounded, so that there are ties, across shards as well.
    logits = np.round(normal(seed, scale, 90), 1)
    sampler = Sampler(temperature, top_k, top_p, min_p)
    if not sampler.truncates:
        return
    ids, _ = exact(logits, sampler)
    assert [candidate.id for candidate in Heads(logits, shards).kept(sampler)] == ids


def test_ties_go_to_the_lower_id_also_where_a_truncation_cuts_through_them() -> None:
    logits = np.zeros(VOCAB, "<f4")
    for shards in (1, 3, 8):
        heads = Heads(logits, shards)
        assert heads.draw(Sampler(), 0)[0] == 0
        kept = heads.kept(Sampler(temperature=1.0, top_k=70))
        assert [candidate.id for candidate in kept] == list(range(70))
        kept = heads.kept(Sampler(temperature=1.0, top_p=0.45))
        assert [candidate.id for candidate in kept] == list(range(90))


def test_a_flat_nucleus_asks_for_more_than_the_first_candidates_and_a_peaked_one_does_not() -> None:
    sampler = Sampler(temperature=1.0, top_p=0.99)
    flat, peaked = Heads(SHAPES["flat"], 1), Heads(SHAPES["peaked"], 1)
    assert len(flat.kept(sampler)) > FIRST_CANDIDATES
    assert flat.rounds > 1
    assert len(peaked.kept(sampler)) < FIRST_CANDIDATES
    assert peaked.rounds == 1


@pytest.mark.parametrize(
    "sampler", [Sampler(1.0, min_p=1e-30), Sampler(1.0, top_p=1 - 1e-12)], ids=["min_p", "top_p"]
)
def test_a_shard_whose_other_ids_are_banned_is_not_asked_again_and_again(sampler: Sampler) -> None:
    heads = Heads(normal(5), 3, banned=[(0, 60), (190, 200)])
    assert len(heads.kept(sampler)) == VOCAB - 70
    assert heads.rounds <= 3


def test_what_is_asked_for_next_is_four_times_as_much_and_never_more_than_can_be_given() -> None:
    slices = Heads(SHAPES["flat"], 2).slices(Choice(top_k=8, temperature=1.0))
    sampler = Sampler(temperature=1.0, top_p=0.9)
    with pytest.raises(NotEnough) as caught:
        sample(sampler, slices, [100, 100], 8, 0)
    assert caught.value.top_k == 32
    many = [Slice(9.0, 9.0, tuple(Ranked(i, 0.0, 0.0, 0.0) for i in range(8)))]
    with pytest.raises(NotEnough) as caught:
        sample(sampler, many, [MAX_TOP_K * 2], 8, 0)
    assert caught.value.top_k == 32


def chi_squared(counts: Counter[int], ids: Sequence[int], shares: Sequence[float]) -> None:
    """Fails when the counts are not of this distribution: one in 10,000 that are would fail.

    Rare ids are put together until ten are expected; the bound is Wilson and Hilferty's of 1931.
    """
    draws = sum(counts.values())
    assert set(counts) <= set(ids), "nothing but what is kept is ever drawn"
    cells: list[tuple[float, float]] = []
    seen = expected = 0.0
    for id, share in zip(ids, shares, strict=True):
        seen, expected = seen + counts[id], expected + share * draws
        if expected >= 10:
            cells.append((seen, expected))
            seen = expected = 0.0
    if expected and cells:
        cells[-1] = (cells[-1][0] + seen, cells[-1][1] + expected)
    degrees = len(cells) - 1
    assert degrees > 0
    statistic = sum((a - b) ** 2 / b for a, b in cells)
    bound = degrees * (1 - 2 / (9 * degrees) + 3.72 * math.sqrt(2 / (9 * degrees))) ** 3
    assert statistic < bound, (statistic, bound, degrees)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
@pytest.mark.parametrize("by", ["seed", "position"])
def test_plain_temperature_draws_with_the_frequencies_of_the_softmax(temperature: float, by: str) -> None:
    logits = normal(7, 1.5, 40)
    heads = Heads(logits, 3)
    counts: Counter[int] = Counter()
    for n in range(1500):
        seed, position = (n, 11) if by == "seed" else (11, n)
        counts[heads.draw(Sampler(temperature, seed=seed), position)[0]] += 1
    scaled = logits.astype(np.float64) / temperature
    shares = np.exp(scaled - scaled.max())
    chi_squared(counts, range(40), list(shares / shares.sum()))


@pytest.mark.parametrize(
    "sampler", SAMPLERS[:4] + SAMPLERS[6:8] + SAMPLERS[-2:], ids=NAMES[:4] + NAMES[6:8] + NAMES[-2:]
)
@pytest.mark.parametrize("by", ["seed", "position"])
def test_truncated_draws_have_the_frequencies_of_what_is_kept(sampler: Sampler, by: str) -> None:
    logits = normal(8, 1.5, 80)
    heads = Heads(logits, 3)
    choice = sampler.first_choice(0)
    while True:
        slices = heads.slices(choice)
        try:
            sample(sampler, slices, heads.sizes, choice.top_k, 0)
            break
        except NotEnough as more:
            choice = Choice(top_k=more.top_k, temperature=choice.temperature)
    counts: Counter[int] = Counter()
    for n in range(2000):
        seed, position = (n, 11) if by == "seed" else (11, n)
        one = Sampler(sampler.temperature, sampler.top_k, sampler.top_p, sampler.min_p, seed)
        counts[sample(one, slices, heads.sizes, choice.top_k, position).id] += 1
    chi_squared(counts, *exact(logits, sampler))


@pytest.mark.parametrize(
    "sampler", [Sampler(), Sampler(1.0, seed=5), *SAMPLERS], ids=["greedy", "plain", *NAMES]
)
def test_a_choice_depends_on_seed_and_position_alone_and_not_on_the_shards(sampler: Sampler) -> None:
    for shape in ("ordinary", "steps"):
        few, one, many = (heads_of(shape, shards) for shards in (3, 1, 8))
        for position in range(6):
            [expected, logprob, adjusted] = one.draw(sampler, position)
            for heads in (one, few, many):
                found = heads.draw(sampler, position)
                assert found[0] == expected
                assert found[1:] == pytest.approx((logprob, adjusted), abs=1e-12)


def test_other_seeds_and_other_positions_choose_otherwise() -> None:
    heads = Heads(SHAPES["nearly flat"], 3)
    for sampler in (Sampler(1.0), Sampler(1.0, top_p=0.9)):
        by_position = [heads.draw(sampler, position)[0] for position in range(40)]
        by_seed = [
            heads.draw(Sampler(sampler.temperature, top_p=sampler.top_p, seed=seed), 0)[0]
            for seed in range(40)
        ]
        assert len(set(by_position)) > 20
        assert len(set(by_seed)) > 20
        assert by_position != by_seed


def test_log_probabilities_are_those_of_the_whole_vocabulary_before_and_after_temperature() -> None:
    logits = SHAPES["ordinary"].astype(np.float64)
    heads = Heads(SHAPES["ordinary"], 3)
    for sampler in (Sampler(), Sampler(0.7, seed=3), Sampler(0.7, top_k=9, seed=3)):
        id, logprob, adjusted = heads.draw(sampler, 4)
        temperature = sampler.temperature or 1
        for values, found in ((logits, logprob), (logits / temperature, adjusted)):
            expected = values[id] - np.log(np.exp(values - values.max()).sum()) - values.max()
            assert found == pytest.approx(expected, abs=1e-6)


def test_temperature_zero_or_top_k_one_is_greedy_whatever_the_rest_says() -> None:
    heads = Heads(SHAPES["ordinary"], 3)
    best = int(SHAPES["ordinary"].argmax())
    for sampler in (
        Sampler(temperature=0.0, top_p=0.5, min_p=0.3, top_k=7),
        Sampler(temperature=1.9, top_k=1),
        Sampler(temperature=1.9, top_k=1, top_p=0.1, seed=9),
    ):
        assert sampler.greedy
        assert {heads.draw(sampler, position)[0] for position in range(5)} == {best}


def test_when_every_id_is_banned_there_is_nothing_to_choose() -> None:
    heads = Heads(normal(1, size=20), 2, banned=[(0, 20)])
    for sampler in (Sampler(), Sampler(1.0), Sampler(1.0, top_p=0.5)):
        with pytest.raises(ValueError, match="every id is banned"):
            heads.draw(sampler, 0)


def test_one_shard_whose_ids_are_all_banned_leaves_the_choice_to_the_others() -> None:
    logits = normal(2, size=60)
    logits[:20] += 100
    heads = Heads(logits, 3, banned=[(0, 20)])
    assert heads.draw(Sampler(), 0)[0] == 20 + int(logits[20:].argmax())
    for sampler in (Sampler(1.0, seed=1), Sampler(1.0, top_p=0.9), Sampler(1.0, top_k=30)):
        assert all(heads.draw(sampler, position)[0] >= 20 for position in range(20))


def test_seeds_and_draws_are_spread_evenly_and_do_not_repeat() -> None:
    seeds = {noise_seed(seed, position) for seed in range(60) for position in range(60)}
    assert len(seeds) == 3600
    assert all(0 <= seed < 1 << 63 for seed in seeds)
    draws = sorted(uniform(seed, position) for seed in range(60) for position in range(60))
    assert draws[0] >= 0
    assert draws[-1] < 1
    assert max(b - a for a, b in pairwise(draws)) < 0.005
    assert noise_seed(-1, 0) == noise_seed((1 << 64) - 1, 0)
    assert uniform(7, 3) != uniform(3, 7)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(-50, 50) | st.just(-math.inf), max_size=9), st.randoms())
def test_log_sum_exp_does_not_depend_on_who_comes_first(values: list[float], chance: Any) -> None:
    shuffled = list(values)
    chance.shuffle(shuffled)
    assert logsumexp(values) == logsumexp(shuffled)
    finite = [math.exp(value) for value in values if value > -math.inf]
    if finite:
        assert logsumexp(values) == pytest.approx(math.log(math.fsum(finite)), abs=1e-9)
    else:
        assert logsumexp(values) == -math.inf
