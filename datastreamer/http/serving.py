"""The two kinds of HTTP ports: one with the stream, and one with the monitoring paths alone.

Owns which paths each has. The caller closes nothing: the listeners are closed here.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Final

import trio

from datastreamer.http.access import HttpAccess
from datastreamer.http.endpoint import HttpEndpoint, shown
from datastreamer.http.monitoring import Gather, Monitoring
from datastreamer.http.routes import Routes
from datastreamer.metrics.exposition import load_exporter
from datastreamer.metrics.writer_numbers import WriterNumbers
from datastreamer.server.metrics import collect
from datastreamer.transport.listeners import host_of

if TYPE_CHECKING:
    from datastreamer.server.server import Server

_log = logging.getLogger(__name__)

_MONITORING_CONNECTIONS: Final = 64


async def serve_metrics_of(
    server: Server,
    listeners: Iterable[socket.socket],
    numbers: WriterNumbers | None = None,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """`serve_metrics` for one server and, if it is in this process, its stream's writer."""
    await serve_metrics(
        listeners, partial(collect, server, numbers), lambda: server.unready, task_status
    )


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
    monitoring = Monitoring(gather, unready)
    handlers = {
        "/metrics": monitoring.metrics,
        "/healthz": monitoring.healthz,
        "/readyz": monitoring.readyz,
        "/v1/clients": monitoring.clients,
    }
    hosts = [host_of(each.getsockname()) for each in listeners]
    routes = Routes(handlers, HttpAccess(listeners=hosts), frozenset(handlers))
    await HttpEndpoint(routes.answer, most=_MONITORING_CONNECTIONS).run(listeners, task_status)
