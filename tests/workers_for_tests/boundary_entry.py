"""Uses every function of the boundary, and answers with what came of it."""

from urllib.parse import urlsplit

import boundary
from protocol.bodies import BytesInflow, JoinedInflow
from protocol.calls import Call, Reply, ShortBody, json_reply
from protocol.ports import BlobChanged, BlobFailed, BlobMissing, PeerLost
from workers import DurableObject, WorkerEntrypoint

cancelled = []
# Only the bundle's own classes count.
ERRORS = (BlobChanged, BlobFailed, BlobMissing, PeerLost, ShortBody)


class View:
    """An engine's region with a view."""

    def __init__(self, size):
        self.memory = bytearray(b"." * size)

    def view(self, offset, length):
        return memoryview(self.memory)[offset : offset + length]

    def read(self, offset, length):
        return bytes(self.view(offset, length))


async def in_order(inflow, host):
    """Reads and pours 10,240 bytes by turns, asks for more than are left, and cancels twice."""
    found = bytearray()
    for piece in (100, 0, 1000, 9000):
        if piece == 1000:
            await inflow.pour(host, 50, piece)
            found += host.read(50, piece)
        else:
            found += await inflow.read(piece)
    errors = []
    for _ in range(2):
        try:
            await inflow.read(141)
        except ShortBody as error:
            errors.append(type(error).__name__)
    await inflow.cancel()
    await inflow.cancel()
    return json_reply([inflow.length, bytes(found) == (bytes(range(256)) * 40)[:10100], *errors])


class Plain:
    """One without."""

    def __init__(self, size):
        self.memory = bytearray(b"." * size)

    def write(self, offset, data):
        self.memory[offset : offset + len(data)] = data


class Watched:
    """An inflow without end that says when it is cancelled."""

    length = 1 << 40

    async def read(self, length):
        return b"x" * 1000

    async def pour(self, host, offset, length):
        raise NotImplementedError

    async def cancel(self):
        cancelled.append("cancelled")


class Keeper(DurableObject):
    """An object with storage."""

    async def fetch(self, request):
        call = await boundary.call_of(request)
        if call.path == "/object/request":
            return boundary.response_of(json_reply([call.method, call.path, call.query]))
        storage = boundary.storage(self.ctx)
        before = await storage.get("a")
        await storage.put("a", b"one")
        await storage.put("a", b"two")
        await storage.put("p2", b"")
        await storage.put("p1", b"")
        now = (await storage.get("a")).decode()
        keys = await storage.keys("p")
        await storage.delete("a")
        await storage.delete("a")
        return boundary.response_of(json_reply([before, now, keys, await storage.get("a")]))


class Default(WorkerEntrypoint):
    """`/method?arguments`."""

    async def fetch(self, request):
        path = urlsplit(request.url).path
        if path.startswith("/object/"):
            return await boundary.forward(request, self.env.KEEPER, "one")
        if path == "/service/request" and "x-again" not in request.headers:
            call = await boundary.call_of(request)
            again = Call(call.method, call.path, b"", {"x-again": "1"}, call.query)
            return boundary.response_of(await boundary.peer(self.env.SELF).call(again))
        call = await boundary.call_of(request)
        name = path.split("/")[1]
        try:
            return boundary.response_of(await getattr(self, name)(call))
        except ERRORS as error:
            return boundary.response_of(json_reply(type(error).__name__))

    async def service(self, call):
        return json_reply([call.method, call.path, call.query])

    async def variables(self, call):
        return json_reply([boundary.variable(self.env, name) for name in call.query.split(",")])

    async def call(self, call):
        return json_reply([call.method, call.path, call.query, call.body.decode(), call.headers["x-a"]])

    def _blob(self, call):
        key, offset, length, *etag = call.query.split(",")
        return key, int(offset), int(length), (etag[0] or None) if etag else None

    async def blob_head(self, call):
        info = await boundary.blobs(self.env.BUCKET).head(call.query)
        return json_reply([info.size, info.etag])

    async def blob_read(self, call):
        return json_reply((await boundary.blobs(self.env.BUCKET).read(*self._blob(call))).decode())

    async def blob_open(self, call):
        inflow = await boundary.blobs(self.env.BUCKET).open(*self._blob(call))
        return json_reply(inflow.length)

    async def inflow_read(self, call):
        inflow = await boundary.blobs(self.env.BUCKET).open(*self._blob(call))
        return json_reply((await inflow.read(inflow.length)).decode())

    async def inflow_pour(self, call):
        inflow = await boundary.blobs(self.env.BUCKET).open(*self._blob(call))
        await inflow.pour(View(100), 0, inflow.length)
        return json_reply("poured")

    async def inflow_order(self, call):
        inflow = await boundary.blobs(self.env.BUCKET).open(call.query, 0, 10240)
        return await in_order(inflow, View(10240))

    async def inflow_into(self, call):
        key, kind = call.query.split(",")
        inflow = await boundary.blobs(self.env.BUCKET).open(key, 3, 50)
        host = globals()[kind](14)
        await inflow.pour(host, 2, 10)
        await inflow.cancel()
        return json_reply(host.memory.decode())

    async def peer_call(self, call):
        reply = await boundary.peer(self.env.SELF).call(Call("POST", f"/{call.query}", b"echo", {"x-a": "1"}))
        return json_reply([reply.status, reply.bytes().decode(), reply.headers.get("x-got")])

    async def peer_open(self, call):
        reply, inflow = await boundary.peer(self.env.SELF).open(Call("GET", f"/{call.query}"))
        wanted = inflow.length if inflow.length >= 0 else 4
        wanted = 400 if call.query == "breaks" else wanted
        found = await inflow.read(wanted)
        await inflow.cancel()
        return json_reply([reply.status, inflow.length, found.decode()])

    async def echo(self, call):
        return Reply(200, call.body, {"x-got": call.headers["x-a"]})

    async def raises(self, call):
        raise RuntimeError("on purpose")

    async def breaks(self, call):
        async def pieces():
            yield b"one"
            raise RuntimeError("on purpose")

        return Reply(200, pieces())

    async def bytes(self, call):
        return Reply(200, b"one two 3")

    async def empty(self, call):
        return Reply(204)

    async def unsized(self, call):
        async def pieces():
            for piece in (b"one ", b"", b"two ", b"3"):
                yield piece

        return Reply(200, pieces())

    async def sized(self, call):
        return Reply(200, BytesInflow(b"one two 3"))

    async def joined(self, call):
        async def first():
            return BytesInflow(b"one ")

        async def second():
            return BytesInflow(b"two 3")

        return Reply(200, JoinedInflow([(4, first), (5, second)]))

    async def watched(self, call):
        return Reply(200, Watched())

    async def cancelled(self, call):
        return json_reply(cancelled)

    async def key_values(self, call):
        cache = boundary.key_values(self.env.CACHE)
        before = await cache.get("k")
        await cache.put("k", b"value", 60)
        now = (await cache.get("k")).decode()
        await cache.delete("k")
        await cache.delete("k")
        return json_reply([before, now, await cache.get("k")])
