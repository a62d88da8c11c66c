"""What requests, responses and their headers do, as Python Workers see it."""

import json
from http import HTTPMethod

from check_support import raises, refused

from workers import Request, Response


async def a_response_of_text_says_so(env, ctx):
    response = Response("grün")
    assert response.status == 200
    assert response.headers["content-type"].lower().replace(" ", "") == "text/plain;charset=utf-8"
    assert await response.text() == "grün"


async def a_response_of_bytes_says_no_type(env, ctx):
    response = Response(b"\x00\xff")
    assert "content-type" not in response.headers
    assert await response.bytes() == b"\x00\xff"


async def an_empty_response_has_no_body(env, ctx):
    response = Response(None, status=204)
    assert response.status == 204
    assert await response.bytes() == b""


async def a_response_of_json_is_read_as_json(env, ctx):
    for response in (Response.json({"a": [1]}), Response.from_json({"a": [1]}, status=201)):
        assert response.headers["content-type"] == "application/json"
        assert await response.json() == {"a": [1]}


async def json_keeps_a_type_that_was_given(env, ctx):
    response = Response.json({}, headers={"Content-Type": "application/problem+json"})
    assert response.headers["content-type"] == "application/problem+json"


async def a_status_outside_of_http_isrefused(env, ctx):
    assert refused(lambda: Response("x", status=99))
    assert refused(lambda: Response("x", status=600))


async def a_status_without_body_refuses_one(env, ctx):
    assert refused(lambda: Response("x", status=204))
    assert refused(lambda: Response(b"x", status=304))


async def ok_says_whether_the_status_is_2xx(env, ctx):
    assert Response("x", status=299).ok
    assert not Response("x", status=300).ok
    assert not Response("x", status=404).ok


async def headers_have_no_case(env, ctx):
    response = Response("x", headers={"X-One": "1"})
    assert response.headers["x-one"] == response.headers["X-ONE"] == "1"
    assert "X-one" in response.headers
    assert response.headers.get("x-two", "none") == "none"


async def headers_may_be_a_list_of_pairs(env, ctx):
    response = Response("x", headers=[("a", "1"), ("b", "2")])
    assert (response.headers["a"], response.headers["b"]) == ("1", "2")


async def the_space_around_a_header_is_dropped(env, ctx):
    assert Response("x", headers={"a": "  1 "}).headers["a"] == "1"


async def a_header_with_a_line_break_isrefused(env, ctx):
    assert refused(lambda: Response("x", headers={"a": "1\r\nb: 2"}))
    assert refused(lambda: Response("x", headers={"a b": "1"}))


async def a_body_is_read_once(env, ctx):
    response = Response("x")
    assert not response.body_used
    await response.text()
    assert response.body_used
    await raises(response.text(), "used")


async def a_clone_has_the_same_body(env, ctx):
    response = Response("x", status=201)
    twin = response.clone()
    assert (await response.text(), await twin.text(), twin.status) == ("x", "x", 201)


async def bodies_of_other_types_arerefused(env, ctx):
    for body in (1, ["x"], {"a": 1}, bytearray(b"x"), (b"x",)):
        try:
            Response(body)
        except TypeError:
            continue
        raise AssertionError(body)


async def a_request_has_a_method_and_a_url(env, ctx):
    request = Request("http://x/a/b?c=d", method="POST", body="hello", headers={"X-A": "1"})
    assert request.method == HTTPMethod.POST
    assert request.method.value == "POST"
    assert request.url == "http://x/a/b?c=d"
    assert request.headers["x-a"] == "1"
    assert await request.text() == "hello"


async def a_request_is_get_by_default(env, ctx):
    assert Request("http://x/").method == HTTPMethod.GET


async def a_request_without_a_scheme_isrefused(env, ctx):
    assert refused(lambda: Request("/path"))


async def a_get_request_refuses_a_body(env, ctx):
    assert refused(lambda: Request("http://x/", body="x"))


async def a_request_is_made_of_another(env, ctx):
    first = Request("http://x/", method="POST", body="hello", headers={"a": "1"})
    second = Request(first, headers={"b": "2"})
    assert second.method == HTTPMethod.POST
    assert "a" not in second.headers
    assert await second.text() == "hello"
    assert first.body_used


async def a_request_reads_json(env, ctx):
    request = Request("http://x/", method="POST", body=json.dumps({"a": 1}))
    assert await request.json() == {"a": 1}


async def a_request_object_is_sent_as_it_is(env, ctx):
    request = Request("http://x/echo", method="POST", body=b"abc", headers={"x-sent": "1"})
    response = await env.SELF.fetch(request)
    assert (response.headers["x-method"], response.headers["x-seen"]) == ("POST", "1")
    assert await response.bytes() == b"abc"


async def a_response_is_passed_on_untouched(env, ctx):
    response = await env.SELF.fetch("http://x/echo", method="POST", body=b"abc")
    copy = Response(response.body, status=response.status, headers={"y": "2"})
    assert await copy.bytes() == b"abc"
    assert copy.headers["y"] == "2"


async def a_redirect_names_where_to(env, ctx):
    response = Response.redirect("http://y/", 307)
    assert response.status == 307
    assert response.headers["location"] == "http://y/"
