"""A stream file or an archive as SOURCE. Nothing is written, not even beside a file."""

from __future__ import annotations

import time
from collections.abc import Generator

from datastreamer._codec import Entry, EntryBatch
from datastreamer.archive import open_to_read
from datastreamer.cli.shared.exit_codes import Failure
from datastreamer.cli.shared.options import check_start
from datastreamer.errors import DamagedFile, FileMissing, StreamBusy
from datastreamer.format import Header
from datastreamer.printable import counted
from datastreamer.selection.clauses import Selection

# Interval between checks of a followed file for new entries; a check is one small read.
_POLL_SECONDS = 0.01


class FileSource:
    """A stream file, or an archive; a context manager that closes it."""

    def __init__(self, path: str, stream_type: int | None, follow: bool) -> None:
        self.name = path
        self._follow = follow
        try:
            # What is printed or exported is right, also if its page was in the page cache.
            self.stream = open_to_read(
                path, stream_type=stream_type, follow=follow, verify="always"
            )
        except FileMissing:
            raise Failure(f"{path}: no such file") from None
        self.entry_at, self.time_marks = self.stream.entry_at, self.stream.time_marks
        self._epoch = self.stream.epoch

    def __enter__(self) -> FileSource:
        return self

    def __exit__(self, *raised: object) -> None:
        stream = self.stream
        # Inconsistent data may come from a change of history during the read.
        busy = isinstance(raised[1], DamagedFile) and (
            stream.epoch != self._epoch or stream.outdated
        )
        stream.close()
        if busy:
            raise StreamBusy(
                self.name,
                "busy: it was truncated or updated during the read, which is not damage; try "
                "again, or read a snapshot",
            ) from None

    def header(self) -> Header:
        """The header as committed now."""
        self.stream.refresh()
        return self.stream.header

    def reach(self, start: int | bytes, header: Header, last: int | None = None) -> Header:
        """The header, or a newer one, of a stream that the entry or bookmark `start` is in, and of
        several servers of one that holds entry `last`, if there is one. Raises `UnknownEntry`; of
        several servers, also `UnknownBookmark`."""
        if isinstance(start, int):
            check_start(start, header)
        return header

    def entry(self, number: int) -> Entry:
        """The entry of this number. Raises `UnknownEntry`."""
        return self.stream.entry(number)

    def first_event(self, key: bytes) -> Entry:
        """The first event at or after a bookmark. Raises `UnknownBookmark`."""
        return self.stream.first_event_after_bookmark(key)

    def bookmark(self, key: bytes) -> int:
        """The number of the bookmark's own entry. Raises `UnknownBookmark`."""
        return self.stream.bookmark(key)

    def batches(
        self, start: int | bytes, stop: int | None, where: Selection | None = None
    ) -> Generator[EntryBatch, None, None]:
        """Entries from a number or bookmark up to, not including, `stop`; with `where` only
        those that it selects.

        Waits for later commits; without a `stop` it does not end.
        """
        stream = self.stream
        number = start if isinstance(start, int) else stream.bookmark(start)
        epoch = stream.epoch
        while True:
            for batch in stream.batches(number, stop):
                number = batch.next_number
                yield batch if where is None else batch.select(where)
            if stop is not None and number >= stop:
                return
            # Without follow, only committed entries were asked for: missing ones were truncated.
            while self._follow and not stream.refresh():
                time.sleep(_POLL_SECONDS)
            if not self._follow or stream.epoch != epoch or stream.total_entries < number:
                raise Failure(
                    f"{self.name}: the stream was truncated or updated during the read (up to "
                    f"entry {number - 1}); it now holds {counted(stream.total_entries)}"
                )
