"""A server for plain synchronous code: what a sequencer embeds.

The caller's process writes. Child processes (`workers.py`), one unless told otherwise,
follow the file and serve it, so that a writer that keeps its interpreter busy moves no
client's latency; or a thread of the caller's, where that is asked for. Owns the listeners.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import weakref
from collections.abc import Awaitable, Callable
from types import TracebackType

from datastreamer.errors import ServerFailed, StreamClosed, UsageError
from datastreamer.protocol.retry import check_seconds
from datastreamer.server.limits import Limits
from datastreamer.server.publish.policy import Publishing, check_client_tokens
from datastreamer.service.worker_pool import Workers
from datastreamer.storage.stream import DataStream, PathLike
from datastreamer.storage.view import IndexName
from datastreamer.storage.write.commit_doubt import raised_after
from datastreamer.storage.write.durability import SyncPolicy
from datastreamer.transport.listeners import Hosts, metrics_listeners, name_of, open_listeners
from datastreamer.transport.tls import ServerTLS

_log = logging.getLogger(__name__)

_open_servers: weakref.WeakSet[StreamServer] = weakref.WeakSet()


class StreamServer:
    """A stream that is open for writing, and a server of it.

    ``with StreamServer(path, port=6900) as server:
    with server.stream.atomic_op() as op: ...``

    `create` says what to do where there is no file: make one with `version`,
    `system_id` and `stream_type` (the default), or raise `FileMissing`. `host`, `port`,
    `unix`, `tls` and `limits` are those of `serve`; `sync` and `index` those of
    `DataStream`.

    `workers` is how many processes serve: more of them send more at a time, up to the
    machine's cores. They accept from the same listeners and share `limits`' clients.
    `in_process` serves from a thread of this process: for tests, and for writers that
    are mostly idle.

    `publishing` lets a source elsewhere publish into the stream (``docs/PUBLISHING.md``), with
    `in_process` alone; while it has the lease no operation begins here.

    `metrics_port` is where Prometheus finds metrics (0: a free port, see `metrics_port`), on
    `metrics_host` (None: 127.0.0.1); needs the extra ``metrics``.

    Raises `ListenFailed`, `UsageError` and what `DataStream.open` raises, all before it
    returns. A serving process that dies takes its own clients along and is started again;
    should all die again and again, the next commit raises `ServerFailed` (nothing of it is
    written then).
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
    ) -> None:
        self._closed = False
        if publishing is not None and not in_process:
            raise UsageError("publishing needs the process that writes to serve: in_process=True")
        if in_process and workers != 1:
            raise UsageError("workers are processes; in_process serves from one thread")
        limits = limits or Limits()
        check_client_tokens(limits.client_token_file)
        listeners = open_listeners(host, port, unix)
        self._addresses = [name_of(listener) for listener in listeners]
        metrics: list[socket.socket] = []
        self._tls = tls
        try:
            if metrics_port is not None:
                metrics = metrics_listeners(metrics_host, metrics_port)
            self._metrics_port = name_of(metrics[0])[1] if metrics else None
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
                self._serving: _Thread | Workers = (
                    _Thread(self.stream, listeners, limits, tls, metrics, publishing)
                    if in_process
                    else Workers(self.stream, listeners, limits, tls, workers, metrics)
                )
            except BaseException:
                self.stream.close()
                raise
        except BaseException:
            for listener in (*listeners, *metrics):
                listener.close()
            raise
        self.stream.commit_guard = self._serving.check
        self._listeners = [*listeners, *metrics]
        _open_servers.add(self)

    @property
    def addresses(self) -> list[tuple[str, int]]:
        """What it listens on: [(host, port), ...]; a Unix socket is ("unix:PATH", 0)."""
        return self._addresses

    @property
    def port(self) -> int:
        """The TCP port it listens on; 0 where it listens on a Unix socket alone."""
        return max(port for _, port in self._addresses)

    @property
    def metrics_port(self) -> int | None:
        """Where it answers with metrics; None where it does not."""
        return self._metrics_port

    def drain(self, timeout: float | None = None) -> bool:
        """Wait until every streaming client has been sent all that is committed.

        True when that is so, False after `timeout` seconds (None: the limits' `grace`).
        """
        if timeout is not None:
            check_seconds("timeout", timeout, zero=True)
        if self._closed:
            raise StreamClosed("the server is closed")
        return self._serving.drain(timeout)

    def reload_tls(self) -> None:
        """Read the files of `tls` again, for connections from now on.

        Raises `BadCertificate` (then what was read before stays in use), and `ServerFailed`
        where the serving process does not say that it has read them.
        """
        if self._closed:
            raise StreamClosed("the server is closed")
        if self._tls is not None:
            self._tls.reload()
            self._serving.reload_tls()

    def close(self) -> None:
        """Let nobody in, let the last commit go out, then end everything. Clients have the
        limits' `grace` for it. Raises what closing the stream raises."""
        if self._closed:
            return
        self._closed = True
        try:
            self._serving.close()
        finally:
            for listener in self._listeners:
                listener.close()
            self.stream.close()

    def _abandon(self) -> None:
        """In the child of a fork: give up what is the parent's, and touch nothing."""
        if not self._closed:
            self._closed = True
            self._serving.abandon()
            for listener in self._listeners:
                listener.close()

    def __enter__(self) -> StreamServer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with raised_after(error):
            self.close()


