"""Plans a query on the driver: which entries to read, in which parts.

Owns how offsets and filters become pages of files and ranges of entries of servers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from pyspark.sql.datasource import InputPartition

from datastreamer.errors import BadRange, DamagedEntry, NotFound, UnknownEntry
from datastreamer.format import page_of
from datastreamer.spark.options import Offset, Options
from datastreamer.spark.read.bookmark_search import BookmarkSearch
from datastreamer.spark.read.files import FileSnapshot, open_reader, take_snapshot
from datastreamer.spark.read.partitions import cut_entries, cut_pages, parts_of_entries
from datastreamer.spark.read.paths import find
from datastreamer.spark.read.pushdown import ALL, Bounds, NumberRange
from datastreamer.spark.read.servers import (
    Servers,
    entry_of_bookmark,
    history_of,
    take_server_snapshot,
)
from datastreamer.storage.read.reader import Reader
from datastreamer.zkevm.bookmark_keys import BookmarkName, Kind

FindBookmark = Callable[[Kind, int], int]


def plan(options: Options, bounds: Bounds) -> Iterator[InputPartition]:
    """The parts of a query of what is committed now. Raises what reading the sources raises."""
    if options.servers:
        yield from _plan_servers(options, bounds)
        return
    for location in find(options.paths):
        snapshot = take_snapshot(location, options.stream_type)
        yield from _plan_file(options, snapshot, bounds)


def _plan_file(
    options: Options, snapshot: FileSnapshot, bounds: Bounds
) -> Iterator[InputPartition]:
    version = snapshot.header.version if options.version is None else options.version
    with open_reader(snapshot, verify=options.verify) as reader:

        def search(kind: Kind) -> BookmarkSearch:
            return BookmarkSearch(reader, snapshot.location.path, version, kind)

        total = snapshot.header.total_entries
        start, stop = _offsets(options, total, lambda kind, number: search(kind).exact(number))
        bounds = bounds.within(start, stop)
        if bounds.empty:
            return
        for kind, wanted in (("block", bounds.blocks), ("batch", bounds.batches)):
            if wanted != ALL:
                found = _entries_of(search(kind), wanted)  # type: ignore[arg-type]
                bounds = bounds.within(found.first, found.last + 1)
        if not bounds.empty:
            pages = pages_of(reader, snapshot, bounds)
            yield from cut_pages(
                snapshot, pages, bounds.start, bounds.stop, options.partition_bytes
            )


def _entries_of(search: BookmarkSearch, wanted: NumberRange) -> NumberRange:
    """The entries of these blocks or batches; all entries if damage hides where they are."""
    try:
        return search.entries_of(wanted)
    except DamagedEntry:
        return ALL


def pages_of(reader: Reader, snapshot: FileSnapshot, bounds: Bounds) -> range:
    """The pages with the entries within the bounds; all pages if damage hides which."""
    everything = range(snapshot.pages)
    try:
        first, last = 0, snapshot.pages - 1
        if bounds.start > 0:
            first = page_of(reader.cursor(bounds.start).offset)
        if bounds.stop < snapshot.header.total_entries:
            last = page_of(reader.cursor(bounds.stop - 1).offset)
    except DamagedEntry:
        return everything
    return range(first, last + 1)


def _plan_servers(options: Options, bounds: Bounds) -> Iterator[InputPartition]:
    servers = Servers(
        options.servers, options.stream_type, options.tls, options.timeout, options.retry_for
    )
    index, client = servers.connect_any()
    with client:
        history = history_of(client)
        header = client.header()
        version = header.version if options.version is None else options.version

        def find(kind: Kind, number: int) -> int:
            return entry_of_bookmark(client, version, kind, number)

        start, stop = _offsets(options, header.total_entries, find)
        bounds = bounds.within(start, stop)
        for kind, wanted in (("block", bounds.blocks), ("batch", bounds.batches)):
            found = _between_bookmarks(find, kind, wanted)  # type: ignore[arg-type]
            bounds = bounds.within(found.first, found.last + 1)
        if not bounds.empty:
            pieces = cut_entries(header, bounds.start, bounds.stop, options.partition_bytes)
            known = {index: history}
            snapshot = take_server_snapshot(
                servers, client, header, bounds.stop, known, len(pieces)
            )
            yield from parts_of_entries(snapshot, pieces)


def _between_bookmarks(find: FindBookmark, kind: Kind, wanted: NumberRange) -> NumberRange:
    """A range of entries that holds these blocks or batches, limited by the bookmarks that the
    server has for the range's two ends."""
    found = ALL
    if wanted.first > ALL.first:
        with contextlib.suppress(NotFound):
            found &= NumberRange(first=find(kind, wanted.first))
    if wanted.last < ALL.last:
        with contextlib.suppress(NotFound):
            found &= NumberRange(last=find(kind, wanted.last + 1) - 1)
    return found


def _offsets(options: Options, total: int, find: FindBookmark) -> tuple[int, int]:
    """The first entry of the query and the entry after its last one.

    Raises `UnknownEntry` and `UnknownBookmark` for an offset beyond the stream's end, `BadRange`
    if the end precedes the start.
    """

    def number_of(offset: Offset) -> int:
        number = find(*offset) if isinstance(offset, BookmarkName) else offset
        if number > total:
            raise UnknownEntry(number, total)
        return number

    start = number_of(options.start)
    stop = total if options.stop is None else number_of(options.stop)
    if stop < start:
        raise BadRange(f"endingOffset is entry {stop}, before startingOffset, entry {start}")
    return start, stop
