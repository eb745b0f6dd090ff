"""Packets by which a relay keeps its copy of a stream equal to its upstream's.

Owns their layout: reports of changes of committed entries, hashes of ranges, the checksums of
pages, and when entries were committed. Must not know which of them is allowed when (`server`,
`client`).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from itertools import pairwise
from typing import Final, NamedTuple

from datastreamer._codec import Entry, scan
from datastreamer.errors import CorruptEntries
from datastreamer.format import (
    CHANGE_SIZE,
    CHANGE_STRUCT,
    ENTRY_HEAD_SIZE,
    FOLLOW_STRUCT,
    MAX_SUMS_PAGES,
    MAX_TIME_MARKS,
    PACKET_CHANGE,
    PACKET_FOLLOW,
    PACKET_PAGE_SUMS,
    PACKET_RANGE_HASH,
    PACKET_TIMES,
    PAGE_SIZE,
    PAGE_SUMS_STRUCT,
    RANGE_HASH_STRUCT,
    RANGE_SUM_STRUCT,
    TIME_MARK_STRUCT,
    TIMES_STRUCT,
    TYPE_BOOKMARK,
    U64_MAX,
)
from datastreamer.protocol.commands import HashQuery, MarksQuery, SumsQuery, TimeQuery
from datastreamer.selection.times import LATEST_MS, TimeMarks

MAX_CHANGE_SIZE: Final = CHANGE_SIZE + PAGE_SIZE


class Reports(IntEnum):
    """Which changes since the client's epoch a server can report."""

    UNKNOWN = 0
    ALL = 1
    NEVER = 2


class FollowBegun(NamedTuple):
    """The first packet after the Result of a `FollowStart`.

    With `ALL`, the changes after epoch `since` up to `epoch` follow before any entry. With
    `UNKNOWN`, any entry may have changed up to `epoch`, and later changes are reported. With
    `NEVER`, no change of this file is reported.
    """

    reports: Reports
    stream_id: bytes
    since: int
    epoch: int

    def pack(self) -> bytes:
        return FOLLOW_STRUCT.pack(PACKET_FOLLOW, FOLLOW_STRUCT.size, *self)

    @classmethod
    def unpack(cls, data: bytes | bytearray | memoryview) -> FollowBegun:
        """Decode a packet. Raises `ValueError` if it is invalid."""
        _, length, reports, stream_id, since, epoch = FOLLOW_STRUCT.unpack_from(data)
        if length != FOLLOW_STRUCT.size or reports > Reports.NEVER or since > epoch:
            raise ValueError(f"a follow packet of {length} bytes: {reports}, {since} to {epoch}")
        return cls(Reports(reports), stream_id, since, epoch)


@dataclass(frozen=True, slots=True)
class ChangeReceived:
    """The stream's epoch became `epoch`: `entry` replaced the entry with its number, or (None) all
    entries from `first` on were truncated. What the server sent before is from before the change.
    """

    epoch: int
    first: int
    entry: Entry | None


def encode_update(epoch: int, packed: bytes) -> bytes:
    """The report of an update; `packed` is the entry as the file holds it now."""
    number = int.from_bytes(packed[9:ENTRY_HEAD_SIZE], "big")
    size = CHANGE_SIZE + len(packed)
    return CHANGE_STRUCT.pack(PACKET_CHANGE, size, epoch, number, number + 1) + packed


def encode_truncation(epoch: int, total_entries: int) -> bytes:
    """The report of a truncation to `total_entries` entries."""
    return CHANGE_STRUCT.pack(PACKET_CHANGE, CHANGE_SIZE, epoch, total_entries, U64_MAX)


def decode_change(data: memoryview) -> ChangeReceived:
    """Decode a complete report. Raises `ValueError` if it is invalid."""
    _, length, epoch, first, end = CHANGE_STRUCT.unpack_from(data)
    if end == U64_MAX:
        if length != CHANGE_SIZE:
            raise ValueError(f"a truncation of {length} bytes")
        return ChangeReceived(epoch, first, None)
    if end != first + 1:
        raise ValueError(f"a change of entries {first} to {end}")
    try:
        batch = scan(bytes(data), first, start=CHANGE_SIZE)
    except CorruptEntries as damage:
        raise ValueError(f"an update with an invalid entry: {damage.reason}") from None
    if len(batch) != 1 or batch.end != length:
        raise ValueError(f"an update of {length} bytes with {len(batch)} entries")
    if batch.types[0] == TYPE_BOOKMARK:
        raise ValueError(f"an update of bookmark {first}")
    return ChangeReceived(epoch, first, batch[0])


