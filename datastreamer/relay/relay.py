"""A relay: downloads a stream, stores it in a file and serves it.

Owns its file, its server and its end. `upstreams.py` copies the upstreams' stream.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Final, Literal

import trio

from datastreamer.archive.beside import archiving, restored
from datastreamer.archive.options import ArchiveOptions
from datastreamer.client.server_peer import ServerPeer
from datastreamer.client.upstream import Upstream, upstream_of
from datastreamer.errors import DatastreamerError, FileMissing, UsageError
from datastreamer.http.answers.reading import HttpSource
from datastreamer.http.options import HttpOptions
from datastreamer.http.ports import Listening, Ports
from datastreamer.http.serving import HttpPort, serve_metrics
from datastreamer.metrics.exposition import MetricsSnapshot
from datastreamer.metrics.writer_numbers import WriterNumbers, unready_archive
from datastreamer.protocol import exchanges
from datastreamer.protocol.arguments import check_number
from datastreamer.protocol.retry import BACKOFF, Backoff, check_seconds, check_waits
from datastreamer.relay.status import READY_LAG, gather, unready, upstreams
from datastreamer.relay.upstreams import Download
from datastreamer.server.limits import Limits
from datastreamer.server.publish.policy import check_client_tokens
from datastreamer.server.server import Server
from datastreamer.storage.disk.file_ops import Disk
from datastreamer.storage.stream import DataStream, PathLike
from datastreamer.storage.view import IndexName
from datastreamer.storage.write.sync_policy import SyncPolicy
from datastreamer.transport.listeners import Hosts, open_listeners
from datastreamer.transport.tls import ServerTLS

_log = logging.getLogger(__name__)

OnRewrite = Literal["stop", "follow"]

DEFAULT_PORT: Final = 7900
"""Default port of a relay."""


class Relay(Listening):
    """Downloads a stream, stores it in the file at `path`, and serves it.

    Run it with ``await nursery.start(relay.run)``; shut it down with ``await relay.finish()``.

    `upstreams` are tried in this order, each an `Upstream`, an address such as
    ``tcps://HOST:PORT``, or (host, port). When an earlier one is reachable again and holds as many
    entries, the relay returns to it. A new file becomes a copy of the upstream's stream, which must
    have `stream_type`; an existing file is compared with each upstream before entries are appended.

    `on_rewrite` decides what happens if an upstream holds other entries than the file, or has
    truncated some: with "stop" it is set aside, and while all are, `failure` is the reason why the
    download has stopped; with "follow" the file is truncated to the last entry in common. An
    upstream with another version, system id or stream type is always set aside. One that is set
    aside is compared again every six `look_seconds`, and used again once it holds the file's
    entries. The entries in the file are served all the time. If there are several upstreams, one
    that is only shorter is waited for; "follow" truncates if it gained no entry for `patience`
    seconds.

    `sync` is that of `DataStream`: with "commit" readers get entries that are on disk, and many
    commits share a sync. `host`, `port`, `unix`, `tls` and `limits` are those of `serve`;
    `timeout`, `heartbeat` and `backoff` those of `connect`. The upstreams' heads are queried every
    `look_seconds` seconds.

    `metrics_port`, `metrics_host` and `http` are those of `StreamServer`; /readyz answers 503 while
    the relay lacks more than `ready_lag` entries.

    `archive`: a relay without a file begins with the entries of this archive; with its mode
    "push" the relay also archives what it has.
    """

    def __init__(
        self,
        upstreams: Sequence[Upstream | tuple[str, int] | str],
        path: PathLike,
        *,
        host: Hosts = None,
        port: int | None = DEFAULT_PORT,
        unix: PathLike | None = None,
        tls: ServerTLS | None = None,
        limits: Limits | None = None,
        sync: SyncPolicy = "commit",
        index: IndexName = "lmdb",
        stream_type: int | None = None,
        on_rewrite: OnRewrite = "stop",
        patience: float = 30.0,
        timeout: float = exchanges.TIMEOUT,
        heartbeat: float | None = 10.0,
        backoff: Backoff = BACKOFF,
        look_seconds: float = 10.0,
        metrics_port: int | None = None,
        metrics_host: Hosts = None,
        ready_lag: int = READY_LAG,
        http: HttpOptions | None = None,
        archive: ArchiveOptions | None = None,
    ) -> None:
        if isinstance(upstreams, str):
            raise UsageError(f'upstreams is a list such as ["host:6900"], not {upstreams!r}')
        if not upstreams:
            raise UsageError("a relay needs a server to download from")
        if on_rewrite not in ("stop", "follow"):
            raise UsageError(f'on_rewrite is "stop" or "follow", not {on_rewrite!r}')
        sources = self._upstreams = [upstream_of(each) for each in upstreams]
        if stream_type is not None:
            check_number("stream_type", stream_type)
        check_waits(timeout, heartbeat=heartbeat)
        check_seconds("patience", patience, zero=True)
        check_seconds("look_seconds", look_seconds)
        check_client_tokens(None if limits is None else limits.client_token_file)
        names = Counter(each.name for each in sources)
        if twice := [name for name, count in names.items() if count > 1]:
            raise UsageError(
                f"{twice[0]} is given {names[twice[0]]} times as a server; give it once"
            )
        self.path = os.fspath(path)
        self._archive = archive
        self.stream: DataStream | None = None
        self.server: Server | None = None
        self.download = Download(
            sources,
            stream_type=stream_type,
            follow=on_rewrite == "follow",
            patience=patience,
            timeout=timeout,
            heartbeat=heartbeat,
            backoff=backoff,
            look_seconds=look_seconds,
        )
        self.listen = (host, port, unix)
        self.tls = tls
        self._addresses: list[tuple[str, int]] = []
        self._metrics = None if metrics_port is None else (metrics_host, metrics_port)
        self._http = http
        self._numbers: WriterNumbers | None = None
        self._ready_lag = ready_lag
        self._limits = limits
        self._sync: SyncPolicy = sync
        self._index = index
        # Of the file: another one in tests.
        self._disk: Disk | None = None
        self._stream_type = stream_type

    @property
    def total_entries(self) -> int:
        """The number of entries in the file, which are served."""
        return 0 if self.stream is None else self.stream.total_entries

    @property
    def lag(self) -> int | None:
        """The number of entries that the current upstream holds and the relay lacks; None without a
        current upstream."""
        return self.download.lag_behind(self.download.current)

    @property
    def caught_up(self) -> bool:
        """Whether it has a current upstream and had all of its entries."""
        return self.download.caught_up

    @property
    def failure(self) -> DatastreamerError | None:
        """Why the download has stopped; None while it continues."""
        return self.download.failure

    async def until(self, condition: Callable[[], bool]) -> None:
        """Return when `condition()` is true. It is evaluated now, and whenever an upstream is lost,
        found shorter, set aside or used; entries were appended, updated, compared or truncated;
        the relay has caught up, or has stopped the download."""
        await self.download.until(condition)

    # Life cycle.

    async def run(
        self,
        listeners: Iterable[socket.socket] | None = None,
        task_status: trio.TaskStatus[list[tuple[str, int]]] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """Relay until cancelled, or until `finish` is through.

        `nursery.start` returns the addresses it listens on when clients are served: at once if
        there is a file, else as soon as an upstream has sent its header. `listeners` replace
        `host`, `port` and `unix`, and are closed at the end.

        Raises `ListenFailed`, what `DataStream.open` raises, and `UsageError` after `finish`, also
        if `finish` was called during `run` before clients were served. Later failures of upstreams
        or of the disk are reported in the log and by `failure`.
        """
        sockets = list(open_listeners(*self.listen) if listeners is None else listeners)
        self.download.own = sockets
        ports = Ports(self._http, sockets, [], [])
        try:
            self._ensure_not_finished()
            ports = Ports.open(lambda: sockets, self._metrics, self._http)
            self._name_ports(ports)
            failure: DatastreamerError | None = None
            async with trio.open_nursery() as nursery:
                if ports.metrics:
                    await nursery.start(serve_metrics, ports.metrics, self._snapshot, self._unready)
                port = None
                if self._http is not None:
                    port = HttpPort(
                        HttpSource(
                            lambda: self.server,
                            self._snapshot,
                            self._unready,
                            self.path,
                            partial(upstreams, self.download),
                        ),
                        ports.web,
                        self._http,
                        tls=self.tls,
                        write_timeout=None if self._limits is None else self._limits.write_timeout,
                    )
                    await nursery.start(port.run)
                try:
                    await self._run(sockets, port, task_status)
                except DatastreamerError as error:
                    failure = error
                nursery.cancel_scope.cancel()
            if failure is not None:
                raise failure
        finally:
            ports.close()

    async def _run(
        self,
        listeners: list[socket.socket],
        port: HttpPort | None,
        task_status: trio.TaskStatus[list[tuple[str, int]]],
    ) -> None:
        await self._restore()
        stream = self.stream = await self._open()
        stream.parts.relay.leave_times()
        archiver = ExitStack()
        try:
            self._ensure_not_finished()
            archiver.enter_context(archiving(stream, self._archive))
            if self._metrics is not None or self._http is not None:
                self._numbers = stream.parts.counters.share()
            kind = stream.header.stream_type
            peers = [ServerPeer(each, stream_type=kind) for each in self._upstreams]
            self.server = Server(
                stream,
                limits=self._limits,
                tls=self.tls,
                heal_from=peers,
                other_connections=0 if self._http is None else self._http.max_clients,
            )
            if port is not None:
                port.attach(self.server)
            self.download.counts = self.server.counts
            async with trio.open_nursery() as nursery:
                self._addresses = await nursery.start(self.server.run, listeners)
                task_status.started(self._addresses)
                nursery.start_soon(self.download.run, stream)
        finally:
            with trio.CancelScope(shield=True):
                await trio.to_thread.run_sync(archiver.close)
                await trio.to_thread.run_sync(stream.close)

    async def _restore(self) -> None:
        """Make the file from the archive, if there is none."""
        if self._archive is not None:
            abandoned = threading.Event()
            made = partial(restored, self._archive, self.path, abandoned)
            try:
                await trio.to_thread.run_sync(made, abandon_on_cancel=True)
            finally:
                abandoned.set()

    def _ensure_not_finished(self) -> None:
        if self.download.scope.cancel_called:
            raise UsageError("this relay was finished before it served; create another")

    async def finish(self, grace: float | None = None) -> bool:
        """Stop the download, then shut down: clients have `grace` seconds (None: the limits') to
        receive the entries in the file. True if every client received everything. `run` returns
        then."""
        if grace is not None:
            check_seconds("grace", grace, zero=True)
        self.download.scope.cancel()
        if self.server is None or self.stream is None:
            return True
        try:
            await trio.to_thread.run_sync(self.stream.sync)
        except DatastreamerError as error:
            if not self.stream.closed:
                _log.error("%s", error)
        # An earlier call may have ended it.
        return self.stream.closed or await self.server.finish(grace)

    async def _snapshot(self, *, limit: int) -> MetricsSnapshot:
        return await gather(self.download, self.server, self._numbers, limit)

    def _unready(self) -> str:
        if self.stream is None and self._archive is not None:
            return f"the file is made from {self._archive.url}, or no upstream has answered yet"
        why = unready(self.download, self.server, self._ready_lag)
        return why or unready_archive(self._numbers)

    async def _open(self) -> DataStream:
        def existing() -> DataStream:
            return DataStream.open(
                self.path,
                stream_type=self._stream_type,
                sync=self._sync,
                index=self._index,
                disk=self._disk,
            )

        def new() -> DataStream:
            return DataStream.create(
                self.path,
                version=header.version,
                system_id=header.system_id,
                stream_type=header.stream_type,
                sync=self._sync,
                index=self._index,
                disk=self._disk,
            )

        try:
            return await trio.to_thread.run_sync(existing)
        except FileMissing:
            await trio.to_thread.run_sync(_check_folder, self.path)
            header = await self.download.first_header(self.path)
        return await trio.to_thread.run_sync(new)


def _check_folder(path: str) -> None:
    """Raises `FileMissing` before any upstream is queried."""
    if not os.path.isdir(os.path.dirname(os.path.abspath(path))):
        raise FileMissing(path, "no such folder")
