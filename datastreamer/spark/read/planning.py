"""What there is to read, and in which parts: the driver's share of a query.

Owns how offsets and filters become pages of files and entries of servers. What is not there
to be read is left out here, and not read at all.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from pyspark.sql.datasource import InputPartition

from datastreamer.errors import BadRange, DamagedEntry, NotFound, UnknownEntry
from datastreamer.format import page_of
from datastreamer.spark.options import Offset, Options
from datastreamer.spark.read import paths as places
from datastreamer.spark.read.bookmark_search import BookmarkSearch
from datastreamer.spark.read.files import FileSnapshot, look_at, open_place, reader_of
from datastreamer.spark.read.partitions import cut_entries, cut_pages, parts_of_entries
from datastreamer.spark.read.pushdown import ALL, Bounds, NumberRange
from datastreamer.spark.read.servers import Servers, entry_of_bookmark, history_of, look_at_servers
from datastreamer.storage.read.reader import Reader
from datastreamer.zkevm.keys import BookmarkName, Kind

FindBookmark = Callable[[Kind, int], int]


def plan(options: Options, bounds: Bounds) -> Iterator[InputPartition]:
    """The parts of a query, as things are now. Raises what looking at the sources raises."""
    if options.servers:
        yield from _plan_servers(options, bounds)
        return
    for place in places.find(options.paths):
        yield from _plan_file(options, look_at(place, options.stream_type), bounds)


def _plan_file(
    options: Options, snapshot: FileSnapshot, bounds: Bounds
) -> Iterator[InputPartition]:
    version = snapshot.header.version if options.version is None else options.version
    file = open_place(snapshot.place)
    try:
        reader = reader_of(file, snapshot)

        def search(kind: Kind) -> BookmarkSearch:
            return BookmarkSearch(reader, snapshot.place.path, version, kind)

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
    finally:
        file.close()


def _entries_of(search: BookmarkSearch, wanted: NumberRange) -> NumberRange:
    """Where blocks or batches stand; anywhere, where damage hides it."""
    try:
        return search.entries_of(wanted)
    except DamagedEntry:
        return ALL


def pages_of(reader: Reader, snapshot: FileSnapshot, bounds: Bounds) -> range:
    """The pages with the entries within the bounds; all, where damage hides which."""
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
    at, client = servers.any()
    with client:
        history = history_of(client)
        header = client.header()
        version = header.version if options.version is None else options.version

        def find(kind: Kind, number: int) -> int:
            return entry_of_bookmark(client, version, kind, number)

        start, stop = _offsets(options, header.total_entries, find)
        bounds = bounds.within(start, stop)
        for kind, wanted in (("block", bounds.blocks), ("batch", bounds.batches)):
            found = _between_marks(find, kind, wanted)  # type: ignore[arg-type]
            bounds = bounds.within(found.first, found.last + 1)
        if not bounds.empty:
            pieces = cut_entries(header, bounds.start, bounds.stop, options.partition_bytes)
            known = {at: history}
            snapshot = look_at_servers(servers, client, header, bounds.stop, known, len(pieces))
            yield from parts_of_entries(snapshot, pieces)


def _between_marks(find: FindBookmark, kind: Kind, wanted: NumberRange) -> NumberRange:
    """Where blocks or batches stand, as far as the server has bookmarks of exactly these."""
    found = ALL
    if wanted.first > ALL.first:
        with contextlib.suppress(NotFound):
            found &= NumberRange(first=find(kind, wanted.first))
    if wanted.last < ALL.last:
        with contextlib.suppress(NotFound):
            found &= NumberRange(last=find(kind, wanted.last + 1) - 1)
    return found


def _offsets(options: Options, total: int, find: FindBookmark) -> tuple[int, int]:
    """The first entry that is asked for, and the one behind the last.

    Raises `UnknownEntry` and `UnknownBookmark` where the stream does not go so far, `BadRange`
    where it ends before it begins.
    """

    def number_of(offset: Offset) -> int:
        number = find(*offset) if isinstance(offset, BookmarkName) else offset
        if number > total:
            raise UnknownEntry(number, total)
        return number

    start = number_of(options.start)
    stop = total if options.stop is None else number_of(options.stop)
    if stop < start:
        raise BadRange(f"endingOffset is entry {stop}, which stands before startingOffset, {start}")
    return start, stop
