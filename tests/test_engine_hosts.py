"""Hosts: bytes stay within the region, calls are whole, cancellation waits, errors say what to do."""

from __future__ import annotations

import asyncio
import platform
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import wasmtime
import xxhash

from engine import _native
from engine.client import Engine
from engine.errors import BadArgument, EngineError, OutOfBounds
from engine.host import EngineHost
from engine.native import NativeEngine
from engine.wasm import PIPELINE, WasmEngine

MAKERS: list[Any] = [
    pytest.param(NativeEngine, id="native"),
    pytest.param(WasmEngine, id="wasm", marks=pytest.mark.wasm),
]
ROWS, COLS, BATCH = 512, 1024, 32


def long_call(host: EngineHost) -> tuple[int, ...]:
    """Arguments of a product that takes some milliseconds; x and w are ones."""
    w_at = host.call("engine_arena_at")
    x_at = w_at + ROWS * COLS * 4
    y_at = x_at + BATCH * COLS * 4
    host.write(w_at, np.ones((ROWS + BATCH) * COLS, "<f4").data)
    return 0, COLS, ROWS, w_at, ROWS * COLS * 4, BATCH, x_at, y_at


@pytest.mark.parametrize("make", MAKERS)
def test_bytes_written_are_the_bytes_read_and_none_lie_outside_of_the_region(make: Any) -> None:
    host = make(1 << 20)
    host.call("engine_reserve_arena", 1000)
    size = host.call("engine_region_bytes")
    for data in (
        b"abc",
        bytearray(b"defg"),
        memoryview(b"hijkl"),
        np.arange(6, dtype="<i4").reshape(2, 3).data,
    ):
        length = memoryview(data).nbytes
        host.write(size - length, data)
        assert host.read(size - length, length) == memoryview(data).tobytes()
        with pytest.raises(EngineError, match="leave the engine's region"):
            host.write(size - length + 1, data)
    host.write(size, b"")
    assert host.read(size, 0) == b""
    for offset, length in ((size, 1), (-1, 1), (0, -1), (0, size + 1)):
        with pytest.raises(EngineError, match="leave the engine's region"):
            host.read(offset, length)
    host.view(65536, 3)[:] = b"xyz"
    assert host.read(65536, 3) == b"xyz"


@pytest.mark.parametrize("make", MAKERS)
def test_a_view_is_right_after_the_region_has_moved(make: Any) -> None:
    host = make(64 << 20)
    for arena in (100, 30 << 20, 1000):
        host.call("engine_reserve_arena", arena)
        at = host.call("engine_arena_at")
        host.write(at, b"\x07" * arena)
        digest_at = 0
        host.call("xxh3_64_at", at, arena, digest_at)
        assert host.read(digest_at, 8) == xxhash.xxh3_64_intdigest(b"\x07" * arena).to_bytes(8, "little")
        assert host.memory_bytes() >= host.call("engine_region_bytes")


@pytest.mark.parametrize("make", MAKERS)
def test_the_first_group_that_does_not_match_its_digest_is_found(make: Any) -> None:
    engine = Engine(make(1 << 20))
    engine.host.call("engine_reserve_arena", 5000)
    data = np.random.default_rng(0).bytes(4500)
    at = engine.arena_at + 1
    digests = b"".join(
        xxhash.xxh3_64_intdigest(data[i : i + 1000]).to_bytes(8, "little") for i in range(0, 4500, 1000)
    )
    engine.host.write(at, data)
    assert asyncio.run(engine.first_bad_group(at, 4500, 1000, digests)) is None
    for group, byte in ((4, 4499), (2, 2999), (1, 1000), (0, 0)):
        engine.host.write(at + byte, bytes([data[byte] ^ 1]))
        assert asyncio.run(engine.first_bad_group(at, 4500, 1000, digests)) == group
    with pytest.raises(BadArgument, match="5 groups have 40 bytes of digests, got 32"):
        asyncio.run(engine.first_bad_group(at, 4500, 1000, digests[:32]))


@pytest.mark.parametrize("make", MAKERS)
def test_arguments_that_are_no_u32_are_refused_in_python(make: Any) -> None:
    host = make(1 << 20)
    for value in (-1, 1 << 32):
        with pytest.raises((EngineError, OverflowError)):
            host.call("type_block", value)


@pytest.mark.parametrize("make", MAKERS)
def test_others_run_while_an_engine_computes(make: Any) -> None:
    host = make(16 << 20)
    host.call("engine_reserve_arena", 8 << 20)
    arguments = long_call(host)

    async def run() -> int:
        turns = 0
        computing = asyncio.ensure_future(host.compute("matmul_block", *arguments))
        while not computing.done():
            turns += 1
            host.write(0, b"the mailbox may be written meanwhile")
            await asyncio.sleep(0)
        assert await computing == BATCH * ROWS * 4
        return turns

    assert max(asyncio.run(run()) for _ in range(5)) > 1
    assert host.read(arguments[-1], 4) == np.float32(COLS).tobytes()


