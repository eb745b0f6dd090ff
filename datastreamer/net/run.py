"""Programs that serve: from the first listener to the signal that ends them.

For callers that know no event loop, the command line above all.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable
from types import FrameType

import trio

from datastreamer.net import systemd
from datastreamer.net.limits import Limits
from datastreamer.net.listen import Hosts, metrics_listeners, open_listeners
from datastreamer.net.scrape import serve_metrics_of
from datastreamer.net.secure import reload_on_hangup
from datastreamer.net.server import Server
from datastreamer.net.tls import ServerTLS
from datastreamer.storage.stream import DataStream

_ENDING = (signal.SIGINT, signal.SIGTERM)


def serve_until_signal(
    open_stream: Callable[[], DataStream],
    *,
    host: Hosts,
    port: int | None,
    unix: str | None = None,
    tls: ServerTLS | None = None,
    limits: Limits,
    metrics: tuple[Hosts, int] | None = None,
    listening: Callable[[DataStream, list[tuple[str, int]]], None],
) -> str:
    """Serve a stream until SIGINT or SIGTERM; gives the signal's name. In the main thread.

    The signal lets nobody in any more and gives clients the limits' grace to take what is
    committed; a second one ends that at once; more are ignored, while the stream is closed.
    SIGHUP has the files of `tls` read again. `metrics` is host and port for those who ask for
    metrics (`scrape.py`).

    The addresses are bound before the stream is opened, so that a port in use leaves no
    trace on disk; where systemd hands listeners down, these are used. systemd is told when
    clients can connect, when the end begins, and between that the process is alive, where it
    asks for that. `listening` is told the addresses once clients can connect. Raises
    `ListenFailed` and what `open_stream` raises.
    """
    ending = _Ending()

    async def main(stream: DataStream) -> None:
        server = Server(stream, limits=limits, tls=tls)
        async with trio.open_nursery() as nursery:
            ending.enter_loop(nursery.cancel_scope)
            if ending.begun.is_set():
                return
            if tls is not None:
                await nursery.start(reload_on_hangup, tls)
            addresses = await nursery.start(server.run, listeners)
            if asked:
                await nursery.start(serve_metrics_of, server, asked, stream.share_numbers())
            seconds = systemd.watchdog_seconds()
            if seconds is not None:
                nursery.start_soon(_show_life, seconds)
            listening(stream, addresses)
            systemd.notify(systemd.READY)
            await ending.begun.wait()
            systemd.notify(systemd.STOPPING)
            await server.finish()
            nursery.cancel_scope.cancel()

    asked = [] if metrics is None else metrics_listeners(*metrics)
    try:
        listeners = systemd.take_listeners() or open_listeners(host, port, unix)
    except BaseException:
        for listener in asked:
            listener.close()
        raise
    # No signal is raised as an exception where it happens to arrive: that may be anywhere
    # in the event loop.
    before = [(number, signal.signal(number, ending.note)) for number in _ENDING]
    try:
        with open_stream() as stream:
            trio.run(main, stream)
    finally:
        for number, handler in before:
            signal.signal(number, handler)
        for listener in (*listeners, *asked):
            listener.close()
    return signal.Signals(ending.caught[0]).name


class _Ending:
    """What signals have asked for, noted wherever they arrive."""

    def __init__(self) -> None:
        self.caught: list[int] = []
        self.begun = trio.Event()
        self._scope = trio.CancelScope()
        self._token: trio.lowlevel.TrioToken | None = None

    def enter_loop(self, scope: trio.CancelScope) -> None:
        """From now on a signal is passed on to the loop; `scope` is what the second ends."""
        self._scope = scope
        self._token = trio.lowlevel.current_trio_token()
        self._pass_on()

    def note(self, number: int, frame: FrameType | None) -> None:
        self.caught.append(number)
        if self._token is not None:
            # The loop may be over already; what is left to do is the close.
            with contextlib.suppress(trio.RunFinishedError):
                self._token.run_sync_soon(self._pass_on, idempotent=True)

    def _pass_on(self) -> None:
        if self.caught:
            self.begun.set()
        if len(self.caught) > 1:
            self._scope.cancel()


async def _show_life(seconds: float) -> None:
    while True:
        systemd.notify(systemd.WATCHDOG)
        await trio.sleep(seconds)
