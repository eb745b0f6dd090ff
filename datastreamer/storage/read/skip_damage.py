"""Reads a stream that has damaged pages: continues with the next page that begins with an entry."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from datastreamer._codec import EntryBatch
from datastreamer.errors import DamagedEntry
from datastreamer.format import HEADER_PAGE_SIZE, page_of, page_start, pages_for
from datastreamer.storage.read.reader import Reader
from datastreamer.storage.read.spans import Cursor


def run_or_skip(
    reader: Reader, cursor: Cursor, pace: Callable[[], object]
) -> tuple[EntryBatch | DamagedEntry, Cursor]:
    """As `reader.run`. If no entry can be read at the cursor: the error, and the place of the next
    one that can be read, or the end of the stream.

    `pace` is called for each page that is skipped, and may raise.
    """
    try:
        return reader.run(cursor)
    except DamagedEntry as damage:
        for place in _later_pages(reader, cursor, pace):
            return damage, place
        return damage, Cursor(*reader.head)


def _later_pages(reader: Reader, cursor: Cursor, pace: Callable[[], object]) -> Iterator[Cursor]:
    """The starts of the later pages that begin with a possible entry and can be read there."""
    for page in range(page_of(cursor.offset) + 1, pages_for(reader.head.length)):
        pace()
        place = _readable_start(reader, page, cursor.number)
        if place is not None:
            yield place


def _readable_start(reader: Reader, page: int, lowest: int) -> Cursor | None:
    with contextlib.suppress(DamagedEntry):
        place = Cursor(page_start(page), reader.first_number(page))
        if lowest <= place.number < reader.head.entries:
            reader.run(place)
            return place
    return None


def lost_entries(reader: Reader) -> Iterator[tuple[int, int]]:
    """The ranges of entries that cannot be read: the first one, and the one after the last."""
    cursor, head = Cursor(HEADER_PAGE_SIZE, 0), reader.head
    while cursor.number < head.entries:
        try:
            _, cursor = reader.run(cursor)
        except DamagedEntry:
            first, cursor = cursor.number, after_damage(reader, cursor)
            if cursor.number > first:
                yield first, cursor.number


def after_damage(reader: Reader, cursor: Cursor) -> Cursor:
    """The next entry, in a page after the cursor's, that a search for its number finds, or the end
    of the stream: no search finds an entry in a page that is at the place of another page."""
    for place in _later_pages(reader, cursor, lambda: None):
        with contextlib.suppress(DamagedEntry):
            if reader.cursor(place.number) == place:
                return place
    return Cursor(*reader.head)
