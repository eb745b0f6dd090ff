"""The monitoring paths: /metrics, /healthz, /readyz and /v1/clients.

Knows no metric; the caller passes the function that collects a snapshot, of one process or of
several, and the one that says why the server is not ready.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Final, Protocol

import trio

from datastreamer.http.port.messages import JSON, PLAIN, HttpAnswer, HttpProblem, HttpRequest
from datastreamer.metrics.exposition import (
    LISTED_CLIENTS,
    TEXT,
    MetricsSnapshot,
    exposition_parts,
)

_MOST_LISTED: Final = 10_000
_CLIENTS_A_TURN: Final = 128
_NOT_STORED: Final = [("Cache-Control", "no-store")]


class Gather(Protocol):
    """Collects a snapshot with the `limit` clients that have the largest lag."""

    def __call__(self, *, limit: int) -> Awaitable[MetricsSnapshot]: ...


class Monitoring:
    """Answers the monitoring paths."""

    def __init__(self, gather: Gather, unready: Callable[[], str]) -> None:
        """`unready` returns the reason for which /readyz answers 503; empty: it answers 200."""
        self._gather = gather
        self._unready = unready

    async def healthz(self, request: HttpRequest) -> HttpAnswer:
        request.parameters()
        return HttpAnswer(200, PLAIN, b"alive\n", _NOT_STORED)

    async def readyz(self, request: HttpRequest) -> HttpAnswer:
        request.parameters()
        why = self._unready()
        if why:
            return HttpAnswer(503, PLAIN, f"{why}\n".encode(), _NOT_STORED)
        return HttpAnswer(200, PLAIN, b"serving\n", _NOT_STORED)

    async def metrics(self, request: HttpRequest) -> HttpAnswer:
        """Raises `HttpProblem` if prometheus-client is not installed."""
        parts = []
        try:
            for part in exposition_parts(await self._gather(limit=LISTED_CLIENTS)):
                parts.append(part)
                await trio.lowlevel.checkpoint()
        except ImportError:
            raise HttpProblem(
                501,
                "metrics need prometheus-client, which the server does not have; install "
                "datastreamer[metrics] there",
            ) from None
        return HttpAnswer(200, TEXT, b"".join(parts), _NOT_STORED)

    async def clients(self, request: HttpRequest) -> HttpAnswer:
        limit = request.parameters("limit").number("limit", most=_MOST_LISTED)
        snapshot = await self._gather(limit=LISTED_CLIENTS if limit is None else limit)
        parts = []
        for at, client in enumerate(snapshot["clients"], 1):
            parts.append(json.dumps(client))
            if at % _CLIENTS_A_TURN == 0:
                await trio.lowlevel.checkpoint()
        head = json.dumps(overview(snapshot)).removesuffix("}")
        body = f'{head}, "clients": [{", ".join(parts)}]}}\n'
        return HttpAnswer(200, JSON, body.encode(), _NOT_STORED)


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
        "index_lag_entries": one("index_lag_entries"),
        "sent_entries": one("sent_entries_total"),
        "sent_bytes": one("sent_bytes_total"),
        "connected": {
            labels[0]: count for labels, count in samples.get("datastreamer_clients", ())
        },
    }
