"""What R2 does, as Python Workers see it. Every check works in a bucket of its own."""

import hashlib

from check_support import raises

HELLO = b"hello, world"


async def a_missing_object_is_none(env, ctx):
    assert await env.BUCKET.get("nothing") is None
    assert await env.BUCKET.head("nothing") is None


async def what_was_put_is_read_back_whole(env, ctx):
    put = await env.BUCKET.put("k", HELLO)
    found = await env.BUCKET.get("k")
    assert bytes(await found.arrayBuffer()) == HELLO
    assert (put.key, put.size, put.etag) == (found.key, found.size, found.etag) == ("k", 12, put.etag)


async def text_is_stored_as_utf_8_and_read_as_text(env, ctx):
    await env.BUCKET.put("k", "grün")
    found = await env.BUCKET.get("k")
    assert found.size == 5
    assert await found.text() == "grün"


async def json_is_read_as_json(env, ctx):
    await env.BUCKET.put("k", '{"a": [1, 2]}')
    found = await (await env.BUCKET.get("k")).json()
    assert found["a"] == [1, 2]


async def an_empty_object_has_no_bytes(env, ctx):
    await env.BUCKET.put("k", b"")
    found = await env.BUCKET.get("k")
    assert found.size == 0
    assert bytes(await found.arrayBuffer()) == b""


async def the_etag_of_a_single_put_is_the_md5_of_its_bytes(env, ctx):
    put = await env.BUCKET.put("k", HELLO)
    assert put.etag == hashlib.md5(HELLO).hexdigest()
    assert put.httpEtag == f'"{put.etag}"'


async def a_range_has_offset_and_length(env, ctx):
    await env.BUCKET.put("k", HELLO)
    found = await env.BUCKET.get("k", {"range": {"offset": 7, "length": 3}})
    assert bytes(await found.arrayBuffer()) == b"wor"
    assert (found.range["offset"], found.range["length"], found.size) == (7, 3, 12)


async def a_range_without_length_goes_to_the_end(env, ctx):
    await env.BUCKET.put("k", HELLO)
    assert await (await env.BUCKET.get("k", {"range": {"offset": 7}})).text() == "world"


async def a_range_without_offset_begins_at_the_start(env, ctx):
    await env.BUCKET.put("k", HELLO)
    assert await (await env.BUCKET.get("k", {"range": {"length": 5}})).text() == "hello"


async def a_range_past_the_end_is_cut_there(env, ctx):
    await env.BUCKET.put("k", HELLO)
    found = await env.BUCKET.get("k", {"range": {"offset": 7, "length": 1000}})
    assert await found.text() == "world"
    assert found.range["length"] == 5


async def a_suffix_range_reads_the_last_bytes(env, ctx):
    await env.BUCKET.put("k", HELLO)
    found = await env.BUCKET.get("k", {"range": {"suffix": 5}})
    assert await found.text() == "world"


async def a_suffix_larger_than_the_object_is_the_object(env, ctx):
    await env.BUCKET.put("k", HELLO)
    assert await (await env.BUCKET.get("k", {"range": {"suffix": 500}})).text() == "hello, world"


async def a_range_that_begins_past_the_end_isrefused(env, ctx):
    await env.BUCKET.put("k", HELLO)
    await raises(env.BUCKET.get("k", {"range": {"offset": 12, "length": 1}}))


async def a_suffix_with_an_offset_isrefused(env, ctx):
    await env.BUCKET.put("k", HELLO)
    await raises(env.BUCKET.get("k", {"range": {"offset": 1, "suffix": 2}}), "incompatible")


async def options_may_be_given_by_keyword(env, ctx):
    await env.BUCKET.put("k", HELLO)
    assert await (await env.BUCKET.get("k", range={"offset": 7})).text() == "world"


async def a_get_on_the_right_etag_has_a_body(env, ctx):
    put = await env.BUCKET.put("k", HELLO)
    found = await env.BUCKET.get("k", {"onlyIf": {"etagMatches": put.etag}})
    assert await found.text() == "hello, world"


