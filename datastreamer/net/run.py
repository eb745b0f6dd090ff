"""Programs that serve: from the first listener to the signal that ends them.

For callers that know no event loop, the command line above all.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable
from functools import partial
from types import FrameType

import trio

from datastreamer.net.listen import Hosts, open_listeners
from datastreamer.net.secure import reload_on_hangup
from datastreamer.net.server import serve
from datastreamer.net.tls import ServerTLS
from datastreamer.storage.stream import DataStream

_ENDING = (signal.SIGINT, signal.SIGTERM)


def _overhear(number: int, frame: FrameType | None) -> None:
    pass


def serve_until_signal(
    open_stream: Callable[[], DataStream],
    *,
    host: Hosts,
    port: int | None,
    unix: str | None = None,
    tls: ServerTLS | None = None,
    max_clients: int,
    listening: Callable[[DataStream, list[tuple[str, int]]], None],
) -> str:
    """Serve a stream until SIGINT or SIGTERM; gives the signal's name. In the main thread.

    The addresses are bound before the stream is opened, so that a port in use leaves no
    trace on disk; the stream is closed at the end. `listening` is told the addresses once
    clients can connect. A second signal is ignored; SIGHUP has the files of `tls` read
    again. Raises `ListenFailed` and
    what `open_stream` raises.
    """
    caught: list[int] = []
    cancel: Callable[[], None] | None = None

    def note(number: int, frame: FrameType | None) -> None:
        for each in _ENDING:
            # The close takes its time, and is not disturbed. (SIG_IGN would: Python raises at
            # a signal that arrives while that is being set.)
            signal.signal(each, _overhear)
        caught.append(number)
        if cancel is not None:
            # The loop may be over already; what is left to do is the close.
            with contextlib.suppress(trio.RunFinishedError):
                cancel()

    async def main(stream: DataStream) -> None:
        nonlocal cancel
        token = trio.lowlevel.current_trio_token()
        async with trio.open_nursery() as nursery:
            cancel = partial(token.run_sync_soon, nursery.cancel_scope.cancel, idempotent=True)
            if caught:
                return
            if tls is not None:
                await nursery.start(reload_on_hangup, tls)
            serving = partial(serve, stream, listeners=listeners, max_clients=max_clients, tls=tls)
            listening(stream, await nursery.start(serving))

    listeners = open_listeners(host, port, unix)
    # No signal is raised as an exception where it happens to arrive: that may be anywhere
    # in the event loop.
    before = [(number, signal.signal(number, note)) for number in _ENDING]
    try:
        with open_stream() as stream:
            trio.run(main, stream)
    finally:
        for number, handler in before:
            signal.signal(number, handler)
        for listener in listeners:
            listener.close()
    return signal.Signals(caught[0]).name
