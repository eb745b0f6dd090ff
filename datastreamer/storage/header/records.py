"""The records after the header in the header page: their layout, and values to bytes and back.

``docs/FILE.md`` specifies them. Knows no files and decides nothing.

========  ============================  ==========================================
offset    record                        written
========  ============================  ==========================================
64        commit record, 128 bytes      with the header, in the header's sector
512       synced header, slot 0         after a sync, in turn with slot 1
1024      synced header, slot 1
1536      visible mark, 48 bytes        last: the end for readers
2048      writer, 64 bytes              when a writer opens
2304      source, the second copy       after the first one is on disk
2560      doubt, 128 bytes              during the recovery from a failed sync
3072      changes, 408 bytes            before a truncation or update
3584      source, 64 bytes              before a lease to publish is granted
3712      upstream, 80 bytes            by a relay, after it applied a change
4032      claim, 48 bytes               when an operation begins to place its bytes
========  ============================  ==========================================

Every record ends in an xxh3 of 64 bits. Programs that do not know the records ignore and keep
them.
"""

from __future__ import annotations

import struct
from typing import Final, NamedTuple

from xxhash import xxh3_64_intdigest

from datastreamer.format import (
    HEADER_OFFSET,
    HEADER_PAGE_SIZE,
    HEADER_SIZE,
    HEADER_STRUCT,
    MAGIC,
    PACKET_HEADER,
    U64_MAX,
    Header,
)

RECORD_OFFSET: Final = 64
SLOT_OFFSETS: Final = (512, 1024)
MARK_OFFSET: Final = 1536
WRITER_OFFSET: Final = 2048
DOUBT_OFFSET: Final = 2560
CHANGES_OFFSET: Final = 3072
CHANGES_SIZE: Final = 512
SOURCE_OFFSETS: Final = (3584, 2304)  # two sectors: the loss of one loses one copy
UPSTREAM_OFFSET: Final = 3712
CLAIM_OFFSET: Final = 4032

_VERSION: Final = 1
_RECORD: Final = struct.Struct(">8sII16sQ16sQQQQQQQQ")
_SLOT: Final = struct.Struct(">8sIIQ16sQ38s2x")
_MARK: Final = struct.Struct(">8sIIQQQ")
_WRITER: Final = struct.Struct(">8sIQ16s20x")
_CHANGES: Final = struct.Struct(">8sII384s")
_CLAIM: Final = struct.Struct(">8sIIQQQ")
_CHANGE: Final = struct.Struct(">QQQ")
_UPSTREAM: Final = struct.Struct(">8sII16sQQQQq")
_SOURCE: Final = struct.Struct(">8sII16sQ16s")
_SUM: Final = struct.Struct(">Q")
_HEAD: Final = struct.Struct(">QQ")

# Offsets in a slot: its sequence number, and the last fields of its header.
_SLOT_SEQUENCE: Final = struct.calcsize(">8sII")
_SLOT_TOTALS: Final = struct.calcsize(">8sIIQ16sQ38s") - 16

_CHANGES_HEAD: Final = struct.calcsize(">8sII")

_RECORD_END: Final = RECORD_OFFSET + _RECORD.size
_MARK_END: Final = MARK_OFFSET + _MARK.size

# The last fields of header and mark, and of the record.
_TOTALS_OFFSET: Final = HEADER_OFFSET + HEADER_SIZE - 16
_TOTALS_END: Final = HEADER_OFFSET + HEADER_SIZE
_ENDS_OFFSET: Final = _RECORD_END - 64
_AFTER_OFFSET: Final = _RECORD_END - 32
_MARKED_OFFSET: Final = _MARK_END - 16

# What a commit writes: header and record before the sync; slots and mark after it.
BEFORE_SYNC: Final = (HEADER_OFFSET, _RECORD_END + _SUM.size)
AFTER_SYNC: Final = (SLOT_OFFSETS[0], _MARK_END + _SUM.size)
WITHOUT_SYNC: Final = (HEADER_OFFSET, _MARK_END + _SUM.size)

_Span = tuple[int, int]
CommitLayout = tuple[int, int, int, int, int, _Span, _Span, _Span, _Span, tuple[int, int, int]]
# The offsets of the bytes that every commit changes: the header's totals, the record's heads and
# hashes (four pairs of u64), its sum, the mark (which ends in a head) and its sum; the spans that
# are written; the slots, and in a slot its sequence number, the totals, its sum.
COMMIT_LAYOUT: Final[CommitLayout] = (
    _TOTALS_OFFSET,
    _ENDS_OFFSET,
    _RECORD_END,
    MARK_OFFSET,
    _MARK_END,
    BEFORE_SYNC,
    AFTER_SYNC,
    WITHOUT_SYNC,
    SLOT_OFFSETS,
    (_SLOT_SEQUENCE, _SLOT_TOTALS, _SLOT.size),
)

