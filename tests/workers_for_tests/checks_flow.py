"""What goes on at the same time, after an answer, and between Workers."""

import asyncio
import hashlib

from check_support import object_of, raises

from workers import Request


async def _until(ask, wanted):
    for _ in range(200):
        if await ask() == wanted:
            return
        await asyncio.sleep(0.01)
    raise AssertionError(f"{wanted!r} did not come")


async def callers_of_an_object_may_wait_for_each_other(env, ctx):
    assert await asyncio.gather(*(object_of(env).meet(4) for _ in range(4))) == [4, 4, 4, 4]


async def a_lock_of_an_object_lets_one_in_at_a_time(env, ctx):
    await asyncio.gather(*(object_of(env).in_turn(name) for name in "abc"))
    lines = await object_of(env).said()
    assert [line.split()[0] for line in lines[::2]] == [line.split()[0] for line in lines[1::2]]
    assert [line.split()[1] for line in lines] == ["in", "out"] * 3


async def calls_of_an_object_overlap_where_they_wait(env, ctx):
    await asyncio.gather(*(object_of(env).overlap(name) for name in "ab"))
    assert [line.split()[1] for line in await object_of(env).said()] == ["in", "in", "out", "out"]


async def calls_of_an_object_begin_in_the_order_they_were_made(env, ctx):
    notes = object_of(env)
    await asyncio.gather(*(notes.overlap(str(number)) for number in range(8)))
    begun = [line.split()[0] for line in await notes.said() if line.endswith("in")]
    assert begun == [str(number) for number in range(8)]


async def an_object_goes_on_with_work_after_its_answer(env, ctx):
    assert await object_of(env).later("k", 7) == "soon"
    await _until(lambda: object_of(env).kept("k"), 7)


async def an_entrypoint_hands_work_to_wait_until(env, ctx):
    ctx.waitUntil(env.CACHE.put("k", "v"))
    await _until(lambda: env.CACHE.get("k"), "v")


async def many_reads_at_once_each_get_their_own(env, ctx):
    for number in range(12):
        await env.BUCKET.put(f"k{number}", b"%d" % number)

    async def read(number):
        return await (await env.BUCKET.get(f"k{number}")).text()

    assert await asyncio.gather(*map(read, range(12))) == [str(number) for number in range(12)]


async def a_failure_among_many_leaves_the_others_alone(env, ctx):
    notes = object_of(env)
    found = await asyncio.gather(
        notes.count(), notes.fail("no"), notes.count(), env.CACHE.get("nothing"), return_exceptions=True
    )
    assert (found[0], found[2], found[3]) == (1, 2, None)
    assert "no" in str(found[1])


async def objects_run_beside_each_other(env, ctx):
    await asyncio.gather(*(object_of(env, name).later("k", name) for name in "abcdef"))
    for name in "abcdef":
        await _until(lambda name=name: object_of(env, name).kept("k"), name)


async def a_body_of_a_megabyte_comes_back_whole(env, ctx):
    data = bytes(range(256)) * 4096
    response = await env.SELF.fetch("http://x/echo", method="POST", body=data)
    assert response.status == 201
    assert hashlib.md5(await response.bytes()).digest() == hashlib.md5(data).digest()


async def a_body_of_eight_megabytes_comes_back_whole(env, ctx):
    data = hashlib.sha256(b"seed").digest() * (1 << 18)
    response = await env.SELF.fetch("http://x/echo", method="POST", body=data)
    assert hashlib.md5(await response.bytes()).digest() == hashlib.md5(data).digest()


async def an_empty_body_is_empty_at_the_other_side(env, ctx):
    response = await env.SELF.fetch("http://x/echo", method="POST")
    assert await response.bytes() == b""


async def the_first_bytes_of_a_body_are_what_was_sent(env, ctx):
    for size in (1, 7, 8, 9, 63, 64, 65, 4095, 4096, 4097):
        data = bytes((number * 7 + size) % 256 for number in range(size))
        response = await env.SELF.fetch("http://x/echo", method="POST", body=data)
        assert await response.bytes() == data, size


async def a_method_and_a_header_arrive(env, ctx):
    for method in ("GET", "POST", "PUT", "PATCH", "DELETE"):
        response = await env.SELF.fetch("http://x/echo", method=method, headers={"X-Sent": method.lower()})
        assert response.headers["x-method"] == method
        assert response.headers["X-Seen"] == method.lower()


