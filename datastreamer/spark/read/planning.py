"""Plans a query on the driver: which entries to read, in which parts.

Owns how offsets become pages of files and ranges of entries of servers.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

from pyspark.sql.datasource import InputPartition

from datastreamer.client.blocking_client import BlockingClient
from datastreamer.errors import BadRange, DamagedEntry, UnknownEntry
from datastreamer.format import Header, page_of
from datastreamer.spark.options import Offset, Options, StartTime
from datastreamer.spark.read.bookmark_search import BookmarkSearch
from datastreamer.spark.read.files import FileSnapshot, entry_at, open_reader, take_snapshot
from datastreamer.spark.read.page_summaries import Filter, PageFilter, needed, proven
from datastreamer.spark.read.partitions import FilePart, cut_entries, pack, parts_of_entries
from datastreamer.spark.read.paths import find
from datastreamer.spark.read.servers import (
    Servers,
    find_at_server,
    history_of,
    take_server_snapshot,
)
from datastreamer.storage.read.reader import Reader
from datastreamer.zkevm.bookmark_keys import BookmarkName, Kind

FindPlace = Callable[[BookmarkName | StartTime], int]


def plan(options: Options) -> Iterator[InputPartition]:
    """The parts of a query of what is committed now, without pages that hold no row. Raises what
    reading the sources raises."""
    if options.servers:
        yield from _of_servers(options, functools.partial(_committed, options))
        return
    most = options.partition_bytes
    parts = (part for whole in plan_files(options) for part in narrowed(options, whole)[0])
    yield from pack((piece for part in parts for piece in part.cut(most)), most)


def plan_files(options: Options) -> Iterator[FilePart]:
    """A part for the entries of each file that a query of what is committed now reads."""
    for location in find(options.paths, deep=options.deep):
        snapshot = take_snapshot(location, options.stream_type, options.generation)
        yield from _plan_file(options, snapshot)


def narrowed(
    options: Options, part: FilePart, filters: Iterable[Filter] = ()
) -> tuple[list[FilePart], float | None]:
    """What is left of a part without the pages that hold no row, and about how many rows there
    are; None if that is not known. Filters only narrow what is read: Spark applies all of them."""
    snapshot, pages = part.snapshot, part.pages
    rows = PageFilter.of(options, options.version_of(snapshot.header), filters)
    start, stop = max(part.start, rows.first), min(part.stop, rows.last + 1)
    if start >= stop:
        return [], 0
    if (start, stop) != (part.start, part.stop):
        with open_reader(snapshot, verify=options.verify) as reader:
            within = pages_of(reader, snapshot, start, stop)
        pages = range(max(pages.start, within.start), min(pages.stop, within.stop))
    left = replace(part, start=start, stop=stop)
    if rows.everything:
        return left.of_runs([pages] if pages else []), stop - start
    known = proven(options, snapshot, pages)
    counts = [count for each in known.values() if (count := rows.rows(each)) is not None]
    mean = sum(counts) / len(counts) if counts else None
    return left.of_runs(needed(pages, rows, known)), None if mean is None else mean * len(pages)


def _plan_file(options: Options, snapshot: FileSnapshot) -> Iterator[FilePart]:
    total = snapshot.header.total_entries
    if options.start == 0 and options.stop is None:
        # Nothing to look for, so the file is not opened again: there may be thousands.
        yield FilePart(snapshot, 0, snapshot.pages, 0, total)
        return
    with open_reader(snapshot, verify=options.verify) as reader:
        start, stop = _offsets(options, total, finder(options, snapshot, reader))
        if start < stop:
            pages = pages_of(reader, snapshot, start, stop)
            yield FilePart(snapshot, pages.start, pages.stop, start, stop)


def finder(options: Options, snapshot: FileSnapshot, reader: Reader) -> FindPlace:
    """What finds the entry of the bookmark of a block or batch, or of a time. It raises
    `UnknownBookmark` and `TimeUnknown`."""
    header, location = snapshot.header, snapshot.location
    version = options.version_of(header)

    @functools.cache
    def search(kind: Kind) -> BookmarkSearch:
        return BookmarkSearch(reader, location.path, version, kind)

    def find(place: BookmarkName | StartTime) -> int:
        if isinstance(place, StartTime):
            return min(header.total_entries, entry_at(location, options.stream_type, place.ms))
        return search(place.kind).entry_of(place.number)

    return find


def plan_ranges(options: Options, edges: Sequence[int]) -> Iterator[InputPartition]:
    """A part for the entries between each two successive `edges`, of one file or server."""
    if len(edges) < 2:
        return
    pieces = list(itertools.pairwise(edges))
    if options.servers:
        yield from _of_servers(options, lambda *_: pieces)
        return
    (location,) = find(options.paths)
    file = take_snapshot(location, options.stream_type, options.generation)
    with open_reader(file, verify=options.verify) as reader:
        for start, stop in pieces:
            pages = pages_of(reader, file, start, stop)
            yield FilePart(file, pages.start, pages.stop, start, stop)


def pages_of(reader: Reader, snapshot: FileSnapshot, start: int, stop: int) -> range:
    """The pages with the entries from `start` up to, not including, `stop`; all pages if damage
    hides which. `start` is less than `stop`."""
    everything = range(snapshot.pages)
    try:
        first, last = 0, snapshot.pages - 1
        if start > 0:
            first = page_of(reader.cursor(start).offset)
        if stop < snapshot.header.total_entries:
            last = page_of(reader.cursor(stop - 1).offset)
    except DamagedEntry:
        return everything
    # The numbers of pages that are at the place of others do not rise.
    return range(first, last + 1) if first <= last else everything


def _of_servers(
    options: Options, cut: Callable[[BlockingClient, Header], list[tuple[int, int]]]
) -> Iterator[InputPartition]:
    """A part for each of the ranges of entries that `cut` gives."""
    servers = Servers.of(options)
    index, client = servers.connect_any()
    with client:
        known, header = {index: history_of(client)}, client.header()
        if pieces := cut(client, header):
            stop = pieces[-1][1]
            snapshot = take_server_snapshot(servers, client, header, stop, known, len(pieces))
            yield from parts_of_entries(snapshot, pieces)


def _committed(options: Options, client: BlockingClient, header: Header) -> list[tuple[int, int]]:
    find = functools.partial(find_at_server, options, client, header)
    start, stop = _offsets(options, header.total_entries, find)
    return cut_entries(header, start, stop, options.partition_bytes) if start < stop else []


def _offsets(options: Options, total: int, find: FindPlace) -> tuple[int, int]:
    """The first entry of the query and the entry after its last one.

    Raises `UnknownEntry` and `UnknownBookmark` for an offset beyond the stream's end, `BadRange`
    if the end precedes the start.
    """

    def number_of(offset: Offset) -> int:
        number = offset if isinstance(offset, int) else find(offset)
        if number > total:
            raise UnknownEntry(number, total)
        return number

    start = number_of(options.start)
    stop = total if options.stop is None else number_of(options.stop)
    if stop < start:
        raise BadRange(f"endingOffset is entry {stop}, before startingOffset, entry {start}")
    return start, stop
