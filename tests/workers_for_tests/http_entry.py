"""A Worker for clients over HTTP."""

import asyncio
from urllib.parse import urlsplit

import boundary
from protocol.calls import Reply, json_reply
from workers import Response, WorkerEntrypoint

seen = []


class Default(WorkerEntrypoint):
    """`/method`."""

    async def fetch(self, request):
        return await getattr(self, urlsplit(request.url).path[1:].split("/")[0])(request)

    async def echo(self, request):
        call = await boundary.call_of(request)
        headers = {"x-method": call.method, "x-path": call.path, "x-query": call.query}
        return boundary.response_of(
            Reply(201, call.body, headers | {"x-got": call.headers.get("x-sent", "")})
        )

    async def passes(self, request):
        """Streams the body back as it comes."""
        stream = request.body

        async def pieces():
            while piece := await stream.read(1000):
                yield piece

        return boundary.response_of(Reply(200, pieces()))

    async def events(self, request):
        async def pieces():
            try:
                for number in range(1_000_000):
                    yield b"data: %d\n\n" % number
                    await asyncio.sleep(0.001)
            finally:
                seen.append("left")

        return boundary.response_of(Reply(200, pieces(), {"content-type": "text/event-stream"}))

    async def slow(self, request):
        try:
            await asyncio.sleep(60)
        finally:
            seen.append("cancelled")

    async def ignores(self, request):
        return Response("ignored")

    async def breaks(self, request):
        async def pieces():
            yield b"one"
            raise RuntimeError("on purpose")

        return boundary.response_of(Reply(200, pieces()))

    async def raises(self, request):
        raise RuntimeError("on purpose")

    async def empty(self, request):
        return Response(None, status=204)

    async def cookies(self, request):
        headers = [("Set-Cookie", "a=1"), ("Set-Cookie", "b=2"), ("X-Two", "1"), ("X-Two", "2")]
        return Response("x", headers=headers)

    async def seen(self, request):
        return boundary.response_of(json_reply(seen))