async def a_get_on_another_etag_has_metadata_and_no_body(env, ctx):
    put = await env.BUCKET.put("k", HELLO)
    found = await env.BUCKET.get("k", {"onlyIf": {"etagMatches": "0" * 32}})
    assert found.etag == put.etag
    assert getattr(found, "body", None) is None


async def a_get_unless_the_etag_is_known_has_no_body(env, ctx):
    put = await env.BUCKET.put("k", HELLO)
    found = await env.BUCKET.get("k", {"onlyIf": {"etagDoesNotMatch": put.etag}})
    assert getattr(found, "body", None) is None


async def a_put_on_a_wrong_etag_changes_nothing(env, ctx):
    await env.BUCKET.put("k", HELLO)
    assert await env.BUCKET.put("k", b"other", {"onlyIf": {"etagMatches": "0" * 32}}) is None
    assert await (await env.BUCKET.get("k")).text() == "hello, world"


async def a_put_only_where_nothing_is_keeps_what_is_there(env, ctx):
    assert await env.BUCKET.put("k", b"first", {"onlyIf": {"etagDoesNotMatch": "*"}}) is not None
    assert await env.BUCKET.put("k", b"second", {"onlyIf": {"etagDoesNotMatch": "*"}}) is None
    assert await (await env.BUCKET.get("k")).text() == "first"


async def a_second_put_replaces_the_first_and_has_another_version(env, ctx):
    first = await env.BUCKET.put("k", b"one")
    second = await env.BUCKET.put("k", b"two")
    assert first.version != second.version
    assert await (await env.BUCKET.get("k")).text() == "two"


async def a_body_stays_what_it_was_when_the_object_is_replaced(env, ctx):
    await env.BUCKET.put("k", b"before")
    found = await env.BUCKET.get("k")
    await env.BUCKET.put("k", b"after!")
    assert await found.text() == "before"


async def a_body_is_read_once(env, ctx):
    await env.BUCKET.put("k", HELLO)
    found = await env.BUCKET.get("k")
    await found.text()
    assert found.bodyUsed
    await raises(found.text(), "used")


async def metadata_comes_back(env, ctx):
    options = {"httpMetadata": {"contentType": "text/plain"}, "customMetadata": {"model": "tiny"}}
    await env.BUCKET.put("k", HELLO, options)
    found = await env.BUCKET.head("k")
    assert found.httpMetadata["contentType"] == "text/plain"
    assert found.customMetadata["model"] == "tiny"


async def a_wrong_checksum_is_refused_and_nothing_is_stored(env, ctx):
    await raises(env.BUCKET.put("k", HELLO, {"sha256": "0" * 64}), "10037")
    assert await env.BUCKET.head("k") is None


async def a_right_checksum_is_accepted(env, ctx):
    await env.BUCKET.put("k", HELLO, {"sha256": hashlib.sha256(HELLO).hexdigest()})
    assert (await env.BUCKET.head("k")).size == 12


async def a_deleted_object_is_gone_and_deleting_it_again_is_no_error(env, ctx):
    await env.BUCKET.put("k", HELLO)
    await env.BUCKET.delete("k")
    assert await env.BUCKET.head("k") is None
    await env.BUCKET.delete("k")


async def many_objects_are_deleted_at_once(env, ctx):
    for key in ("a", "b", "c"):
        await env.BUCKET.put(key, b"x")
    await env.BUCKET.delete(["a", "c", "no such"])
    assert [found.key for found in (await env.BUCKET.list())["objects"]] == ["b"]


async def a_listing_is_in_the_order_of_keys(env, ctx):
    for key in ("b", "a/2", "a/1", "ü"):
        await env.BUCKET.put(key, b"x")
    found = await env.BUCKET.list()
    assert [each.key for each in found["objects"]] == ["a/1", "a/2", "b", "ü"]
    assert found["truncated"] is False


async def a_listing_by_prefix_has_only_its_keys(env, ctx):
    for key in ("a/1", "a/2", "b/1"):
        await env.BUCKET.put(key, b"x")
    found = await env.BUCKET.list({"prefix": "a/"})
    assert [each.key for each in found["objects"]] == ["a/1", "a/2"]


