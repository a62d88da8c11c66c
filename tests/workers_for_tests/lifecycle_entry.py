"""A Worker whose globals, objects, streams and background work tests watch."""

import asyncio
from urllib.parse import urlsplit

import boundary
import shared
from protocol.calls import Reply, json_reply
from workers import DurableObject, Response, WorkerEntrypoint

__all__ = ["Broken", "Default", "Meeting"]

seen = []
kept = []


class Broken(DurableObject):
    """An object that does not start."""

    attempts = 0

    def __init__(self, ctx, env):
        super().__init__(ctx, env)
        type(self).attempts += 1
        if env.BREAKS == "constructor":
            raise RuntimeError("no start")

        async def prepare():
            await asyncio.sleep(0)
            if type(self).attempts == 1:
                raise RuntimeError("no preparation")

        ctx.blockConcurrencyWhile(prepare)

    async def fetch(self, request):
        return Response.json(type(self).attempts)


class Meeting(DurableObject):
    """An object in which requests meet."""

    constructed = 0

    def __init__(self, ctx, env):
        super().__init__(ctx, env)
        type(self).constructed += 1
        self.order = []
        self.gate = asyncio.Event()
        self.lock = asyncio.Lock()

        async def prepare():
            await asyncio.sleep(0.01)
            self.order.append("prepared")

        ctx.blockConcurrencyWhile(prepare)

    async def fetch(self, request):
        call = await boundary.call_of(request)
        return boundary.response_of(await getattr(self, call.path[1:])(call))

    async def order_of(self, call):
        self.order.append("called")
        return json_reply(self.order)

    async def wait(self, call):
        self.order.append("waiting")
        await self.gate.wait()
        return json_reply("went on")

    async def open_gate(self, call):
        self.gate.set()
        return json_reply("opened")

    async def locked(self, call):
        async with self.lock:
            self.order.append(f"in {call.query}")
            await asyncio.sleep(0.005)
            self.order.append(f"out {call.query}")
        return json_reply(self.order)

    async def note(self, call):
        seen.append(call.query)
        shared.values.append(call.query)
        return json_reply({"seen": seen, "shared": shared.values, "constructed": type(self).constructed})

    async def survive(self, call):
        await self.gate.wait()
        seen.append("survived")
        return json_reply("done")

    async def stream(self, call):
        return Reply(200, self._pieces(call.query))

    async def _pieces(self, name):
        try:
            while True:
                yield b"piece"
                await asyncio.sleep(0.001)
        finally:
            seen.append(f"closed {name}")

    async def broken(self, call):
        async def pieces():
            yield b"one"
            raise ValueError("no more")

        return Reply(200, pieces())

    async def reset(self, call):
        boundary.abort(self.ctx, "asked for it")

    async def seen(self, call):
        return json_reply(seen)

    async def background(self, call):
        boundary.background(self.ctx)(self._later(float(call.query)))
        return json_reply("started")

    async def stray(self, call):
        self.task = asyncio.ensure_future(self._later(float(call.query)))
        return json_reply("left something running")

    async def _later(self, seconds):
        await asyncio.sleep(seconds)
        seen.append("later")

    async def ring(self, call):
        await boundary.set_alarm(self.ctx, float(call.query))
        return json_reply("set")

    async def alarm(self, info):
        seen.append(f"alarm {info['retryCount']}")
        await self.ctx.storage.put("rang", (await self.ctx.storage.get("rang") or 0) + 1)
        if boundary.variable(self.env, "ALARM") == "fails":
            raise RuntimeError("the alarm fails")

    async def rang(self, call):
        return json_reply(await self.ctx.storage.get("rang"))

    async def count(self, call):
        storage = boundary.storage(self.ctx)
        count = int(await storage.get("count") or b"0") + 1
        await storage.put("count", b"%d" % count)
        return json_reply(count)


class Default(WorkerEntrypoint):
    """`/object/NAME/METHOD?QUERY` asks an object, everything else a method of this class."""

    async def fetch(self, request):
        path = urlsplit(request.url).path[1:]
        if path.startswith("object/"):
            _, name, method = path.split("/")
            peer = boundary.objects(self.env.MEETING).peer(name)
            call = await boundary.call_of(request)
            reply, inflow = await peer.open(type(call)("GET", f"/{method}", query=call.query))
            return boundary.response_of(
                Reply(reply.status, inflow, reply.headers) if inflow.length else reply
            )
        return await getattr(self, path)(await boundary.call_of(request))

    async def note(self, call):
        seen.append(call.query)
        shared.values.append(call.query)
        return Response.json({"seen": seen, "shared": shared.values, "module": __name__})

    async def background(self, call):
        boundary.background(self.ctx)(self._later(float(call.query)))
        return Response("started")

    async def _later(self, seconds):
        try:
            await asyncio.sleep(seconds)
        except asyncio.CancelledError:
            seen.append("stopped")
            raise
        seen.append("later")

    async def stray(self, call):
        self.task = asyncio.ensure_future(self._later(30))
        await asyncio.sleep(0)
        return Response("left something running")

    async def slow(self, call):
        try:
            await asyncio.sleep(30)
        finally:
            seen.append("ended")
        return Response("slept")

    async def seen(self, call):
        return Response.json(seen)

    async def ignores_bodies(self, call):
        """Leaves bodies unread that are still referred to, so that no collection closes them."""
        stream = type(call)("GET", "/stream", query="ignored")
        for _ in range(3):
            kept.append(await boundary.blobs(self.env.BUCKET).open("k", 0, 1 << 20))
            _, inflow = await boundary.peer(self.env.MEETING.getByName("s")).open(stream)
            await inflow.read(1)
            kept.append(inflow)
        return Response("ignored")

    async def copies(self, call):
        inflow = await boundary.blobs(self.env.BUCKET).open("k", 0, int(call.query))
        return boundary.response_of(Reply(200, inflow))

    async def calls(self, call):
        peer = boundary.peer(getattr(self.env, call.query))
        try:
            reply = await peer.call(type(call)("GET", "/seen"))
        except Exception as error:
            return Response.json({"error": type(error).__name__, "detail": str(error)})
        return Response.json({"status": reply.status})

    async def broken(self, call):
        call = type(call)("GET", "/")
        found = []
        for _ in range(2):
            try:
                found.append((await boundary.objects(self.env.BROKEN).peer("b").call(call)).json())
            except Exception as error:
                found.append(str(error))
        return Response.json(found)

    async def fails(self, call):
        raise ValueError("a sentence of its own")

    async def logs(self, call):
        for number in range(int(call.query)):
            boundary.log("x" * 5000, number=number, data={"a": "y" * 5000}, none=None)
        return Response("logged")
