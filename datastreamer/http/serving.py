"""The two kinds of HTTP ports: one with the stream, and one with the monitoring paths alone.

Owns which paths each has. The caller closes nothing: the listeners are closed here.
"""

from __future__ import annotations

import contextlib
import logging
import socket
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Final

import trio

from datastreamer.http import console
from datastreamer.http.answers.blocks import BlockQueries
from datastreamer.http.answers.durable import DurableStreams
from datastreamer.http.answers.entries import CachePolicy, EntryQueries
from datastreamer.http.answers.explorer import Explorer
from datastreamer.http.answers.follow import FollowQueries
from datastreamer.http.answers.monitoring import Gather, Monitoring
from datastreamer.http.answers.openapi import openapi
from datastreamer.http.answers.overview import Overview
from datastreamer.http.answers.ranges import EntryRanges
from datastreamer.http.answers.reading import HttpSource
from datastreamer.http.options import HttpOptions
from datastreamer.http.port.access import HttpAccess
from datastreamer.http.port.endpoint import HttpEndpoint, shown
from datastreamer.http.port.routes import Handler, Routes
from datastreamer.http.ports import Ports
from datastreamer.metrics.counters import HttpCounts
from datastreamer.metrics.exposition import load_exporter
from datastreamer.metrics.writer_numbers import WriterNumbers, unready_archive
from datastreamer.server.admission.tokens import TokenExaminer
from datastreamer.server.metrics import collect
from datastreamer.server.server import Server
from datastreamer.transport.refusal_log import RefusalLog
from datastreamer.transport.tls import ServerTLS

_log = logging.getLogger(__name__)

_MONITORING_CONNECTIONS: Final = 64


def source_of(server: Server, numbers: WriterNumbers | None = None) -> HttpSource:
    """A server and, if it is in this process, its stream's writer as the source of answers."""
    gather = partial(collect, server, numbers)

    def unready() -> str:
        return server.unready or unready_archive(numbers)

    return HttpSource(lambda: server, gather, unready, str(server.stream.path))


class HttpPort:
    """The HTTP port of one process."""

    def __init__(
        self,
        source: HttpSource,
        listeners: Iterable[socket.socket],
        options: HttpOptions,
        *,
        tls: ServerTLS | None = None,
        write_timeout: float | None = None,
    ) -> None:
        """Owns `listeners`. A client that receives nothing for `write_timeout` (None: a minute) is
        disconnected."""
        self._listeners = list(listeners)
        self._tls = tls
        counts = self.counts = HttpCounts()
        """Its counters."""
        examiner = None
        if options.token_file is not None:
            examiner = TokenExaminer(str(options.token_file), counts.not_allowed, RefusalLog(_log))
        access = HttpAccess(options.cors, examiner)
        cache = CachePolicy(private=access.private)
        self._durable = DurableStreams(source, cache)
        self._overview = Overview(source)
        self._explorer = Explorer(source, at_once=options.explorer)
        handlers = {
            **stream_handlers(source, cache, self._durable),
            "/v1/overview": self._overview.answer,
            "/v1/archive": self._overview.archive,
            "/v1/search/{key}": self._explorer.search,
        }
        # An alert sees the first of a kind only if there was a sample of none before.
        counts.requests.update({(path, "200"): 0 for path in handlers})
        self._endpoint = HttpEndpoint(
            Routes(handlers, access, OPEN_PATHS).answer,
            counts,
            most=options.max_clients,
            most_followers=options.max_followers,
            write_timeout=write_timeout,
            tls=tls,
        )

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Answer until cancelled or finished; closes the listeners. A failed answer is logged and
        affects no other."""
        urls = shown(self._listeners, self._tls, "/")
        _log.info("HTTP on %s", urls, extra={"address": urls})
        with contextlib.suppress(ImportError):
            load_exporter()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._overview.run)
            nursery.start_soon(self._explorer.run)
            await self._endpoint.run(self._listeners, task_status)
            nursery.cancel_scope.cancel()

    def attach(self, server: Server) -> None:
        """Have `server` report the port's counters, and finish it."""
        server.counts.http = self.counts
        server.finish_with[self.finish] = None

    async def finish(self, grace: float) -> None:
        """Stop accepting; let answers end within `grace` seconds and followers reconnect."""
        self._durable.finish()
        await self._endpoint.finish(grace)


OPEN_PATHS: Final = frozenset({"/", "/console/{file}", "/healthz"})
"""Paths without anything of the stream."""


def stream_handlers(
    source: HttpSource, cache: CachePolicy, durable: DurableStreams
) -> dict[str, Handler]:
    """The handlers of a port with the stream, by path."""
    queries, ranges, blocks = (
        EntryQueries(source, cache),
        EntryRanges(source, cache),
        BlockQueries(source),
    )
    return {
        "/": console.page,
        "/console/{file}": console.file,
        "/v1/stream": queries.stream,
        "/v1/entries/{number}": queries.entry,
        "/v1/entries": ranges.entries,
        "/v1/bookmarks/{key}": queries.bookmark,
        "/v1/follow": FollowQueries(source).follow,
        "/v1/streams/{name}": durable.stream,
        "/v1/blocks": blocks.recent,
        "/v1/blocks/{number}": blocks.block,
        "/v1/transactions/{number}": blocks.transaction,
        "/v1/batches/{number}": blocks.batch,
        "/v1/openapi.json": openapi,
        **monitoring_handlers(Monitoring(source.gather, source.unready)),
    }


def monitoring_handlers(monitoring: Monitoring) -> dict[str, Handler]:
    """The handlers of the monitoring paths, by path."""
    return {
        "/v1/clients": monitoring.clients,
        "/metrics": monitoring.metrics,
        "/healthz": monitoring.healthz,
        "/readyz": monitoring.readyz,
    }


async def start_ports(
    nursery: trio.Nursery,
    server: Server,
    ports: Ports,
    numbers: WriterNumbers | None = None,
    gather: Gather | None = None,
) -> None:
    """Answer on the metrics port and the HTTP port of a server, if it has them, with the numbers
    of its stream's writer. `gather`: the metrics of all processes that serve, for HTTP."""
    source = source_of(server, numbers)
    if ports.metrics:
        await nursery.start(serve_metrics, ports.metrics, source.gather, source.unready)
    if ports.http is not None:
        port = HttpPort(
            source if gather is None else replace(source, gather=gather),
            ports.web,
            ports.http,
            tls=server.tls,
            write_timeout=server.limits.write_timeout,
        )
        port.attach(server)
        await nursery.start(port.run)


async def serve_metrics(
    listeners: Iterable[socket.socket],
    gather: Gather,
    unready: Callable[[], str] = lambda: "",
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Answer the monitoring paths on listening sockets until cancelled; closes them.

    `unready` returns the reason for which /readyz answers 503; empty: it answers 200. A failed
    answer is logged and affects no other.
    """
    load_exporter()
    listeners = list(listeners)
    urls = shown(listeners, None, "/metrics")
    _log.info("metrics on %s", urls, extra={"address": urls})
    handlers = monitoring_handlers(Monitoring(gather, unready))
    routes = Routes(handlers, HttpAccess(), frozenset(handlers))
    endpoint = HttpEndpoint(routes.answer, HttpCounts(), most=_MONITORING_CONNECTIONS)
    await endpoint.run(listeners, task_status)
