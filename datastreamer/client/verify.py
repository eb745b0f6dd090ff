"""Checks of what a server serves: each entry once and in order, and its bookmarks.

Reads as any client does; it cannot see the file.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from datastreamer._codec import EntryBatch
from datastreamer.client.blocking_client import BlockingClient
from datastreamer.errors import ProtocolViolation, UnknownBookmark
from datastreamer.storage.maintain.report import Problem, Report

MOST_LOOKED_UP: Final = 1000
"""The number of bookmarks to look up by default; two round trips each."""

_SEE_THE_FILE: Final = "none from here: verify the server's file"
_REINDEX: Final = "reindex the server's file"


def verify_server(
    client: BlockingClient,
    *,
    most: int = MOST_LOOKED_UP,
    advance: Callable[[int], object] = lambda count: None,
) -> Report:
    """Read all that is committed now, and look up at most `most` of its bookmarks, evenly spread.

    `advance` is called with the number of entries that were read. The report has no pages.
    Raises what the client's calls raise, except `ProtocolViolation`, which is a problem of the
    report.
    """
    report = Report()
    total = client.header().total_entries
    sample = _Sample(most)
    try:
        with client.batches(from_entry=0, stop=total) as batches:
            for batch in batches:
                report.entries += len(batch)
                report.bookmarks += sample.take(batch)
                advance(len(batch))
        looked_up = "entry 0"
        for key, event in sample.events.items():
            looked_up = f"bookmark 0x{key.hex()}"
            wrong = _wrong_with(client, key, event, total)
            if wrong is not None:
                report.problems.append(Problem(looked_up, wrong, _REINDEX))
    except ProtocolViolation as error:
        where = f"entry {report.entries}" if report.entries < total else looked_up
        report.problems.append(Problem(where, str(error), _SEE_THE_FILE))
    if len(sample.events) < report.bookmarks:
        report.notes.append(sample.described(report.bookmarks))
    report.ok = not report.problems
    return report


class _Sample:
    """At most `most` keys of bookmarks, those of all bookmarks or of one in 2, 4, 8 ..., each with
    the number of the first event after its last entry (None: no event follows)."""

    def __init__(self, most: int) -> None:
        self.events: dict[bytes, int | None] = {}
        self._most = most
        self._stride = 1
        self._seen = 0
        # Keys since the last event.
        self._waiting: list[bytes] = []

    def take(self, batch: EntryBatch) -> int:
        """Add the next entries; returns the number of bookmarks among them."""
        bookmarks = batch.bookmarks()
        at = batch.first_number
        for key, number in bookmarks:
            if number > at:
                self._event(at)
            at = number + 1
            self._add(key)
        if at < batch.next_number:
            self._event(at)
        return len(bookmarks)

    def described(self, bookmarks: int) -> str:
        """How many of the keys of this number of bookmarks there are, for a note."""
        if self._stride > 1:
            which = f"the keys of one bookmark in {self._stride:,}"
        else:
            which = "all of their keys, since a key leads to its newest bookmark"
        return f"of {bookmarks:,} bookmarks {len(self.events):,} were looked up: {which}"

    def _event(self, number: int) -> None:
        """The entry of this number is an event."""
        for key in self._waiting:
            if key in self.events:
                self.events[key] = number
        self._waiting = []

    def _add(self, key: bytes) -> None:
        if key not in self.events and self._seen % self._stride == 0:
            if len(self.events) == self._most:
                self.events = dict(list(self.events.items())[::2])
                self._stride *= 2
            self.events[key] = None
        if key in self.events:
            self.events[key] = None
            self._waiting.append(key)
        self._seen += 1


def _wrong_with(client: BlockingClient, key: bytes, event: int | None, total: int) -> str | None:
    """The problem of a bookmark that must lead to the entry `event` (None: to no entry); None if
    there is no problem."""
    try:
        found = client.bookmark(key)
    except UnknownBookmark:
        return None if event is None else f"it is not found, and entry {event} is its event"
    if found.number >= total:
        # A bookmark with its key, or the first event after it, was committed meanwhile.
        return None
    if found.number == event:
        # It may be updated between the two.
        if found == client.entry(event) or client.bookmark(key) == client.entry(event):
            return None
        return f"it leads to entry {event} with other data than that entry has"
    wanted = "no event follows it" if event is None else f"its event is entry {event}"
    return f"it leads to entry {found.number}, and {wanted}"
