"""What a LayerWarden keeps under a budget: a prefix of the cycle, or, by name, what was used last."""

from __future__ import annotations

import pytest
from station_support import Clock

from durable_objects.budget import MOST_KEPT, OUT_OF_USE_SECONDS, IsolateBudget
from durable_objects.layer_cache import LayerCache
from protocol.bodies import HeldBytes
from protocol.settings import MIB

# A cycle of 40 tensors of 1 MiB, as a forward pass asks for them; the bytes are one and the same.
CYCLE = [f"blk_{i}_w" for i in range(16)]
DATA = bytes(MIB)


def keep(cache: LayerCache, name: str, data: bytes) -> bool:
    ticket = cache.reserve(name, len(data))
    return ticket is not None and cache.put(ticket, name, HeldBytes(data))


def hits_of_a_pass(policy: str, share: float) -> float:
    """The share of hits in a pass once the cache is warm."""
    budget = IsolateBudget(int(len(CYCLE) * share) * MIB, Clock())
    cache = LayerCache(policy, budget)
    for _ in range(4):
        before = cache.counts.hits
        for name in CYCLE:
            if cache.get(name) is None:
                keep(cache, name, DATA)
        assert budget.used == cache.size <= budget.limit
    return (cache.counts.hits - before) / len(CYCLE)


@pytest.mark.parametrize("share", [0.25, 0.5, 0.875])
def test_on_a_cyclic_scan_a_pinned_prefix_hits_its_share_and_lru_never(share: float) -> None:
    assert hits_of_a_pass("pinned-prefix", share) == share
    assert hits_of_a_pass("lru", share) == 0


def test_with_room_for_all_either_policy_hits_always() -> None:
    assert hits_of_a_pass("pinned-prefix", 1.0) == hits_of_a_pass("lru", 1.0) == 1


def test_lru_keeps_what_was_used_last_and_never_lets_go_of_small_ones_and_norms() -> None:
    cache = LayerCache("lru", IsolateBudget(4 * MIB, Clock()))

    def had(name: str, size: int) -> bool:
        if cache.get(name) is not None:
            return True
        return keep(cache, name, bytes(size))

    assert all(had(name, MIB) for name in ("a", "b", "output_norm"))
    assert had("small", 1000)
    had("a", MIB)
    assert had("c", MIB)
    assert set(cache._tensors) == {"a", "c", "output_norm", "small"}
    assert cache.counts.evicted == 1
    assert not had("too large", 5 * MIB)
    assert set(cache._tensors) == {"a", "c", "output_norm", "small"}, "and nothing was thrown out for it"
    with pytest.raises(ValueError, match="'mru' is not known; the known ones are pinned-prefix, lru"):
        LayerCache("mru", IsolateBudget(MIB, Clock()))


def test_a_budget_is_clamped_to_what_an_isolate_has_whatever_it_was_told() -> None:
    told: list[int] = []
    budget = IsolateBudget(1 << 30, Clock(), told.append)
    assert budget.limit == budget.free == MOST_KEPT == 16 * MIB
    assert budget.take(MOST_KEPT)
    assert not budget.take(1)
    budget.give(10)
    assert budget.take(10)
    assert (budget.used, sum(told)) == (MOST_KEPT, MOST_KEPT)


def test_what_objects_out_of_use_keep_is_taken_back_when_others_need_it_and_not_before() -> None:
    clock = Clock()
    clock.now = 0.0
    budget = IsolateBudget(4 * MIB, clock)
    old, new = LayerCache("pinned-prefix", budget), LayerCache("pinned-prefix", budget)
    budget.register("old", old)
    budget.register("new", new)
    for name in CYCLE[:3]:
        assert keep(old, name, DATA)
    clock.now = OUT_OF_USE_SECONDS - 1
    assert new.reserve("x", MIB)
    assert not new.reserve("y", MIB), "the other is still in use"
    budget.touch("new")
    clock.now = OUT_OF_USE_SECONDS
    assert new.reserve("y", MIB)
    assert (len(old), budget.used) == (0, 2 * MIB)
    budget.register("new", LayerCache("pinned-prefix", budget))


def test_what_was_set_aside_for_an_object_that_was_aborted_is_given_back_once() -> None:
    budget = IsolateBudget(4 * MIB, Clock())
    aborted = LayerCache("pinned-prefix", budget)
    budget.register("warden", aborted)
    ticket = aborted.reserve("on its way", 3 * MIB)
    assert ticket is not None
    # Nothing of the aborted object runs any more, and the next of its name begins.
    cache = LayerCache("pinned-prefix", budget)
    budget.register("warden", cache)
    assert budget.used == 0
    assert keep(cache, "a", DATA)
    # If it runs after all, it finds its reservation ended.
    assert not aborted.put(ticket, "on its way", HeldBytes(DATA))
    aborted.release(ticket)
    assert budget.used == MIB
