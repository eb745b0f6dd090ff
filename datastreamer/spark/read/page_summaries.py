"""What whole pages of a stream file hold, as far as `FILE.pages` beside it says so and the page's
proven checksum confirms that.

Owns which pages hold no row of a query. Only mode FAILFAST asks: in the other modes what is lost in
a page is a row, too.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from datastreamer.arrow.tables import ENTRIES, TABLES
from datastreamer.errors import FileMissing, StreamFileError
from datastreamer.format import U64_MAX
from datastreamer.spark.options import Options
from datastreamer.spark.read.files import FileSnapshot, open_location
from datastreamer.spark.read.page_sums import open_records
from datastreamer.spark.read.schemas import number_column
from datastreamer.storage.disk.file_ops import OsDisk, OsFile, Readable
from datastreamer.storage.header import undo_journal as journal
from datastreamer.storage.pages.hashes import last_page
from datastreamer.storage.summaries.records import SUFFIX, PageSummary, StoredSummaries
from datastreamer.zkevm.schema import FIRST_PROTOBUF_VERSION

_RANGES: Final = (
    *(("batches", "number"), ("blocks", "number"), ("blocks", "batch_number")),
    *(("blocks", "timestamp"), ("block_ends", "number"), ("transactions", "l2block_number")),
    *(("batch_ends", "number"), ("ger_updates", "batch_number"), ("ger_updates", "timestamp")),
)
RANGES: Final = {column: at for at, column in enumerate(_RANGES)}
"""The columns of which a summary has the least and the greatest value, and where."""

_TYPE: Final = ENTRIES, "type"
# Pages whose records are in memory at once.
_MANY: Final = 4096
# Reading this many pages costs no more than beginning again after them.
_GAP: Final = 4

Filter = Mapping[str, Any]
"""A `column`, and the `least` and the `most` that it may be (None: no limit)."""


@dataclass(frozen=True, slots=True)
class PageFilter:
    """What an entry has to be to be a row: its number is from `first` up to `last`, its type one of
    `types` (None: any) and within `type_limits`. `limits`: of some ranges of a summary the least
    and the most that a row needs."""

    types: frozenset[int] | None
    limits: tuple[tuple[int, int, int], ...]
    type_limits: tuple[tuple[int, int], ...]
    first: int
    last: int

    @classmethod
    def of(cls, options: Options, version: int, filters: Iterable[Filter] = ()) -> PageFilter:
        types: frozenset[int] | None = None
        if options.table != ENTRIES:
            kind = TABLES[options.table].entry_type(version)
            types = frozenset(() if kind is None else (kind,))
        elif options.where is not None:
            types = frozenset(it if isinstance(it, int) else it.type for it in options.where)
        limits, type_limits, first, last = [], [], 0, U64_MAX
        for each in filters:
            least = 0 if each["least"] is None else each["least"]
            most = U64_MAX if each["most"] is None else each["most"]
            place = options.table, each["column"]
            if each["column"] == number_column(options.table):
                first, last = max(first, least), min(last, most)
            elif place == _TYPE:
                type_limits.append((least, most))
            elif place in RANGES and version >= FIRST_PROTOBUF_VERSION:
                limits.append((RANGES[place], least, most))
        return cls(types, tuple(limits), tuple(type_limits), first, last)

    @property
    def everything(self) -> bool:
        return self.types is None and not self.limits and not self.type_limits

    def rows(self, summary: PageSummary) -> int | None:
        """At most how many entries of a page are rows; None if that is not known."""
        counts = summary.counts
        if counts is None:
            return None
        if summary.has_ranges:
            for which, least, most in self.limits:
                found = summary.range(which)
                if found is None or found[1] < least or found[0] > most:
                    return 0
        return sum(
            count
            for kind, count in counts.items()
            if (self.types is None or kind in self.types)
            and all(least <= kind <= most for least, most in self.type_limits)
        )


def proven(options: Options, snapshot: FileSnapshot, pages: range) -> dict[int, PageSummary]:
    """The summaries of these pages, of those that are whole and have one that is proven."""
    stop = min(pages.stop, last_page(snapshot.head.length))
    found: dict[int, PageSummary] = {}
    if options.mode != "FAILFAST" or not (options.verify and snapshot.recorded):
        return found
    if pages.start >= stop:
        return found
    with contextlib.ExitStack() as opened, contextlib.suppress(OSError, StreamFileError):
        file = open_location(snapshot.location)
        opened.callback(file.close)
        beside = _open_beside(snapshot, file)
        opened.callback(beside.close)
        stored = StoredSummaries(beside)
        if stored.stream_id() != snapshot.stream_id:
            return found
        sums = open_records(snapshot.location, file, snapshot.sums_state)
        opened.callback(sums.close)
        for first in range(pages.start, stop, _MANY):
            end = min(first + _MANY, stop)
            summaries = stored.get_many(first, end, snapshot.stream_id)
            both = zip(summaries, sums.get_many(first, end), strict=True)
            for page, (summary, known) in enumerate(both, first):
                if summary is None or known is None or not summary.counted:
                    continue
                if (summary.digest, summary.covered) == (known.digest, known.end):
                    found[page] = summary
    return found


def _open_beside(snapshot: FileSnapshot, file: Readable) -> Readable:
    location = snapshot.location
    if location.uri is None and isinstance(file, OsFile):
        path = journal.path_of(location.path) + SUFFIX
        return OsDisk().open(path, write=False, beside=file.access())
    if location.archive is not None:
        raise FileMissing(location.path, "archives have none")
    return location.beside(SUFFIX).open_remote()


def needed(pages: range, wanted: PageFilter, known: Mapping[int, PageSummary]) -> list[range]:
    """The pages that may hold rows; small gaps are read, too."""
    runs: list[range] = []
    for page in pages:
        if page in known and wanted.rows(known[page]) == 0:
            continue
        if runs and page - runs[-1].stop < _GAP:
            runs[-1] = range(runs[-1].start, page + 1)
        else:
            runs.append(range(page, page + 1))
    return runs
