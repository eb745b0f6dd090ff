"""A stream written to files: Parquet datasets that go on where they ended, or one file.

Owns the passes over the stream, where one part ends and the next begins, and that parts are of
the stream that they are continued from. What a Parquet file looks like is `parts.py`'s, lines of
text are `lines.py`'s.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol

import pyarrow as pa

from datastreamer._codec import EntryBatch
from datastreamer.arrow.batches import Converter, OnError
from datastreamer.arrow.lines import LineWriter, writer_of
from datastreamer.arrow.parts import (
    Part,
    PartWriter,
    locked,
    part_name,
    parts_in,
    publish,
    read_back,
    reason,
    temporary_beside,
)
from datastreamer.arrow.reading import StreamClient, StreamSource, header_of, opened, runs
from datastreamer.arrow.tables import ENTRIES, NAMES, schema
from datastreamer.errors import (
    BadRange,
    DatastreamerError,
    DecodeFailed,
    FileExists,
    StreamFileError,
    UnknownEntry,
    UsageError,
)
from datastreamer.position import KEPT, Identity, Position
from datastreamer.protocol.history import Trail
from datastreamer.storage.disk.access import Access, check_folder, make_folder
from datastreamer.storage.view import StreamView

ALL: Final = "all"
"""Every table, each in a folder of its own."""
PART_BYTES: Final = 256 << 20
"""About so many bytes of entries go into a part."""
_FILES: Final = (".parquet", ".jsonl", ".csv")
# Whoever names OUT so wants a file, which a folder would not be.
_OTHER_FILES: Final = (
    *(".json", ".ndjson", ".tsv", ".txt", ".xlsx", ".arrow", ".feather", ".ipc", ".orc", ".avro"),
    *(".parq", ".pq", ".sqlite", ".duckdb", ".db", ".gz", ".zst", ".zip", ".bin"),
)

Advance = Callable[[int, int], None]


class Exported(NamedTuple):
    """What an export has written: the range of its entries, rows by table, files."""

    first: int
    next: int
    rows: dict[str, int]
    files: list[Path]


class _Output(Protocol):
    """Where the rows of one table go."""

    def write(self, batch: Any) -> None: ...
    def discard(self) -> None: ...


class _Plan(NamedTuple):
    """A table's folder, and which of its entries are there already."""

    table: str
    folder: Path
    next: int


def export(
    source: StreamSource,
    out: str | os.PathLike[str],
    table: str = ENTRIES,
    *,
    start: int | None = None,
    stop: int | None = None,
    on_error: OnError = "raise",
    version: int | None = None,
    part_bytes: int = PART_BYTES,
    advance: Advance | None = None,
) -> Exported:
    """Write the entries from `start` up to, not including, `stop` (None: the head now).

    `out` may be a symbolic link; the parts, and the folders of the tables, may not.
    `out` that ends in .parquet, .jsonl or .csv is one file, which must not be there; the names of
    other files (.json, .gz, ...) are refused. Everything else is a folder of Parquet files, named
    by their entries; with the table "all" it has a folder for each table. An export to a folder
    goes on behind its last part (`start` is then None, or a place that is there already), and
    never writes again what is there. A file appears under its name when it is complete and on
    disk.

    `table`, `on_error` and `version` are as in `ArrowStream`; `advance(done, total)` is told of
    entries. Where an entry or a page is damaged a folder has everything before it when the error
    is raised. Raises `StreamFileError` for files of another stream, history or form,
    or where the disk refuses, `UnknownEntry` and `BadRange` for a range that is not in the stream,
    and what reading raises.
    """
    if table != ALL and table not in NAMES:
        raise UsageError(f"there is no table {table!r}: the tables are {', '.join(NAMES)}, all")
    if part_bytes < 1:
        raise UsageError(f"part_bytes is 1 or more, not {part_bytes}")
    if not os.fspath(out):
        raise UsageError("the path to export to is empty: it is a folder, or a new file")
    path = Path(out)
    single = path.suffix.lower() in _FILES
    if single and table == ALL:
        raise UsageError(f"{path} is one file: all tables want a folder")
    if not single and path.exists() and not path.is_dir():
        raise FileExists(
            str(path),
            f"it is a file: OUT is a folder, or a new file that ends in {', '.join(_FILES)}",
        )
    if path.suffix.lower() in _OTHER_FILES and not path.exists():
        raise UsageError(
            f"{path}: a file that ends in {path.suffix} cannot be written: OUT is a folder, or a "
            f"new file that ends in {', '.join(_FILES)}"
        )
    try:
        with opened(source) as stream:
            header = header_of(stream)
            total = header.total_entries
            if start is not None and start > total:
                raise UnknownEntry(start, total)
            stop = total if stop is None else min(stop, total)
            if start is not None and stop < start:
                raise BadRange(f"stop {stop} stands before start {start}")
            # Who could not read the stream cannot read what is made of it.
            access = stream.access if isinstance(stream, StreamView) else Access.by_umask()
            if not single:
                # The operator names OUT, as the stream: it may be a link, and anyone's folder. In
                # it no link is followed, and OUT's owner is trusted.
                _make(path, access)
                access = access._replace(uid=os.stat(path).st_uid)
            job = _Job(
                stream,
                access,
                Identity.of(header),
                header.version if version is None else version,
                on_error,
                part_bytes,
                advance or (lambda done, total: None),
            )
            if single:
                return job.to_file(path, table, start or 0, stop)
            tables = NAMES if table == ALL else (table,)
            folders = {name: path / name if table == ALL else path for name in tables}
            with contextlib.ExitStack() as stack:
                # A table's folder may be another export's OUT.
                for folder in dict.fromkeys((path, *folders.values())):
                    if folder != path:
                        _make(folder, access)
                        check_folder(str(folder), access)
                    stack.enter_context(locked(folder))
                return job.to_folders(folders, start, stop)
    except DatastreamerError:
        raise
    except (OSError, pa.ArrowException) as error:
        raise StreamFileError(path, f"it was not written: {reason(error)}") from error


