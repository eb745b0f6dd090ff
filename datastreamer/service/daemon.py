"""Programs that serve: from the first listener to the signal that ends them.

For callers that know no event loop, the command line above all.
"""

from __future__ import annotations

import contextlib
import logging
import signal
from collections.abc import Callable, Iterator
from types import FrameType

import trio

from datastreamer.errors import ServerFailed, UsageError
from datastreamer.server.file_watch import FileWatch
from datastreamer.server.limits import Limits
from datastreamer.server.metrics_http import serve_metrics_of
from datastreamer.server.publish.policy import Publishing
from datastreamer.server.server import Server
from datastreamer.service import systemd
from datastreamer.service.worker_pool import Workers
from datastreamer.service.worker_process import Unwanted
from datastreamer.storage.stream import DataStream
from datastreamer.transport.listeners import Hosts, metrics_listeners, name_of, open_listeners
from datastreamer.transport.tls import ServerTLS
from datastreamer.transport.tls_stream import reload_and_log, reload_on_hangup

_log = logging.getLogger(__name__)

# How often it is looked whether anybody serves.
_LOOK_SECONDS = 1.0
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
    workers: int = 1,
    publishing: Publishing | None = None,
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

    `publishing` says who may publish into the stream; this process serves it then, and no others.

    With more than one of `workers` this process keeps the stream open, the writer's lock with
    it, and so many others serve it (`workers.py`); `ServerFailed` is raised where none of them
    can be kept alive, and `UsageError` where there are more of them than clients.
    """
    ending = Shutdown()

    async def main(stream: DataStream) -> None:
        server = Server(stream, limits=limits, tls=tls, publishing=publishing)
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
                nursery.start_soon(show_life, seconds)
            listening(stream, addresses)
            systemd.notify(systemd.READY)
            await ending.begun.wait()
            systemd.notify(systemd.STOPPING)
            await server.finish()
            nursery.cancel_scope.cancel()

    async def look_after(many: Workers, stream: DataStream) -> None:
        async with trio.open_nursery() as nursery:
            ending.enter_loop(nursery.cancel_scope)
            nursery.start_soon(_hurry_when_cancelled, many)
            if stream.follows:
                nursery.start_soon(_adopt_successors, many, stream)
            if tls is not None:
                await nursery.start(_reload_all_on_hangup, tls, many)
            seconds = systemd.watchdog_seconds()
            if seconds is not None:
                nursery.start_soon(show_life, seconds)
            if not ending.begun.is_set():
                listening(stream, [name_of(listener) for listener in listeners])
                systemd.notify(systemd.READY)
            while not ending.begun.is_set() and many.serving:
                with trio.move_on_after(_LOOK_SECONDS):
                    await ending.begun.wait()
            systemd.notify(systemd.STOPPING)
            # Whoever comes now is refused by the system, and does not wait for nobody.
            for listener in listeners:
                listener.close()
            with trio.CancelScope(shield=True):
                await trio.to_thread.run_sync(many.close)
            nursery.cancel_scope.cancel()

    limits.share(0, workers)  # whether they go together
    if publishing is not None and workers != 1:
        raise UsageError("publishing needs the one process that writes to serve: one worker")
    asked = [] if metrics is None else metrics_listeners(*metrics)
    try:
        listeners = systemd.take_listeners() or open_listeners(host, port, unix)
    except BaseException:
        for listener in asked:
            listener.close()
        raise
    try:
        with ending.noted(), open_stream() as stream:
            if workers == 1:
                trio.run(main, stream)
            else:
                with contextlib.suppress(Unwanted):
                    many = Workers(
                        stream, listeners, limits, tls, workers, asked, lambda: bool(ending.caught)
                    )
                    try:
                        trio.run(look_after, many, stream)
                        if not ending.caught:
                            many.check()
                    finally:
                        many.close()
    finally:
        for listener in (*listeners, *asked):
            listener.close()
    return ending.name


class Shutdown:
    """What signals have asked for, noted wherever they arrive."""

    def __init__(self) -> None:
        self.caught: list[int] = []
        self.begun = trio.Event()
        self._scope = trio.CancelScope()
        self._token: trio.lowlevel.TrioToken | None = None

    @property
    def name(self) -> str:
        """The first signal's."""
        return signal.Signals(self.caught[0]).name

    @contextlib.contextmanager
    def noted(self) -> Iterator[None]:
        """Within this, no signal is raised as an exception where it happens to arrive: that
        may be anywhere in the event loop."""
        before = [(number, signal.signal(number, self.note)) for number in _ENDING]
        try:
            yield
        finally:
            for number, handler in before:
                signal.signal(number, handler)

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


async def _hurry_when_cancelled(workers: Workers) -> None:
    try:
        await trio.sleep_forever()
    finally:
        workers.hurry()


async def _adopt_successors(workers: Workers, stream: DataStream) -> None:
    """Where the file that the workers follow is replaced, hold the new one open for those that
    are started again, and the old one no longer."""
    watch = FileWatch(stream, logs=False)
    try:
        while True:
            await watch.until_lost()
            successor = await watch.successor()
            if successor is not None:
                before = watch.stream
                watch.adopt(successor)
                with trio.CancelScope(shield=True):
                    await trio.to_thread.run_sync(workers.adopt, successor)
                    await trio.to_thread.run_sync(before.close)
    finally:
        watch.stream.close()


async def _reload_all_on_hangup(
    tls: ServerTLS, workers: Workers, task_status: trio.TaskStatus[None]
) -> None:
    """As `reload_on_hangup`, for every worker; where this process can read the files."""
    with trio.open_signal_receiver(signal.SIGHUP) as hangups:
        task_status.started()
        async for _ in hangups:
            if reload_and_log(tls):
                try:
                    await trio.to_thread.run_sync(workers.reload_tls)
                except ServerFailed as error:
                    _log.error("%s", error)


async def show_life(seconds: float) -> None:
    """Tell systemd every so many seconds that the loop turns."""
    while True:
        systemd.notify(systemd.WATCHDOG)
        await trio.sleep(seconds)
