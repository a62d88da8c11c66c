"""The head: slices that merge exactly, adjustments, bans, and samples that follow the softmax."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import numpy as np
import pytest
from engine_blocks import HOSTS, tiny
from engine_support import make_host
from gguf.constants import GGMLQuantizationType as Kind
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.client import Adjust, Selection, ShardConfig, ShardEngine
from engine.errors import BadArgument, BadState, NonFinite, OutOfBounds, Unsupported

HOSTS_ = HOSTS[:2]
F32 = int(Kind.F32)
VOCAB = 50


def shard(kind: str = "native", start: int = 0, end: int = VOCAB, **changes: Any) -> ShardEngine:
    """A shard of a head whose rows are the unit vectors: the logits are the hidden state itself."""
    engine = ShardEngine(make_host(kind, 1 << 24))
    given: dict[str, Any] = {"hidden": VOCAB, "max_rows": 4, "kept": 4, "arena_bytes": 1 << 16}
    engine.shard_configure(ShardConfig(vocab_start=start, vocab_end=end, **{**given, **changes}))
    return engine


def fill(engine: ShardEngine, rows: np.ndarray, kept: list[int] | None = None) -> None:
    """Runs the head on hidden rows [n, VOCAB] (zeros at ids that are not the shard's do no harm)."""
    config = engine.config
    assert config is not None
    weights = np.eye(VOCAB, dtype="<f4")[config.vocab_start : config.vocab_end]
    at = engine.arena_at
    engine.host.write(at, np.ascontiguousarray(rows, "<f4").tobytes())
    engine.logits_begin(list(range(len(rows))) if kept is None else kept, at)
    engine.host.write(at, weights.tobytes())
    asyncio.run(engine.logits_block(F32, 0, len(weights), at, weights.nbytes))
    engine.logits_end()


def select(engine: ShardEngine, kept: int = 0, **arguments: Any) -> Selection:
    return asyncio.run(engine.select(kept, **arguments))


def normal(seed: int = 0, scale: float = 3.0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(VOCAB) * scale).astype(np.float32)


def lse(values: np.ndarray) -> float:
    values = values[values > -np.inf].astype(np.float64)
    return float(np.log(np.exp(values - values.max()).sum()) + values.max())


@pytest.mark.parametrize("kind", HOSTS_)
def test_the_best_ids_come_in_order_with_their_logits(kind: str) -> None:
    engine, logits = shard(kind), normal()
    logits[[7, 3]] = logits.max()
    fill(engine, logits[None])
    order = sorted(range(VOCAB), key=lambda i: (-logits[i], i))
    for top_k in (0, 1, 5, VOCAB, 10 * VOCAB):
        found = select(engine, top_k=top_k)
        assert [c.id for c in found.candidates] == order[:top_k]
        assert all(c.raw == c.adjusted == c.key == logits[c.id] for c in found.candidates)
    assert found.lse_raw == found.lse_adjusted == pytest.approx(lse(logits), abs=1e-12)


@pytest.mark.parametrize("kind", HOSTS_)
@settings(max_examples=40, deadline=None)
@given(
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.5]),
    top_k=st.integers(0, 12),
    adjust=st.lists(
        st.tuples(
            st.integers(0, VOCAB + 9),
            st.sampled_from([1.0, 1.3, 0.5]),
            st.sampled_from([0.0, -2.5, 100.0, -math.inf]),
        ),
        max_size=8,
    ),
    wanted=st.lists(st.integers(5, VOCAB - 6), max_size=5),
    banned=st.tuples(st.integers(0, VOCAB), st.integers(0, 2 * VOCAB)),
)
def test_adjustments_bans_and_temperature_are_what_they_are_said_to_be(
    kind: str,
    temperature: float,
    top_k: int,
    adjust: list[tuple[int, float, float]],
    wanted: list[int],
    banned: tuple[int, int],
) -> None:
    start, end = 5, VOCAB - 5
    engine, logits = shard(kind, start, end), normal(4)
    fill(engine, logits[None])
    engine.shard_ban(banned[0], max(banned))
    found = select(
        engine,
        top_k=top_k,
        temperature=temperature,
        adjust=[Adjust(*entry) for entry in adjust],
        wanted=wanted,
    )

    expected = logits.copy()
    for id, multiply, add in adjust:
        if id < VOCAB:
            raw = logits[id]
            expected[id] = (
                raw / np.float32(multiply) if raw > 0 else raw * np.float32(multiply)
            ) + np.float32(add)
    expected = (expected / np.float32(temperature or 1)).astype(np.float32)
    expected[banned[0] : max(banned)] = -np.inf
    mine = [id for id in range(start, end) if expected[id] > -np.inf]
    best = sorted(mine, key=lambda i: (-expected[i], i))[:top_k]
    assert [c.id for c in found.candidates] == best
    assert [c.id for c in found.wanted] == wanted
    for candidate in found.candidates + found.wanted:
        assert candidate.raw == logits[candidate.id]
        assert candidate.adjusted == candidate.key == expected[candidate.id]
    assert found.lse_raw == pytest.approx(lse(logits[start:end]), abs=1e-12)
    if mine:
        assert found.lse_adjusted == pytest.approx(lse(expected[start:end]), abs=1e-12)
    else:
        assert found.lse_adjusted == -math.inf