class RangeHash(NamedTuple):
    """The xxh3 (128 bits) of the packed entries from `first` up to `end`, at `epoch`."""

    first: int
    end: int
    epoch: int
    digest: bytes

    def pack(self) -> bytes:
        """Encode the answer."""
        return RANGE_HASH_STRUCT.pack(PACKET_RANGE_HASH, RANGE_HASH_STRUCT.size, *self)

    @classmethod
    def unpack(cls, data: bytes | bytearray | memoryview, query: HashQuery) -> RangeHash:
        """Decode the answer to `query`. Raises `ValueError` if it is invalid."""
        _, length, first, end, epoch, digest = RANGE_HASH_STRUCT.unpack_from(data)
        if length != RANGE_HASH_STRUCT.size or first != query.first or not first < end <= query.end:
            raise ValueError(f"a hash of entries {first} to {end} in {length} bytes for {query}")
        return cls(first, end, epoch, digest)


class RangeSum(NamedTuple):
    """The xxh3 (128 bits) of the packed entries from `first` up to `end`, which are those of a
    page of the server's file."""

    first: int
    end: int
    digest: bytes


NO_SUM: Final = RangeSum(0, 0, bytes(16))


@dataclass(frozen=True, slots=True)
class SumsFound:
    """The checksums of the stream `stream_id` at `epoch`: of consecutive whole pages, and of the
    last page up to the head (`NO_SUM`: not known, or pages before it are missing)."""

    stream_id: bytes
    epoch: int
    pages: tuple[RangeSum, ...]
    tail: RangeSum = NO_SUM

    @property
    def ranges(self) -> tuple[RangeSum, ...]:
        """The consecutive ranges, that of the last page included."""
        return self.pages if self.tail == NO_SUM else (*self.pages, self.tail)

    def pack(self) -> bytes:
        sums = [RANGE_SUM_STRUCT.pack(*each) for each in (*self.pages, self.tail)]
        count = len(self.pages)
        head = (PACKET_PAGE_SUMS, sums_size(count), self.stream_id, self.epoch, count)
        return b"".join([PAGE_SUMS_STRUCT.pack(*head), *sums])

    @classmethod
    def unpack(cls, data: bytes | bytearray | memoryview, query: SumsQuery) -> SumsFound:
        """Decode the answer to `query`. Raises `ValueError` if it is invalid."""
        _, length, stream_id, epoch, count = PAGE_SUMS_STRUCT.unpack_from(data)
        if sums_size(count) != length or count > (query.max_pages or MAX_SUMS_PAGES):
            raise ValueError(f"checksums of {count} pages in {length} bytes for {query}")
        sums = [
            RangeSum(*each)
            for each in RANGE_SUM_STRUCT.iter_unpack(memoryview(data)[PAGE_SUMS_STRUCT.size :])
        ]
        found = cls(stream_id, epoch, tuple(sums[:-1]), sums[-1])
        due = None
        for first, end, _ in found.ranges:
            if first >= end or first != (first if due is None else due):
                raise ValueError(f"the checksum of entries {first} to {end} for {query}")
            due = end
        if due is not None and not found.ranges[0].first <= query.from_entry <= due:
            raise ValueError(f"checksums of entries {found.ranges[0].first} to {due} for {query}")
        return found


def sums_size(count: int) -> int:
    """The size of the answer with the checksums of that many whole pages."""
    return PAGE_SUMS_STRUCT.size + RANGE_SUM_STRUCT.size * (count + 1)


MAX_SUMS_SIZE: Final = sums_size(MAX_SUMS_PAGES)


def encode_times(found: TimeMarks) -> bytes:
    """The answer to a `MarksQuery` or `TimeQuery`."""
    marks = b"".join([TIME_MARK_STRUCT.pack(*mark) for mark in found.marks])
    head = (PACKET_TIMES, TIMES_STRUCT.size + len(marks), *found[1:], len(found.marks))
    return TIMES_STRUCT.pack(*head) + marks


def decode_times(data: bytes | bytearray | memoryview, query: MarksQuery | TimeQuery) -> TimeMarks:
    """Decode the answer to `query`. Raises `ValueError` if it is invalid."""
    _, length, resolution, following, count = TIMES_STRUCT.unpack_from(data)
    if TIMES_STRUCT.size + count * TIME_MARK_STRUCT.size != length:
        raise ValueError(f"{count} times in {length} bytes for {query}")
    marks = list(TIME_MARK_STRUCT.iter_unpack(memoryview(data)[TIMES_STRUCT.size :]))
    rises = all(one < other for one, other in pairwise([*(it[0] for it in marks), following]))
    if not rises or max([resolution, *(it[1] for it in marks)]) > LATEST_MS:
        raise ValueError(f"times of entries up to {following} that do not follow for {query}")
    return TimeMarks(marks, resolution, following)


MAX_TIMES_SIZE: Final = TIMES_STRUCT.size + MAX_TIME_MARKS * TIME_MARK_STRUCT.size
