"""Exports a stream to files: Parquet datasets that later exports extend, or one file.

Owns the passes over the stream, the bounds of parts, and that an existing dataset is of this
stream. `parquet` owns the format of Parquet files, `json_csv` that of text.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import pyarrow as pa

from datastreamer._codec import EntryBatch
from datastreamer.arrow.json_csv import LineWriter, writer_of
from datastreamer.arrow.parquet import (
    Part,
    PartWriter,
    locked,
    part_name,
    parts_in,
    publish,
    read_metadata,
    reason,
    temporary_path,
)
from datastreamer.arrow.record_batches import Converter, OnError
from datastreamer.arrow.stream_reader import (
    StreamClient,
    StreamSource,
    header_of,
    opened,
    read_batches,
)
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
from datastreamer.printable import counted
from datastreamer.protocol.history import Trail
from datastreamer.selection.clauses import Selection, Where, selected
from datastreamer.storage.disk.access import Access, check_folder, make_folder
from datastreamer.storage.view import StreamView

ALL: Final = "all"
"""Every table, each in its own folder."""
PART_BYTES: Final = 256 << 20
"""Bytes of entries per part, approximately."""
_FILES: Final = (".parquet", ".jsonl", ".csv")
# Suffixes of file formats that are not written: OUT with one of them is no name for a folder.
_OTHER_FILES: Final = (
    *(".json", ".ndjson", ".tsv", ".txt", ".xlsx", ".arrow", ".feather", ".ipc", ".orc", ".avro"),
    *(".parq", ".pq", ".sqlite", ".duckdb", ".db", ".gz", ".zst", ".zip", ".bin"),
)

Advance = Callable[[int, int], None]


class Exported(NamedTuple):
    """The result of an export: the range of its entries, rows by table, files."""

    first: int
    next: int
    rows: dict[str, int]
    files: list[Path]


class _Plan(NamedTuple):
    """A table's folder, and the next entry to export to it."""

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
    where: Iterable[Where | int] | None = None,
    part_bytes: int = PART_BYTES,
    advance: Advance | None = None,
) -> Exported:
    """Write the entries from `start` up to, not including, `stop` (None: the head now).

    If `out` ends in .parquet, .jsonl or .csv, it is one file, which must not exist; other file
    suffixes (.json, .gz, ...) are rejected. Everything else is a folder of Parquet files, named by
    their entries; with the table "all", a folder of one such folder per table. An export to a
    folder continues after its last part (`start` is then None, or within what it holds) and never
    rewrites a part. A file gets its name when it is complete and synced. `out` may be a symbolic
    link; the parts and the tables' folders may not.

    `table`, `on_error` and `version` are as in `ArrowStream`. The table entries has rows only of
    the entries that `where` selects; all are read. `advance(done, total)` reports entries. If an
    entry or a page is damaged, a folder holds everything before it when the error is raised. Raises
    `StreamFileError` for a folder of another stream, history, selection or format and for errors of
    the disk, `UnknownEntry` and `BadRange` for a range outside the stream, and what reading raises.
    """
    if table != ALL and table not in NAMES:
        raise UsageError(f"there is no table {table!r}: the tables are {', '.join(NAMES)}, all")
    if part_bytes < 1:
        raise UsageError(f"part_bytes must be 1 or more, not {part_bytes}")
    if not os.fspath(out):
        raise UsageError("the path to export to is empty: name a folder or a new file")
    chosen = selected(where=where)
    if chosen is not None and table != ENTRIES:
        raise UsageError(f"the table {table} has rows of its own types: where is for {ENTRIES}")
    path = Path(out)
    single = path.suffix.lower() in _FILES
    if single and table == ALL:
        raise UsageError(f"{path} is one file: the table all needs a folder")
    if not single and path.exists() and not path.is_dir():
        raise FileExists(
            str(path),
            f"it is a file: name a folder, or a new file that ends in {', '.join(_FILES)}",
        )
    if path.suffix.lower() in _OTHER_FILES and not path.exists():
        raise UsageError(
            f"{path}: files that end in {path.suffix} cannot be written: name a folder, or a new "
            f"file that ends in {', '.join(_FILES)}"
        )
    try:
        with opened(source) as stream:
            header = header_of(stream)
            total = header.total_entries
            if start is not None and start > total:
                raise UnknownEntry(start, total)
            stop = total if stop is None else min(stop, total)
            if start is not None and stop < start:
                raise BadRange(f"stop {stop} is before start {start}")
            # Export files are no more readable than the stream.
            access = stream.access if isinstance(stream, StreamView) else Access.by_umask()
            if not single:
                # The operator names OUT, so it may be a link and belong to anyone. Inside OUT no
                # link is followed, and its owner is trusted.
                _make_folder(path, access)
                access = access._replace(uid=os.stat(path).st_uid)
            job = _Export(
                stream,
                access,
                Identity.of(header),
                header.version if version is None else version,
                on_error,
                chosen,
                part_bytes,
                advance or (lambda done, total: None),
            )
            if single:
                return job.to_file(path, table, start or 0, stop)
            tables = NAMES if table == ALL else (table,)
            folders = {name: path / name if table == ALL else path for name in tables}
            with contextlib.ExitStack() as stack:
                # A table's folder may also be the OUT of another export.
                for folder in dict.fromkeys((path, *folders.values())):
                    if folder != path:
                        _make_folder(folder, access)
                        check_folder(str(folder), access)
                    stack.enter_context(locked(folder))
                return job.to_folders(folders, start, stop)
    except DatastreamerError:
        raise
    except (OSError, pa.ArrowException) as error:
        raise StreamFileError(path, f"it could not be written: {reason(error)}") from error


