"""The life of a program that serves or relays, from its listeners to the signal that ends it.

For callers without an event loop, such as the command line.
"""

from __future__ import annotations

import contextlib
import logging
import signal
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from types import FrameType
from typing import TYPE_CHECKING

import trio

from datastreamer.archive.beside import archiving
from datastreamer.archive.options import ArchiveOptions
from datastreamer.client.server_peer import ServerPeer
from datastreamer.client.upstream import Upstream
from datastreamer.errors import ServerFailed, UsageError
from datastreamer.http.options import HttpOptions
from datastreamer.http.ports import Ports
from datastreamer.http.serving import start_ports
from datastreamer.server.file_watch import FileWatch
from datastreamer.server.limits import Limits
from datastreamer.server.publish.policy import Publishing
from datastreamer.server.server import Server
from datastreamer.server.ticks import next_tick
from datastreamer.service import systemd
from datastreamer.service.worker_pool import Workers
from datastreamer.service.worker_process import StartAbandoned
from datastreamer.storage.pages.restore import Peer
from datastreamer.storage.stream import DataStream
from datastreamer.transport.listeners import Hosts, name_of, open_listeners
from datastreamer.transport.tls import ServerTLS
from datastreamer.transport.tls_stream import reload_and_log, reload_on_hangup

if TYPE_CHECKING:
    from datastreamer.relay.relay import Relay

_log = logging.getLogger(__name__)

# Interval between checks that a worker serves.
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
    http: HttpOptions | None = None,
    workers: int = 1,
    publishing: Publishing | None = None,
    heal_from: Sequence[Upstream | Peer] = (),
    archive: ArchiveOptions | None = None,
    listening: Callable[[DataStream, list[tuple[str, int]]], None],
) -> str:
    """Serve a stream until SIGINT or SIGTERM; returns the signal's name. In the main thread.

    On the first signal the server stops accepting connections and gives clients the limits' grace
    period to receive committed entries; a second signal ends that at once; more are ignored while
    the stream is closed. On SIGHUP the files of `tls` are read again. `metrics` is host and port
    of the metrics endpoint, `http` the options of the HTTP port (`http/serving.py`).

    The addresses are bound before the stream is opened, so that a port in use leaves no trace on
    disk; listeners passed by systemd are used instead. systemd is notified when clients can
    connect, when the shutdown begins, and, with a watchdog, that the process is alive.
    `listening` is called with the addresses once clients can connect. Raises `ListenFailed` and
    what `open_stream` raises.

    `publishing` accepts publishers; then this process serves alone. `heal_from` are servers
    and other peers that damaged pages are restored from, with a single worker and if this process
    writes the stream. `archive` says where the stream is archived, if this process writes it.

    With more than one of `workers` this process keeps the stream open, with the writer's lock, and
    worker processes serve it (`worker_pool.py`); `ServerFailed` is raised if none of them can be
    kept alive, and `UsageError` if there are more workers than clients.
    """
    shutdown = Shutdown()

    async def serve(stream: DataStream) -> None:
        kind = stream.header.stream_type
        peers = [
            ServerPeer(each, stream_type=kind) if isinstance(each, Upstream) else each
            for each in heal_from
        ]
        server = Server(
            stream,
            limits=limits,
            tls=tls,
            publishing=publishing,
            heal_from=peers,
            other_connections=ports.http_clients,
        )
        async with shutdown.event_loop() as nursery:
            if shutdown.begun.is_set():
                return
            if tls is not None:
                await nursery.start(reload_on_hangup, tls)
            addresses = await nursery.start(server.run, ports.clients)
            counted = ports.metrics or ports.web
            numbers = stream.parts.counters.share() if counted else None
            await start_ports(nursery, server, ports, numbers)
            listening(stream, addresses)
            systemd.notify(systemd.READY)
            await shutdown.begun.wait()
            systemd.notify(systemd.STOPPING)
            await server.finish()

    async def supervise(many: Workers, stream: DataStream) -> None:
        async with shutdown.event_loop() as nursery:
            nursery.start_soon(_hurry_when_cancelled, many)
            if stream.follows:
                nursery.start_soon(_adopt_successors, many, stream)
            if tls is not None:
                await nursery.start(_reload_all_on_hangup, tls, many)
            if not shutdown.begun.is_set():
                listening(stream, [name_of(listener) for listener in ports.clients])
                systemd.notify(systemd.READY)
            while not shutdown.begun.is_set() and many.serving:
                with trio.move_on_at(next_tick(_LOOK_SECONDS)):
                    await shutdown.begun.wait()
            systemd.notify(systemd.STOPPING)
            # The system refuses new connections from now on, instead of queueing them.
            for listener in (*ports.clients, *ports.web):
                listener.close()
            with trio.CancelScope(shield=True):
                await trio.to_thread.run_sync(many.close)

    limits.share(0, workers)  # raises if they do not fit
    if publishing is not None and workers != 1:
        raise UsageError("publishing needs a single worker: the process that writes has to serve")
    ports = Ports.open(
        lambda: systemd.take_listeners() or open_listeners(host, port, unix), metrics, http
    )
    try:
        with shutdown.handling_signals(), open_stream() as stream, archiving(stream, archive):
            if workers == 1:
                trio.run(serve, stream)
            else:
                with contextlib.suppress(StartAbandoned):
                    many = Workers(
                        stream, ports, limits, tls, workers, lambda: bool(shutdown.caught)
                    )
                    try:
                        trio.run(supervise, many, stream)
                        if not shutdown.caught:
                            many.check()
                    finally:
                        many.close()
    finally:
        ports.close()
    return shutdown.name


