"""Runs the check that a request names, inside a Worker."""

import asyncio
from urllib.parse import urlsplit

import checks

from workers import DurableObject, Response, WorkerEntrypoint

__all__ = ["Default", "Notes", "Other"]


class Notes(DurableObject):
    """An object that does what checks want of one."""

    def __init__(self, ctx, env):
        super().__init__(ctx, env)
        self.seen = 0
        self.rang = []
        self.here = 0
        self.all_here = asyncio.Event()
        self.lock = asyncio.Lock()
        self.lines = []

    async def meet(self, count):
        """Waits until so many callers are here."""
        self.here += 1
        if self.here == count:
            self.all_here.set()
        await self.all_here.wait()
        return self.here

    async def in_turn(self, name):
        """Holds a lock over a wait, and says when it came and went."""
        async with self.lock:
            self.lines.append(f"{name} in")
            await asyncio.sleep(0.01)
            self.lines.append(f"{name} out")
        return self.lines

    async def overlap(self, name):
        """The same without a lock."""
        self.lines.append(f"{name} in")
        await asyncio.sleep(0.02)
        self.lines.append(f"{name} out")

    async def said(self):
        return self.lines

    async def later(self, key, value):
        """Stores a value after it has answered."""

        async def store():
            await asyncio.sleep(0.02)
            await self.ctx.storage.put(key, value)

        # The SDK lets coroutines through `waitUntil` of an entrypoint only; an object's tasks need none.
        self.tasks = [*getattr(self, "tasks", []), asyncio.ensure_future(store())]
        return "soon"

    async def fetch(self, request):
        self.seen += 1
        return Response.json(
            {"path": urlsplit(request.url).path, "body": await request.text(), "seen": self.seen}
        )

    async def count(self):
        self.seen += 1
        return self.seen

    async def give_back(self, value):
        return value

    async def kind_of(self, value):
        return type(value).__name__

    async def fail(self, sentence):
        raise ValueError(sentence)

    async def abort(self):
        self.ctx.abort("enough")

    async def keep(self, key, value):
        await self.ctx.storage.put(key, bytes(value) if isinstance(value, memoryview) else value)

    async def kept(self, key):
        found = await self.ctx.storage.get(key)
        return bytes(found) if isinstance(found, memoryview) else found

    async def ask(self, method, *args):
        """Any method of the object's storage."""
        result = await getattr(self.ctx.storage, method)(*args)
        return [list(item) for item in result.items()] if isinstance(result, dict) else result

    async def swap(self, fails):
        async def closure(txn):
            await txn.put("a", 2)
            assert await txn.get("a") == 2
            if fails:
                raise RuntimeError("no")

        await self.ctx.storage.transaction(closure)

    async def who(self):
        return {"id": str(self.ctx.id), "name": self.ctx.id.name}

    async def alarm(self):
        self.rang.append(await self.ctx.storage.getAlarm())

    async def rings(self):
        return self.rang

    def plain(self, a, b=1):
        return a + b

    async def _hidden(self):
        return "secret"


class Own:
    """The bindings of one check of several in this Worker: its stores have its number."""

    def __init__(self, env, number):
        self.env = env
        self.number = number

    def __getattr__(self, name):
        return getattr(self.env, f"{name}_{self.number}" if name in ("BUCKET", "CACHE") else name)


class Other(WorkerEntrypoint):
    """A second entrypoint."""

    async def fetch(self, request):
        return Response("other")

    async def greet(self, name):
        return f"hello {name}"


class Default(WorkerEntrypoint):
    """Runs `/name` of the module `checks`; a check that fails raises."""

    async def fetch(self, request):
        url = urlsplit(request.url)
        name = url.path[1:]
        if name == "where":
            return Response.json({"path": url.path, "query": url.query, "method": request.method.value})
        if name == "status":
            return Response("said", status=int(url.query), headers={"x-a": "1"})
        if name == "echo":
            headers = {"x-method": request.method.value, "x-seen": request.headers.get("x-sent", "")}
            return Response(await request.bytes(), status=201, headers=headers)
        await getattr(checks, name)(Own(self.env, url.query) if url.query else self.env, self.ctx)
        return Response("ok")

    async def add(self, a, b):
        return a + b

    async def fail(self):
        raise KeyError("gone")
