"""Ingests a sequencer's stream into typed tables: a backfill, then a live tail.

Owns a folder with the tables. Each change of them is one change of the manifest: a range of entries
that is complete, ranges that are joined, or the removal of what the stream no longer has.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Final, NamedTuple

from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

from datastreamer.errors import DatastreamerError, ExtraMissing
from datastreamer.spark.pipeline.folder import folder_of
from datastreamer.spark.pipeline.frames import frame
from datastreamer.spark.pipeline.manifest import EntryRange, Manifest, edges_of
from datastreamer.spark.pipeline.source import Seen, Source
from datastreamer.spark.pipeline.tables import (
    TABLES,
    Format,
    columns_of,
    copy,
    tables_in,
    with_day,
)
from datastreamer.spark.pipeline.transactions import BlocksOfRange, decoded_transactions
from datastreamer.zkevm.schema import FIRST_PROTOBUF_VERSION

CHUNK: Final = 1_000_000
"""Entries per range of a backfill."""

COMPACT: Final = 20_000_000
"""Entries per range after `Ingest.compact`."""

_SMALL: Final = 10
"""As many small ranges are joined by themselves."""

_log = logging.getLogger(__name__)


class Progress(NamedTuple):
    """How far a backfill is: it writes `table`, the one after `tables` others, of the entries from
    `start` up to before `stop`, of `total`."""

    start: int
    stop: int
    total: int
    table: str
    tables: int

    def share(self, of_table: float) -> float:
        """The part of the stream that is done, if this part of the table is."""
        of_range = (self.tables + of_table) / len(TABLES)
        return (self.start + (self.stop - self.start) * of_range) / self.total


class Ingest:
    """The tables of one stream in the folder `out`, which all executors must share.

    `source` names the stream with options of `spark.read`: ``{"path": ...}`` or
    ``{"server": ...}``, and perhaps ``mode``. `out` is a path, or a URL that Hadoop knows.
    `format` is that of the tables, for a new folder (None: Parquet). A local folder is locked until
    `close`. Raises what `Manifest` raises, and `ExtraMissing` without the packages that decode
    transactions.
    """

    def __init__(
        self,
        spark: SparkSession,
        source: Mapping[str, str],
        out: str | os.PathLike[str],
        format: Format | None = None,
    ) -> None:
        ensure_openable()
        self._spark = spark
        self._options = dict(source)
        self._source = Source(source)
        self.progress: Progress | None = None
        columns = columns_of(self._source.options)
        folder = folder_of(out, spark)
        self._manifest = Manifest(folder, self._source, columns, format)
        try:
            self._tables = tables_in(spark, folder, self._manifest.now.format, columns)
        except BaseException:
            self.close()
            raise

    @property
    def done(self) -> int:
        """The next entry to ingest: all entries before it are in the tables."""
        return self._manifest.now.done

    def backfill(self, chunk: int = CHUNK) -> int:
        """Ingest everything that is committed now; returns the number of entries.

        First removes from the tables what the stream no longer has.
        """
        seen, written = self._agree(), 0
        total = seen.total
        while self.done < min(total, seen.total):
            start, stop = self.done, min(total, seen.total, self.done + chunk)
            self.progress = Progress(start, stop, total, TABLES[0], 0)
            last = len(self._manifest.now.ranges)
            write = partial(self._write_tables, start, stop)
            if self._write(seen, start, stop, write, last, last):
                written += stop - start
                self._join_small(seen)
            else:
                # Of a stream that changes often, a smaller range has a chance.
                chunk = max(1, chunk // 2)
            seen = self._agree()
        self.progress = None
        return written

    def follow(
        self,
        seconds: float = 10.0,
        stopped: Callable[[float], object] = time.sleep,
        *,
        chunk: int = CHUNK,
    ) -> Iterator[int]:
        """Ingest new entries every `seconds` seconds, and yield their number, until `stopped`,
        which waits for as long, returns something true: ``threading.Event().wait`` for example."""
        while not stopped(seconds):
            if count := self.backfill(chunk):
                yield count

    def compact(self, entries: int = COMPACT) -> int:
        """Join successive ranges of up to `entries` entries together, in fewer and larger files;
        returns the number of ranges. Queries that run meanwhile have 10 minutes to end."""
        seen = self._agree()
        for first, last in self._manifest.joinable(entries):
            self._join(seen, first, last)
        return len(self._manifest.now.ranges)

    def close(self) -> None:
        """Unlock the folder."""
        self._manifest.close()

    def _agree(self) -> Seen:
        """The stream, which has the entries in the tables: what it no longer has is removed."""
        while True:
            seen = self._source.look()
            lags = self._source.may_lag and seen.total < self.done
            if lags or self._manifest.unchanged():
                return seen
            with self._unless_changed(seen):
                if self._roll_back(seen):
                    return seen

    def _roll_back(self, seen: Seen) -> bool:
        """Remove what the stream no longer has; False if it is no longer as it was `seen`."""
        keep, now = self._manifest.common(seen), self._manifest.now
        whole = [each for each in now.ranges if each.stop <= keep]
        if keep < now.done:
            _log.warning(
                "%s: the stream was changed from entry %d on: the tables lose the entries from "
                "there up to %d, and those that replaced them follow",
                *(self._manifest.folder.url, keep, now.done),
            )
        start, count = (whole[-1].stop if whole else 0), len(now.ranges)
        if start == keep:
            return self._put(seen, len(whole), count, [], keep)
        # Of the range with the first change, its beginning is kept.
        part = [now.ranges[len(whole)].name]
        write = partial(copy, self._tables, part, keep)
        return self._write(seen, start, keep, write, len(whole), count)

    def _join_small(self, seen: Seen) -> None:
        """Join the newest ranges if there are many that are small beside the others."""
        ranges = self._manifest.now.ranges
        last = len(ranges)
        for first in range(last - _SMALL + 1):
            size = ranges[first].stop - ranges[first].start
            together = ranges[-1].stop - ranges[first].start
            if together <= COMPACT and size <= together - size:
                self._join(seen, first, last)
                return

    def _join(self, seen: Seen, first: int, last: int) -> None:
        ranges = self._manifest.now.ranges[first:last]
        stop = ranges[-1].stop
        write = partial(copy, self._tables, [each.name for each in ranges], stop)
        self._write(seen, ranges[0].start, stop, write, first, last)

    def _write(
        self,
        seen: Seen,
        start: int,
        stop: int,
        write: Callable[[str], None],
        first: int,
        last: int,
    ) -> bool:
        """Have `write` write the rows of a range, and put it in the place of the ranges from
        `first` up to before `last`; False if the stream is no longer as it was `seen`."""
        name = self._manifest.begin(start, stop)
        self._tables.clear(self._manifest.due())
        with self._unless_changed(seen):
            write(name)
            hashes = tuple(self._source.hashes(edges_of(start, stop)))
            return self._put(seen, first, last, [EntryRange(name, start, stop, hashes)], stop)
        return False

    def _put(self, seen: Seen, first: int, last: int, new: list[EntryRange], stop: int) -> bool:
        state = self._source.state(stop)
        if same := self._source.is_as(seen):
            self._manifest.put(first, last, new, state)
        return same

    @contextmanager
    def _unless_changed(self, seen: Seen) -> Iterator[None]:
        """Pass over an error if the stream is no longer as it was `seen`: what was truncated cannot
        be read."""
        try:
            yield
        except (DatastreamerError, PySparkException, Py4JJavaError):
            if self._source.is_as(seen):
                raise

    def _write_tables(self, start: int, stop: int, name: str) -> None:
        for at, table in enumerate(TABLES):
            assert self.progress is not None
            self.progress = self.progress._replace(table=table, tables=at)
            if table == "transactions":
                with self._transactions(start, stop) as rows:
                    self._tables.save(with_day(rows), table, name)
                continue
            rows = self._read(table, start, stop)
            dated = with_day(rows) if "timestamp" in rows.columns else rows
            self._tables.save(dated, table, name)

    def _read(self, table: str, start: int, stop: int, schema: str | None = None) -> DataFrame:
        offsets = {"startingOffset": str(start), "endingOffset": str(stop)}
        return frame(self._spark, {**self._options, "table": table, **offsets}, schema)

    @contextmanager
    def _transactions(self, start: int, stop: int) -> Iterator[DataFrame]:
        """Decoded transactions with the entry and time of their blocks; null for an unknown one."""
        schema = "number long, entry_number long, timestamp long"
        first = self._block_before(start)
        blocks = self._read("blocks", first, stop, schema).toArrow()
        # A transaction of version 1 does not name its block, which is the one before it.
        named = self._source.look().identity.version >= FIRST_PROTOBUF_VERSION
        known = BlocksOfRange(blocks, first, stop, named=named)
        # Spark broadcasts large closures, too, but keeps their files until the session ends.
        sent = self._spark.sparkContext.broadcast(known)
        try:
            yield decoded_transactions(self._spark, self._options, start, stop, sent)
        finally:
            sent.destroy()

    def _block_before(self, start: int) -> int:
        """The entry of the last block before this entry; 0 if there is none."""
        step, stop = 1_000, start
        while stop > 0:
            begin = max(0, stop - step)
            blocks = self._read("blocks", begin, stop, "entry_number long")
            found = blocks.agg(f.max("entry_number")).collect()[0][0]
            if found is not None:
                return int(found)
            step, stop = step * 16, begin
        return 0


def ensure_openable() -> None:
    """Raise `ExtraMissing` if a package that decodes transactions is missing."""
    if any(importlib.util.find_spec(name) is None for name in ("coincurve", "sha3")):
        raise ExtraMissing("decoding transactions needs packages that are not installed", "zkevm")
