"""What Workers KV does, as Python Workers see it."""

import time

from check_support import raises


async def a_missing_key_is_none(env, ctx):
    assert await env.CACHE.get("nothing") is None


async def text_is_read_as_text(env, ctx):
    await env.CACHE.put("k", "grün")
    assert await env.CACHE.get("k") == "grün"


async def bytes_are_read_as_an_array_buffer(env, ctx):
    await env.CACHE.put("k", bytes(range(256)))
    assert bytes(await env.CACHE.get("k", "arrayBuffer")) == bytes(range(256))


async def the_type_may_be_an_option(env, ctx):
    await env.CACHE.put("k", b"\x00\xff")
    assert bytes(await env.CACHE.get("k", {"type": "arrayBuffer"})) == b"\x00\xff"
    assert bytes(await env.CACHE.get("k", type="arrayBuffer")) == b"\x00\xff"


async def json_is_read_as_json(env, ctx):
    await env.CACHE.put("k", '{"a": {"b": 1}}')
    assert (await env.CACHE.get("k", "json"))["a"]["b"] == 1


async def an_unknown_type_isrefused(env, ctx):
    await env.CACHE.put("k", "x")
    await raises(env.CACHE.get("k", "bytes"), "type")


async def an_empty_value_is_a_value(env, ctx):
    await env.CACHE.put("k", "")
    assert await env.CACHE.get("k") == ""


async def a_second_put_replaces_value_and_metadata(env, ctx):
    await env.CACHE.put("k", "1", {"metadata": {"n": 1}})
    await env.CACHE.put("k", "2")
    found = await env.CACHE.getWithMetadata("k")
    assert (found["value"], found["metadata"]) == ("2", None)


async def metadata_comes_with_the_value(env, ctx):
    await env.CACHE.put("k", "v", {"metadata": {"n": 1, "s": "x"}})
    found = await env.CACHE.getWithMetadata("k")
    assert found["value"] == "v"
    assert (found["metadata"]["n"], found["metadata"]["s"]) == (1, "x")


async def a_missing_key_has_no_metadata(env, ctx):
    found = await env.CACHE.getWithMetadata("nothing")
    assert (found["value"], found["metadata"]) == (None, None)


async def a_deleted_key_is_gone_and_deleting_it_again_is_no_error(env, ctx):
    await env.CACHE.put("k", "v")
    await env.CACHE.delete("k")
    assert await env.CACHE.get("k") is None
    await env.CACHE.delete("k")


async def a_time_to_live_below_a_minute_isrefused(env, ctx):
    await raises(env.CACHE.put("k", "v", {"expirationTtl": 59}), "59", "at least 60")
    assert await env.CACHE.get("k") is None


async def a_time_to_live_of_a_minute_is_accepted_and_listed(env, ctx):
    await env.CACHE.put("k", "v", {"expirationTtl": 60})
    found = (await env.CACHE.list())["keys"][0]
    assert abs(found["expiration"] - time.time() - 60) < 5


async def an_expiration_in_the_past_isrefused(env, ctx):
    await raises(env.CACHE.put("k", "v", {"expiration": int(time.time()) - 10}), "expiration")


async def an_empty_key_isrefused(env, ctx):
    await raises(env.CACHE.get(""), "empty")
    await raises(env.CACHE.put("", "x"), "empty")


async def keys_that_are_dots_arerefused(env, ctx):
    await raises(env.CACHE.get("."), "not allowed")
    await raises(env.CACHE.put("..", "x"), "not allowed")


async def a_key_has_at_most_512_bytes(env, ctx):
    await env.CACHE.put("k" * 512, "v")
    assert await env.CACHE.get("k" * 512) == "v"
    await raises(env.CACHE.get("k" * 513), "414", "512")
    await raises(env.CACHE.put("ü" * 257, "v"), "414", "514")


async def a_value_has_at_most_25_mebibytes(env, ctx):
    await env.CACHE.put("k", bytes(25 << 20))
    await raises(env.CACHE.put("k", bytes((25 << 20) + 1)), "413", "26214400")


async def metadata_has_at_most_1024_bytes(env, ctx):
    await raises(env.CACHE.put("k", "v", {"metadata": "x" * 1023}), "413", "1024")
    await env.CACHE.put("k", "v", {"metadata": "x" * 1022})


async def a_listing_is_in_the_order_of_keys_with_metadata(env, ctx):
    for key in ("b", "a", "c"):
        await env.CACHE.put(key, "v", {"metadata": {"key": key}})
    found = await env.CACHE.list()
    assert [each["name"] for each in found["keys"]] == ["a", "b", "c"]
    assert found["keys"][1]["metadata"]["key"] == "b"
    assert found["list_complete"] is True


async def a_listing_by_prefix_has_only_its_keys(env, ctx):
    for key in ("a:1", "a:2", "b:1"):
        await env.CACHE.put(key, "v")
    assert [each["name"] for each in (await env.CACHE.list({"prefix": "a:"}))["keys"]] == ["a:1", "a:2"]


async def a_long_listing_goes_on_from_its_cursor(env, ctx):
    for number in range(5):
        await env.CACHE.put(f"k{number}", "v")
    first = await env.CACHE.list({"limit": 3})
    assert first["list_complete"] is False
    second = await env.CACHE.list({"limit": 3, "cursor": first["cursor"]})
    assert second["list_complete"] is True
    assert [each["name"] for each in first["keys"] + second["keys"]] == [f"k{number}" for number in range(5)]


async def a_listing_of_more_than_a_thousand_keys_is_refused(env, ctx):
    await raises(env.CACHE.list({"limit": 1001}), "400")


async def many_keys_are_read_at_once(env, ctx):
    await env.CACHE.put("a", "1")
    await env.CACHE.put("b", "2")
    found = await env.CACHE.get(["a", "b", "c"])
    assert (found["a"], found["b"], found["c"]) == ("1", "2", None)


async def a_value_that_is_no_text_or_bytes_isrefused(env, ctx):
    await raises(env.CACHE.put("k", {"a": 1}))