async def a_path_stays_percent_encoded(env, ctx):
    found = await (await env.SELF.fetch("http://x/where?a=%20b&c=%2F")).json()
    assert found == {"path": "/where", "query": "a=%20b&c=%2F", "method": "GET"}
    found = await (await object_of(env).fetch("http://x/a%20b%2Fc")).json()
    assert found["path"] == "/a%20b%2Fc"


async def a_status_is_passed_on_and_is_no_error(env, ctx):
    for status in (200, 201, 400, 404, 409, 500, 503):
        response = await env.SELF.fetch(f"http://x/status?{status}")
        assert (response.status, response.headers["x-a"]) == (status, "1")
        assert await response.text() == "said"


async def a_request_with_a_body_is_handed_on(env, ctx):
    request = Request("http://x/echo", method="POST", body="grün", headers={"x-sent": "a"})
    response = await env.SELF.fetch(request)
    assert (await response.bytes()).decode() == "grün"
    assert response.headers["x-seen"] == "a"


async def an_object_gets_the_body_of_a_request(env, ctx):
    found = await (await object_of(env).fetch("http://x/p", method="POST", body="hello")).json()
    assert (found["path"], found["body"], found["seen"]) == ("/p", "hello", 1)


async def a_named_entrypoint_is_another_one(env, ctx):
    assert await (await env.OTHER.fetch("http://x/")).text() == "other"
    assert await env.OTHER.greet("you") == "hello you"


async def a_service_has_no_methods_of_another_entrypoint(env, ctx):
    await raises(env.OTHER.add(1, 2))


async def a_stub_of_an_aborted_object_fails_and_a_new_one_works(env, ctx):
    await object_of(env).keep("k", 1)
    await raises(object_of(env).abort())
    assert await object_of(env).kept("k") == 1


async def storage_outlives_attributes(env, ctx):
    notes = object_of(env)
    await notes.keep("k", "v")
    assert await notes.count() == 1
    await raises(notes.abort())
    assert await object_of(env).count() == 1
    assert await object_of(env).kept("k") == "v"


async def what_one_object_stores_no_other_sees(env, ctx):
    for number, name in enumerate("abc"):
        await object_of(env, name).keep("k", number)
    assert [await object_of(env, name).kept("k") for name in "abc"] == [0, 1, 2]


async def a_write_is_seen_by_the_next_call(env, ctx):
    for number in range(10):
        await object_of(env).keep("k", number)
        assert await object_of(env).kept("k") == number


async def values_of_a_megabyte_are_stored(env, ctx):
    data = hashlib.sha256(b"a").digest() * (1 << 15)
    await object_of(env).keep("k", data)
    assert bytes(await object_of(env).kept("k")) == data


async def an_object_of_r2_is_read_while_others_are_written(env, ctx):
    await env.BUCKET.put("a", bytes(1 << 20))

    async def read():
        return len(bytes(await (await env.BUCKET.get("a")).arrayBuffer()))

    async def write(number):
        await env.BUCKET.put(f"b{number}", bytes(1 << 16))
        return 0

    found = await asyncio.gather(read(), write(0), read(), write(1), read())
    assert found == [1 << 20, 0, 1 << 20, 0, 1 << 20]


async def sleeping_lets_others_go_on(env, ctx):
    order = []

    async def step(name, seconds):
        await asyncio.sleep(seconds)
        order.append(name)

    await asyncio.gather(step("late", 0.05), step("early", 0.005))
    assert order == ["early", "late"]


async def what_is_cancelled_is_told(env, ctx):
    told = []

    async def wait():
        try:
            await asyncio.sleep(30)
        except asyncio.CancelledError:
            told.append(True)
            raise

    task = asyncio.ensure_future(wait())
    await asyncio.sleep(0.005)
    task.cancel()
    await asyncio.wait([task])
    assert told == [True]
    assert task.cancelled()


async def waiting_ends_at_its_time(env, ctx):
    try:
        async with asyncio.timeout(0.02):
            await asyncio.sleep(30)
    except TimeoutError:
        return
    raise AssertionError("it went on")
