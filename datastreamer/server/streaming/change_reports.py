"""What a server does for copies of its stream: reports of changes, and hashes of ranges.

Owns what one client was told of changes of committed entries, and what it is told next. The
sending, and that no entry overtakes a report, is `sender.py`'s. Knows no connection.
"""

from __future__ import annotations

from collections.abc import Sequence

import trio

from datastreamer.errors import DamagedFile, NotFound, UnknownEntry
from datastreamer.format import MAX_HASH_BYTES
from datastreamer.protocol.following import (
    FollowBegun,
    HashQuery,
    KnownHistory,
    RangeHash,
    Reports,
    encode_truncation,
    encode_update,
)
from datastreamer.server.streaming.broadcast import Broadcast
from datastreamer.storage.header.records import NO_ID, Change
from datastreamer.storage.read.range_hash import hash_range
from datastreamer.storage.stream import DataStream

# Reports made at once: an update has the entry's bytes with it.
_REPORT_BYTES = 1 << 20


class ChangesForgotten(Exception):
    """More was changed than is known: the client is to compare. Never leaves `net`."""


class ChangeReports:
    """Reports of changes to one client that knows the stream as it was at `known`."""

    def __init__(self, live: Broadcast, known: KnownHistory) -> None:
        self._live = live
        self._stream = live.stream
        self._known = known
        self._begun = False
        # The epoch up to which the client was told; None: this file's changes are never known.
        self._told: int | None = None

    @property
    def due(self) -> bool:
        """Whether a report goes out before the next entry."""
        if not self._begun:
            return True
        return self._told is not None and self._told != self._stream.recorded_epoch

    async def next(self) -> bytes:
        """The next reports; empty while the stream is being changed. Raises `ChangesForgotten`, and
        what the stream raises. Nobody else had a turn between the last look at the stream and
        the return."""
        if not self._begun:
            return self._begin()
        live, stream, told = self._live, self._stream, self._told
        epoch = stream.recorded_epoch
        changes = None if told is None else stream.recorded_changes(told)
        if changes is None or any((c.stop or c.start + 1) != c.start + 1 for c in changes):
            raise ChangesForgotten
        try:
            reports, upto = await live.cold.run(self._reports, changes)
        except (DamagedFile, UnknownEntry):
            if live.outdated() or stream.recorded_epoch != epoch:
                return b""
            raise
        if live.outdated() or stream.recorded_epoch != epoch:
            return b""
        self._told = upto
        return reports

    def _begin(self) -> bytes:
        stream, (stream_id, since) = self._stream, self._known
        epoch, ours = stream.recorded_epoch, stream.stream_id
        self._begun = True
        if epoch is None or ours == NO_ID:
            return FollowBegun(Reports.NEVER, ours, 0, 0).pack()
        if stream_id == ours and stream.recorded_changes(since) is not None:
            self._told = since
            return FollowBegun(Reports.ALL, ours, since, epoch).pack()
        self._told = epoch
        return FollowBegun(Reports.UNKNOWN, ours, epoch, epoch).pack()

    def _reports(self, changes: Sequence[Change]) -> tuple[bytes, int]:
        """Reports of some of the changes, the first ones, and the epoch that they go up to."""
        reader, found, size, upto = self._stream.reader, [], 0, changes[-1].epoch
        for at, (epoch, start, stop) in enumerate(changes):
            if stop is None:
                report = encode_truncation(epoch, start)
            elif any(later.stop is None and later.start <= start for later in changes[at:]):
                continue  # the truncation says more
            else:
                report = encode_update(epoch, reader.packed(start))
            found.append(report)
            size += len(report)
            if size >= _REPORT_BYTES:
                upto = epoch
                break
        return b"".join(found), upto


async def hash_of(live: Broadcast, limiter: trio.CapacityLimiter, query: HashQuery) -> bytes | None:
    """The answer to `query`, of the stream as it is now; None where it does not hold the first
    of these entries. Raises what the stream raises."""
    stream: DataStream = live.stream
    most = min(query.max_bytes or MAX_HASH_BYTES, MAX_HASH_BYTES)
    while True:
        await live.settled()
        epoch, place = stream.epoch, stream.recorded_epoch
        first, end = query.first, min(query.end, stream.total_entries)
        if first >= end:
            return None
        try:
            end, digest = await trio.to_thread.run_sync(
                hash_range, stream.reader, first, end, most, limiter=limiter
            )
        except (DamagedFile, NotFound):
            if not live.outdated() and stream.epoch == epoch:
                raise
        else:
            if not live.outdated() and stream.epoch == epoch:
                return RangeHash(first, end, place or 0, digest).pack()
        # Changed meanwhile: what is read faster is more likely to be left alone.
        most = max(1, most // 4)
