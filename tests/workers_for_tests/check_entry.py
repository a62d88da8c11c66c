"""Runs the check that a request names, inside a Worker."""

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


class Other(WorkerEntrypoint):
    """A second entrypoint."""

    async def fetch(self, request):
        return Response("other")

    async def greet(self, name):
        return f"hello {name}"


class Default(WorkerEntrypoint):
    """Runs `/name` of the module `checks`; a check that fails raises."""

    async def fetch(self, request):
        name = urlsplit(request.url).path[1:]
        if name == "echo":
            headers = {"x-method": request.method.value, "x-seen": request.headers.get("x-sent", "")}
            return Response(await request.bytes(), status=201, headers=headers)
        await getattr(checks, name)(self.env, self.ctx)
        return Response("ok")

    async def add(self, a, b):
        return a + b

    async def fail(self):
        raise KeyError("gone")
