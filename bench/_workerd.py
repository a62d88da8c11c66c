"""What measurements on workerd share."""

from __future__ import annotations

import time

from knot.workerd import WorkerdCluster
from protocol.calls import json_call

PROMPT = (1, 2, 3, 4)


async def generate(cluster: WorkerdCluster, tokens: int) -> float:
    """One greedy generation: a pass for its prompt and one for each token but the last; its seconds."""
    body = {"prompt": list(PROMPT), "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    bearer = {"authorization": f"Bearer {cluster.secret}"}
    started = time.perf_counter()
    reply = await cluster.fetch("gateway", json_call("POST", "/v1/completions", body, bearer))
    seconds = time.perf_counter() - started
    if reply.status != 200:
        raise SystemExit(f"the cluster answered {reply.status}: {reply.body!r:.500}")
    return seconds
