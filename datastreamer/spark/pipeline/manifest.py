"""The record of which entries of a stream are in a folder of tables, range after range.

Owns the folder's ``_ranges``, and that all of it is of one stream, which still holds it. Knows
no table, and needs no Spark: what is wrong with a stream or a folder is found before that starts.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final, NamedTuple

from datastreamer.errors import (
    DatastreamerError,
    FileMissing,
    StreamFileError,
    UnknownBookmark,
    UsageError,
)
from datastreamer.position import Identity
from datastreamer.spark.options import read_options
from datastreamer.spark.stream.offsets import StreamOffset
from datastreamer.spark.stream.sources import followed_stream
from datastreamer.zkevm.keys import BookmarkName

_FIRST_VERSION: Final = 2
_RANGE: Final = re.compile(r"(\d{20})-(\d{20})")


class EntryRange(NamedTuple):
    """Entries, from `start` up to, not including, `stop`."""

    start: int
    stop: int

    @property
    def name(self) -> str:
        """As folders and records are named by it: names sort by numbers."""
        return f"{self.start:020d}-{self.stop:020d}"


class Manifest:
    """The ranges of one stream in the folder `out`, which is this one's alone until `close`.

    Raises `UsageError` for a stream of version 1, and `StreamFileError` where the folder cannot
    be written, another one writes there, it is another stream's or the stream was cut back.
    """

    def __init__(self, source: Mapping[str, str], out: str | os.PathLike[str]) -> None:
        self._out = Path(out).absolute()
        self.folder = self._out / "_ranges"
        self._upstream = followed_stream(read_options(source))
        # How the range ends that is being written.
        self._end: StreamOffset | None = None
        self._lock: int | None = None
        try:
            if self._upstream.look().version < _FIRST_VERSION:
                raise UsageError(
                    "this is a stream of version 1, whose transactions do not say in which block "
                    "they are: the pipeline is for streams from version 2 on"
                )
            self._take()
            self.done = self._ensure_same()
        except BaseException:
            self.close()
            raise

    def total(self) -> int:
        """How many entries the stream holds now."""
        return self._upstream.look().total_entries

    def entry_of_block(self, number: int, default: int) -> int:
        """The entry of a block's bookmark, as the stream is now; `default` where there is none."""
        self._upstream.look()
        try:
            return self._upstream.entry_of(BookmarkName("block", number))
        except UnknownBookmark:
            return default

    def begun(self) -> list[EntryRange]:
        """The ranges that were begun and not finished."""
        return _recorded(self.folder, "begun")

    def begin(self, wanted: EntryRange) -> None:
        """Record that a range is being written, or written again."""
        self._end = self._end_of(wanted)
        self._record(wanted, "begun").touch()

    def forget(self, begun: EntryRange) -> None:
        """A range that was begun is none any more: the stream ends before it does."""
        self._record(begun, "begun").unlink()

    def finish(self, wanted: EntryRange) -> None:
        """Record that a range is there whole, and how it ends.

        Raises what `begin` does, and also where it ends otherwise than it did then: its tables
        may be of two histories, since each is read by itself.
        """
        end = self._end_of(wanted)
        if end != self._end:
            raise self._gone(wanted)
        begun = self._record(wanted, "begun")
        begun.write_text(json.dumps(end.told()))
        begun.rename(self._record(wanted, "done"))
        self.done = wanted.stop

    def close(self) -> None:
        """Let go of the stream and of the folder."""
        self._upstream.close()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _end_of(self, wanted: EntryRange) -> StreamOffset:
        header = self._upstream.look()
        if header.total_entries < wanted.stop:
            raise self._gone(wanted)
        digest = self._upstream.digest_before(wanted.stop)
        return StreamOffset(wanted.stop, digest, Identity.of(header))

    def _gone(self, wanted: EntryRange) -> DatastreamerError:
        return self._upstream.changed(
            f"entries before {wanted.stop} were taken back while they were ingested; run it again",
            wanted.stop,
        )

    def _take(self) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(self.folder, os.O_RDONLY)
        except OSError as error:
            raise StreamFileError(str(self._out), f"cannot be made: {error.strerror}") from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise StreamFileError(str(self._out), "another ingest writes there") from None

    def _ensure_same(self) -> int:
        """The entry that is due; all before it are in the tables, each once, and still the
        stream's."""
        due = 0
        for there in _recorded(self.folder, "done"):
            if there.start != due:
                raise StreamFileError(
                    str(self.folder),
                    f"entry {due} is due, and the range {there.name} begins with {there.start}: "
                    "the folder is not whole; ingest into another one",
                )
            due = there.stop
            last = there
        if due:
            header = self._upstream.look()
            told = StreamOffset.read(json.loads(self._record(last, "done").read_text()))
            same = header.total_entries >= due and told.stream == Identity.of(header)
            if not same or self._upstream.digest_before(due) != told.digest:
                raise self._upstream.changed(
                    f"the {due} entries in {self._out} are not this stream's any more: ingest into "
                    "another folder",
                    due,
                )
        return due

    def _record(self, of: EntryRange, state: str) -> Path:
        return self.folder / f"{of.name}.{state}"


def done_in(out: str | os.PathLike[str]) -> list[EntryRange]:
    """The ranges that are whole in a folder of tables. Raises `FileMissing` where there is none."""
    done = _recorded(Path(out) / "_ranges", "done")
    if not done:
        raise FileMissing(str(out), "no tables: ingest a stream into it first")
    return done


def _recorded(folder: Path, state: str) -> list[EntryRange]:
    """The ranges of a state, in order."""
    found = []
    for path in sorted(folder.glob(f"*.{state}")):
        numbers = _RANGE.fullmatch(path.stem)
        if numbers is not None:
            found.append(EntryRange(int(numbers[1]), int(numbers[2])))
    return found
