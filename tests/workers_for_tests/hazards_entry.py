"""Does what has gone wrong on the real platform elsewhere, through the real boundary."""

import asyncio
import hashlib

import boundary_entry
from boundary_entry import cancelled, in_order

import boundary
from protocol.calls import Call, Reply, ShortBody, json_reply
from protocol.deadlines import DeadlineExceeded, within

MIB = 1 << 20
PIECE = 256 * 1024
notes = []


class Keeper(boundary_entry.Keeper):
    """The same object, which also does what may only be done in one."""

    async def fetch(self, request):
        name = request.url.partition("?")[0].rpartition("/")[2]
        if not hasattr(self, f"do_{name}"):
            return await super().fetch(request)
        call = await boundary.call_of(request)
        return boundary.response_of(await getattr(self, f"do_{name}")(call))

    async def do_notes(self, call):
        return json_reply([*cancelled, *notes])

    async def do_pause(self, call):
        await asyncio.sleep(0.02)
        return json_reply(None)

    async def do_watched(self, call):
        return Reply(200, boundary_entry.Watched())

    async def do_background(self, call):
        """Work that outlives its answer, and the `finally` of it."""

        async def work():
            try:
                await asyncio.sleep(0.05)
                await boundary.storage(self.ctx).put("x", b"1")
                notes.append("done")
            finally:
                notes.append("at last")

        boundary.background(self.ctx)(work())
        return json_reply("answered")

    async def do_given_up(self, call):
        """Calls that nobody waits for any more."""
        peer = boundary.peer(self.env.SELF)

        async def all_of_them():
            await asyncio.gather(*(peer.call(Call("GET", "/slow")) for _ in range(3)))

        try:
            await within(0.05, all_of_them(), "slow calls", boundary.background(self.ctx))
        except DeadlineExceeded as error:
            return json_reply(type(error).__name__)
        return json_reply("in time")

    async def do_hold(self, call):
        """A body that is kept, and read by two while it arrives; the second leaves in the middle."""
        key, length, breaks = call.query.split(",")
        length = int(length)
        inflow = await boundary.blobs(self.env.BUCKET).open(key, 0, length // 2 if int(breaks) else length)
        held, arrival = boundary.hold(inflow, length)
        first, second = held.part(0, length), held.part(length - 10, length)
        boundary.background(self.ctx)(self.arrive(arrival))
        said = []
        for part, wanted in ((first, length), (second, 10), (second, 10)):
            try:
                found = await part.read(wanted)
                said.append(len(found) == wanted)
            except ShortBody:
                said.append("ShortBody")
        await first.cancel()
        await second.cancel()
        held.drop()
        return json_reply(said)

    async def arrive(self, arrival):
        try:
            await arrival
        except ShortBody:
            notes.append("broken off")


class Default(boundary_entry.Default):
    """`/method?arguments`."""

    async def slow(self, call):
        await asyncio.sleep(0.4)
        return json_reply("slow")

    async def _opened(self, key, length):
        return await boundary.engine(32 * MIB), await boundary.blobs(self.env.BUCKET).open(key, 0, length)

    async def engine_order(self, call):
        host, inflow = await self._opened(call.query, 10240)
        return await in_order(inflow, host)

    async def engine_pour(self, call):
        key, length = call.query.split(",")
        length = int(length)
        host, inflow = await self._opened(key, length)
        host.call("engine_reserve_arena", length)
        before = boundary.memory()
        for at in range(0, length, 4 * MIB):
            await inflow.pour(host, at, min(4 * MIB, length - at))
        await inflow.cancel()
        after = boundary.memory()
        digest = hashlib.md5()
        for at in range(0, length, PIECE):
            digest.update(host.read(at, min(PIECE, length - at)))
        return json_reply([before, after, digest.hexdigest()])
