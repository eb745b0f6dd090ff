"""Reports of updates and truncations to clients that keep a copy of the stream, and answers to
their requests for hashes and checksums.

Owns which changes one client has been sent and which come next. `catch_up.py` sends them and keeps
entries from overtaking a report. Knows no connection.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from datastreamer.format import MAX_HASH_BYTES, MAX_SUMS_PAGES, PAGE_SIZE
from datastreamer.protocol.commands import HashQuery, KnownHistory, SumsQuery
from datastreamer.protocol.following import (
    NO_SUM,
    FollowBegun,
    RangeHash,
    RangeSum,
    Reports,
    SumsFound,
    encode_truncation,
    encode_update,
)
from datastreamer.server.streaming.broadcast import Broadcast
from datastreamer.server.streaming.turns import Changed
from datastreamer.storage.header.records import NO_ID, Change
from datastreamer.storage.read.range_sums import hash_range
from datastreamer.storage.stream import DataStream

# Reports are sent in parts of about this size: an update carries the entry's bytes.
_REPORT_BYTES = 1 << 20


class ChangesForgotten(Exception):
    """More changes were made than are recorded: the client has to compare. Internal."""


class ChangeReports:
    """Change reports for one client, whose copy agrees with the stream at `known`."""

    def __init__(self, broadcast: Broadcast, known: KnownHistory) -> None:
        self._broadcast = broadcast
        self._stream = broadcast.stream
        self._known = known
        self._begun = False
        # The epoch up to which changes were reported; None: this file records no changes.
        self._reported: int | None = None

    @property
    def due(self) -> bool:
        """Whether a report is to be sent before the next entry."""
        if not self._begun:
            return True
        return self._reported is not None and self._reported != self._stream.recorded_epoch

    async def next(self) -> bytes:
        """The next reports; empty while the stream is being changed. Raises `ChangesForgotten`, and
        what the stream raises. No other task runs between the last look at the stream and the
        return."""
        if not self._begun:
            return self._begin()
        broadcast, stream, reported = self._broadcast, self._stream, self._reported
        changes = None if reported is None else stream.recorded_changes(reported)
        if changes is None or any((c.stop or c.start + 1) != c.start + 1 for c in changes):
            raise ChangesForgotten
        try:
            with broadcast.turns.one():
                reports, upto = await broadcast.cold.run_verified(
                    self._reports, changes, lambda _: self._pages(changes)
                )
        except Changed:
            return b""
        self._reported = upto
        return reports

    def _begin(self) -> bytes:
        stream, (stream_id, since) = self._stream, self._known
        epoch, ours = stream.recorded_epoch, stream.stream_id
        self._begun = True
        if epoch is None or ours == NO_ID:
            return FollowBegun(Reports.NEVER, ours, 0, 0).pack()
        if stream_id == ours and stream.recorded_changes(since) is not None:
            self._reported = since
            return FollowBegun(Reports.ALL, ours, since, epoch).pack()
        self._reported = epoch
        return FollowBegun(Reports.UNKNOWN, ours, epoch, epoch).pack()

    def _pages(self, changes: Sequence[Change]) -> set[int]:
        """The pages of updated entries whose reports were just read."""
        pages_of, total = self._broadcast.pages_of, self._stream.reader.head.entries
        starts = [change.start for change in changes if change.stop and change.start < total]
        return {page for start in starts for page in pages_of(start, start)}

    def _reports(self, changes: Sequence[Change]) -> tuple[bytes, int]:
        """Reports of the first of the changes, and the epoch up to which they go."""
        reader, found, size, upto = self._stream.reader, [], 0, changes[-1].epoch
        for at, (epoch, start, stop) in enumerate(changes):
            if stop is None:
                report = encode_truncation(epoch, start)
            elif any(later.stop is None and later.start <= start for later in changes[at:]):
                continue  # a later truncation covers it
            else:
                report = encode_update(epoch, reader.packed(start))
            found.append(report)
            size += len(report)
            if size >= _REPORT_BYTES:
                upto = epoch
                break
        return b"".join(found), upto


async def hash_of(broadcast: Broadcast, query: HashQuery) -> bytes | None:
    """The answer to `query` for the stream as it is now; None if the first entry is past its end.
    Raises what the stream raises, and `DamagedPage` for pages that do not match their checksum: a
    client must not take damage for an update."""
    stream: DataStream = broadcast.stream

    def hashed(bounds: tuple[int, int, int]) -> tuple[int, bytes]:
        first, end, most = bounds
        reader, pages = stream.reader, broadcast.pages
        start = reader.cursor(first).offset
        # Before they are read: no other client is sent what comes from the disk.
        pages.are_ready(start, most + PAGE_SIZE, reader.head.length)
        upto, digest = hash_range(reader, first, end, most)
        pages.verify_all(broadcast.pages_of(first, upto - 1))
        return upto, digest

    most = min(query.max_bytes or MAX_HASH_BYTES, MAX_HASH_BYTES)
    while True:
        await broadcast.turns.settled()
        place = stream.recorded_epoch
        first, end = query.first, min(query.end, stream.total_entries)
        if first >= end:
            return None
        with suppress(Changed), broadcast.turns.one():
            bounds = first, end, most
            end, digest = await broadcast.cold.run(hashed, bounds, limiter=broadcast.hashing)
            return RangeHash(first, end, place or 0, digest).pack()
        # The stream changed meanwhile: a shorter range is more likely to be hashed between changes.
        most = max(1, most // 4)


async def sums_of(broadcast: Broadcast, query: SumsQuery) -> bytes | None:
    """The answer to `query` for the stream as it is now; None if it ends before the first entry.
    Raises what the stream raises."""
    stream: DataStream = broadcast.stream
    most = min(query.max_pages or MAX_SUMS_PAGES, MAX_SUMS_PAGES)
    while True:
        await broadcast.turns.settled()
        epoch = stream.recorded_epoch
        if query.from_entry > stream.total_entries:
            return None
        with suppress(Changed), broadcast.turns.one():
            pages, tail = await broadcast.cold.run(
                lambda number: stream.parts.pages.sums(number, most), query.from_entry
            )
            sums = tuple(RangeSum(*each) for each in pages)
            last = NO_SUM if tail is None else RangeSum(*tail)
            return SumsFound(stream.stream_id, epoch or 0, sums, last).pack()
