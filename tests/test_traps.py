"""Bugs of a cluster's parts that once cost days, each in a test of its own that fails when it is put back."""

from __future__ import annotations

import asyncio
import dataclasses
import shutil
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from core_support import grouped, header_of, knot_of, run
from fake_cluster import Background, DictKv, FakeCluster, FileBlobs, fake_cluster
from generation_support import EXPECTED, LIMITS, PROMPT, generate
from knot_bytes import as_old, edited
from reference import Model
from shard_support import row_warden, shard_on
from station_support import embedded, exact_states, inline, station_on
from synth import make_tiny_knot

from durable_objects.budget import IsolateBudget
from durable_objects.layer_cache import LayerCache
from durable_objects.layer_warden_api import LayerWardenApi
from embedding import Degradation, embed
from engine.errors import Unsupported
from hops import Ticket
from knot.bucket import BucketKnot
from knot.errors import HeaderError, MissingTensorError, OldLayoutError
from knot.quants import ENGINE_TYPES, QUANTS, ggml_id
from protocol.bodies import HeldBytes
from protocol.calls import Call
from protocol.frames import Kind
from protocol.identity import Identity

PATH = grouped()


def case(body: Callable[[FakeCluster], Coroutine[Any, Any, None]], **more: Any) -> None:
    async def main() -> None:
        async with fake_cluster(PATH, host=inline, **more) as cluster:
            await body(cluster)
            await cluster.background.drain()

    run(main())


# F32-only fallthrough: rows of any other type came out as zeros, and the model wrote gibberish.


@pytest.mark.parametrize("type", sorted(ENGINE_TYPES))
def test_rows_of_every_type_are_what_they_are_and_never_zeros(type: str, tmp_path: Path) -> None:
    hidden = max(96, QUANTS[type][1])
    path = make_tiny_knot(
        tmp_path / "tiny.knot", types={"token_embd": type}, hidden=hidden, heads=hidden // 32, layers=1
    )

    async def main() -> None:
        assert header_of(path).embedding_tensor().type == type
        tokens = [0, 5, 150, 299]
        found = await (await shard_on(path)).embed(tokens)
        expected = Model(path.with_suffix(".gguf")).rows("token_embd.weight", tokens)
        for place in range(len(tokens)):
            row = np.frombuffer(found[place], "<f4")
            assert np.abs(row).max() > 0.1
            assert np.array_equal(row, expected[place])

    run(main())