def test_slices_merge_to_exactly_what_the_whole_vocabulary_gives() -> None:
    logits = normal(2)
    whole = shard()
    fill(whole, logits[None])
    parts = [shard("native", start, end) for start, end in ((0, 7), (7, 8), (8, VOCAB))]
    for part in parts:
        fill(part, logits[None])
    for arguments in ({"top_k": 6}, {"top_k": 3, "seed": 12345, "temperature": 0.7}):
        expected = select(whole, **arguments)
        answers = [select(part, **arguments) for part in parts]
        merged = sorted((c for a in answers for c in a.candidates), key=lambda c: (-c.key, c.id))
        assert merged[: arguments["top_k"]] == expected.candidates
        assert lse(np.array([a.lse_adjusted for a in answers])) == pytest.approx(
            expected.lse_adjusted, abs=1e-12
        )
        assert lse(np.array([a.lse_raw for a in answers])) == pytest.approx(expected.lse_raw, abs=1e-12)


@pytest.mark.wasm
def test_noise_and_sums_have_the_same_bits_on_every_host() -> None:
    logits = normal(9)
    answers: list[Selection] = []
    for kind in ("native", "wasm", "relaxed"):
        engine = shard(kind)
        fill(engine, logits[None])
        answers.append(select(engine, top_k=VOCAB, seed=2**63 + 11, temperature=0.8))
    assert answers[0] == answers[1] == answers[2]


def test_the_noise_is_the_documented_function_of_seed_and_id() -> None:
    def mix(x: int) -> int:
        mask = 2**64 - 1
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & mask
        x = (x ^ x >> 27) * 0x94D049BB133111EB & mask
        return x ^ x >> 31

    engine = shard("native", 3)
    fill(engine, np.zeros((1, VOCAB)))
    for seed in (0, 1, 2**64 - 1):
        for candidate in select(engine, top_k=VOCAB, seed=seed).candidates:
            counter = (candidate.id + 1) * 0x9E3779B97F4A7C15
            h = mix((mix(seed) + counter) & 2**64 - 1) >> 11
            u = (h + 0.5) / 2**53
            assert candidate.key == pytest.approx(-math.log(-math.log(u)), abs=1e-6)


def test_samples_follow_the_softmax() -> None:
    """Chi-squared over 4,000 seeds, with adjustments and a temperature, against a bound of 1 in 10^6."""
    logits = np.zeros((1, VOCAB), np.float32)
    logits[0, :8] = [2.0, 1.5, 1.0, 0.5, 0.0, -0.5, -1.0, -1.5]
    engine = shard()
    fill(engine, logits)
    engine.shard_ban(8, VOCAB)
    adjust = [Adjust(3, add=1.0)]
    counts = np.zeros(8)
    samples = 4000
    for seed in range(samples):
        found = select(engine, top_k=1, seed=seed, temperature=0.9, adjust=adjust)
        counts[found.candidates[0].id] += 1
    adjusted = (logits[0, :8].astype(np.float64) + np.eye(8)[3]) / np.float32(0.9)
    expected = samples * np.exp(adjusted - lse(adjusted))
    assert ((counts - expected) ** 2 / expected).sum() < 40.5  # 7 degrees of freedom
    assert found.lse_adjusted == pytest.approx(lse(adjusted), abs=1e-6)


