"""Collects the metrics of one serving process: of itself, its stream and its clients.

Owns how each sample is obtained. Knows no HTTP and no text format; `datastreamer.metrics` has the
names of metrics and aggregates several processes.
"""

from __future__ import annotations

import contextlib
import os
import platform
import time
from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

import trio

from datastreamer._version import __version__
from datastreamer.errors import DatastreamerError
from datastreamer.format import RESULT_NOT_ALLOWED, RESULT_OK, RESULT_TEXTS
from datastreamer.metrics.counters import DROPPED, FAULT, HttpCounts, kind_of
from datastreamer.metrics.exposition import (
    LISTED_CLIENTS,
    ConnectedClient,
    MetricsSnapshot,
    Sampled,
    Samples,
    Tally,
    largest_lags,
    process_samples,
)
from datastreamer.metrics.writer_numbers import WriterNumbers
from datastreamer.server.admission.gate import EVICTED, NO_STREAM, TOO_MANY, TOO_MANY_OF_ADDRESS
from datastreamer.server.command_labels import AUTHENTICATE, COMMANDS, HTTP, PUBLISH
from datastreamer.server.scrub import RESULTS
from datastreamer.server.session import CHANGED, FAILED, GONE, LEFT, REFUSED, SERVER_ENDED
from datastreamer.server.streaming.catch_up import State
from datastreamer.server.timeouts import LIFETIMES

if TYPE_CHECKING:
    from datastreamer.server.server import Server
    from datastreamer.server.session import Session
    from datastreamer.storage.header.records import Head

# Sessions collected before this task yields, some 0.3 ms.
_SESSIONS_A_TURN = 128

# Label values that are exposed before anything was counted for them: a rate over a series that
# begins with its first event misses that event, and no alert fires.
REASONS: Final = (LEFT, GONE, REFUSED, CHANGED, FAILED, SERVER_ENDED, EVICTED, *LIFETIMES)
_REFUSALS: Final = (NO_STREAM, TOO_MANY, TOO_MANY_OF_ADDRESS)
_RESULTS: Final = {n: kind_of(n) for n in RESULT_TEXTS if n != RESULT_OK}
_OF_PUBLISHING: Final = [kind for n, kind in _RESULTS.items() if n > RESULT_NOT_ALLOWED]
_ERRORS: Final = (FAULT, DROPPED, *(k for k in _RESULTS.values() if k not in _OF_PUBLISHING))


async def collect(
    server: Server, numbers: WriterNumbers | None = None, limit: int = LISTED_CLIENTS
) -> MetricsSnapshot:
    """A snapshot of all metrics, with the `limit` clients that have the largest lag.

    `numbers` are the writer's, if known here. Values are plain, to be sent to another process as
    JSON. With many clients other tasks run in between, so two samples may differ
    by what happened meanwhile.
    """
    head = server.stream.reader.head
    server.broadcast.locate()
    entries = Tally("datastreamer_clients_lag_entries")
    sizes = Tally("datastreamer_clients_lag_bytes")
    states: Counter[str] = Counter()
    clients: list[ConnectedClient] = []
    now = trio.current_time()
    for at, session in enumerate(list(server.sessions), 1):
        client = _client(session, head, now)
        clients.append(client)
        states[client["state"]] += 1
        if client["lag_entries"] is not None:
            entries.add(client["lag_entries"])
        if client["lag_bytes"] is not None:
            sizes.add(client["lag_bytes"])
        if at % _SESSIONS_A_TURN == 0:
            if len(clients) > _SESSIONS_A_TURN + 2 * limit:
                clients = largest_lags(clients, limit)
            await trio.lowlevel.checkpoint()
    clients = largest_lags(clients, limit)
    counts = server.counts
    publishes = server.publish_lease is not None
    proofs = [PUBLISH] * publishes + [AUTHENTICATE] * server.takes_tokens
    http = counts.http
    not_allowed = counts.not_allowed if http is None else counts.not_allowed + http.not_allowed
    refusing = proofs if http is None else [*proofs, HTTP]
    samples: Samples = {
        **_build(),
        "datastreamer_head_entries": [([], head.entries)],
        "datastreamer_head_bytes": [([], head.length)],
        "datastreamer_file_replaced": [([], int(bool(server.watch.lost)))],
        **_tls(server),
        **_index(server),
        **({} if numbers is None else numbers.samples()),
        "datastreamer_clients": [([state.value], states[state.value]) for state in State],
        "datastreamer_clients_limit": [([], server.limits.max_clients)],
        **_reserve(server),
        "datastreamer_connections_accepted_total": [([], counts.accepted)],
        "datastreamer_connections_refused_total": _by_label(counts.refused, _REFUSALS),
        "datastreamer_connections_ended_total": _by_label(counts.ended, REASONS),
        "datastreamer_authentication_failures_total": _by_label(not_allowed, refusing),
        "datastreamer_commands_total": _by_label(counts.commands, (*COMMANDS, *proofs)),
        "datastreamer_errors_total": _by_label(
            counts.errors, (*_ERRORS, *_OF_PUBLISHING * publishes)
        ),
        "datastreamer_sent_bytes_total": [([], counts.bytes_sent)],
        "datastreamer_sent_entries_total": [([], counts.entries_sent)],
        "datastreamer_batch_read_request_seconds": [([], counts.batch_seconds.histogram())],
        "datastreamer_batch_read_response_bytes": [([], counts.batch_bytes.histogram())],
        **({} if http is None else _http(http)),
        "datastreamer_filter_scanned_bytes_total": [([], counts.filter_scanned)],
        "datastreamer_filter_sent_bytes_total": [([], counts.filter_sent)],
        "datastreamer_range_hash_seconds_total": [([], counts.hash_seconds)],
        **_publishing(server),
        "datastreamer_cold_reads_total": [([], counts.cold_reads)],
        "datastreamer_damaged_pages": [([], len(server.broadcast.pages.damaged))],
        "datastreamer_healed_pages_total": [([], counts.healed_pages)],
        **_scrub(server),
        "datastreamer_clients_lag_entries": [([], entries.histogram())],
        "datastreamer_clients_lag_bytes": [([], sizes.histogram())],
        **process_samples(),
    }
    return {"time": time.time(), "samples": samples, "clients": clients}


