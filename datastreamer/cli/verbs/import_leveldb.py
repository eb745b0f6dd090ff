"""`datastreamer import-leveldb`: index a stream, compared with the Go program's bookmarks.

The index is built from the stream file; the database is only compared with it.
"""

from __future__ import annotations

from typing import Annotated, Any, NamedTuple

from datastreamer.cli.shared import logs
from datastreamer.cli.shared.exit_codes import Failure, write_out
from datastreamer.cli.shared.options import FileArgument, Format, ReportOutput, text_option
from datastreamer.cli.shared.output import json_line, type_name
from datastreamer.cli.shared.progress import ProgressBar
from datastreamer.cli.verbs.reindex import ensure_readable, rebuild
from datastreamer.errors import FileMissing, UnknownBookmark
from datastreamer.format import MAX_BOOKMARK_SIZE, TYPE_BOOKMARK
from datastreamer.storage.bookmarks.leveldb import ReferenceBookmarks, database_folder
from datastreamer.storage.stream import DataStream

FolderOption = Annotated[
    str | None,
    text_option(
        "FOLDER",
        "Folder of the database [FILE up to its first dot, with .db, as the Go program does].",
    ),
]


class Difference(NamedTuple):
    """A bookmark that differs: the entry number in the database and in the file, and why."""

    key: bytes
    database: int | None
    file: int | None
    why: str


def import_leveldb(file: FileArgument, *, db: FolderOption = None, output: ReportOutput) -> None:
    """Index a stream and compare the index with the Go program's.

    The Go program keeps its index in LevelDB. Builds the index from the stream, and prints each
    bookmark that is stale or missing in the database. Does not change the database.

    Examples:
      datastreamer import-leveldb stream.bin
      datastreamer import-leveldb stream.bin --db stream.db --json
    """
    shape = output.chosen()
    folder = database_folder(file) if db is None else db
    ensure_readable(file)
    with (
        logs.hold_index_errors(),
        DataStream.open(file, verify="always") as stream,
        _database(folder, named=db is not None) as theirs,
    ):
        rebuild(stream)
        checked = _Checked(stream, shape)
        checked.against(theirs)
        logs.say(
            f"{folder}: {checked.same:,} bookmarks match the stream, {checked.stale:,} are stale, "
            f"{checked.missing:,} are missing; the index of {file} has {len(stream.bookmarks):,}"
        )


def _database(folder: str, *, named: bool) -> ReferenceBookmarks:
    try:
        return ReferenceBookmarks(folder)
    except FileMissing as error:
        if named:
            raise
        raise Failure(f"{error}; name the database with --db") from None


class _Checked:
    """Compares, prints and counts."""

    def __init__(self, stream: DataStream, shape: Format) -> None:
        self._stream = stream
        self._shape = shape
        self.same = self.stale = self.missing = 0

    def against(self, theirs: ReferenceBookmarks) -> None:
        stream = self._stream
        known = 0
        with ProgressBar(f"comparing {stream.path}", len(stream.bookmarks)) as progress:
            for key, number in theirs.items():
                newest = _newest(stream, key)
                known += newest is not None
                progress.advance(newest is not None)
                if newest is not None and newest == number:
                    self.same += 1
                else:
                    self.stale += 1
                    self._print(Difference(key, number, newest, self._why(key, number, newest)))
        if known < len(stream.bookmarks):
            self._print_missing(theirs)

    def _print_missing(self, theirs: ReferenceBookmarks) -> None:
        stream = self._stream
        with ProgressBar(f"reading {stream.path}", stream.total_entries) as progress:
            for batch in stream.batches():
                for key, number in batch.bookmarks():
                    # A key that occurs several times is printed once, as the newest.
                    if key not in theirs and _newest(stream, key) == number:
                        self.missing += 1
                        self._print(Difference(key, None, number, "missing in the database"))
                progress.advance(len(batch))

    def _why(self, key: bytes, number: int | None, newest: int | None) -> str:
        if number is None:
            return "the value in the database is not an entry number"
        total = self._stream.total_entries
        if number >= total:
            return f"the stream ends with entry {total - 1}" if total else "the stream is empty"
        entry = self._stream.entry(number)
        if entry.type != TYPE_BOOKMARK:
            return f"entry {number} has type {type_name(entry.type)}"
        if entry.data != key:
            return f"entry {number} is the bookmark 0x{entry.data.hex()}"
        if newest is None:
            return f"a key of {len(key)} bytes cannot be looked up and is not indexed"
        return f"entry {newest} is newer"

    def _print(self, found: Difference) -> None:
        if self._shape == "jsonl":
            line: dict[str, Any] = {**found._asdict(), "key": f"0x{found.key.hex()}"}
            write_out(json_line(line))
            return
        theirs = "-" if found.database is None else str(found.database)
        ours = "-" if found.file is None else str(found.file)
        if not self.stale + self.missing - 1:
            write_out(f"{'DATABASE':>10}  {'FILE':>10}  KEY, AND WHY\n".encode())
        write_out(f"{theirs:>10}  {ours:>10}  0x{found.key.hex()}: {found.why}\n".encode())


def _newest(stream: DataStream, key: bytes) -> int | None:
    if not 1 <= len(key) <= MAX_BOOKMARK_SIZE:
        return None
    try:
        return stream.bookmark(key)
    except UnknownBookmark:
        return None
