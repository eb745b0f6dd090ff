"""Metrics over HTTP: /metrics, /healthz, /readyz and /clients.json.

Owns the endpoint and its limits: a number of connections, shared fairly among addresses, small
requests, one answer per connection, each within seconds. Knows no metric; the caller passes the
function that collects a snapshot, of one process (`metrics.py`) or of several.
"""

from __future__ import annotations

import contextlib
import json
import logging
import socket
from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from http import HTTPStatus
from typing import TYPE_CHECKING, Protocol
from urllib.parse import parse_qs, urlsplit

import trio

from datastreamer.metrics.exposition import (
    LISTED_CLIENTS,
    TEXT,
    MetricsSnapshot,
    exposition_parts,
    load_exporter,
)
from datastreamer.metrics.writer_numbers import WriterNumbers
from datastreamer.server.admission.fair_slots import FairSlots
from datastreamer.server.metrics import collect
from datastreamer.transport.listeners import address_of, host_of, name_of

if TYPE_CHECKING:
    from datastreamer.server.server import Server

_log = logging.getLogger(__name__)

_CONNECTIONS = 64
_REQUEST_BYTES = 8192
_REQUEST_SECONDS = 3.0
_ANSWER_SECONDS = 10.0
# If a part of a request is not read, the system resets the connection on close.
_LINGER_SECONDS = 1.0
_MOST_LISTED = 10_000
_CLIENTS_A_TURN = 128
_JSON = "application/json"
_PLAIN = "text/plain; charset=utf-8"


class Gather(Protocol):
    """Collects a snapshot with the `limit` clients that have the largest lag."""

    def __call__(self, *, limit: int) -> Awaitable[MetricsSnapshot]: ...


async def serve_metrics_of(
    server: Server,
    listeners: Iterable[socket.socket],
    numbers: WriterNumbers | None = None,
    task_status: trio.TaskStatus[list[trio.SocketListener]] = trio.TASK_STATUS_IGNORED,
) -> None:
    """`serve_metrics` for one server and, if it is in this process, its stream's writer."""
    await serve_metrics(
        listeners, partial(collect, server, numbers), lambda: server.unready, task_status
    )