async def a_long_listing_goes_on_from_its_cursor(env, ctx):
    for number in range(7):
        await env.BUCKET.put(f"k{number}", b"x")
    seen, cursor, pages = [], None, 0
    while True:
        found = await env.BUCKET.list({"limit": 3, **({"cursor": cursor} if cursor else {})})
        seen += [each.key for each in found["objects"]]
        pages += 1
        if not found["truncated"]:
            break
        cursor = found["cursor"]
    assert seen == [f"k{number}" for number in range(7)]
    assert pages == 3


async def a_listing_that_just_fits_is_not_truncated(env, ctx):
    for number in range(3):
        await env.BUCKET.put(f"k{number}", b"x")
    assert (await env.BUCKET.list({"limit": 3}))["truncated"] is False


async def a_delimiter_folds_keys_into_prefixes(env, ctx):
    for key in ("a/1", "a/2", "b", "c/1"):
        await env.BUCKET.put(key, b"x")
    found = await env.BUCKET.list({"delimiter": "/"})
    assert [each.key for each in found["objects"]] == ["b"]
    assert list(found["delimitedPrefixes"]) == ["a/", "c/"]


async def a_listing_starts_after_a_key(env, ctx):
    for key in ("a", "b", "c"):
        await env.BUCKET.put(key, b"x")
    assert [each.key for each in (await env.BUCKET.list({"startAfter": "a"}))["objects"]] == ["b", "c"]


async def parts_become_one_object_in_the_order_of_their_numbers(env, ctx):
    size = 5 << 20
    upload = await env.BUCKET.createMultipartUpload("k", {"customMetadata": {"a": "b"}})
    last = await upload.uploadPart(2, b"end")
    first = await upload.uploadPart(1, bytes(size))
    parts = [{"partNumber": part["partNumber"], "etag": part["etag"]} for part in (first, last)]
    done = await upload.complete(parts)
    assert done.size == size + 3
    assert done.etag.endswith("-2")
    found = await env.BUCKET.get("k", {"range": {"suffix": 4}})
    assert bytes(await found.arrayBuffer()) == b"\0end"
    assert (await env.BUCKET.head("k")).customMetadata["a"] == "b"


async def an_object_of_parts_does_not_exist_before_it_is_complete(env, ctx):
    upload = await env.BUCKET.createMultipartUpload("k")
    await upload.uploadPart(1, b"x")
    assert await env.BUCKET.head("k") is None


async def a_small_part_before_the_last_isrefused(env, ctx):
    upload = await env.BUCKET.createMultipartUpload("k")
    parts = [await upload.uploadPart(number, b"small") for number in (1, 2)]
    named = [{"partNumber": part["partNumber"], "etag": part["etag"]} for part in parts]
    await raises(upload.complete(named), "10011")


async def an_unknown_part_isrefused(env, ctx):
    upload = await env.BUCKET.createMultipartUpload("k")
    await upload.uploadPart(1, b"x")
    await raises(upload.complete([{"partNumber": 1, "etag": "nonsense"}]), "10025")


async def an_upload_is_resumed_by_its_id(env, ctx):
    upload = await env.BUCKET.createMultipartUpload("k")
    resumed = env.BUCKET.resumeMultipartUpload("k", upload.uploadId)
    part = await resumed.uploadPart(1, b"whole")
    await resumed.complete([{"partNumber": 1, "etag": part["etag"]}])
    assert await (await env.BUCKET.get("k")).text() == "whole"


async def an_aborted_upload_takes_no_more_parts(env, ctx):
    upload = await env.BUCKET.createMultipartUpload("k")
    await upload.abort()
    await raises(upload.uploadPart(1, b"x"), "10024")


async def a_key_that_is_too_long_isrefused(env, ctx):
    await env.BUCKET.put("k" * 1024, b"x")
    await raises(env.BUCKET.put("k" * 1025, b"x"), "10020")


async def a_body_is_copied_from_one_object_to_another(env, ctx):
    await env.BUCKET.put("a", bytes(range(256)) * 5000)
    await env.BUCKET.put("b", (await env.BUCKET.get("a")).body)
    assert (await env.BUCKET.head("a")).etag == (await env.BUCKET.head("b")).etag
