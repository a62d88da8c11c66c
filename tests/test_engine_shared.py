"""The founders' tiny model, of which six engines agree on the answer."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest
from engine_blocks import HOSTS
from engine_support import Cluster, by
from reference import Model, Reference

SHARED = Path(__file__).resolve().parents[2] / "shared"
PROMPT = [750, 282, 579, 263, 580, 66, 72, 1445, 1648]
ANSWER = [1491, 1745, 832, 1436, 924, 89, 5, 1453]
# Of logits up to 12, over four layers, with activations of 16 bits; measured 6.6e-4.
LOGIT_TOLERANCE = 3e-3

pytestmark = [
    pytest.mark.shared,
    pytest.mark.skipif(
        not SHARED.is_dir(), reason=f"{SHARED} is not there: the founders' data lies beside the checkout"
    ),
]


@pytest.mark.parametrize("kind", HOSTS)
def test_the_tiny_model_answers_what_six_engines_agree_on(kind: str) -> None:
    model = Model(SHARED / "tiny-qwen2.gguf")
    cluster = Cluster(model, kind, limit=64 << 20, cut=by(100))
    found, logits = asyncio.run(cluster.greedy(PROMPT, len(ANSWER)))
    assert found == ANSWER
    [exact] = Reference(model).logits([PROMPT + ANSWER[:-1]])
    worst = np.abs(logits - exact).max(axis=1)
    assert worst[0] < LOGIT_TOLERANCE, "position 0"
    assert worst.max() < LOGIT_TOLERANCE
