"""What Durable Objects and calls between Workers do, as Python Workers see it."""

import asyncio
import time
from datetime import datetime

from check_support import object_of, raises


async def a_name_has_always_the_same_id(env, ctx):
    assert env.NOTES.idFromName("a").toString() == env.NOTES.idFromName("a").toString()
    assert env.NOTES.idFromName("a").toString() != env.NOTES.idFromName("b").toString()


async def an_id_is_64_hexadecimal_digits(env, ctx):
    text = env.NOTES.idFromName("a").toString()
    assert len(text) == 64
    assert int(text, 16) > 0


async def a_new_id_is_never_the_same(env, ctx):
    assert env.NOTES.newUniqueId().toString() != env.NOTES.newUniqueId().toString()


async def an_id_comes_back_from_its_text(env, ctx):
    id = env.NOTES.newUniqueId()
    assert env.NOTES.idFromString(id.toString()).equals(id)


async def text_that_is_no_id_isrefused(env, ctx):
    for text in ("", "abc", "0" * 64, "z" * 64):
        try:
            env.NOTES.idFromString(text)
        except Exception:
            continue
        raise AssertionError(text)


async def an_object_knows_its_id_and_name(env, ctx):
    found = await env.NOTES.getByName("me").who()
    assert found["id"] == env.NOTES.idFromName("me").toString()
    assert found["name"] == "me"


async def an_object_keeps_its_attributes_between_calls(env, ctx):
    assert [await object_of(env).count() for _ in range(3)] == [1, 2, 3]


async def two_objects_share_nothing(env, ctx):
    await object_of(env, "a").keep("k", 1)
    await object_of(env, "a").count()
    assert await object_of(env, "b").kept("k") is None
    assert await object_of(env, "b").count() == 1


async def an_object_answers_requests(env, ctx):
    response = await object_of(env).fetch("http://x/path", method="POST", body="hello")
    assert response.status == 200
    found = await response.json()
    assert (found["path"], found["body"]) == ("/path", "hello")


async def an_aborted_object_loses_attributes_and_keeps_storage(env, ctx):
    notes = object_of(env)
    await notes.keep("k", "v")
    await notes.count()
    await raises(notes.abort(), "enough")
    assert await object_of(env).count() == 1
    assert await object_of(env).kept("k") == "v"


async def calls_that_run_when_an_object_aborts_fail(env, ctx):
    notes = object_of(env)
    results = await asyncio.gather(notes.abort(), notes.abort(), return_exceptions=True)
    assert all(isinstance(result, Exception) for result in results)


async def stored_values_come_back_as_they_were(env, ctx):
    notes = object_of(env)
    for value in (1, -2.5, "text", True, [1, [2, "x"]], {"a": {"b": [1]}}, 2**53 - 1):
        await notes.keep("k", value)
        assert await notes.kept("k") == value, value


async def stored_bytes_come_back_as_bytes(env, ctx):
    await object_of(env).keep("k", b"\x00\x01\xff")
    assert bytes(await object_of(env).kept("k")) == b"\x00\x01\xff"


async def a_missing_entry_is_none(env, ctx):
    assert await object_of(env).kept("nothing") is None


async def deleting_says_whether_there_was_something(env, ctx):
    notes = object_of(env)
    await notes.keep("k", 1)
    assert await notes.ask("delete", "k") is True
    assert await notes.ask("delete", "k") is False


async def many_entries_are_stored_read_and_deleted_at_once(env, ctx):
    notes = object_of(env)
    await notes.ask("put", {"a": 1, "b": 2, "c": 3})
    assert dict(await notes.ask("get", ["a", "c", "x"])) == {"a": 1, "c": 3}
    assert await notes.ask("delete", ["a", "b", "x"]) == 2


async def entries_are_listed_in_the_order_of_keys(env, ctx):
    notes = object_of(env)
    await notes.ask("put", {"b": 2, "a": 1, "ba": 3, "c": 4})
    assert await notes.ask("list") == [["a", 1], ["b", 2], ["ba", 3], ["c", 4]]
    assert await notes.ask("list", {"prefix": "b"}) == [["b", 2], ["ba", 3]]
    assert await notes.ask("list", {"start": "b", "end": "c"}) == [["b", 2], ["ba", 3]]
    assert await notes.ask("list", {"startAfter": "b"}) == [["ba", 3], ["c", 4]]
    assert await notes.ask("list", {"reverse": True, "limit": 2}) == [["c", 4], ["ba", 3]]


