"""A server for synchronous programs that write a stream, such as a sequencer.

The caller's process writes. Child processes (`worker_pool.py`), one by default, follow the file and
serve it, so that a writer that keeps its interpreter busy does not delay clients; or a thread of
the caller's process does. Owns the listeners.
"""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from types import TracebackType

from datastreamer.archive.beside import archiving
from datastreamer.archive.options import ArchiveOptions
from datastreamer.errors import ServerFailed, StreamClosed, UsageError
from datastreamer.http.options import HttpOptions
from datastreamer.http.ports import Listening, Ports
from datastreamer.protocol.retry import check_seconds
from datastreamer.server.limits import Limits
from datastreamer.server.publish.policy import Publishing, check_client_tokens
from datastreamer.service.worker_pool import Workers
from datastreamer.storage.stream import DataStream, PathLike
from datastreamer.storage.view import IndexName
from datastreamer.storage.write.atomic_op import raised_after
from datastreamer.storage.write.sync_policy import SyncPolicy
from datastreamer.transport.listeners import Hosts, address_of, name_of, open_listeners
from datastreamer.transport.tls import ServerTLS

_log = logging.getLogger(__name__)

_open_servers: weakref.WeakSet[StreamServer] = weakref.WeakSet()


class StreamServer(Listening):
    """A stream that is open for writing, and its server.

    ``with StreamServer(path, port=6900) as server:
    with server.stream.atomic_op() as op: ...``

    If there is no file, one is created with `version`, `system_id` and `stream_type`; with
    `create=False`, `FileMissing` is raised. `host`, `port`, `unix`, `tls` and `limits` are those of
    `serve`; `sync` and `index` those of `DataStream`.

    `workers` is the number of serving processes: more of them have a higher throughput, up to the
    machine's cores. They accept from the same listeners and share the limits. `in_process` serves
    from a thread of this process: for tests, and for writers that are mostly idle.

    `publishing` accepts publishers into the stream (``docs/PUBLISHING.md``) and needs
    `in_process`; while a publisher has the lease, this process cannot start an operation.

    `metrics_port` is the port of the Prometheus endpoint (0: a free port, see `metrics_port`), on
    `metrics_host` (None: 127.0.0.1); needs the extra ``metrics``. `http` answers HTTP on one more
    port (``docs/HTTP.md``). `archive` says where this process archives the stream
    (``docs/ARCHIVE.md``).

    Raises `ListenFailed`, `UsageError` and what `DataStream.open` raises. If a serving process
    dies, its clients are disconnected and it is restarted; if all processes die repeatedly, the
    next commit raises `ServerFailed` and writes nothing.
    """

    def __init__(
        self,
        path: PathLike,
        *,
        host: Hosts = None,
        port: int | None = 6900,
        unix: PathLike | None = None,
        tls: ServerTLS | None = None,
        create: bool = True,
        version: int = 1,
        system_id: int = 0,
        stream_type: int = 1,
        sync: SyncPolicy = "commit",
        index: IndexName = "lmdb",
        limits: Limits | None = None,
        workers: int = 1,
        in_process: bool = False,
        metrics_port: int | None = None,
        metrics_host: Hosts = None,
        publishing: Publishing | None = None,
        http: HttpOptions | None = None,
        archive: ArchiveOptions | None = None,
    ) -> None:
        self._closed = False
        if publishing is not None and not in_process:
            raise UsageError(
                "publishing needs in_process=True: the process that writes has to serve"
            )
        if in_process and workers != 1:
            raise UsageError(
                "workers are processes, but in_process serves from one thread; set one of them"
            )
        limits = limits or Limits()
        check_client_tokens(limits.client_token_file)
        ports = self._ports = Ports.open(
            lambda: open_listeners(host, port, unix),
            None if metrics_port is None else (metrics_host, metrics_port),
            http,
        )
        self._addresses = [name_of(listener) for listener in ports.clients]
        self._name_ports(ports)
        self._tls = tls
        try:
            if create:
                self.stream = DataStream.open_or_create(
                    path,
                    version=version,
                    system_id=system_id,
                    stream_type=stream_type,
                    sync=sync,
                    index=index,
                )
            else:
                self.stream = DataStream.open(path, stream_type=stream_type, sync=sync, index=index)
            try:
                self._serving: _ServerThread | Workers = (
                    _ServerThread(self.stream, ports, limits, tls, publishing)
                    if in_process
                    else Workers(self.stream, ports, limits, tls, workers)
                )
                try:
                    self._archiver = ExitStack()
                    self._archiver.enter_context(archiving(self.stream, archive))
                except BaseException:
                    self._serving.close()
                    raise
            except BaseException:
                self.stream.close()
                raise
        except BaseException:
            ports.close()
            raise
        self.stream.commit_guard = self._serving.check
        _open_servers.add(self)

    def __repr__(self) -> str:
        served = ", ".join(map(address_of, self._addresses))
        state = "closed" if self._closed else f"on {served}"
        return f"<{type(self).__name__} of {os.fspath(self.stream.path)!r}: {state}>"

    def drain(self, timeout: float | None = None) -> bool:
        """Wait until every streaming client was sent all committed entries.

        False if that takes more than `timeout` seconds (None: the limits' `grace`).
        """
        if timeout is not None:
            check_seconds("timeout", timeout, zero=True)
        if self._closed:
            raise StreamClosed("the server is closed")
        return self._serving.drain(timeout)

    def reload_tls(self) -> None:
        """Read the files of `tls` again, for connections from now on.

        Raises `BadCertificate` (then the files read before stay in use), and `ServerFailed` if a
        serving process does not confirm that it has read them.
        """
        if self._closed:
            raise StreamClosed("the server is closed")
        if self._tls is not None:
            self._tls.reload()
            self._serving.reload_tls()

    def close(self) -> None:
        """Stop accepting, send committed entries to clients within the limits' `grace`, then close
        the server and the stream. Raises what closing the stream raises."""
        self.__exit__(None, None, None)

    def _abandon(self) -> None:
        """In the child of a fork: close copies of the parent's descriptors, and nothing else."""
        if not self._closed:
            self._closed = True
            self._serving.abandon()
            self._ports.close()

    def __enter__(self) -> StreamServer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._closed:
            return
        self._closed = True
        with raised_after(error):
            try:
                self._serving.close()
            finally:
                self._ports.close()
                self._archiver.close()
                self.stream.__exit__(kind, error, trace)


