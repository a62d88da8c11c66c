"""Real models over real workerd."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from test_workerd_cluster import ISOLATE_BYTES, Running

from knot.paths import models_folder

pytestmark = [
    pytest.mark.workerd, pytest.mark.wasm, pytest.mark.models, pytest.mark.slow, pytest.mark.shared,
]  # fmt: skip

GOLDENS = Path(__file__).resolve().parent.parent.parent / "shared" / "goldens" / "q05.jsonl"


@pytest.mark.skipif(not GOLDENS.exists(), reason=f"{GOLDENS} is not there")
def test_the_goldens_of_a_half_billion_model_pass_with_two_stations_and_eight_shards(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from knot.fetch import fetch
    from knot.paths import resolve_model

    knot = resolve_model(str(fetch("q05", models_folder())))
    running = Running(knot, tmp_path, stations=2, shards=8)
    try:
        for line in GOLDENS.read_text().splitlines():
            golden: dict[str, Any] = json.loads(line)
            answer = running.complete(
                prompt=golden["prompt_ids"],
                max_tokens=len(golden["gen_ids"]),
                temperature=0,
                ignore_eos=True,
            ).json()
            assert answer["knot"]["ids"] == golden["gen_ids"], golden["prompt"]
            assert answer["knot"]["attempts"] == 1
        seen = running.run(running.cluster.memory())
        heaps = running.run(running.cluster.heaps())
        with capsys.disabled():
            print()
            for worker, heap in heaps.items():
                inside = seen[worker]
                python, wasm = inside["python_heap"], inside["wasm"]
                script = heap["totalSize"] + heap.get("embedderHeapUsedSize", 0)
                stores = heap["backingStorageSize"]
                peak = max(stores, inside["buffers_peak"] + inside["kept"])
                together = (python + wasm + script + peak) / 1e6
                print(
                    f"{worker}: python {python / 1e6:.1f} MB, wasm {wasm / 1e6:.1f}, JavaScript "
                    f"{script / 1e6:.1f}, buffers {stores / 1e6:.1f}, together {together:.1f}"
                )
                assert python + wasm + script + peak < ISOLATE_BYTES, worker
    finally:
        running.close()
