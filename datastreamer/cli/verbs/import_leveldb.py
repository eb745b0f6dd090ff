"""`datastreamer import-leveldb`: the reference implementation's bookmarks become ours.

The file is the truth: the index is built from it, and what the database says is held
against that.
"""

from __future__ import annotations

from typing import Annotated, Any, NamedTuple

import typer

from datastreamer.cli.shared import logs
from datastreamer.cli.shared.exit_codes import Failure, write_out
from datastreamer.cli.shared.options import (
    FileArgument,
    Format,
    FormatOption,
    JsonOption,
    chosen_format,
)
from datastreamer.cli.shared.output import json_line, type_name
from datastreamer.cli.shared.progress import ProgressBar
from datastreamer.cli.verbs.reindex import rebuild
from datastreamer.errors import FileMissing, UnknownBookmark
from datastreamer.format import MAX_BOOKMARK_SIZE, TYPE_BOOKMARK
from datastreamer.storage import bookmarks
from datastreamer.storage.bookmarks.leveldb import ReferenceBookmarks, database_folder
from datastreamer.storage.stream import DataStream

FolderOption = Annotated[
    str | None,
    typer.Option(
        "--db",
        metavar="FOLDER",
        help="The database [FILE up to its first dot, and .db: where the Go program has it].",
    ),
]


class Difference(NamedTuple):
    """A bookmark that database and file do not agree about: the entry number that each has,
    and what the file says to the database's."""

    key: bytes
    database: int | None
    file: int | None
    why: str


def import_leveldb(
    file: FileArgument,
    db: FolderOption = None,
    format: FormatOption = None,
    json: JsonOption = False,
) -> None:
    """Take over the bookmarks of the Go program's database, checked against the stream.

    The index becomes what the stream says; each bookmark that is stale in the database, or
    lacks there, is printed. The database is not touched.
    """
    shape = chosen_format(format, json)
    if shape in (Format.raw, Format.hex):
        raise typer.BadParameter(f"--format {shape.value} is for entries; here table or jsonl")
    folder = database_folder(file) if db is None else db
    with (
        logs.damage_told_once(bookmarks.__name__),
        DataStream.open(file) as stream,
        _database(folder, named=db is not None) as theirs,
    ):
        rebuild(stream)
        checked = _Checked(stream, shape)
        checked.against(theirs)
        logs.say(
            f"{folder}: {checked.same:,} bookmarks are as in the stream, {checked.stale:,} are "
            f"not, {checked.lacking:,} of the stream's lack; {file} has "
            f"{len(stream.bookmarks):,} in its index now"
        )


def _database(folder: str, *, named: bool) -> ReferenceBookmarks:
    try:
        return ReferenceBookmarks(folder)
    except FileMissing as error:
        if named:
            raise
        raise Failure(f"{error}; --db names it") from None


class _Checked:
    """Compares, prints and counts."""

    def __init__(self, stream: DataStream, shape: Format) -> None:
        self._stream = stream
        self._shape = shape
        self.same = self.stale = self.lacking = 0

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
            self._print_lacking(theirs)

    def _print_lacking(self, theirs: ReferenceBookmarks) -> None:
        stream = self._stream
        with ProgressBar(f"reading {stream.path}", stream.total_entries) as progress:
            for batch in stream.batches():
                for key, number in batch.bookmarks():
                    # A key that occurs several times is told of once, as the newest.
                    if key not in theirs and _newest(stream, key) == number:
                        self.lacking += 1
                        self._print(Difference(key, None, number, "the database lacks it"))
                progress.advance(len(batch))

    def _why(self, key: bytes, number: int | None, newest: int | None) -> str:
        if number is None:
            return "the database's value is no entry number"
        total = self._stream.total_entries
        if number >= total:
            return f"the stream ends with entry {total - 1}" if total else "the stream is empty"
        entry = self._stream.entry(number)
        if entry.type != TYPE_BOOKMARK:
            return f"entry {number} is of type {type_name(entry.type)}"
        if entry.data != key:
            return f"entry {number} is the bookmark 0x{entry.data.hex()}"
        if newest is None:
            return f"a key of {len(key)} bytes, which nobody can ask for, is not indexed"
        return f"entry {newest} is newer"

    def _print(self, found: Difference) -> None:
        if self._shape is Format.jsonl:
            told: dict[str, Any] = {**found._asdict(), "key": f"0x{found.key.hex()}"}
            write_out(json_line(told))
            return
        theirs = "-" if found.database is None else str(found.database)
        ours = "-" if found.file is None else str(found.file)
        if not self.stale + self.lacking - 1:
            write_out(f"{'DATABASE':>10}  {'FILE':>10}  KEY, AND WHY\n".encode())
        write_out(f"{theirs:>10}  {ours:>10}  0x{found.key.hex()}: {found.why}\n".encode())


def _newest(stream: DataStream, key: bytes) -> int | None:
    if not 1 <= len(key) <= MAX_BOOKMARK_SIZE:
        return None
    try:
        return stream.bookmark(key)
    except UnknownBookmark:
        return None
