"""A server's counters: plain numbers that only grow."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Final

from datastreamer.format import RESULT_TEXTS
from datastreamer.metrics.exposition import Tally

# Kinds of errors that are neither a Result nor an exception class of the library.
FAULT: Final = "fault"
DROPPED: Final = "dropped"


def kind_of(number: int) -> str:
    """The kind of error of a Result other than OK."""
    return RESULT_TEXTS[number].lower().replace(" ", "_")


@dataclass(slots=True)
class HttpCounts:
    """Counters of an HTTP port, and what is connected to it."""

    requests: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Requests by path and status."""

    not_allowed: Counter[str] = field(default_factory=Counter)
    """As `Counts.not_allowed`."""

    bytes_sent: int = 0
    """Bytes handed to the sockets of clients, without those of TLS."""

    connections: int = 0
    followers: int = 0


@dataclass(slots=True)
class Counts:
    """Counters since the start of the server, updated in the thread of its event loop."""

    accepted: int = 0
    """Connections accepted as clients."""

    refused: Counter[str] = field(default_factory=Counter)
    """Connections refused, by the limit that they exceeded."""

    not_allowed: Counter[str] = field(default_factory=Counter)
    """Tokens and certificates that were rejected, by the command that presented them."""

    ended: Counter[str] = field(default_factory=Counter)
    """Connections that ended, by reason."""

    commands: Counter[str] = field(default_factory=Counter)
    """Commands received, by kind; rejected ones are counted as errors only."""

    errors: Counter[str] = field(default_factory=Counter)
    """Requests rejected and connections failed, by kind of error."""

    bytes_sent: int = 0
    """Bytes of entries, answers and Results handed to the sockets of clients."""

    entries_sent: int = 0
    """Entries sent completely: streamed, or in batches and ranges."""

    batch_seconds: Tally = field(
        default_factory=lambda: Tally("datastreamer_batch_read_request_seconds")
    )
    """Batch reads by duration, from the request, or from the commit that it waited for, to the
    answer."""

    batch_bytes: Tally = field(
        default_factory=lambda: Tally("datastreamer_batch_read_response_bytes")
    )
    """Batch reads by the bytes of entries in the answer."""

    filter_scanned: int = 0
    """Bytes of the file scanned for entries of some types."""

    published_operations: int = 0
    """Operations that a remote publisher committed and the server appended."""

    published_again: int = 0
    """Operations that a remote publisher sent again and the stream already held."""

    published_entries: int = 0
    """Entries of the appended operations."""

    published_bytes: int = 0
    """Bytes of these entries, entry heads included."""

    hash_seconds: float = 0.0
    """Duration of requests for hashes of ranges, the wait for one another included."""

    cold_reads: int = 0
    """Spans that were not in the page cache and were read in a thread ahead of sending."""

    scrubbed: Counter[str] = field(default_factory=Counter)
    """Pages that the scrub examined, by result."""

    healed_pages: int = 0
    """Damaged pages that were restored from other servers."""

    http: HttpCounts | None = None
    """Those of the server's HTTP port; None without one."""

    scrub_bytes: int = 0
    """Bytes that the scrub read."""
