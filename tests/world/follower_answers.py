"""How a simulated server answers followers over HTTP: with the package's own handlers."""

from __future__ import annotations

import contextlib

import trio

from datastreamer.http.answers.durable import DurableStreams
from datastreamer.http.answers.entries import CachePolicy
from datastreamer.http.port.access import HttpAccess
from datastreamer.http.port.connection import HttpConnection
from datastreamer.http.port.messages import AnswerCut
from datastreamer.http.port.routes import Routes
from datastreamer.http.serving import OPEN_PATHS, source_of, stream_handlers
from datastreamer.metrics.counters import HttpCounts
from datastreamer.server.server import Server
from datastreamer.transport.server_stream import Transport

NAME = "follower"
"""Machines whose names begin so speak HTTP."""


async def serve_follower(server: Server, transport: Transport) -> None:
    """Answer the requests of one connection, until it ends."""
    source, cache = source_of(server), CachePolicy(private=False)
    handlers = stream_handlers(source, cache, DurableStreams(source, cache))
    routes = Routes(handlers, HttpAccess(), OPEN_PATHS)
    connection = HttpConnection(transport, NAME, HttpCounts(), on_loopback=True)
    try:
        with contextlib.suppress(trio.BrokenResourceError, trio.ClosedResourceError, AnswerCut):
            await connection.run(routes.answer, lambda: None)
    finally:
        with trio.CancelScope(shield=True):
            await transport.close()
