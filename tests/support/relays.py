"""A slow or broken way to a port."""

import asyncio
import threading

__all__ = ["Relay"]


class _End(asyncio.Protocol):
    """One end of a connection that is passed on; `watch` says whether to cut it at what came."""

    def __init__(self, relay, *, watched):
        self.transport, self.other = None, None
        self._relay, self._watched = relay, watched
        self._kept = []

    def connection_made(self, transport):
        self.transport = transport
        self._relay.open.add(self)

    def meet(self, other):
        self.other, other.other = other, self
        if not self._relay.holds:
            self.pass_on()
            other.pass_on()

    def pass_on(self):
        """What came before there was another end, or while the relay held."""
        kept, self._kept = self._kept, []
        for data in kept:
            self.other.write(data)

    def data_received(self, data):
        if self._watched and self._relay.cut_at is not None and self._relay.cut_at in data:
            self._relay.cut_at = None
            self.cut()
            self.other.cut()
        elif self.other is None or self._relay.holds:
            self._kept.append(data)
        else:
            self.other.write(data)

    def connection_lost(self, error):
        self._relay.open.discard(self)
        if self.other is not None:
            self._relay.later(self.other.cut)

    def write(self, data):
        self._relay.later(lambda: self.transport.write(data))

    def cut(self):
        self.transport.abort()


class Relay:
    """Passes connections on to a port, with a delay each way, and cuts them on demand.

    Attributes:
        port: Where it listens.
        to: The port that it leads to.
        connections: How many have come.
        cut_at: Cuts the next connection in which the listening end says this.
        open: Ends of connections.
        holds: Whether nothing is passed on for a while.
    """

    def __init__(self, to, *, delay_seconds=0.0):
        self.to, self.connections, self.cut_at, self.open = to, 0, None, set()
        self.holds = False
        self._delay_seconds = delay_seconds
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._dialling = set()
        self._server = asyncio.run_coroutine_threadsafe(self._serve(), self._loop).result()
        self.port = self._server.sockets[0].getsockname()[1]

    def later(self, act):
        self._loop.call_later(self._delay_seconds, act)

    def hold(self):
        """Passes nothing on until `go_on`; connections are made and end as always."""
        self._loop.call_soon_threadsafe(setattr, self, "holds", True)

    def go_on(self):
        """Passes on what was held, and all that comes."""
        self._loop.call_soon_threadsafe(self._go_on)

    def cut(self):
        """Ends all connections that are open now."""
        self._loop.call_soon_threadsafe(self._cut)

    def close(self):
        async def end():
            self._server.close()
            for task in self._dialling:
                task.cancel()
            self._cut()
            await asyncio.sleep(0.01)

        asyncio.run_coroutine_threadsafe(end(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _go_on(self):
        self.holds = False
        for end in self.open:
            if end.other is not None:
                end.pass_on()

    def _cut(self):
        for end in [*self.open]:
            end.cut()

    async def _serve(self):
        return await self._loop.create_server(self._accept, "127.0.0.1", 0, backlog=1000)

    def _accept(self):
        self.connections += 1
        near = _End(self, watched=False)
        task = self._loop.create_task(self._dial(near))
        self._dialling.add(task)
        task.add_done_callback(self._dialling.discard)
        return near

    async def _dial(self, near):
        try:
            _, far = await self._loop.create_connection(
                lambda: _End(self, watched=True), "127.0.0.1", self.to
            )
        except OSError:
            near.cut()
        else:
            near.meet(far)