def _make(folder: Path, access: Access) -> None:
    try:
        make_folder(str(folder), access)
    except OSError as error:
        raise StreamFileError(folder, f"it cannot be made: {reason(error)}") from error


class _Job:
    """One export from one open stream."""

    def __init__(
        self,
        stream: StreamView | StreamClient,
        access: Access,
        identity: Identity,
        version: int,
        on_error: OnError,
        part_bytes: int,
        advance: Advance,
    ) -> None:
        self._stream = stream
        self._access = access
        self._identity = identity
        self._version = version
        self._on_error = on_error
        self._part_bytes = part_bytes
        self._advance = advance
        self._rows: dict[str, int] = {}
        self._files: list[Path] = []

    def _converters(self, tables: Sequence[str]) -> dict[str, Converter]:
        return {
            table: Converter(table, version=self._version, on_error=self._on_error)
            for table in tables
        }

    # One file.

    def to_file(self, path: Path, table: str, start: int, stop: int) -> Exported:
        """Everything in one file, or no file."""
        if path.exists():
            raise FileExists(
                str(path), "something stands there already (a folder would be gone on with)"
            )
        converters = self._converters((table,))
        converter = converters[table]
        temporary = temporary_beside(path)
        output: PartWriter | LineWriter
        if path.suffix.lower() == ".parquet":
            output = PartWriter(
                path.parent, table, converter.schema, self._access, temporary=temporary
            )
        else:
            output = writer_of(path, temporary, converter.schema, self._access)
        trail = Trail(start)
        try:
            for batch in self._runs(start, stop, total=stop):
                found = converter.convert(batch)
                if found.error is not None:
                    raise found.error
                self._put(output, table, found.batch)
                if batch:
                    trail.extend(batch)
            if isinstance(output, PartWriter):
                output.publish(path, start, self._position(trail), self._version_of(table))
            else:
                output.finish()
                publish(output.temporary, path)
        finally:
            output.discard()
        return Exported(start, stop, {table: self._rows.get(table, 0)}, [path])

    # Folders.

    def to_folders(self, folders: dict[str, Path], start: int | None, stop: int) -> Exported:
        """Each table goes on where it ended; those that are at one place go on together."""
        plans = [self._plan(table, folder, start) for table, folder in folders.items()]
        first = min(plan.next for plan in plans)
        while plans:
            here = min(plan.next for plan in plans)
            if here >= stop:
                break
            together = [plan for plan in plans if plan.next == here]
            until = min([stop, *(plan.next for plan in plans if plan.next > here)])
            self._extend(together, here, until, total=stop)
            plans = [plan._replace(next=max(plan.next, until)) for plan in plans]
        rows = {table: self._rows.get(table, 0) for table in folders}
        return Exported(first, max(first, stop), rows, self._files)

    def _plan(self, table: str, folder: Path, start: int | None) -> _Plan:
        parts = parts_in(folder, table)
        if not parts:
            return _Plan(table, folder, start or 0)
        first, last = parts[0].first, parts[-1]
        if start is not None and not first <= start <= last.next:
            raise StreamFileError(
                str(folder),
                f"it holds entries {first} to {last.next - 1}: an export from entry {start} on "
                "wants another folder",
            )
        self._check(last)
        return _Plan(table, folder, last.next)

    def _check(self, part: Part) -> None:
        """Whether a part is of this stream, and has the form that the next one will have."""
        found, position, version = read_back(part, self._access)
        path = str(part.path)
        if position.stream != self._identity:
            raise StreamFileError(
                path,
                f"it is of a stream of {position.stream}, and this is one of {self._identity}",
            )
        if found != schema(part.table, error=self._on_error == "null"):
            raise StreamFileError(
                path,
                "it has other columns than this export writes (on_error may be another): export "
                "to another folder",
            )
        if version not in (None, self._version_of(part.table)):
            raise StreamFileError(
                path,
                f"its events were decoded as those of version {version}, and this export takes "
                f"them for those of version {self._version}: export to another folder",
            )
        total = header_of(self._stream).total_entries
        trail = Trail.of(position)
        if total < part.next:
            raise StreamFileError(
                path, f"it goes up to entry {part.next - 1}, and the stream holds {total} entries"
            )
        for batch in runs(self._stream, trail.first_number, part.next):
            differing = trail.first_difference(batch)
            if differing is not None:
                raise StreamFileError(
                    path,
                    f"entry {differing} of the stream is not the one that it was written from: "
                    "it is of another stream, or of entries that were taken back",
                )

    def _extend(self, plans: list[_Plan], start: int, stop: int, *, total: int) -> None:
        """Write parts of these tables, from one place in one pass."""
        converters = self._converters([plan.table for plan in plans])
        trail = self._trail_before(start)
        batches = self._runs(start, stop, total=total)
        while trail.next_number < stop:
            self._write_parts(plans, converters, batches, trail)

    def _write_parts(
        self,
        plans: list[_Plan],
        converters: dict[str, Converter],
        batches: Iterator[EntryBatch],
        trail: Trail,
    ) -> None:
        """One part of each table. Damage ends it early, and is raised when it is published."""
        first, size = trail.next_number, 0
        damage: DatastreamerError | None = None
        with contextlib.ExitStack() as stack:
            writers = {}
            for plan in plans:
                table = plan.table
                writers[table] = PartWriter(
                    plan.folder, table, converters[table].schema, self._access
                )
                stack.callback(writers[table].discard)
            try:
                for batch in batches:
                    self._convert(batch, converters, writers, trail)
                    size += batch.nbytes
                    if size >= self._part_bytes:
                        break
            except DatastreamerError as error:
                damage = error
            if trail.next_number > first:
                for plan in plans:
                    path = plan.folder / part_name(plan.table, first, trail.next_number)
                    position, version = self._position(trail), self._version_of(plan.table)
                    writers[plan.table].publish(path, first, position, version)
                    self._files.append(path)
        if damage is not None:
            raise damage

    def _convert(
        self,
        batch: EntryBatch,
        converters: dict[str, Converter],
        writers: dict[str, PartWriter],
        trail: Trail,
    ) -> None:
        """Write the rows of a run to all tables, up to the first entry that is no event."""
        found = {table: converter.convert(batch) for table, converter in converters.items()}
        errors = [each.error for each in found.values() if each.error is not None]
        worst: DecodeFailed | None = None
        if errors:
            worst = min(errors, key=lambda error: error.number or 0)
            assert worst.number is not None
            batch = batch[: worst.number - batch.first_number]
            found = {table: converter.convert(batch) for table, converter in converters.items()}
        for table, each in found.items():
            self._put(writers[table], table, each.batch)
        if batch:
            trail.extend(batch)
        if worst is not None:
            raise worst

    # Common to both.

    def _put(self, output: _Output, table: str, batch: Any) -> None:
        output.write(batch)
        self._rows[table] = self._rows.get(table, 0) + batch.num_rows

    def _runs(self, start: int, stop: int, *, total: int) -> Iterator[EntryBatch]:
        if start >= stop:
            return
        for batch in runs(self._stream, start, stop):
            yield batch
            self._advance(batch.next_number, total)

    def _trail_before(self, number: int) -> Trail:
        """The last entries before a place, whether or not they are exported."""
        first = max(0, number - KEPT)
        trail = Trail(first)
        if first < number:
            for batch in runs(self._stream, first, number):
                trail.extend(batch)
        return trail

    def _version_of(self, table: str) -> int | None:
        """What a table's rows depend on; entries are the same in all versions."""
        return None if table == ENTRIES else self._version

    def _position(self, trail: Trail) -> Position:
        return Position(trail.next_number, trail.hashes, self._identity)