def of_process() -> MetricsSnapshot:
    """The snapshot of a process that serves no stream yet."""
    return {"time": time.time(), "samples": {**_build(), **process_samples()}, "clients": []}


def _tls(server: Server) -> Samples:
    expires = server.certificate_expires_at
    if expires is None:
        return {}
    return {"datastreamer_tls_certificate_expiry_seconds": [([], expires)]}


def _client(session: Session, head: Head, now: float) -> ConnectedClient:
    client: ConnectedClient = {
        "id": f"{os.getpid()}.{session.id}",
        "client": session.transport.peer,
        "state": session.state.value,
        "seconds": round(now - session.watch.came_at, 3),
        "entry": None,
        "offset": None,
        "lag_entries": None,
        "lag_bytes": None,
    }
    if session.streaming:
        cursor, at = session.sender.cursor, session.sender.at
        client["entry"] = cursor.number
        # Before its first read the cursor has a number only. A client that was sent entries
        # committed since the head was read has no lag.
        client["lag_entries"] = max(0, head.entries - cursor.number)
        if cursor.offset or at:
            offset = max(cursor.offset, at)
            client["offset"], client["lag_bytes"] = offset, max(0, head.length - offset)
        elif cursor.number >= head.entries:
            client["offset"], client["lag_bytes"] = head.length, 0
    return client


def _index(server: Server) -> Samples:
    with contextlib.suppress(DatastreamerError, OSError):
        entries, size = server.stream.bookmarks.index_lag()
        return {
            "datastreamer_index_lag_entries": [([], entries)],
            "datastreamer_index_lag_bytes": [([], size)],
            "datastreamer_index_on_disk": [([], int(server.stream.bookmarks.on_disk))],
        }
    return {}


def _reserve(server: Server) -> Samples:
    gate = server.gate
    if not gate.reserved:
        return {}
    return {
        "datastreamer_reserved_clients": [([], gate.reserved_in_use)],
        "datastreamer_reserved_clients_limit": [([], gate.reserved)],
        "datastreamer_provisional_clients": [([], gate.provisional)],
    }


def _publishing(server: Server) -> Samples:
    publish_lease, counts = server.publish_lease, server.counts
    if publish_lease is None:
        return {}
    return {
        "datastreamer_publish_sources": [([], int(publish_lease.holder is not None))],
        "datastreamer_publish_epoch": [([], publish_lease.last.epoch)],
        "datastreamer_publish_operations_total": [
            (["appended"], counts.published_operations),
            (["again"], counts.published_again),
        ],
        "datastreamer_publish_entries_total": [([], counts.published_entries)],
        "datastreamer_publish_bytes_total": [([], counts.published_bytes)],
    }


def _http(counts: HttpCounts) -> Samples:
    return {
        "datastreamer_http_requests_total": [
            (list(labels), count) for labels, count in sorted(counts.requests.items())
        ],
        "datastreamer_http_sent_bytes_total": [([], counts.bytes_sent)],
        "datastreamer_http_connections": [([], counts.connections)],
        "datastreamer_http_followers": [([], counts.followers)],
    }


def _scrub(server: Server) -> Samples:
    if server.scrub.rate is None:
        return {}
    return {
        "datastreamer_scrub_pages_total": _by_label(server.counts.scrubbed, RESULTS),
        "datastreamer_scrub_bytes_total": [([], server.counts.scrub_bytes)],
        "datastreamer_scrub_age_seconds": [([], server.scrub.age)],
    }


def _build() -> Samples:
    return {"datastreamer_build_info": [([__version__, platform.python_version()], 1)]}


def _by_label(counts: Counter[str], known: Iterable[str]) -> Sampled:
    return [([label], counts[label]) for label in sorted({*known, *counts})]