SOURCE_SIZE: Final = _SOURCE.size + _SUM.size

NO_ID: Final = bytes(16)


class Head(NamedTuple):
    """The end of a stream: the offset after its last byte, the number of entries."""

    length: int = HEADER_PAGE_SIZE
    entries: int = 0


class CommitRecord(NamedTuple):
    """What the disk may hold after a power cut, and how to check it.

    Up to `base` everything was synced. `first_hash` is the xxh3 of the entries (without
    padding) from `base` to `mid`, `second_hash` of those from `mid` to `after`, the end in the
    header.
    """

    stream_id: bytes
    epoch: int
    boot_id: bytes
    base: Head
    mid: Head
    after: Head
    first_hash: int
    second_hash: int


class SyncedHeader(NamedTuple):
    """A header that was on disk; a power cut cannot damage it together with the header itself."""

    sequence: int
    stream_id: bytes
    epoch: int
    header: Header


class VisibleMark(NamedTuple):
    """The end for readers; the header may be ahead of the disk."""

    epoch: int
    head: Head


class Writer(NamedTuple):
    """The process that last opened the stream for writing."""

    pid: int
    boot_id: bytes


class Claim(NamedTuple):
    """An operation that began at offset `length`, in that epoch, placed bytes there before its
    commit; the file had `size` bytes before it grew for them."""

    epoch: int
    length: int
    size: int


class PublisherRecord(NamedTuple):
    """The last source that was granted a lease to publish; all zeros if there was none."""

    epoch: int = 0
    source_id: bytes = NO_ID


class Change(NamedTuple):
    """Entries from `start` up to, not including, `stop` were changed when the epoch became `epoch`;
    if `stop` is None, all from `start` on were truncated."""

    epoch: int
    start: int
    stop: int | None


class Agreement(NamedTuple):
    """With which state of an upstream a relay's file agrees: all entries except those from `low` up
    to `high`, which are still to be compared, were the same at the upstream's `epoch` when the
    file's own epoch was `own_epoch`.

    Entries that differ in that range are missed updates if there are at most the upstream's
    epoch + `allowance` of them.
    """

    stream_id: bytes
    epoch: int
    own_epoch: int
    low: int = 0
    high: int = 0
    allowance: int = 0


def new_page(header: Header) -> bytearray:
    """A header page with magic and header and no records."""
    page = bytearray(HEADER_PAGE_SIZE)
    page[:HEADER_OFFSET] = MAGIC
    put_header(page, header)
    return page


def put_header(page: bytearray, header: Header) -> None:
    HEADER_STRUCT.pack_into(page, HEADER_OFFSET, PACKET_HEADER, HEADER_SIZE, *header)


def put_record(page: bytearray, record: CommitRecord) -> None:
    """Write the record; its sum covers the magic and the header in `page` too."""
    stream_id, epoch, boot, base, mid, after, first, second = record
    _RECORD.pack_into(
        page,
        RECORD_OFFSET,
        b"DSrecord",
        _VERSION,
        0,
        stream_id,
        epoch,
        boot,
        *base,
        *mid,
        *after,
        first,
        second,
    )
    _SUM.pack_into(page, _RECORD_END, xxh3_64_intdigest(page[:_RECORD_END]))


def put_doubt(page: bytearray, record: CommitRecord) -> tuple[int, int]:
    """Write what the header said before it was set back; returns the changed span of `page`."""
    stream_id, epoch, boot, base, mid, after, first, second = record
    end = DOUBT_OFFSET + _RECORD.size
    heads = (*base, *mid, *after)
    _RECORD.pack_into(
        page, DOUBT_OFFSET, b"DSdoubt_", _VERSION, 0, stream_id, epoch, boot, *heads, first, second
    )
    _put_sum(page, DOUBT_OFFSET, end)
    return DOUBT_OFFSET, end + _SUM.size


def get_doubt(page: bytes | bytearray, record: CommitRecord) -> CommitRecord | None:
    """What the header said before a failed sync, if it was set back to `record`."""
    magic, version, _, stream_id, epoch, boot, *rest = _RECORD.unpack_from(page, DOUBT_OFFSET)
    whole = _sum_fits(page, DOUBT_OFFSET, _RECORD.size)
    if magic != b"DSdoubt_" or version != _VERSION or not whole:
        return None
    base, mid, after = Head(*rest[:2]), Head(*rest[2:4]), Head(*rest[4:6])
    if (stream_id, epoch) != (record.stream_id, record.epoch):
        return None
    if not base == record.base == record.after:
        return None
    return CommitRecord(stream_id, epoch, boot, base, mid, after, rest[6], rest[7])


