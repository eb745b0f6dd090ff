"""The parts of a query, one per Spark task: pages of files, or entries of a server.

Owns how streams are cut into parts, and small files packed into one. The driver pickles parts for
executors, so they hold only names and numbers.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Final

from pyspark.sql.datasource import InputPartition

from datastreamer.format import HEADER_PAGE_SIZE, PAGE_SIZE, Header, page_start
from datastreamer.spark.read.files import FileSnapshot
from datastreamer.spark.read.servers import ServerSnapshot

OPEN_COST: Final = 1 << 20
"""What opening a file counts, in bytes, as Spark's ``spark.sql.files.openCostInBytes`` does. Less
than Spark's 4 MiB: the start of a task costs as much as reading some hundred small files."""


@dataclass(frozen=True)
class FilePart(InputPartition):
    """Pages `first_page` to `stop_page` (exclusive) of a file, and of their entries those from
    `start` to `stop` (exclusive)."""

    snapshot: FileSnapshot
    first_page: int
    stop_page: int
    start: int
    stop: int

    @property
    def cost(self) -> int:
        """The bytes to read, and the cost to open the file."""
        end = min(page_start(self.stop_page), self.snapshot.head.length)
        return end - page_start(self.first_page) + OPEN_COST

    @property
    def pages(self) -> range:
        return range(self.first_page, self.stop_page)

    def of_runs(self, runs: Iterable[range]) -> list[FilePart]:
        """The part without the pages outside of these runs."""
        return [replace(self, first_page=run.start, stop_page=run.stop) for run in runs]

    def cut(self, part_bytes: int) -> list[FilePart]:
        """Parts of its pages, of about `part_bytes` each."""
        pieces = len(self.pages) * PAGE_SIZE / part_bytes
        return self.of_runs(range(*it) for it in _cut(self.first_page, self.stop_page, pieces))


@dataclass(frozen=True)
class PackedParts(InputPartition):
    """Parts of several files, which one task reads in this order."""

    parts: tuple[FilePart, ...]


@dataclass(frozen=True)
class ServerPart(InputPartition):
    """Entries `start` to `stop` (exclusive) of a server."""

    snapshot: ServerSnapshot
    start: int
    stop: int
    turn: int
    """Index of the server to ask first: parts are spread over the servers."""


def pack(parts: Iterable[FilePart], most: int) -> Iterator[FilePart | PackedParts]:
    """The parts in their order, packed up to a cost of `most` as Spark packs files."""
    held: list[FilePart] = []
    cost = 0
    for part in parts:
        if held and cost + part.cost > most:
            yield _packed(held)
            held, cost = [], 0
        held.append(part)
        cost += part.cost
    if held:
        yield _packed(held)


def _packed(parts: list[FilePart]) -> FilePart | PackedParts:
    return parts[0] if len(parts) == 1 else PackedParts(tuple(parts))


def cut_entries(header: Header, start: int, stop: int, part_bytes: int) -> list[tuple[int, int]]:
    """Ranges of these entries, of about `part_bytes` each if all entries have the mean size."""
    size = (header.total_length - HEADER_PAGE_SIZE) / max(1, header.total_entries)
    return _cut(start, stop, (stop - start) * size / part_bytes)


def parts_of_entries(
    snapshot: ServerSnapshot, pieces: list[tuple[int, int]]
) -> Iterator[ServerPart]:
    """One part per range."""
    for turn, (first, end) in enumerate(pieces):
        yield ServerPart(snapshot, first, end, turn)


def _cut(start: int, stop: int, parts: float) -> list[tuple[int, int]]:
    """Cut a range into about `parts` equal ranges, none of them empty."""
    count = max(1, min(round(parts), stop - start))
    edges = [start + (stop - start) * at // count for at in range(count + 1)]
    return [(a, b) for a, b in itertools.pairwise(edges) if a < b]
