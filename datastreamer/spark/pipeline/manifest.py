"""The manifest of a folder of tables: which ranges of a stream's entries it holds.

Owns the folder's ``_ranges``, and that all of it is of one stream that still holds it. Needs no
Spark session, so that errors of a stream or a folder are found before one starts.
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
from datastreamer.zkevm.bookmark_keys import BookmarkName

_FIRST_VERSION: Final = 2
_RANGE: Final = re.compile(r"(\d{20})-(\d{20})")


class EntryRange(NamedTuple):
    """Entries from `start` up to, not including, `stop`."""

    start: int
    stop: int

    @property
    def name(self) -> str:
        """The name of its folder and its record. Names sort by number."""
        return f"{self.start:020d}-{self.stop:020d}"


class Manifest:
    """The ranges of one stream in the folder `out`, which is locked until `close`.

    Raises `UsageError` for a stream of version 1, and `StreamFileError` if the folder cannot be
    written, is locked or holds another stream, or if the stream was truncated.
    """

    def __init__(self, source: Mapping[str, str], out: str | os.PathLike[str]) -> None:
        self._out = Path(out).absolute()
        self.folder = self._out / "_ranges"
        self._stream = followed_stream(read_options(source))
        # The end of the range that is being written.
        self._end: StreamOffset | None = None
        self._lock: int | None = None
        try:
            if self._stream.refresh().version < _FIRST_VERSION:
                raise UsageError(
                    "the stream is of version 1, whose transactions do not name their block: "
                    "the pipeline needs a stream of version 2 or later"
                )
            self._lock_folder()
            self.done = self._ensure_same()
        except BaseException:
            self.close()
            raise

    def total(self) -> int:
        """The number of entries that the stream holds now."""
        return self._stream.refresh().total_entries

    def entry_of_block(self, number: int, default: int) -> int:
        """The entry of a block's bookmark now; `default` if there is no such bookmark."""
        self._stream.refresh()
        try:
            return self._stream.entry_of(BookmarkName("block", number))
        except UnknownBookmark:
            return default

    def begun(self) -> list[EntryRange]:
        """The ranges that were begun and not finished."""
        return _recorded(self.folder, "begun")

    def begin(self, wanted: EntryRange) -> None:
        """Record that a range is being written."""
        self._end = self._end_of(wanted)
        self._record(wanted, "begun").touch()

    def forget(self, begun: EntryRange) -> None:
        """Remove the record of a range that the truncated stream no longer holds."""
        self._record(begun, "begun").unlink()

    def finish(self, wanted: EntryRange) -> None:
        """Record that a range is complete, and how it ends.

        Raises what `begin` raises, also if the range's end has changed since: each table is read
        separately, so they may be of two histories.
        """
        end = self._end_of(wanted)
        if end != self._end:
            raise self._truncated(wanted)
        begun = self._record(wanted, "begun")
        begun.write_text(json.dumps(end.as_json()))
        begun.rename(self._record(wanted, "done"))
        self.done = wanted.stop

    def ranges(self) -> list[EntryRange]:
        """The complete ranges, in order."""
        return _complete(self.folder)

    def joinable(self, entries: int) -> list[list[EntryRange]]:
        """Two or more successive complete ranges, of up to `entries` entries together, each."""
        found: list[list[EntryRange]] = []
        for each in self.ranges():
            if found and each.stop - found[-1][0].start <= entries:
                found[-1].append(each)
            else:
                found.append([each])
        return [joined for joined in found if len(joined) > 1]

    def join(self, joined: list[EntryRange]) -> None:
        """Record that these ranges are one, which replaces them."""
        whole = EntryRange(joined[0].start, joined[-1].stop)
        begun = self._record(whole, "joining")
        begun.write_bytes(self._record(joined[-1], "done").read_bytes())
        begun.rename(self._record(whole, "done"))

    def replaced(self) -> list[EntryRange]:
        """The ranges that a joined one has replaced, and whose records remain."""
        complete = self.ranges()
        return [each for each in _recorded(self.folder, "done") if each not in complete]

    def remove(self, replaced: EntryRange) -> None:
        """Remove the record of a range whose files are removed."""
        self._record(replaced, "done").unlink()

    def close(self) -> None:
        """Close the stream and unlock the folder."""
        self._stream.close()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _end_of(self, wanted: EntryRange) -> StreamOffset:
        header = self._stream.refresh()
        if header.total_entries < wanted.stop:
            raise self._truncated(wanted)
        digest = self._stream.digest_before(wanted.stop)
        return StreamOffset(wanted.stop, digest, Identity.of(header))

    def _truncated(self, wanted: EntryRange) -> DatastreamerError:
        return self._stream.changed(
            f"entries before {wanted.stop} were truncated while they were ingested; run it again",
            wanted.stop,
        )

    def _lock_folder(self) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(self.folder, os.O_RDONLY)
        except OSError as error:
            raise StreamFileError(str(self._out), f"cannot be created: {error.strerror}") from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise StreamFileError(str(self._out), "another ingest is writing to it") from None

    def _ensure_same(self) -> int:
        """The next entry to ingest. Raises unless all entries before it are in the tables once and
        are still the stream's."""
        due = 0
        for there in self.ranges():
            if there.start != due:
                raise StreamFileError(
                    str(self.folder),
                    f"entry {due} is missing: the range {there.name} begins with {there.start}; "
                    "ingest into another folder",
                )
            due = there.stop
            last = there
        if due:
            header = self._stream.refresh()
            end = StreamOffset.from_json(json.loads(self._record(last, "done").read_text()))
            same = header.total_entries >= due and end.stream == Identity.of(header)
            if not same or self._stream.digest_before(due) != end.digest:
                raise self._stream.changed(
                    f"the stream no longer holds the {due} entries in {self._out}: ingest into "
                    "another folder",
                    due,
                )
        return due

    def _record(self, of: EntryRange, state: str) -> Path:
        return self.folder / f"{of.name}.{state}"


def complete_ranges(out: str | os.PathLike[str]) -> list[EntryRange]:
    """The complete ranges in a folder of tables. Raises `FileMissing` if there is none."""
    done = _complete(Path(out) / "_ranges")
    if not done:
        raise FileMissing(str(out), "it holds no tables: ingest a stream into it first")
    return done


def _complete(folder: Path) -> list[EntryRange]:
    """The complete ranges in order, without those that a joined one contains."""
    found: list[EntryRange] = []
    for each in sorted(_recorded(folder, "done"), key=lambda it: (it.start, -it.stop)):
        if not found or each.stop > found[-1].stop:
            found.append(each)
    return found


def _recorded(folder: Path, state: str) -> list[EntryRange]:
    """The ranges of a state, in order."""
    found = []
    for path in sorted(folder.glob(f"*.{state}")):
        numbers = _RANGE.fullmatch(path.stem)
        if numbers is not None:
            found.append(EntryRange(int(numbers[1]), int(numbers[2])))
    return found
