"""The manifest of a folder of tables: which ranges of a stream's entries it holds.

Owns the folder's ``_manifest``, where each change of the tables is one new file: readers use the
newest one, and what it does not name is not in the tables. Needs no Spark session, so that errors
of a stream or a local folder are found before one starts.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import Any, Final, NamedTuple

from pyspark.sql.types import StructType

from datastreamer.errors import FileMissing, StreamFileError, UsageError
from datastreamer.spark.pipeline.folder import TableFolder
from datastreamer.spark.pipeline.source import Seen, Source
from datastreamer.spark.pipeline.tables import Format

GRACE: Final = 600.0
"""Seconds that files stay after the manifest ceased to name them, for queries that read them."""

_FOLDER: Final = "_manifest"
_KEPT: Final = 16
"""The newest manifests that stay, for readers that have listed them."""

_PIECES: Final = 16
_LEAST_PIECE: Final = 256


class EntryRange(NamedTuple):
    """Entries from `start` up to, not including, `stop`.

    `name` is that of its folders: no other range ever has it. `hashes` are of its pieces.
    """

    name: str
    start: int
    stop: int
    hashes: tuple[str, ...]


def edges_of(start: int, stop: int) -> list[int]:
    """Where the pieces of a range begin that are hashed, and where the last one ends."""
    size = stop - start
    pieces = max(1, min(_PIECES, size // _LEAST_PIECE))
    return [start + size * at // pieces for at in range(pieces + 1)]


@dataclass(frozen=True)
class Contents:
    """What a manifest says; `number` is its own.

    `stream` identifies the stream and `state` its entries (`Source.state`). `columns` are the
    schemas of the tables. Files of the range `writing` may exist, and those of the ranges in
    `removed`, since this time (Unix).
    """

    number: int
    format: Format
    stream: list[int]
    columns: dict[str, Any]
    state: str = ""
    ranges: tuple[EntryRange, ...] = ()
    writing: str | None = None
    removed: Mapping[str, float] | None = None

    @property
    def done(self) -> int:
        """The next entry: all before it are in the tables."""
        return self.ranges[-1].stop if self.ranges else 0

    @property
    def names(self) -> list[str]:
        """The ranges' names, in order."""
        return [each.name for each in self.ranges]

    def schema(self, table: str) -> StructType:
        """The columns of a table."""
        return StructType.fromJson(self.columns[table])

    def to_json(self) -> bytes:
        """One object, with the ranges as objects."""
        return json.dumps(
            asdict(self) | {"ranges": [each._asdict() for each in self.ranges]}
        ).encode()

    @classmethod
    def from_json(cls, text: bytes) -> Contents:
        """The inverse of `to_json`. Raises `KeyError`, `TypeError` and `ValueError`."""
        found = json.loads(text)
        ranges = (EntryRange(**each) for each in found.pop("ranges"))
        return cls(ranges=tuple(it._replace(hashes=tuple(it.hashes)) for it in ranges), **found)


def newest(folder: TableFolder) -> Contents | None:
    """What the newest manifest says; None in a folder without one.

    Raises `StreamFileError` for one that this version of the package cannot read.
    """
    while found := [name for name in folder.names(_FOLDER) if name.endswith(".json")]:
        name = f"{_FOLDER}/{found[-1]}"
        if (text := folder.read(name)) is not None:
            try:
                return Contents.from_json(text)
            except (KeyError, TypeError, ValueError):
                raise StreamFileError(
                    f"{folder.url}/{name}",
                    "not a manifest of this version of the package: ingest into another folder",
                ) from None
    return None


def complete(folder: TableFolder) -> Contents:
    """What the newest manifest says. Raises `FileMissing` if no range is complete."""
    found = newest(folder)
    if found is None or not found.ranges:
        raise FileMissing(folder.url, "it holds no tables: ingest a stream into it first")
    return found