def test_a_type_that_has_no_dequantiser_is_an_error_and_not_a_row_of_zeros(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "IQ1_S" not in ENGINE_TYPES
    elements, size = QUANTS["IQ1_S"][1:]

    def retype(meta: dict[str, Any]) -> None:
        table = meta["tensors"]["token_embd_weight"]
        rows = table["length"] // size
        table.update(type="IQ1_S", shape=[rows, elements], length=rows * size)

    path = tmp_path / "odd.knot"
    path.write_bytes(edited(knot_of().read_bytes(), retype))
    for boot in (shard_on, station_on):
        with pytest.raises(HeaderError):
            run(boot(path))  # type: ignore[arg-type, operator]

    # Should a header let it pass, the engine does not.
    async def embed() -> None:
        one = await shard_on(PATH)
        with pytest.raises(Unsupported, match="type 19"):
            await one.shard.engine.embed_range_sliced(
                ggml_id("IQ1_S"), elements, 1, one.shard.desk.at, size, one.shard.desk.at + 64
            )
        monkeypatch.setattr("engine.rows.ggml_id", lambda name: ggml_id("IQ1_S"))
        [answer] = await one.send("/embed", Kind.EMBED, one.embed_step([7]))
        assert answer.envelope["status"] != "ok"
        assert "rows" not in answer.tensors

    run(embed())


# `type` against `tensor_type`: whoever read the wrong one of the two names got no type at all.


def test_a_knot_that_says_tensor_type_is_served_like_one_that_says_type(tmp_path: Path) -> None:
    def rename(meta: dict[str, Any]) -> None:
        for entry in meta["tensors"].values():
            entry["tensor_type"] = entry.pop("type")

    path = tmp_path / "old-names.knot"
    path.write_bytes(edited(PATH.read_bytes(), rename))

    async def main() -> None:
        one = await shard_on(path)
        found = await one.embed(PROMPT)
        expected = embedded(PATH, PROMPT)
        assert found == {place: expected[place].tobytes() for place in range(len(PROMPT))}
        station = await station_on(path)
        rows = await station.forward("s", 0, expected)
        exact = exact_states(PATH, PROMPT)[-1]
        assert np.abs(rows - exact).max() < 4e-4 * np.abs(exact).max()

    run(main())


# Poisoned KV rows: a value of another length was used for the 24 hours of its life.


@pytest.mark.parametrize("length", [0, 96 * 2, 96 * 4 - 1, 96 * 4 + 4, 66])
def test_a_row_of_the_wrong_length_in_kv_is_deleted_and_never_used(length: int) -> None:
    async def main() -> None:
        kv, background = DictKv(), Background()
        one = await shard_on(PATH, kv=kv, background=background)
        key = one.rows.kv_key(7)
        kv.values[key] = bytes(length)
        assert await one.embed([7]) == {0: embedded(PATH, [7]).tobytes()}
        await background.drain()
        assert key not in kv.values
        assert one.rows.counts.kv_poisoned == 1

    run(main())


# Orphaned KV writes: they were started and nobody kept the isolate alive for them.


def test_every_write_to_kv_goes_through_the_background_port() -> None:
    class Dropped(Background):
        """The platform ends the isolate with the answer: nothing in the background ever runs."""

        def __init__(self) -> None:
            super().__init__()
            self.given = 0

        def __call__(self, coroutine: Coroutine[Any, Any, None]) -> None:
            self.given += 1
            coroutine.close()

    async def main() -> None:
        kv, dropped = DictKv(), Dropped()
        one = await shard_on(PATH, kv=kv, background=dropped)
        kv.values[one.rows.kv_key(9)] = b"poison"
        for _ in range(2):
            await one.embed([7, 8, 9])
        for _ in range(5):
            await asyncio.sleep(0)
        # Two poisoned reads to delete, three rows seen twice: all of it was given to the port …
        assert dropped.given == 2 + 3
        # … and nothing of it ran anywhere else.
        assert kv.values == {one.rows.kv_key(9): b"poison"}

    run(main())


# One dead shard killed the whole prefill: its outcome was awaited together with the others', all or nothing.


def test_one_dead_shard_does_not_kill_a_prefills_merge() -> None:
    async def body(cluster: FakeCluster) -> None:
        dead = 4
        cluster.shard_peers[dead].dead = True
        start, end = cluster.route.shards[dead].ids
        tokens = [*PROMPT, start, end - 1]
        lost = [place for place, token in enumerate(tokens) if start <= token < end]
        degraded = Degradation()
        ticket = Ticket("r", "s", 1, cluster.route.model)
        merged = await embed(
            cluster.route.shards, ticket, "e", tokens, 96, retries=1, pause=0, degraded=degraded
        )  # fmt: skip
        expected = embedded(PATH, tokens).copy()
        expected[lost] = 0
        assert bytes(merged) == expected.tobytes(), "every other token has its row"
        assert degraded.shards == {f"{start}-{end}": 2}
        asked = [len([c for c in peer.calls if c.path == "/embed"]) for peer in cluster.shard_peers]
        assert asked[dead] == 2, "and it was asked again before it was given up"
        # A prompt that is none of its business is not touched at all.
        cluster.shard_peers[dead].dead = False
        cluster.shard_peers[dead].lose += ["/embed"] * 20
        found, _ = await generate(cluster, count=1, limits=LIMITS)
        assert found == EXPECTED[:1]

    case(body, shards=8, wardens=False)


# Payload off-by-one: the old encoder's payload began one byte early, and every scale was read a byte off.


def test_a_knot_of_the_old_layout_is_refused_by_station_and_shard_with_what_to_do(tmp_path: Path) -> None:
    path = tmp_path / "old.knot"
    path.write_bytes(as_old(knot_of().read_bytes(), keep_config=True))
    for boot in (shard_on, station_on):
        with pytest.raises(OldLayoutError, match="one byte early; run `knot repair`"):
            run(boot(path))  # type: ignore[arg-type, operator]


# Silent skip of a missing tensor: the phase ran on whatever lay in memory, and the logits were scrambled.


@pytest.mark.parametrize(
    ("tensor", "sentence"),
    [
        ("blk_0_attn_v_weight", "phase attn of layer 0 needs the tensor blk_0_attn_v_weight"),
        ("blk_1_ffn_up_weight", "phase ffn_up of layer 1 needs the tensor blk_1_ffn_up_weight"),
        ("blk_2_ffn_down_weight", "phase ffn_down of layer 2 needs the tensor blk_2_ffn_down_weight"),
        ("blk_1_attn_k_bias", "layer 1 needs the tensor blk_1_attn_k_bias"),
    ],
)
def test_a_station_that_lacks_a_tensor_does_not_boot_and_names_phase_layer_and_tensor(
    tensor: str, sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        original = BucketKnot.open

        async def without(blobs: Any, key: str) -> BucketKnot:
            knot = await original(blobs, key)
            left = {name: info for name, info in knot.header.tensors.items() if name != tensor}
            knot.header = dataclasses.replace(knot.header, tensors=left)
            return knot

        # A header that was checked has them all; this is what a check that forgot one would let through.
        monkeypatch.setattr(BucketKnot, "open", without)
        await station_on(PATH)

    with pytest.raises(MissingTensorError, match=sentence):
        run(main())


def test_a_knot_whose_table_lacks_a_tensor_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    path = tmp_path / "gap.knot"
    path.write_bytes(edited(PATH.read_bytes(), lambda meta: meta["tensors"].pop("blk_1_ffn_up_weight")))
    for boot in (shard_on, station_on):
        with pytest.raises(HeaderError, match="blk_1_ffn_up_weight"):
            run(boot(path))  # type: ignore[arg-type, operator]


# Warden poisoning without invalidate: what could not be decoded was fetched from R2, and the poison stayed.


def test_poison_in_a_layer_warden_is_gone_after_the_first_who_met_it() -> None:
    async def body(cluster: FakeCluster) -> None:
        assert (await generate(cluster))[0] == EXPECTED
        for warden in cluster.layer_wardens:
            tensors = warden.cache._tensors
            for name in tensors:
                tensors[name] = HeldBytes(bytes(len(tensors[name])))
        assert (await generate(cluster))[0] == EXPECTED, "nobody multiplies with it"
        again = [api.station.weights.reads.again for api in cluster.stations]
        assert min(again) > 0
        for warden in cluster.layer_wardens:
            assert warden.cache.counts.invalidated > 0
            for data in warden.cache._tensors.values():
                assert any(await data.part(0, len(data)).read(len(data)))
        assert (await generate(cluster))[0] == EXPECTED
        assert [api.station.weights.reads.again for api in cluster.stations] == again, "nobody meets it twice"

    case(body, RESIDENCY="fluid")


# Identity mismatch: a warden read the knot that its own settings named, whoever had asked for whatever.


def test_a_warden_serves_the_knot_it_is_asked_for_or_says_409_and_never_another_one(tmp_path: Path) -> None:
    one, two = knot_of(), knot_of(seed=2)
    shutil.copy(one, tmp_path / "one.knot")
    shutil.copy(two, tmp_path / "two.knot")
    blobs = FileBlobs(tmp_path)
    name = "blk_0_ffn_up_weight"

    async def ask(path: Path, key: str, configured_by: Path | None = None) -> tuple[int, bytes]:
        cache = LayerCache("pinned-prefix", IsolateBudget(1 << 22, lambda: 0.0))
        warden = LayerWardenApi(cache, lambda k: BucketKnot.open(blobs, k), Background())
        fingerprint = header_of(configured_by or path).fingerprint
        who = Identity("layer", f"{key}@{fingerprint}", key, 0, 3)
        reply = await warden.answer(Call("GET", f"/tensor/{name}", headers=who.headers()))
        if isinstance(reply.body, bytes):
            return reply.status, reply.body
        return reply.status, await reply.body.read(reply.body.length)  # type: ignore[union-attr]

    async def main() -> None:
        for path, key in ((one, "one.knot"), (two, "two.knot")):
            info = header_of(path).tensor(name)
            at = header_of(path).file_offset(info.offset)
            assert await ask(path, key) == (200, path.read_bytes()[at : at + info.length])
        # The key names one upload, the identity another.
        status, body = await ask(one, "one.knot", configured_by=two)
        assert status == 409
        assert b"uploaded again" in body

    run(main())


# A warden that was scaffolding: it existed for weeks, and nobody asked it.


def test_wardens_and_caches_are_really_asked_and_their_counters_move() -> None:
    async def body(cluster: FakeCluster) -> None:
        for _ in range(3):
            assert (await generate(cluster))[0] == EXPECTED
        for api, warden in zip(cluster.stations, cluster.layer_wardens, strict=True):
            assert api._source.counts.warden > 0
            assert api._source.counts.bucket == 0, "and the bucket was left to the warden"
            assert warden.cache.counts.hits > warden.cache.counts.misses > 0
        for api, warden in zip(cluster.shards, cluster.row_wardens, strict=True):
            counts = api._rows.counts
            assert counts.filled > 0
            assert counts.warden > counts.filled
            assert counts.kv_written > 0
            assert warden.cache.counts.hits > 0
        # And KV when the wardens have been restarted.
        for warden in cluster.row_wardens:
            warden.cache.clear()
        await generate(cluster)
        assert all(api._rows.counts.kv > 0 for api in cluster.shards)

    case(body, RESIDENCY="fluid")


def test_without_its_warden_a_shard_still_reads_rows_and_says_that_it_did() -> None:
    async def main() -> None:
        _, peer, _ = row_warden(PATH.parent)
        peer.dead = True
        one = await shard_on(PATH, warden=peer)
        await one.embed([7])
        assert (one.rows.counts.warden, one.rows.counts.filled) == (0, 1)
        assert len(peer.calls) == 2, "it was asked for what it has, and to fill"

    run(main())
