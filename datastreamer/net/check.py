"""What a server serves, checked from outside: each entry once, in order, and bookmarks.

Owns what can be wrong there. Reads as any client does; what it cannot see is the file.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from datastreamer._codec import Entry
from datastreamer.errors import ProtocolViolation, UnknownBookmark
from datastreamer.net.blocking import BlockingClient
from datastreamer.storage.report import Problem, Report

MOST_LOOKED_UP: Final = 1000
"""So many bookmarks are looked up, spread over the stream; two or three round trips each."""

_SEE_THE_FILE: Final = "none from here: verify the server's file"
_REINDEX: Final = "reindex the server's file"


def verify_server(
    client: BlockingClient,
    *,
    most: int = MOST_LOOKED_UP,
    advance: Callable[[int], object] = lambda count: None,
) -> Report:
    """Read all that is committed now, and look up `most` of its bookmarks, evenly spread.

    `advance` is told of entries that were read. The report has no pages. Raises what the
    client's calls raise, but `ProtocolViolation`, which is a problem of the report.
    """
    report = Report()
    total = client.header().total_entries
    sample = _Sample(most)
    try:
        with client.batches(from_entry=0, stop=total) as batches:
            for batch in batches:
                report.entries += len(batch)
                for key, number in batch.bookmarks():
                    report.bookmarks += 1
                    sample.add(key, number)
                advance(len(batch))
        looked_up = "entry 0"
        for key, number in sample.marks.items():
            looked_up = f"bookmark 0x{key.hex()}"
            wrong = _wrong_with(client, key, number, total)
            if wrong is not None:
                report.problems.append(Problem(looked_up, wrong, _REINDEX))
    except ProtocolViolation as error:
        where = f"entry {report.entries}" if report.entries < total else looked_up
        report.problems.append(Problem(where, str(error), _SEE_THE_FILE))
    if len(sample.marks) < report.bookmarks:
        report.notes.append(
            f"of {report.bookmarks:,} bookmarks {len(sample.marks):,} different ones were looked up"
        )
    report.ok = not report.problems
    return report


class _Sample:
    """At most so many keys of bookmarks, evenly spread, each with the number of its last entry."""

    def __init__(self, most: int) -> None:
        self.marks: dict[bytes, int] = {}
        self._most = most
        self._stride = 1
        self._seen = 0

    def add(self, key: bytes, number: int) -> None:
        if key in self.marks:
            self.marks[key] = number
        elif self._seen % self._stride == 0:
            self.marks[key] = number
            if len(self.marks) > self._most:
                self.marks = dict(list(self.marks.items())[::2])
                self._stride *= 2
        self._seen += 1


def _wrong_with(client: BlockingClient, key: bytes, number: int, total: int) -> str | None:
    """What is wrong with what a bookmark leads to; None: nothing. Its last entry has `number`."""
    due: Entry | None = None
    for at in range(number + 1, total):
        due = client.entry(at)
        if not due.is_bookmark:
            break
        due = None
    try:
        found = client.bookmark(key)
    except UnknownBookmark:
        return None if due is None else f"it is not found, and entry {due.number} is its event"
    if found.number >= total or found == due:
        # One of its key, or the first event behind it, may have come meanwhile.
        return None
    wanted = "no event follows it" if due is None else f"its event is entry {due.number}"
    return f"it leads to entry {found.number}, and {wanted}"
