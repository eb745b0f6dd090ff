"""Servers by name over memory streams, for clients of several: who is there, and when."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import trio

from datastreamer._codec import Entry
from datastreamer.errors import ConnectFailed
from datastreamer.protocol.retry import Backoff
from datastreamer.reassembly import Splitter, pack_message
from datastreamer.transport.endpoint import Endpoint
from tests.network.stub import Stub, serve_stream

Message = tuple[bytes, bytes]
Serve = Callable[[trio.abc.Stream], Any]
SOON = Backoff(0.1, 0.1)


def own(number: int) -> bytes:
    return b"%032d" % number


def messages_of(number: int, parts: int = 3) -> list[Message]:
    pairs = [(bytes([at]), b"part %d" % at) for at in range(parts)]
    return Splitter().split(own(number), {b"\x01" + own(number): pairs})


def entries(*messages: Message, first: int = 0) -> list[Entry]:
    return [Entry(first + at, 0x10, pack_message(*each)) for at, each in enumerate(messages)]


class Network:
    """Servers by host; each connection of one goes to the next of its list, the last stays."""

    def __init__(self, nursery: trio.Nursery) -> None:
        self.servers: dict[str, list[Serve | Exception | None]] = {}
        self.dialled: list[str] = []
        self.live: dict[str, list[tuple[Stub, trio.abc.Stream]]] = {}
        self._nursery = nursery

    def stub(self, host: str, *messages: Message, **habits: Any) -> Stub:
        """An honest server, which a test may go on with."""
        made = Stub(entries(*messages), **habits)

        async def serve(stream: trio.abc.Stream) -> None:
            fresh = Stub(made.entries, **habits)
            # The connection's own, with the entries of all.
            fresh.entries = made.entries
            live.append((fresh, stream))
            await serve_stream(fresh, stream)

        live = self.live[host] = []
        self.servers[host] = [serve]
        return made

    async def commit(self, host: str, stub: Stub, *messages: Message) -> None:
        """More entries, which streaming clients are sent."""
        stub.entries += entries(*messages, first=len(stub.entries))
        for each, stream in self.live[host]:
            if sent := each.pump():
                await stream.send_all(sent)

    async def cut(self, host: str) -> None:
        """End its connections."""
        while self.live[host]:
            await self.live[host].pop()[1].aclose()

    async def dial(self, host: str) -> trio.abc.Stream:
        self.dialled.append(host)
        await trio.lowlevel.checkpoint()
        servers = self.servers[host]
        serve = servers.pop(0) if len(servers) > 1 else servers[0]
        if serve is None:
            raise ConnectFailed(f"cannot connect to {host}")
        if isinstance(serve, Exception):
            raise serve
        ours, theirs = trio.testing.memory_stream_pair()
        self._nursery.start_soon(serve, theirs)
        return ours

    async def dial_endpoint(self, endpoint: Endpoint) -> trio.abc.Stream:
        """Takes the place of the Trio driver's `dial`."""
        return await self.dial(endpoint.host)


def hosts(*names: str) -> dict[str, tuple[str, int]]:
    return {name: (name, 1) for name in names}
