"""Programs that serve: from the first listener to the signal that ends them.

For callers that know no event loop, the command line above all.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from functools import partial

import trio

from datastreamer.net.listen import open_listeners
from datastreamer.net.server import serve
from datastreamer.storage.stream import DataStream


def serve_until_signal(
    open_stream: Callable[[], DataStream],
    *,
    host: str | None,
    port: int,
    max_clients: int,
    listening: Callable[[DataStream, list[tuple[str, int]]], None],
) -> str:
    """Serve a stream until SIGINT or SIGTERM; gives the signal's name. In the main thread.

    The addresses are bound before the stream is opened, so that a port in use leaves no
    trace on disk; the stream is closed at the end. `listening` is told the addresses once
    clients can connect. Raises `ListenFailed` and what `open_stream` raises.
    """
    listeners = open_listeners(host, port)
    try:
        stream = open_stream()
    except BaseException:
        for listener in listeners:
            listener.close()
        raise

    async def main() -> str:
        with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
            async with trio.open_nursery() as nursery:
                serving = partial(serve, stream, listeners=listeners, max_clients=max_clients)
                listening(stream, await nursery.start(serving))
                number = await anext(signals)
                nursery.cancel_scope.cancel()
        return signal.Signals(number).name

    with stream:
        return trio.run(main)