class _Thread:
    """Serving from a thread of this process."""

    def __init__(
        self,
        stream: DataStream,
        listeners: list[socket.socket],
        limits: Limits,
        tls: ServerTLS | None,
        metrics: list[socket.socket],
        publishing: Publishing | None,
    ) -> None:
        import trio

        from datastreamer.server.server import Server

        self._grace = limits.grace
        self._server = Server(stream, limits=limits, tls=tls, publishing=publishing)
        self._failure: BaseException | None = None
        self._scope = trio.CancelScope()
        self._token: trio.lowlevel.TrioToken | None = None
        self._ready = threading.Event()
        # The listeners stay this object's: the loop gets copies and closes those.
        served = [listener.dup() for listener in listeners]
        asked = [listener.dup() for listener in metrics]
        self._copies = [*served, *asked]
        self._thread = threading.Thread(
            target=self._run, args=(served, asked), name=f"server of {stream.path}", daemon=True
        )
        self._thread.start()
        self._ready.wait()
        self.check()

    def _run(self, listeners: list[socket.socket], metrics: list[socket.socket]) -> None:
        import trio

        from datastreamer.server.metrics_http import serve_metrics_of

        async def main() -> None:
            self._token = trio.lowlevel.current_trio_token()
            with self._scope:
                async with trio.open_nursery() as nursery:
                    await nursery.start(self._server.run, listeners)
                    if metrics:
                        numbers = self._server.stream.share_numbers()
                        await nursery.start(serve_metrics_of, self._server, metrics, numbers)
                    self._ready.set()

        try:
            trio.run(main)
        except BaseException as error:  # noqa: BLE001 - whatever it is, `check` raises it
            self._failure = error
            _log.exception("the server ended")
        finally:
            self._ready.set()

    def check(self) -> None:
        if self._failure is not None:
            raise ServerFailed(f"the server ended: {_reason(self._failure)}") from self._failure

    def drain(self, timeout: float | None) -> bool:
        return self._ask(self._server.drain, self._grace if timeout is None else timeout)

    def _ask(self, what: Callable[[float], Awaitable[bool]], seconds: float) -> bool:
        import trio

        from datastreamer.server.server import outside_of_loops

        def ask() -> bool:
            return trio.from_thread.run(what, seconds, trio_token=self._token)

        try:
            return outside_of_loops(ask)
        except (trio.RunFinishedError, trio.Cancelled):
            return False

    def reload_tls(self) -> None:
        """The server looks at the same object."""

    def close(self) -> None:
        import trio

        if self._failure is None and self._token is not None:
            self._ask(self._server.finish, self._grace)
            with contextlib.suppress(trio.RunFinishedError):
                self._token.run_sync_soon(self._scope.cancel)
        self._thread.join()

    def abandon(self) -> None:
        for listener in self._copies:
            listener.close()


def _reason(error: BaseException) -> str:
    """What failed in the end: nurseries wrap it in groups."""
    while inner := getattr(error, "exceptions", ()):
        error = inner[0]
    return str(error) or type(error).__name__


def _abandon_all() -> None:
    for server in list(_open_servers):
        server._abandon()


os.register_at_fork(after_in_child=_abandon_all)


__all__ = ["StreamServer"]