@pytest.mark.parametrize("kind", HOSTS_)
def test_rows_keep_their_own_slices_and_old_ones_stay(kind: str) -> None:
    engine = shard(kind)
    rows = np.stack([normal(seed) for seed in range(3)])
    fill(engine, rows[:2], [3, 1])
    fill(engine, rows[2:], [0])
    for kept, row in ((3, 0), (1, 1), (0, 2)):
        slice_ = np.frombuffer(engine.host.read(engine.logits_at(kept), 4 * VOCAB), "<f4")
        assert (slice_ == rows[row]).all()
        assert select(engine, kept, top_k=1).candidates[0].id == int(rows[row].argmax())
    with pytest.raises(BadState, match="kept slice 2 holds no logits"):
        select(engine, 2, top_k=1)
    with pytest.raises(BadArgument, match="kept slice 4, expected 0 to 3"):
        engine.logits_at(4)


def test_a_selection_while_a_pass_runs_disturbs_nothing() -> None:
    engine = shard()
    fill(engine, normal(1)[None], [0])
    weights = np.eye(VOCAB, dtype="<f4")
    at = engine.arena_at
    engine.host.write(at, normal(2).tobytes())
    engine.logits_begin([1], at)
    for row in range(VOCAB):
        engine.host.write(at, weights[row].tobytes())
        asyncio.run(engine.logits_block(F32, row, 1, at, weights[row].nbytes))
        assert select(engine, 0, top_k=1, seed=row).candidates
        with pytest.raises(BadState, match="slice 1 holds no logits"):
            select(engine, 1, top_k=1)
    engine.logits_end()
    assert select(engine, 1, top_k=1).candidates[0].id == int(normal(2).argmax())


def test_rows_of_the_head_that_are_missing_or_out_of_order_are_named() -> None:
    engine = shard("native", 10)
    at = engine.arena_at
    with pytest.raises(BadState, match="call logits_begin first"):
        engine.logits_end()
    engine.logits_begin([0], at)
    asyncio.run(engine.logits_block(F32, 0, 30, at, 30 * VOCAB * 4))
    with pytest.raises(
        BadState, match="expected up to 10 rows of the head from row 30 on, found 10 from row 29"
    ):
        asyncio.run(engine.logits_block(F32, 29, 10, at, 10 * VOCAB * 4))
    with pytest.raises(BadState, match="found 11 from row 30"):
        asyncio.run(engine.logits_block(F32, 30, 11, at, 11 * VOCAB * 4))
    with pytest.raises(BadState, match="30 of 40 rows of the head have come"):
        engine.logits_end()
    with pytest.raises(BadState, match="holds no logits"):
        engine.logits_at(0)


def test_a_logit_that_is_no_number_is_named_by_its_token() -> None:
    engine = shard("native", 10)
    weights = np.eye(VOCAB, dtype="<f4")[10:]
    weights[7] = np.nan
    at = engine.arena_at
    engine.host.write(at, normal().tobytes())
    engine.logits_begin([2], at)
    engine.host.write(at, weights.tobytes())
    asyncio.run(engine.logits_block(F32, 0, 40, at, weights.nbytes))
    with pytest.raises(NonFinite, match="logit of token 17 is NaN for row 0"):
        engine.logits_end()
    with pytest.raises(BadState, match="holds no logits"):
        select(engine, 2, top_k=1)
    bad = normal()
    bad[3] = np.inf
    engine.host.write(at, bad.tobytes())
    with pytest.raises(NonFinite, match="hidden row 0 has inf at element 3"):
        engine.logits_begin([2], at)