def relay_until_signal(
    relay: Relay, listening: Callable[[Relay, list[tuple[str, int]]], None]
) -> str:
    """Relay until SIGINT or SIGTERM; returns the signal's name. In the main thread.

    Signals, systemd and `listening` as for `serve_until_signal`. Raises what `Relay.run` raises.
    """
    shutdown = Shutdown()

    async def main() -> None:
        async with shutdown.event_loop() as nursery:

            async def begin() -> None:
                addresses = await nursery.start(relay.run, listeners)
                listening(relay, addresses)
                systemd.notify(systemd.READY)

            if relay.tls is not None:
                await nursery.start(reload_on_hangup, relay.tls)
            # Without a file the start waits for an upstream, and a signal may arrive first.
            nursery.start_soon(begin)
            await shutdown.begun.wait()
            systemd.notify(systemd.STOPPING)
            await relay.finish()

    listeners = systemd.take_listeners() or open_listeners(*relay.listen)
    try:
        with shutdown.handling_signals():
            trio.run(main)
    finally:
        for listener in listeners:
            listener.close()
    return shutdown.name


class Shutdown:
    """The signals received so far, and the shutdown that they ask for."""

    def __init__(self) -> None:
        self.caught: list[int] = []
        self.begun = trio.Event()
        self._scope = trio.CancelScope()
        self._token: trio.lowlevel.TrioToken | None = None

    @property
    def name(self) -> str:
        """The name of the first signal."""
        return signal.Signals(self.caught[0]).name

    @contextlib.contextmanager
    def handling_signals(self) -> Iterator[None]:
        """Within this context signals raise no exception, which could arrive anywhere in the event
        loop."""
        before = [(number, signal.signal(number, self.note)) for number in _ENDING]
        if systemd.manager():
            # Its reload is a SIGHUP, which would end a server that has no TLS files to read again.
            before.append((signal.SIGHUP, signal.signal(signal.SIGHUP, signal.SIG_IGN)))
        try:
            yield
        finally:
            for number, handler in before:
                signal.signal(number, handler)

    @contextlib.asynccontextmanager
    async def event_loop(self) -> AsyncIterator[trio.Nursery]:
        """A nursery that is cancelled at the end of the block. Within the block, signals are
        delivered to the event loop, where a second one cancels the nursery, and systemd's watchdog
        is notified."""
        async with trio.open_nursery() as nursery:
            self._scope = nursery.cancel_scope
            self._token = trio.lowlevel.current_trio_token()
            self._deliver()
            seconds = systemd.watchdog_seconds()
            if seconds is not None:
                nursery.start_soon(_notify_watchdog, seconds)
            yield nursery
            # Trio closes this descriptor at the loop's end; a signal would be written to it.
            signal.set_wakeup_fd(-1)
            nursery.cancel_scope.cancel()

    def note(self, number: int, frame: FrameType | None) -> None:
        self.caught.append(number)
        if self._token is not None:
            # The loop may have ended; only closing the stream is left then.
            with contextlib.suppress(trio.RunFinishedError):
                self._token.run_sync_soon(self._deliver, idempotent=True)

    def _deliver(self) -> None:
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
    """If the file that the workers follow is replaced, keep the new one open for workers that are
    restarted, and close the old one."""
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
    """As `reload_on_hangup`, for every worker, if this process can read the files."""
    with trio.open_signal_receiver(signal.SIGHUP) as hangups:
        task_status.started()
        async for _ in hangups:
            if reload_and_log(tls):
                try:
                    await trio.to_thread.run_sync(workers.reload_tls)
                except ServerFailed as error:
                    _log.error("%s", error)


async def _notify_watchdog(seconds: float) -> None:
    """Notify systemd's watchdog every `seconds` seconds that the event loop runs."""
    while True:
        systemd.notify(systemd.WATCHDOG)
        await trio.sleep(seconds)
