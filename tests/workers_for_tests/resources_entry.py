"""Uses memory, the engine, and other parts, as much as it is told to."""

import asyncio
from urllib.parse import urlsplit

import boundary
from engine.errors import EngineError
from protocol.calls import Call, Reply, json_reply
from protocol.ports import PeerLost
from workers import DurableObject, WorkerEntrypoint

__all__ = ["Default", "Worker"]


class Worker(DurableObject):
    """An object that owns the engine and counts."""

    def __init__(self, ctx, env):
        super().__init__(ctx, env)
        self.calls = 0

    async def fetch(self, request):
        call = await boundary.call_of(request)
        return boundary.response_of(await getattr(self, call.path[1:])(call))

    async def count(self, call):
        self.calls += 1
        kept = int(await boundary.storage(self.ctx).get("calls") or b"0") + 1
        await boundary.storage(self.ctx).put("calls", b"%d" % kept)
        return json_reply([self.calls, kept])

    async def compute(self, call):
        engine = await boundary.engine(1 << 20)
        await engine.compute("long", 0)
        return json_reply("computed")

    async def many(self, call):
        for _ in range(int(call.query)):
            await self.env.CACHE.get("k")
        return json_reply("done")


class Default(WorkerEntrypoint):
    """`/method?argument`."""

    async def fetch(self, request):
        call = await boundary.call_of(request)
        return boundary.response_of(await getattr(self, urlsplit(request.url).path[1:])(call))

    async def hold(self, call):
        boundary.held(int(call.query))
        await asyncio.sleep(0)
        return json_reply("held")

    async def take(self, call):
        return json_reply(len(call.body))

    async def give(self, call):
        return Reply(200, bytes(int(call.query)))

    async def send(self, call):
        reply = await boundary.peer(self.env.OTHER).call(Call("POST", "/take", bytes(int(call.query))))
        return json_reply(reply.json())

    async def engine(self, call):
        limit, arena = map(int, call.query.split(","))
        try:
            engine = await boundary.engine(limit)
            engine.call("engine_reserve_arena", arena)
            engine.write(0, b"abc")
            view = engine.view(0, 3)
            same = engine is engine and (await boundary.engine(limit)).memory_bytes() == engine.memory_bytes()
            return json_reply([bytes(view).decode(), engine.read(0, 3).decode(), same, engine.memory_bytes()])
        except EngineError as error:
            return json_reply([type(error).__name__, type(error).__module__, str(error)])
        except ValueError as error:
            return json_reply(["ValueError", str(error)])

    async def subrequests(self, call):
        for number in range(int(call.query)):
            try:
                await self.env.CACHE.get("k")
            except Exception as error:
                return json_reply([number, str(error)])
        return json_reply([int(call.query), ""])

    async def gets(self, call):
        done = []

        async def get(number):
            await self.env.BUCKET.head("k")
            done.append(number)

        await asyncio.gather(*(get(number) for number in range(int(call.query))))
        return json_reply(done)

    async def counted(self, call):
        found = []
        for _ in range(int(call.query)):
            try:
                found.append(
                    (await boundary.objects(self.env.WORKER).peer("w").call(Call("GET", "/count"))).json()
                )
            except PeerLost:
                found.append(None)
        return json_reply(found)

    async def stale(self, call):
        cache = boundary.key_values(self.env.CACHE)
        found = []
        for number in range(int(call.query)):
            await cache.put("k", b"%d" % number, 60)
            value = await cache.get("k")
            found.append(None if value is None else int(value))
        return json_reply(found)

    async def through(self, call):
        reply = (
            await boundary.objects(self.env.WORKER).peer("w").call(Call("GET", f"/{call.query}", query="3"))
        )
        return json_reply(reply.json())