def test_what_a_selection_cannot_do_is_an_error() -> None:
    engine = shard("native", 10)
    fill(engine, normal()[None])
    with pytest.raises(BadArgument, match="wanted id 9 is not this shard's, which owns 10 to 50"):
        select(engine, top_k=1, wanted=[9])
    with pytest.raises(BadArgument, match="temperature is -1"):
        select(engine, top_k=1, temperature=-1.0)
    with pytest.raises(BadArgument, match="temperature is NaN"):
        select(engine, top_k=1, temperature=math.nan)
    with pytest.raises(BadArgument, match="id 12 multiplies by 0 and adds"):
        select(engine, top_k=1, adjust=[Adjust(12, multiply=0.0)])
    with pytest.raises(BadArgument, match="adds inf"):
        select(engine, top_k=1, adjust=[Adjust(12, add=math.inf)])
    with pytest.raises(BadArgument, match="pass a larger one in the arena"):
        select(engine, top_k=40, workspace=(engine.arena_at, 256))
    assert len(select(engine, top_k=40, workspace=(engine.arena_at, 4096)).candidates) == 40
    host = engine.host
    at = engine.arena_at  # an error's sentence would overwrite parameters in the mailbox
    host.write(at, bytes(32))
    with pytest.raises(Unsupported, match="version 0"):
        host.call("logits_select", 0, at, 32, 64, 1024)
    host.write(at, b"\1\0\0\0" + bytes(28))
    with pytest.raises(BadArgument, match="ends after 28 bytes"):
        host.call("logits_select", 0, at, 30, 64, 1024)
    with pytest.raises(BadArgument, match="take 0 bytes, found 4"):
        host.call("logits_select", 0, at, 36, 64, 1024)
    with pytest.raises(BadArgument, match="overlap"):
        host.call("logits_select", 0, at, 32, at + 16, 1024)
    with pytest.raises(OutOfBounds, match="has room for 8"):
        host.call("logits_select", 0, at, 32, 64, 8)
    with pytest.raises(OutOfBounds, match="neither in the mailbox"):
        host.call("logits_select", 0, at, 32, engine.logits_at(0), 1024)
    with pytest.raises(BadArgument, match="the end lies before the start"):
        engine.shard_ban(12, 11)


def test_a_shard_says_what_it_takes_and_refuses_what_it_cannot_have() -> None:
    engine = shard()
    config = ShardConfig(hidden=64, vocab_start=0, vocab_end=1000, max_rows=2, kept=3, arena_bytes=4096)
    assert engine.shard_bytes(config) == 65536 + 3 * 1008 * 4 + 128 * 4 + 3 * 1008 * 4 + 4096
    for field, value, complaint in [
        ("hidden", 0, "hidden is 0"),
        ("vocab_start", 1000, "at least one id"),
        ("vocab_end", 1 << 30, "none from"),
        ("max_rows", 0, "max_rows is 0"),
        ("kept", 1 << 20, "kept is 1048576"),
    ]:
        changed = ShardConfig(**{**{n: getattr(config, n) for n in config.__slots__}, field: value})
        with pytest.raises(BadArgument, match=complaint):
            engine.shard_configure(changed)
    with pytest.raises(BadArgument, match="goes to the kept slice 1, expected one of 0 to 3 that no other"):
        engine.logits_begin([1, 1], engine.arena_at)
    with pytest.raises(BadArgument, match="for 5 rows, expected 1 to 4"):
        engine.logits_begin([0, 1, 2, 3, 0], engine.arena_at)


@pytest.mark.parametrize("kind", HOSTS_)
def test_raw_rows_embed_to_what_the_reference_reads(kind: str) -> None:
    model = tiny("qwen2")
    table, data = model.stored("token_embd.weight")
    engine = shard(kind)
    ids = [299, 0, 17, 17]
    rows = np.ascontiguousarray(data[ids])
    at = engine.arena_at
    engine.host.write(at + 3, rows.data)
    length = asyncio.run(engine.embed_range_sliced(table, 96, len(ids), at + 3, rows.size, at + 4096))
    assert engine.host.read(at + 4096, length) == model.rows("token_embd.weight", ids).tobytes()
