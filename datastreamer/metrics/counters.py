"""What a server has done, in plain numbers that only grow.

Owns the names. Knows neither who counts nor who reads: an exporter takes them as they are.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Final

from datastreamer.format import RESULT_TEXTS
from datastreamer.metrics.exposition import Tally

# Errors that are no Result's, beside the library's own, which go by their classes.
FAULT: Final = "fault"
DROPPED: Final = "dropped"


def kind_of(number: int) -> str:
    """What a Result other than OK is counted as."""
    return RESULT_TEXTS[number].lower().replace(" ", "_")


@dataclass(slots=True)
class Counts:
    """Since the server started. Read them at any time; they are changed in the loop's thread."""

    accepted: int = 0
    """Connections that got a place."""

    refused: Counter[str] = field(default_factory=Counter)
    """Connections closed without having had a place, by the limit that they ran into."""

    not_allowed: Counter[str] = field(default_factory=Counter)
    """Tokens and certificates that were not accepted, by the command that showed them."""

    ended: Counter[str] = field(default_factory=Counter)
    """Connections that are over, by why."""

    commands: Counter[str] = field(default_factory=Counter)
    """Commands taken, by kind; those that were refused are among the errors alone."""

    errors: Counter[str] = field(default_factory=Counter)
    """Refusals and failures, by kind."""

    bytes_sent: int = 0
    """Bytes of entries, answers and Results that the system took for clients."""

    entries_sent: int = 0
    """Entries sent whole: streamed, or in batches and ranges."""

    batch_seconds: Tally = field(
        default_factory=lambda: Tally("datastreamer_batch_read_request_seconds")
    )
    """Requests of batches, by how long they took from being taken, or from the commit that
    was waited for, to being answered."""

    batch_bytes: Tally = field(
        default_factory=lambda: Tally("datastreamer_batch_read_response_bytes")
    )
    """The same requests, by the bytes of entries that answered them."""

    filter_scanned: int = 0
    """Bytes of the file looked through for entries of some types."""

    published_operations: int = 0
    """Operations that the stream's source committed over the wire."""

    published_again: int = 0
    """Operations that it sent again, and that stood there."""

    published_entries: int = 0
    """Entries of the former."""

    published_bytes: int = 0
    """Bytes of these, heads included."""

    hash_seconds: float = 0.0
    """Time that requests for hashes of ranges took, with their wait for each other."""

    cold_reads: int = 0
    """Spans that were not in memory and were read in a thread before they were sent."""