def get_record(page: bytes | bytearray) -> CommitRecord | None:
    """The commit record if it fits the header in `page`."""
    magic, version, _, stream_id, epoch, boot, *rest = _RECORD.unpack_from(page, RECORD_OFFSET)
    if magic != b"DSrecord" or version != _VERSION or not _sum_fits(page, 0, _RECORD_END):
        return None
    base, mid, after = Head(*rest[:2]), Head(*rest[2:4]), Head(*rest[4:6])
    return CommitRecord(stream_id, epoch, boot, base, mid, after, rest[6], rest[7])


def put_synced(page: bytearray, slot: int, synced: SyncedHeader) -> None:
    start = SLOT_OFFSETS[slot]
    _SLOT.pack_into(
        page,
        start,
        b"DSsynced",
        _VERSION,
        0,
        synced.sequence,
        synced.stream_id,
        synced.epoch,
        synced.header.pack(),
    )
    _put_sum(page, start, start + _SLOT.size)


def get_synced(page: bytes | bytearray) -> list[SyncedHeader]:
    """The synced headers that are whole, the newest first."""
    found = []
    for start in SLOT_OFFSETS:
        magic, version, _, sequence, stream_id, epoch, packed = _SLOT.unpack_from(page, start)
        if magic == b"DSsynced" and version == _VERSION and _sum_fits(page, start, _SLOT.size):
            found.append(SyncedHeader(sequence, stream_id, epoch, Header.unpack(packed)))
    return sorted(found, reverse=True)


def put_mark(page: bytearray, epoch: int, head: Head) -> None:
    _MARK.pack_into(page, MARK_OFFSET, b"DSmarked", _VERSION, 0, epoch, *head)
    _put_sum(page, MARK_OFFSET, _MARK_END)


def get_mark(page: bytes | bytearray) -> VisibleMark | None:
    magic, version, _, epoch, length, entries = _MARK.unpack_from(page, MARK_OFFSET)
    if magic != b"DSmarked" or version != _VERSION or not _sum_fits(page, MARK_OFFSET, _MARK.size):
        return None
    return VisibleMark(epoch, Head(length, entries))


def committed_since(page: bytes, before: bytes) -> Head | None:
    """The end for readers in `page`, if only commits and syncs came since `before`, a settled page.

    None if there was more, or `page` was read in the middle of a write. Both pages are the bytes
    up to the mark's sum. Every live client waits for this; parsing each value takes nearly twice
    as long.
    """
    if (
        page[:_TOTALS_OFFSET] != before[:_TOTALS_OFFSET]
        or page[_TOTALS_END:_ENDS_OFFSET] != before[_TOTALS_END:_ENDS_OFFSET]
        or page[MARK_OFFSET:_MARKED_OFFSET] != before[MARK_OFFSET:_MARKED_OFFSET]
        or not _sum_fits(page, 0, _RECORD_END)
        or not _sum_fits(page, MARK_OFFSET, _MARK.size)
    ):
        return None
    length, entries = _HEAD.unpack_from(page, _MARKED_OFFSET)
    after_length, _ = _HEAD.unpack_from(page, _AFTER_OFFSET)
    return None if length > after_length else Head(length, entries)


def put_writer(page: bytearray, writer: Writer) -> tuple[int, int]:
    """Write the writer record; returns the changed span of `page`."""
    end = WRITER_OFFSET + _WRITER.size
    _WRITER.pack_into(page, WRITER_OFFSET, b"DSwriter", _VERSION, writer.pid, writer.boot_id)
    _put_sum(page, WRITER_OFFSET, end)
    return WRITER_OFFSET, end + _SUM.size


def get_writer(page: bytes | bytearray) -> Writer | None:
    magic, version, pid, boot = _WRITER.unpack_from(page, WRITER_OFFSET)
    whole = _sum_fits(page, WRITER_OFFSET, _WRITER.size)
    return Writer(pid, boot) if magic == b"DSwriter" and version == _VERSION and whole else None