async def serve_metrics(
    listeners: Iterable[socket.socket],
    gather: Gather,
    unready: Callable[[], str] = lambda: "",
    task_status: trio.TaskStatus[list[trio.SocketListener]] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Answer on listening sockets until cancelled; closes them.

    `unready` returns the reason for which /readyz answers 503; empty: it answers 200. A failed
    answer is logged and affects no other.
    """
    load_exporter()
    listeners = list(listeners)
    shown = ", ".join(f"http://{address_of(name_of(each))}/metrics" for each in listeners)
    _log.info("metrics on %s", shown, extra={"address": shown})
    ours = [trio.SocketListener(trio.socket.from_stdlib_socket(each)) for each in listeners]
    await trio.serve_listeners(_Endpoint(gather, unready).handle, ours, task_status=task_status)


class _Endpoint:
    def __init__(self, gather: Gather, unready: Callable[[], str]) -> None:
        self._gather = gather
        self._unready = unready
        self._connections: FairSlots[trio.CancelScope] = FairSlots(_CONNECTIONS)

    async def handle(self, stream: trio.SocketStream) -> None:
        """One request and its answer; cancelled if too many connections arrive meanwhile."""
        scope, host = trio.CancelScope(), "gone"
        with contextlib.suppress(OSError):
            host = host_of(stream.socket.getpeername())
        displaced = self._connections.add(scope, host)
        if displaced is not None:
            displaced.cancel()
        try:
            with scope:
                await self._serve(stream)
        except (trio.BrokenResourceError, trio.ClosedResourceError, trio.TooSlowError):
            pass
        finally:
            self._connections.discard(scope, host)
            await trio.aclose_forcefully(stream)

    async def _serve(self, stream: trio.SocketStream) -> None:
        with trio.fail_after(_REQUEST_SECONDS):
            request = await _read_request(stream)
        if not request:
            return
        with trio.fail_after(_ANSWER_SECONDS):
            code, kind, body = await self._answer_safely(request)
            if request.startswith(b"HEAD "):
                await stream.send_all(_head(code, kind, len(body)))
            else:
                await stream.send_all(_head(code, kind, len(body)) + body)
            await stream.send_eof()
        with trio.move_on_after(_LINGER_SECONDS):
            while await stream.receive_some(_REQUEST_BYTES):
                pass

    async def _answer_safely(self, request: bytes) -> tuple[int, str, bytes]:
        try:
            return await self._answer(request)
        except Exception:  # noqa: BLE001 - streaming continues
            _log.exception("a request to the metrics port failed")
            return 500, _PLAIN, b"internal error; see the server's log\n"

    async def _answer(self, request: bytes) -> tuple[int, str, bytes]:
        if b"\r\n\r\n" not in request:
            if len(request) > _REQUEST_BYTES:
                return 431, _PLAIN, b"the request is too large\n"
            return 400, _PLAIN, b"the request is incomplete\n"
        words = request.split(b"\r\n", 1)[0].split(b" ")
        if len(words) != 3 or not words[2].startswith(b"HTTP/1."):
            return 400, _PLAIN, b"not an HTTP/1 request\n"
        if words[0] not in (b"GET", b"HEAD"):
            return 405, _PLAIN, b"only GET and HEAD are supported\n"
        try:
            target = urlsplit(words[1].decode("ascii"))
        except ValueError:
            return 400, _PLAIN, b"not a path\n"
        if target.path == "/healthz":
            return 200, _PLAIN, b"alive\n"
        if target.path == "/readyz":
            why = self._unready()
            return (503, _PLAIN, f"{why}\n".encode()) if why else (200, _PLAIN, b"serving\n")
        if target.path == "/metrics":
            return 200, TEXT, await self._text()
        if target.path == "/clients.json":
            return await self._clients_json(target.query)
        return 404, _PLAIN, b"not found; try /metrics, /healthz, /readyz or /clients.json\n"

    async def _text(self) -> bytes:
        parts = []
        for part in exposition_parts(await self._gather(limit=LISTED_CLIENTS)):
            parts.append(part)
            await trio.lowlevel.checkpoint()
        return b"".join(parts)

    async def _clients_json(self, query: str) -> tuple[int, str, bytes]:
        limit = parse_qs(query).get("limit", [str(LISTED_CLIENTS)])[-1]
        if not (limit.isascii() and limit.isdigit()) or int(limit[:6]) > _MOST_LISTED:
            wrong = f"limit must be a number from 0 to {_MOST_LISTED}\n"
            return 400, _PLAIN, wrong.encode()
        snapshot = await self._gather(limit=int(limit[:6]))
        parts = []
        for at, client in enumerate(snapshot["clients"], 1):
            parts.append(json.dumps(client))
            if at % _CLIENTS_A_TURN == 0:
                await trio.lowlevel.checkpoint()
        head = json.dumps(overview(snapshot)).removesuffix("}")
        return 200, _JSON, f'{head}, "clients": [{", ".join(parts)}]}}\n'.encode()


def overview(snapshot: MetricsSnapshot) -> dict[str, object]:
    """The summary that `datastreamer top` shows above the clients."""
    samples = snapshot["samples"]

    def one(name: str) -> object:
        found = samples.get(f"datastreamer_{name}", ())
        return found[0][1] if found else None

    upstreams = samples.get("datastreamer_relay_upstream_state")
    lags = {labels[0]: lag for labels, lag in samples.get("datastreamer_relay_lag_entries", ())}
    return {
        "time": round(snapshot["time"], 3),
        "head_entries": one("head_entries"),
        "head_bytes": one("head_bytes"),
        **(
            {}
            if upstreams is None
            else {
                "upstreams": [
                    {"upstream": name, "state": state, "lag_entries": lags.get(name)}
                    for (name, state), is_so in upstreams
                    if is_so
                ]
            }
        ),
        "sent_entries": one("sent_entries_total"),
        "sent_bytes": one("sent_bytes_total"),
        "connected": {
            labels[0]: count for labels, count in samples.get("datastreamer_clients", ())
        },
    }


async def _read_request(stream: trio.SocketStream) -> bytes:
    """The request up to the end of its head, or what was received of it."""
    request = b""
    while b"\r\n\r\n" not in request and len(request) <= _REQUEST_BYTES:
        more = await stream.receive_some(_REQUEST_BYTES)
        if not more:
            break
        request += more
    return request


def _head(code: int, kind: str, size: int) -> bytes:
    lines = (
        f"HTTP/1.1 {code} {HTTPStatus(code).phrase}",
        f"Content-Type: {kind}",
        f"Content-Length: {size}",
        "Cache-Control: no-store",
        "Connection: close",
    )
    return "".join(f"{line}\r\n" for line in (*lines, "")).encode()
