"""A server with an HTTP port, in the test's own event loop."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import trio

from datastreamer.http.options import HttpOptions
from datastreamer.http.ports import Ports
from datastreamer.http.serving import start_ports
from datastreamer.server.limits import Limits
from datastreamer.server.server import Server
from datastreamer.storage.stream import DataStream
from datastreamer.transport.listeners import open_listeners
from datastreamer.transport.tls import ServerTLS

PATIENCE = 30.0


class Web:
    """A running server: `port` answers HTTP, `address` the stream protocol."""

    def __init__(self, server: Server, port: int, address: tuple[str, int]) -> None:
        self.server = server
        self.port = port
        self.address = address
        self.url = f"http://127.0.0.1:{port}"


@asynccontextmanager
async def serving(
    stream: DataStream,
    *,
    tls: ServerTLS | None = None,
    write_timeout: Any = None,
    patience: float = PATIENCE,
    **options: Any,
) -> AsyncIterator[Web]:
    """The server and its HTTP port, until the block ends."""
    made = HttpOptions(port=0, **options)
    ports = Ports.open(lambda: open_listeners("127.0.0.1", 0), http=made)
    server = Server(stream, limits=Limits(write_timeout=write_timeout), tls=tls)
    with trio.fail_after(patience):
        async with trio.open_nursery() as nursery:
            [address] = await nursery.start(server.run, ports.clients)
            port = ports.web[0].getsockname()[1]
            await start_ports(nursery, server, ports)
            yield Web(server, port, address)
            nursery.cancel_scope.cancel()
    assert not server.other_readers