async def everything_is_deleted_at_once(env, ctx):
    notes = object_of(env)
    await notes.ask("put", {"a": 1, "b": 2})
    await notes.ask("deleteAll")
    assert await notes.ask("list") == []


async def a_transaction_that_raises_writes_nothing(env, ctx):
    notes = object_of(env)
    await notes.keep("a", 1)
    await raises(notes.swap(True), "no")
    assert await notes.kept("a") == 1
    await notes.swap(False)
    assert await notes.kept("a") == 2


async def an_alarm_is_known_until_it_is_deleted(env, ctx):
    notes = object_of(env)
    assert await notes.ask("getAlarm") is None
    at = int(time.time() * 1000) + 100_000
    await notes.ask("setAlarm", at)
    assert await notes.ask("getAlarm") == at
    await notes.ask("deleteAlarm")
    assert await notes.ask("getAlarm") is None


async def an_alarm_rings_once_and_is_none_while_it_rings(env, ctx):
    notes = object_of(env)
    await notes.ask("setAlarm", int(time.time() * 1000) + 10)
    for _ in range(200):
        if await notes.rings():
            break
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.05)
    assert await notes.rings() == [None]


async def numbers_text_and_containers_cross_calls(env, ctx):
    for value in (None, True, 0, -7, 2.5, "ü", [], [1, [2]], {"a": {"b": None}}):
        assert await object_of(env).give_back(value) == value, value


async def bytes_arrive_as_a_memoryview(env, ctx):
    assert await object_of(env).kind_of(b"xyz") == "memoryview"
    assert bytes(await object_of(env).give_back(b"xyz")) == b"xyz"


async def a_whole_float_arrives_as_an_int(env, ctx):
    assert await object_of(env).kind_of(3.0) == "int"
    assert await object_of(env).kind_of(3.5) == "float"


async def a_dictionary_has_attributes_and_text_keys(env, ctx):
    found = await object_of(env).give_back({"a": 1, 2: "two"})
    assert found.a == 1
    assert found["2"] == "two"


async def a_date_crosses_calls(env, ctx):
    when = datetime(2026, 11, 30, 12, 0, 0)
    assert await object_of(env).give_back(when) == when


async def tuples_and_bytearrays_do_not_cross(env, ctx):
    for value in ((1, 2), bytearray(b"x"), [(1,)], {"a": bytearray(b"x")}):
        try:
            await object_of(env).give_back(value)
        except TypeError:
            continue
        raise AssertionError(value)


async def an_error_crosses_as_an_exception_with_its_sentence(env, ctx):
    await raises(object_of(env).fail("the sentence"), "ValueError", "the sentence")


async def a_method_that_does_not_exist_is_an_error(env, ctx):
    await raises(object_of(env).nothing(), "nothing")


async def a_plain_method_is_called_like_a_coroutine(env, ctx):
    assert await object_of(env).plain(2, 3) == 5


async def a_service_is_called_by_its_methods(env, ctx):
    assert await env.SELF.add(2, 3) == 5
    assert await env.OTHER.greet("you") == "hello you"


async def an_error_of_a_service_crosses(env, ctx):
    await raises(env.SELF.fail(), "gone")


async def a_service_is_asked_by_requests(env, ctx):
    response = await env.SELF.fetch(
        "http://x/echo", method="PUT", body=b"\x00\xff", headers={"X-Sent": "yes"}
    )
    assert response.status == 201
    assert (response.headers["x-method"], response.headers["X-Seen"]) == ("PUT", "yes")
    assert await response.bytes() == b"\x00\xff"


async def a_large_body_goes_through_two_workers(env, ctx):
    body = bytes(range(256)) * 40_000
    response = await env.SELF.fetch("http://x/echo", method="POST", body=body)
    assert await response.bytes() == body


async def a_failing_service_is_an_error_of_fetch(env, ctx):
    await raises(env.SELF.fetch("http://x/there_is_no_such_check"))


async def calls_at_once_all_get_their_own_answer(env, ctx):
    found = await asyncio.gather(*(object_of(env, f"n{number}").give_back(number) for number in range(20)))
    assert found == list(range(20))