class _ServerThread:
    """Serves from a thread of this process."""

    def __init__(
        self,
        stream: DataStream,
        ports: Ports,
        limits: Limits,
        tls: ServerTLS | None,
        publishing: Publishing | None,
    ) -> None:
        import trio

        from datastreamer.http.serving import start_ports
        from datastreamer.server.server import Server
        from datastreamer.transport.trio_thread import TrioThread

        self._grace = limits.grace
        self._server = server = Server(
            stream,
            limits=limits,
            tls=tls,
            publishing=publishing,
            other_connections=ports.http_clients,
        )
        # The event loop closes its listeners: it gets copies.
        copies = self._copies = ports.copies()

        async def main(started: Callable[[], None]) -> None:
            try:
                async with trio.open_nursery() as nursery:
                    await nursery.start(server.run, copies.clients)
                    counted = copies.metrics or copies.web
                    numbers = stream.parts.counters.share() if counted else None
                    await start_ports(nursery, server, copies, numbers)
                    started()
            except Exception:
                _log.exception("the server has failed")
                raise

        self._thread = TrioThread(f"server of {stream.path}", main)
        self.check()

    def check(self) -> None:
        failure = self._thread.failure
        if failure is not None:
            reason = str(failure) or type(failure).__name__
            raise ServerFailed(f"the server has failed: {reason}") from failure

    def drain(self, timeout: float | None) -> bool:
        return self._ask(self._server.drain, self._grace if timeout is None else timeout)

    def _ask(self, what: Callable[[float], Awaitable[bool]], seconds: float) -> bool:
        import trio

        try:
            return self._thread.call(lambda: what(seconds))
        except (trio.RunFinishedError, trio.Cancelled):
            return False

    def reload_tls(self) -> None:
        """The server uses the same object, which was reloaded."""

    def close(self) -> None:
        if self._thread.failure is None:
            self._ask(self._server.finish, self._grace)
        self._thread.close()

    def abandon(self) -> None:
        self._copies.close()


def _abandon_all() -> None:
    for server in list(_open_servers):
        server._abandon()


os.register_at_fork(after_in_child=_abandon_all)


__all__ = ["StreamServer"]
