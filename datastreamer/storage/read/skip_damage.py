"""Reads a stream that has damaged pages: continues with the next page that begins with an entry."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from datastreamer._codec import EntryBatch
from datastreamer.errors import DamagedEntry
from datastreamer.format import HEADER_PAGE_SIZE, page_of, page_start, pages_for
from datastreamer.storage.read.reader import Reader
from datastreamer.storage.read.spans import Cursor


def run_or_skip(reader: Reader, cursor: Cursor) -> tuple[EntryBatch | DamagedEntry, Cursor]:
    """As `reader.run`. If no entry can be read at the cursor: the error, and the place of the next
    one that can be read, or the end of the stream."""
    try:
        return reader.run(cursor)
    except DamagedEntry as damage:
        return damage, _after_damage(reader, cursor)


def _after_damage(reader: Reader, cursor: Cursor) -> Cursor:
    head = reader.head
    for page in range(page_of(cursor.offset) + 1, pages_for(head.length)):
        with contextlib.suppress(DamagedEntry):
            place = Cursor(page_start(page), reader.first_number(page))
            # A page of another place begins with an entry too, but no look-up leads there.
            possible = cursor.number <= place.number < head.entries
            if possible and reader.cursor(place.number) == place:
                reader.run(place)
                return place
    return Cursor(*head)


def lost_entries(reader: Reader) -> Iterator[tuple[int, int]]:
    """The ranges of entries that cannot be read: the first one, and the one after the last."""
    cursor, head = Cursor(HEADER_PAGE_SIZE, 0), reader.head
    while cursor.number < head.entries:
        first = cursor.number
        found, cursor = run_or_skip(reader, cursor)
        if isinstance(found, DamagedEntry) and cursor.number > first:
            yield first, cursor.number
