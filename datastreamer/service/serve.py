"""`serve`: a stream is served from the caller's own event loop."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable

import trio

from datastreamer.http.options import HttpOptions
from datastreamer.http.ports import Ports
from datastreamer.http.serving import start_ports
from datastreamer.server.limits import Limits
from datastreamer.server.publish.policy import Publishing, check_client_tokens
from datastreamer.server.server import Server
from datastreamer.storage.stream import DataStream
from datastreamer.transport.listeners import Hosts, open_listeners
from datastreamer.transport.tls import ServerTLS


async def serve(
    stream: DataStream,
    *,
    host: Hosts = None,
    port: int | None = 6900,
    unix: str | os.PathLike[str] | None = None,
    listeners: Iterable[socket.socket] | None = None,
    tls: ServerTLS | None = None,
    limits: Limits | None = None,
    waker: int | None = None,
    publishing: Publishing | None = None,
    http: HttpOptions | None = None,
    stop: trio.Event | None = None,
    task_status: trio.TaskStatus[list[tuple[str, int]]] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Serve `stream` until `stop` is set or the task is cancelled:
    ``await nursery.start(partial(serve, stream, port=0))``.

    `nursery.start` returns the addresses, [(host, port), ...]. The server listens on every
    interface, IPv4 and IPv6, unless `host` names one or several; also on a Unix socket at the path
    `unix`, ("unix:PATH", 0), alone if `port` is None; or on `listeners` that are bound already.
    With `tls`, TCP connections use TLS only; `tls.reload()` reads its files again.

    The stream is open for writing (commits of this process, from any thread, are served at once)
    or with `follow=True`; the caller closes it. If the file of a stream with `follow=True` is
    replaced, that stream is closed and the one at its path is served. `limits` default to
    `Limits()`. `waker` is a non-blocking descriptor that becomes readable when another process
    has committed. `publishing` accepts publishers into the stream, which must be open for writing
    (``docs/PUBLISHING.md``). `http` answers HTTP on one more port (``docs/HTTP.md``).

    When `stop` is set, the server accepts no more connections, answers the commands that it has
    received, sends streaming clients the entries that are committed, and closes each connection
    when that is done, at the latest after the limits' `grace`; then `serve` returns. Cancelling
    `serve`, also meanwhile, closes the listeners and every connection at once.

    Raises `ListenFailed`, and `UsageError` if the limits' client token file has no tokens.
    """
    check_client_tokens(None if limits is None else limits.client_token_file)
    ports = Ports.open(
        lambda: open_listeners(host, port, unix) if listeners is None else listeners, http=http
    )
    server = Server(
        stream,
        limits=limits,
        waker=waker,
        tls=tls,
        publishing=publishing,
        other_connections=ports.http_clients,
    )
    async with trio.open_nursery() as nursery:
        numbers = stream.parts.counters.share() if ports.web else None
        await start_ports(nursery, server, ports, numbers)
        if stop is not None:
            nursery.start_soon(_finish_after, stop, server)
        await server.run(ports.clients, task_status=task_status)
        nursery.cancel_scope.cancel()


async def _finish_after(stop: trio.Event, server: Server) -> None:
    await stop.wait()
    await server.finish()