def _make_folder(folder: Path, access: Access) -> None:
    try:
        make_folder(str(folder), access)
    except OSError as error:
        raise StreamFileError(folder, f"it cannot be created: {reason(error)}") from error


class _Export:
    """One export of one open stream."""

    def __init__(
        self,
        stream: StreamView | StreamClient,
        access: Access,
        identity: Identity,
        version: int,
        on_error: OnError,
        where: Selection | None,
        part_bytes: int,
        advance: Advance,
    ) -> None:
        self._stream = stream
        self._access = access
        self._identity = identity
        self._version = version
        self._on_error = on_error
        self._where = where
        self._named = [str(clause) for clause in where or ()]
        self._part_bytes = part_bytes
        self._advance = advance
        self._rows: dict[str, int] = {}
        self._files: list[Path] = []

    def _converters(self, tables: Sequence[str]) -> dict[str, Converter]:
        return {
            table: Converter(table, version=self._version, on_error=self._on_error)
            for table in tables
        }

    def to_file(self, path: Path, table: str, start: int, stop: int) -> Exported:
        """Write everything to one file, or none."""
        if path.exists():
            raise FileExists(
                str(path), "it exists already (an export to a folder would be continued)"
            )
        converters = self._converters((table,))
        columns = converters[table].schema
        temporary = temporary_path(path)
        output: PartWriter | LineWriter
        if path.suffix.lower() == ".parquet":
            output = PartWriter(path.parent, table, columns, self._access, temporary=temporary)
        else:
            output = writer_of(path, temporary, columns, self._access)
        trail = Trail(start)
        try:
            for batch in self._runs(start, stop, total=stop):
                self._convert(batch, converters, {table: output}, trail)
            if isinstance(output, PartWriter):
                position, version = self._position(trail), self._version_of(table)
                output.publish(path, start, position, version, self._named)
            else:
                output.finish()
                publish(output.temporary, path)
        finally:
            output.discard()
        return Exported(start, stop, {table: self._rows.get(table, 0)}, [path])

    def _wanted(self, batch: EntryBatch) -> EntryBatch:
        return batch if self._where is None else batch.select(self._where)

    def to_folders(self, folders: dict[str, Path], start: int | None, stop: int) -> Exported:
        """Continue each table where it ended; tables that ended at the same entry share a pass."""
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
                f"it holds entries {first} to {last.next - 1}: export from entry {start} to "
                "another folder",
            )
        self._check(last)
        return _Plan(table, folder, last.next)

    def _check(self, part: Part) -> None:
        """Raise unless a part is of this stream and has the format that this export writes."""
        found, position, version, named = read_metadata(part, self._access)
        path = str(part.path)
        if position.stream != self._identity:
            raise StreamFileError(
                path,
                f"it is of a stream of {position.stream}, not of {self._identity}",
            )
        if found != schema(part.table, error=self._on_error == "null"):
            raise StreamFileError(
                path,
                "its columns differ from those of this export (on_error may differ): export to "
                "another folder",
            )
        if version not in (None, self._version_of(part.table)):
            raise StreamFileError(
                path,
                f"its events were decoded as version {version}, not {self._version}: export to "
                "another folder",
            )
        if named != self._named:
            raise StreamFileError(
                path,
                f"it has the entries of {', '.join(named) or 'every type'}, not of "
                f"{', '.join(self._named) or 'every type'}: export to another folder",
            )
        total = header_of(self._stream).total_entries
        trail = Trail.of(position)
        if total < part.next:
            raise StreamFileError(
                path, f"it ends with entry {part.next - 1}, but the stream holds {counted(total)}"
            )
        for batch in read_batches(self._stream, trail.first_number, part.next):
            differing = trail.first_difference(batch)
            if differing is not None:
                raise StreamFileError(
                    path,
                    f"entry {differing} of the stream is not the one that it was written from: "
                    "the stream is another one, or was truncated since",
                )

    def _extend(self, plans: list[_Plan], start: int, stop: int, *, total: int) -> None:
        """Write parts of these tables in one pass."""
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
        """Write one part of each table. Damage ends it early and is raised once it is published."""
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
                    writers[plan.table].publish(path, first, position, version, self._named)
                    self._files.append(path)
        if damage is not None:
            raise damage

    def _convert(
        self,
        batch: EntryBatch,
        converters: dict[str, Converter],
        writers: Mapping[str, PartWriter | LineWriter],
        trail: Trail,
    ) -> None:
        """Write the rows of a batch to all tables, up to the first entry that is not an event."""
        wanted = self._wanted(batch)
        found = {table: converter.convert(wanted) for table, converter in converters.items()}
        errors = [each.error for each in found.values() if each.error is not None]
        worst: DecodeFailed | None = None
        if errors:
            worst = min(errors, key=lambda error: error.number or 0)
            assert worst.number is not None
            batch = batch[: worst.number - batch.first_number]
            found = {table: converter.convert(batch) for table, converter in converters.items()}
        for table, each in found.items():
            writers[table].write(each.batch)
            self._rows[table] = self._rows.get(table, 0) + each.batch.num_rows
        if batch:
            trail.extend(batch)
        if worst is not None:
            raise worst

    def _runs(self, start: int, stop: int, *, total: int) -> Iterator[EntryBatch]:
        if start >= stop:
            return
        for batch in read_batches(self._stream, start, stop):
            yield batch
            self._advance(batch.next_number, total)

    def _trail_before(self, number: int) -> Trail:
        """The last entries before `number`, exported or not."""
        first = max(0, number - KEPT)
        trail = Trail(first)
        if first < number:
            for batch in read_batches(self._stream, first, number):
                trail.extend(batch)
        return trail

    def _version_of(self, table: str) -> int | None:
        """The version that a table's rows depend on; None for entries."""
        return None if table == ENTRIES else self._version

    def _position(self, trail: Trail) -> Position:
        return Position(trail.next_number, trail.hashes, self._identity)