def put_change(page: bytearray, change: Change) -> tuple[int, int]:
    """Append a change to those in the page, and drop the oldest if they are too many; returns the
    changed span of `page`."""
    room = _CHANGES.size - _CHANGES_HEAD
    # A change of the same epoch was begun and not completed.
    before = [known for known in get_changes(page) if known.epoch < change.epoch]
    known = [*before, change][-(room // _CHANGE.size) :]
    packed = b"".join(
        _CHANGE.pack(epoch, start, U64_MAX if stop is None else stop)
        for epoch, start, stop in known
    )
    _CHANGES.pack_into(page, CHANGES_OFFSET, b"DSchange", _VERSION, len(known), packed)
    end = CHANGES_OFFSET + _CHANGES.size
    _put_sum(page, CHANGES_OFFSET, end)
    return CHANGES_OFFSET, end + _SUM.size


def get_changes(page: bytes | bytearray) -> list[Change]:
    """The newest changes, the newest last; perhaps of an older epoch than the stream's."""
    magic, version, count, packed = _CHANGES.unpack_from(page, CHANGES_OFFSET)
    whole = _sum_fits(page, CHANGES_OFFSET, _CHANGES.size)
    if magic != b"DSchange" or version != _VERSION or not whole:
        return []
    return [
        Change(epoch, start, None if stop == U64_MAX else stop)
        for epoch, start, stop in _CHANGE.iter_unpack(packed[: count * _CHANGE.size])
    ]


def put_claim(page: bytearray, claim: Claim) -> tuple[int, int]:
    """Write that an operation places bytes; returns the changed span of `page`."""
    end = CLAIM_OFFSET + _CLAIM.size
    _CLAIM.pack_into(page, CLAIM_OFFSET, b"DSclaims", _VERSION, 0, *claim)
    _put_sum(page, CLAIM_OFFSET, end)
    return CLAIM_OFFSET, end + _SUM.size


def get_claim(page: bytes | bytearray) -> Claim | None:
    magic, version, _, *claim = _CLAIM.unpack_from(page, CLAIM_OFFSET)
    if magic != b"DSclaims" or version != _VERSION:
        return None
    return Claim(*claim) if _sum_fits(page, CLAIM_OFFSET, _CLAIM.size) else None


def put_agreement(page: bytearray, agreement: Agreement | None) -> tuple[int, int]:
    """Write the agreement, or remove it; returns the changed span of `page`."""
    end = UPSTREAM_OFFSET + _UPSTREAM.size
    if agreement is None:
        page[UPSTREAM_OFFSET : end + _SUM.size] = bytes(_UPSTREAM.size + _SUM.size)
    else:
        _UPSTREAM.pack_into(page, UPSTREAM_OFFSET, b"DSupstrm", _VERSION, 0, *agreement)
        _put_sum(page, UPSTREAM_OFFSET, end)
    return UPSTREAM_OFFSET, end + _SUM.size


def get_agreement(page: bytes | bytearray) -> Agreement | None:
    """The agreement; None unless it is whole."""
    magic, version, _, *fields = _UPSTREAM.unpack_from(page, UPSTREAM_OFFSET)
    whole = _sum_fits(page, UPSTREAM_OFFSET, _UPSTREAM.size)
    return Agreement(*fields) if magic == b"DSupstrm" and version == _VERSION and whole else None


def put_source(
    page: bytearray, copy: int, stream_id: bytes, source: PublisherRecord
) -> tuple[int, int]:
    """Write one of the two copies of the source; returns the changed span of `page`.

    The second copy is written when the first is on disk, and a lease is granted when both are.
    So if one copy is damaged, the other one is not older than any lease that was granted.
    """
    start = SOURCE_OFFSETS[copy]
    end = start + _SOURCE.size
    _SOURCE.pack_into(page, start, b"DSsource", _VERSION, 0, stream_id, *source)
    _put_sum(page, start, end)
    return start, end + _SUM.size


def get_sources(page: bytes | bytearray) -> list[tuple[bytes, PublisherRecord] | None]:
    """Both copies, each with its stream id; None for a copy that is damaged. A copy of zeros
    says that there was no source yet, and has the stream id of zeros."""
    found: list[tuple[bytes, PublisherRecord] | None] = []
    for start in SOURCE_OFFSETS:
        if not any(page[start : start + SOURCE_SIZE]):
            found.append((NO_ID, PublisherRecord()))
            continue
        magic, version, _, stream_id, *source = _SOURCE.unpack_from(page, start)
        whole = magic == b"DSsource" and version == _VERSION
        whole = whole and _sum_fits(page, start, _SOURCE.size)
        found.append((stream_id, PublisherRecord(*source)) if whole else None)
    return found


def get_source(page: bytes | bytearray, stream_id: bytes) -> PublisherRecord | None:
    """The last source of the stream; `PublisherRecord()` if there is none. None if neither copy
    is whole and of this stream, and something else is written there."""
    copies = get_sources(page)
    if copies == [(NO_ID, PublisherRecord())] * len(SOURCE_OFFSETS):
        return PublisherRecord()
    written = [found[1] for found in copies if found is not None and found[0] == stream_id]
    return max((source for source in written if source != PublisherRecord()), default=None)


def _put_sum(page: bytearray, start: int, end: int) -> None:
    _SUM.pack_into(page, end, xxh3_64_intdigest(page[start:end]))


def _sum_fits(page: bytes | bytearray, start: int, size: int) -> bool:
    end = start + size
    (stored,) = _SUM.unpack_from(page, end)
    return bool(stored == xxh3_64_intdigest(memoryview(page)[start:end]))
