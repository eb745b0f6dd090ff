"""What one task of Spark reads: pages of a file, or entries of a server.

Owns how a stream is cut into parts. They are pickled on the driver and read on executors, so
they hold names and numbers only.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from pyspark.sql.datasource import InputPartition

from datastreamer.format import HEADER_PAGE_SIZE, PAGE_SIZE, Header
from datastreamer.spark.read.files import FileSnapshot
from datastreamer.spark.read.servers import ServerSnapshot


@dataclass(frozen=True)
class FilePart(InputPartition):
    """Pages of a file, from `first_page` up to, not including, `stop_page`; of their entries
    those from `start` up to, not including, `stop`."""

    snapshot: FileSnapshot
    first_page: int
    stop_page: int
    start: int
    stop: int


@dataclass(frozen=True)
class ServerPart(InputPartition):
    """Entries of a server, from `start` up to, not including, `stop`."""

    snapshot: ServerSnapshot
    start: int
    stop: int
    turn: int
    """Which of several servers is asked first: parts are spread over them."""


def cut_pages(
    snapshot: FileSnapshot, pages: range, start: int, stop: int, part_bytes: int
) -> Iterator[FilePart]:
    """The parts of these pages, of about `part_bytes` each."""
    for first, behind in _cut(pages.start, pages.stop, len(pages) * PAGE_SIZE / part_bytes):
        yield FilePart(snapshot, first, behind, start, stop)


def cut_entries(header: Header, start: int, stop: int, part_bytes: int) -> list[tuple[int, int]]:
    """Pieces of these entries, of about `part_bytes` each if all entries are of a size."""
    size = (header.total_length - HEADER_PAGE_SIZE) / max(1, header.total_entries)
    return _cut(start, stop, (stop - start) * size / part_bytes)


def parts_of_entries(
    snapshot: ServerSnapshot, pieces: list[tuple[int, int]]
) -> Iterator[ServerPart]:
    """A part for each of these pieces."""
    for turn, (first, behind) in enumerate(pieces):
        yield ServerPart(snapshot, first, behind, turn)


def _cut(start: int, stop: int, parts: float) -> list[tuple[int, int]]:
    """About so many equal pieces of a range, none of them empty."""
    count = max(1, min(round(parts), stop - start))
    edges = [start + (stop - start) * at // count for at in range(count + 1)]
    return [(a, b) for a, b in itertools.pairwise(edges) if a < b]