@pytest.mark.parametrize("make", MAKERS)
def test_a_cancelled_call_has_ended_before_the_cancellation_is_seen(make: Any) -> None:
    host = make(16 << 20)
    host.call("engine_reserve_arena", 8 << 20)
    arguments = long_call(host)
    running = threading.Event()
    ended: list[float] = []
    inner = host.call

    def watched(name: str, *args: int) -> int:
        running.set()
        result = inner(name, *args)
        time.sleep(0.05)
        ended.append(time.monotonic())
        return result

    host.call = watched

    async def run() -> float:
        task = asyncio.ensure_future(host.compute("matmul_block", *arguments))
        await asyncio.to_thread(running.wait)
        for _ in range(3):  # impatient callers cancel more than once
            task.cancel()
            await asyncio.sleep(0)
        with pytest.raises(asyncio.CancelledError):
            await task
        return time.monotonic()

    seen = asyncio.run(run())
    assert len(ended) == 1
    assert ended[0] <= seen


@pytest.mark.parametrize("make", MAKERS)
def test_calls_from_many_threads_do_not_mix_their_errors(make: Any) -> None:
    host = make(1 << 20)

    def complain(number: int) -> str:
        with pytest.raises(EngineError) as caught:
            host.call("type_block", number)
        return str(caught.value)

    async def run() -> list[str]:
        return await asyncio.gather(*(asyncio.to_thread(complain, 1000 + i) for i in range(50)))

    assert all(f"ggml type {1000 + i})" in text for i, text in enumerate(asyncio.run(run())))


@pytest.mark.wasm
def test_both_modules_and_the_native_one_have_the_same_functions() -> None:
    for name in ("pipeline.wasm", "pipeline-relaxed.wasm"):
        store = wasmtime.Engine()
        module = wasmtime.Module.from_file(store, str(PIPELINE.with_name(name)))
        found = {e.name: len(e.type.params) for e in module.exports if isinstance(e.type, wasmtime.FuncType)}
        for function, arity in _native.FUNCTIONS:
            assert found[function] == arity + 1, function
        assert not module.imports


@pytest.mark.wasm
@pytest.mark.parametrize(("name", "clips", "pays"), [
    ("pipeline", False, 0), ("pipeline-relaxed", False, 1), ("pipeline-relaxed", True, 0),
])  # fmt: skip
def test_the_relaxed_module_pays_where_its_dot_product_does_not_clip(
    name: str, clips: bool, pays: int
) -> None:
    """Which it does where three instructions stand in for it, as here on x86 unless it is to be exact."""
    if clips and platform.machine() != "x86_64":
        pytest.skip("only x86-64 clips")
    config = wasmtime.Config()
    config.wasm_relaxed_simd_deterministic = not clips
    store = wasmtime.Store(wasmtime.Engine(config))
    module = wasmtime.Module.from_file(store.engine, str(PIPELINE.with_name(f"{name}.wasm")))
    exports = wasmtime.Instance(store, module, []).exports(store)
    asked = exports["engine_relaxed_pays"]
    assert isinstance(asked, wasmtime.Func)
    assert asked(store) == pays


def test_a_module_that_is_not_built_is_an_error_that_says_how(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"python scripts/build_wasm\.py"):
        WasmEngine(1 << 20, tmp_path / "pipeline.wasm")


@pytest.mark.parametrize("make", MAKERS)
def test_a_module_of_another_abi_is_refused(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[make.__module__], "ABI_VERSION", 999)
    with pytest.raises(EngineError, match="expected 999: build it again"):
        make(1 << 20)


@pytest.mark.parametrize("make", MAKERS)
def test_a_limit_too_small_for_the_mailbox_is_an_error(make: Any) -> None:
    with pytest.raises((EngineError, MemoryError), match="1000"):
        make(1000)


@pytest.mark.parametrize("make", MAKERS)
def test_engines_are_apart(make: Any) -> None:
    one, other = make(1 << 20), make(1 << 20)
    one.call("engine_reserve_arena", 64)
    one.write(65536, b"one")
    other.call("engine_reserve_arena", 64)
    assert other.read(65536, 3) == bytes(3)
    with pytest.raises(OutOfBounds):
        one.call("xxh3_64_at", 65536, 65, 0)
    with pytest.raises(BadArgument):
        one.call("matmul_block", 0, 0, 0, 0, 0, 0, 0, 0)
    assert one.read(65536, 3) == b"one"
