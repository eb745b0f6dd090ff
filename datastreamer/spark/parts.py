"""What one task of Spark reads: pages of a file, or entries of a server.

Owns how a stream is cut into parts. They are pickled on the driver and read on executors, so
they hold names and numbers only.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from pyspark.sql.datasource import InputPartition

from datastreamer.errors import DamagedEntry
from datastreamer.format import PAGE_SIZE, page_of
from datastreamer.spark.bounds import Bounds
from datastreamer.spark.files import Snapshot, open_place, reader_of


@dataclass(frozen=True)
class FilePart(InputPartition):
    """Pages of a file, from `first_page` up to, not including, `stop_page`; of their entries
    those from `start` up to, not including, `stop`."""

    snapshot: Snapshot
    first_page: int
    stop_page: int
    start: int
    stop: int


def cut_file(snapshot: Snapshot, bounds: Bounds, part_bytes: int) -> Iterator[FilePart]:
    """The parts of a file with the entries within the bounds, of about `part_bytes` each."""
    start, stop = bounds.start, min(bounds.stop, snapshot.header.total_entries)
    if start >= stop:
        return
    first, behind = _pages_of(snapshot, start, stop)
    count = max(1, round((behind - first) * PAGE_SIZE / part_bytes))
    count = min(count, behind - first)
    edges = [first + (behind - first) * at // count for at in range(count + 1)]
    for at in range(count):
        yield FilePart(snapshot, edges[at], edges[at + 1], start, stop)


def _pages_of(snapshot: Snapshot, start: int, stop: int) -> tuple[int, int]:
    """The pages with the entries from `start` up to `stop`; all, where damage hides which."""
    everything = (0, snapshot.pages)
    if start == 0 and stop == snapshot.header.total_entries:
        return everything
    file = open_place(snapshot.place)
    try:
        reader = reader_of(file, snapshot)
        first = page_of(reader.cursor(start).offset)
        return first, page_of(reader.cursor(stop - 1).offset) + 1
    except DamagedEntry:
        return everything
    finally:
        file.close()