class Manifest:
    """The manifest of the tables of one stream in a folder, which is locked until `close`.

    `columns` are those that its tables have from now on, and `wanted` their format (None: as
    there is, else Parquet). Raises `StreamFileError` if the folder cannot be written, is locked,
    or holds tables of another stream or with other columns, and `UsageError` for another format.
    """

    def __init__(
        self,
        folder: TableFolder,
        source: Source,
        columns: Mapping[str, StructType],
        wanted: Format | None = None,
    ) -> None:
        self.folder = folder
        self._source = source
        seen = source.look()
        identity = seen.identity
        stream = [identity.version, identity.system_id, identity.stream_type]
        folder.lock()
        try:
            found = newest(folder)
            if found is not None:
                older = {table: found.schema(table) for table in found.columns}
                if wanted not in (None, found.format):
                    raise UsageError(
                        f"{folder.url}: its tables are {found.format}, not {wanted}: use another "
                        "folder"
                    )
                if found.stream != stream:
                    raise StreamFileError(
                        folder.url,
                        f"it holds tables of another stream than {source.name}: ingest into "
                        "another folder",
                    )
                if differing := _differences(older, columns):
                    raise StreamFileError(
                        folder.url,
                        "its tables were made by another version or with another --mode, and "
                        f"differ in {differing}: ingest into another folder",
                    )
        except BaseException:
            self.close()
            raise
        made = {table: schema.jsonValue() for table, schema in columns.items()}
        self.now = found or Contents(0, wanted or "parquet", stream, made)

    def unchanged(self) -> bool:
        """Whether the stream still has the entries in the tables, as far as is known."""
        return not self.now.ranges or self.now.state == self._source.state(self.now.done)

    def common(self, seen: Seen) -> int:
        """The first entry in the tables that the stream does not have, or may not have.

        Raises `StreamFileError` for another stream: it has another id, or none, and other entries.
        """
        first = self._source.first_change(self.now.state, seen)
        if first is not None:
            return min(first, self.now.done)
        edges, hashes = [0], list[str]()
        for each in self.now.ranges:
            edges += edges_of(each.start, each.stop)[1:]
            hashes += each.hashes
        there = [edge for edge in edges if edge <= seen.total]
        pairs = zip(hashes, self._source.hashes(there), pairwise(there), strict=False)
        keep = next((start for known, now, (start, _) in pairs if known != now), there[-1])
        own = seen.history is not None and self.now.state.startswith(seen.history.stream_id.hex())
        if not keep and not own:
            raise StreamFileError(
                self.folder.url,
                f"the {self.now.done} entries in its tables are of another stream than "
                f"{self._source.name}: ingest into another folder",
            )
        return keep

    def begin(self, start: int, stop: int) -> str:
        """Record that a range is being written, under the name that this gives it."""
        name = f"{start:020d}-{stop:020d}-{self.now.number + 1}"
        left = [] if self.now.writing is None else [self.now.writing]
        self._put(writing=name, removed={**self._removed, **dict.fromkeys(left, 0.0)})
        return name

    def due(self) -> list[str]:
        """The ranges whose files are to be removed; they are forgotten with the next change."""
        since = time.time() - GRACE
        due = [name for name, at in self._removed.items() if at < since]
        left = {name: at for name, at in self._removed.items() if name not in due}
        self.now = replace(self.now, removed=left)
        return due

    def put(self, first: int, last: int, new: Sequence[EntryRange], state: str) -> None:
        """In one step, put complete ranges in the place of those from `first` up to before `last`.

        `state` is that of the entries before the end of the new ones.
        """
        ranges, now = self.now.ranges, time.time()
        gone = {each.name: now for each in ranges[first:last]}
        # What a crash left of a range.
        left = {self.now.writing} - {None, *(each.name for each in new)}
        self._put(
            ranges=(*ranges[:first], *new, *ranges[last:]),
            state=state if last >= len(ranges) else self.now.state,
            writing=None,
            removed={**self._removed, **gone, **dict.fromkeys(left, 0.0)},
        )

    def joinable(self, entries: int) -> list[tuple[int, int]]:
        """Groups of successive ranges, of up to `entries` entries together; the last ones first."""
        found: list[tuple[int, int]] = []
        first, ranges = 0, self.now.ranges
        for at, each in enumerate(ranges):
            if each.stop - ranges[first].start > entries:
                found.append((first, at))
                first = at
        found.append((first, len(ranges)))
        return [group for group in reversed(found) if group[1] - group[0] > 1]

    @property
    def _removed(self) -> Mapping[str, float]:
        return self.now.removed or {}

    def _put(self, **changes: Any) -> None:
        made = replace(self.now, number=self.now.number + 1, **changes)
        self.folder.put(_name(made.number), made.to_json())
        self.now = made
        self.folder.remove(_name(made.number - _KEPT))

    def close(self) -> None:
        """Unlock the folder, and close the stream."""
        self.folder.close()
        self._source.close()


def _name(number: int) -> str:
    return f"{_FOLDER}/{number:020d}.json"


def _differences(older: Mapping[str, StructType], columns: Mapping[str, StructType]) -> str:
    """The columns that older tables have not as they are written now; empty if there is none."""
    before, now = (
        {
            (f"{table}.{field.name}", field.dataType.simpleString())
            for table, schema in tables.items()
            for field in schema
        }
        for tables in (older, columns)
    )
    return ", ".join(sorted({name for name, _ in before ^ now}))
