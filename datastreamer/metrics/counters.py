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
    """Counters of an HTTP port, and what is connected to it: `names.py` describes them. `requests`
    are counted by path and status, `not_allowed` as in `Counts`."""

    requests: Counter[tuple[str, str]] = field(default_factory=Counter)
    not_allowed: Counter[str] = field(default_factory=Counter)
    bytes_sent: int = 0
    connections: int = 0
    followers: int = 0


@dataclass(slots=True)
class Counts:
    """Counters since the start of the server, updated in the thread of its event loop. `names.py`
    describes them; a `Counter` has a number for each label, such as a reason or a command."""

    accepted: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    not_allowed: Counter[str] = field(default_factory=Counter)
    ended: Counter[str] = field(default_factory=Counter)
    commands: Counter[str] = field(default_factory=Counter)
    """Rejected ones are counted as errors only."""

    errors: Counter[str] = field(default_factory=Counter)
    bytes_sent: int = 0
    entries_sent: int = 0
    batch_seconds: Tally = field(
        default_factory=lambda: Tally("datastreamer_batch_read_request_seconds")
    )
    batch_bytes: Tally = field(
        default_factory=lambda: Tally("datastreamer_batch_read_response_bytes")
    )
    filter_scanned: int = 0
    filter_sent: int = 0
    published_operations: int = 0
    published_again: int = 0
    """Operations that a publisher sent again and the stream already held."""

    published_entries: int = 0
    published_bytes: int = 0
    hash_seconds: float = 0.0
    cold_reads: int = 0
    scrubbed: Counter[str] = field(default_factory=Counter)
    healed_pages: int = 0
    http: HttpCounts | None = None
    """Those of the server's HTTP port; None without one."""

    scrub_bytes: int = 0
