"""The records after the header in the header page: their layout, and values to bytes and back.

``docs/FILE.md`` specifies them and says when each is written. Knows no files and decides nothing.

Every record ends in an xxh3 of 64 bits. Programs that do not know the records ignore and keep
them. Each `put_...` writes a record to a page and returns the span that it changed; each `get_...`
returns None for a record that is not whole.
"""

from __future__ import annotations

import struct
from typing import Any, Final, NamedTuple

from xxhash import xxh3_64_intdigest

from datastreamer.format import (
    EVICTED_MAGIC,
    HEADER_OFFSET,
    HEADER_PAGE_SIZE,
    HEADER_SIZE,
    HEADER_STRUCT,
    MAGIC,
    PACKET_HEADER,
    U64_MAX,
    Header,
)
from datastreamer.storage.pages.hashes import HASH_SIZE, EndSum

RECORD_OFFSET: Final = 64
SLOT_OFFSETS: Final = (512, 1024)
MARK_OFFSET: Final = 1536  # written last: the end for readers
EVICTED_OFFSET: Final = 1664
WRITER_OFFSET: Final = 2048
DOUBT_OFFSET: Final = 2560
CHANGES_OFFSET: Final = 3072
CHANGES_SIZE: Final = 512
SOURCE_OFFSETS: Final = (3584, 2304)  # two sectors: the loss of one loses one copy
UPSTREAM_OFFSET: Final = 3712
CLAIM_OFFSET: Final = 4032

_SUM: Final = struct.Struct(">Q")

Span = tuple[int, int]
"""The bytes of the header page from an offset up to, not including, another."""


class _Record:
    """One kind of record: its letters, the version, its fields, and the sum of all of that."""

    def __init__(
        self, letters: bytes, fields: str, version: int = 1, marked: int | None = None
    ) -> None:
        """`marked` is the version in a file with evicted pages, None: the same. A program that does
        not know such files takes no record of this kind for whole."""
        self._letters = letters
        self._versions = version, version if marked is None else marked
        self._struct = struct.Struct(">8sI" + fields)
        self.sum_offset = self._struct.size
        self.size = self.sum_offset + _SUM.size

    def put(self, page: bytearray, start: int, *fields: Any, sum_from: int | None = None) -> Span:
        """Write it to offset `start`; returns the changed span. The sum begins at `sum_from`, or
        else with the record."""
        self._struct.pack_into(page, start, self._letters, self._versions[is_marked(page)], *fields)
        end = start + self.sum_offset
        summed = page[start if sum_from is None else sum_from : end]
        _SUM.pack_into(page, end, xxh3_64_intdigest(summed))
        return start, end + _SUM.size

    def get(
        self, page: bytes | bytearray, start: int, *, sum_from: int | None = None
    ) -> list[Any] | None:
        """Its fields; None unless it is whole and of this kind and version."""
        letters, version, *fields = self._struct.unpack_from(page, start)
        if letters != self._letters or version not in self._versions:
            return None
        end = start + self.sum_offset
        return fields if _sum_fits(page, start if sum_from is None else sum_from, end) else None


def _sum_fits(page: bytes | bytearray, start: int, end: int) -> bool:
    (stored,) = _SUM.unpack_from(page, end)
    return bool(stored == xxh3_64_intdigest(memoryview(page)[start:end]))


_COMMIT_FIELDS: Final = "I16sQ16s6Q96s"
COMMIT: Final = _Record(b"DSrecord", _COMMIT_FIELDS, version=2, marked=3)
SYNCED: Final = _Record(b"DSsynced", "4xQ16sQ38s2x", marked=2)
MARK: Final = _Record(b"DSmarked", "4xQQQ")
_EVICTED_LETTERS: Final = b"DSevictd"
EVICTED: Final = _Record(_EVICTED_LETTERS, "IQQ16s16sH256s54x")
WRITER: Final = _Record(b"DSwriter", "Q16s??18x")
SOURCE: Final = _Record(b"DSsource", "4x16sQ16s")
_DOUBT: Final = _Record(b"DSdoubt_", _COMMIT_FIELDS, version=2)
_CHANGES: Final = _Record(b"DSchange", "I384s")
_UPSTREAM: Final = _Record(b"DSupstrm", "4x16sQQQQq")
_CLAIM: Final = _Record(b"DSclaims", "4xQQQ")

# The floor in its record; it is 8 bytes at a multiple of 8, so that a write replaces all of it.
_FLOOR: Final = struct.Struct(">8sIIQ")
MOST_URL: Final = 256
MARKED_BYTES: Final = EVICTED_OFFSET + _FLOOR.size
"""How many bytes of the file `floor_in` needs."""

_CHANGE: Final = struct.Struct(">QQQ")
_MAX_CHANGES: Final = 16
_HEAD: Final = struct.Struct(">QQ")

# Offsets in a slot: its sequence number, and the last fields of its header.
_SLOT_SEQUENCE: Final = struct.calcsize(">8sI4x")
_SLOT_TOTALS: Final = struct.calcsize(">8sI4xQ16sQ38s") - 16

_RECORD_END: Final = RECORD_OFFSET + COMMIT.sum_offset
_MARK_END: Final = MARK_OFFSET + MARK.sum_offset

# The last fields of header and mark, and of the record.
_TOTALS_OFFSET: Final = HEADER_OFFSET + HEADER_SIZE - 16
_TOTALS_END: Final = HEADER_OFFSET + HEADER_SIZE
_ENDS_OFFSET: Final = _RECORD_END - 3 * (16 + 2 * HASH_SIZE)
_AFTER_OFFSET: Final = _ENDS_OFFSET + 32
_MARKED_OFFSET: Final = _MARK_END - 16

# What a commit writes: magic, header and record before the sync; slots and mark after it.
BEFORE_SYNC: Final = (0, RECORD_OFFSET + COMMIT.size)
AFTER_SYNC: Final = (SLOT_OFFSETS[0], MARK_OFFSET + MARK.size)
WITHOUT_SYNC: Final = (0, MARK_OFFSET + MARK.size)

# The offsets of the bytes that every commit changes: the header's totals, the record's three heads
# (pairs of u64) and their sums (pairs of 16 bytes), its own sum, the mark (which ends in a head)
# and its sum; the spans that are written; the slots, and in a slot its sequence number, the totals,
# its sum.
COMMIT_LAYOUT: Final = (
    _TOTALS_OFFSET,
    _ENDS_OFFSET,
    _RECORD_END,
    MARK_OFFSET,
    _MARK_END,
    BEFORE_SYNC,
    AFTER_SYNC,
    WITHOUT_SYNC,
    SLOT_OFFSETS,
    (_SLOT_SEQUENCE, _SLOT_TOTALS, SYNCED.sum_offset),
)

# The same for readers beside a writer, as `committed_since` reads them: start and end of the
# header's totals; the record's heads, the last of these; the mark, the head in it, its sum.
VISIBLE_LAYOUT: Final = (
    _TOTALS_OFFSET,
    _TOTALS_END,
    _ENDS_OFFSET,
    _AFTER_OFFSET,
    MARK_OFFSET,
    _MARKED_OFFSET,
    _MARK_END,
)

NO_ID: Final = bytes(16)


class Head(NamedTuple):
    """The end of a stream: the offset after its last byte, the number of entries."""

    length: int = HEADER_PAGE_SIZE
    entries: int = 0


class CommitRecord(NamedTuple):
    """What the disk may hold after a power cut, and how to check it.

    Up to `base` everything was synced. `after` is the end in the header, `mid` one between them.
    Each has its `EndSum`; the chains of all three begin with page `chained_from`.
    """

    stream_id: bytes
    epoch: int
    boot_id: bytes
    base: Head
    mid: Head
    after: Head
    base_sum: EndSum
    mid_sum: EndSum
    after_sum: EndSum

    def sum_at(self, head: Head) -> EndSum | None:
        """What it knows of the entries up to one of its heads; None for another head."""
        known = {self.mid: self.mid_sum, self.after: self.after_sum, self.base: self.base_sum}
        return known.get(head)


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
    """The process that last opened the stream for writing.

    `open`: it has not closed it cleanly yet. `may_lose`: readers may have seen what a power cut
    takes.
    """

    pid: int
    boot_id: bytes
    open: bool = False
    may_lose: bool = False


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


class Evicted(NamedTuple):
    """The pages before page `floor` are in the archive with this URL and id; the file may have
    holes there. `chain` is the one over these pages, `generation` the archive's that has them.

    `url` has at most 256 bytes. `fall` is a random u32, another one each time that the floor falls:
    who missed that knows by it that pages may be others.
    """

    floor: int
    generation: int
    archive_id: bytes
    chain: bytes
    url: str
    fall: int = 0


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


def is_marked(page: bytes | bytearray) -> bool:
    """Whether the file has evicted pages, or is about to have some; also if its magic is
    damaged."""
    magic = page[:HEADER_OFFSET]
    if magic in (MAGIC, EVICTED_MAGIC):
        return magic == EVICTED_MAGIC
    return len(page) == HEADER_PAGE_SIZE and get_evicted(page) is not None


def put_magic(page: bytearray, *, marked: bool) -> None:
    """Mark the file, or take the mark away, with the versions of its records."""
    record, slots = get_record(page), [SYNCED.get(page, start) for start in SLOT_OFFSETS]
    page[:HEADER_OFFSET] = EVICTED_MAGIC if marked else MAGIC
    for start, slot in zip(SLOT_OFFSETS, slots, strict=True):
        if slot is not None:
            SYNCED.put(page, start, *slot)
    if record is not None:
        put_record(page, record)


def put_evicted(page: bytearray, evicted: Evicted) -> Span:
    *fields, url, fall = evicted
    packed = url.encode()
    return EVICTED.put(page, EVICTED_OFFSET, fall, *fields, len(packed), packed)


def clear_evicted(page: bytearray) -> None:
    page[EVICTED_OFFSET : EVICTED_OFFSET + EVICTED.size] = bytes(EVICTED.size)


def get_evicted(page: bytes | bytearray) -> Evicted | None:
    """None also for floor 0, which the record of a file keeps that was marked."""
    fields = EVICTED.get(page, EVICTED_OFFSET)
    if fields is None or not fields[1]:
        return None
    fall, floor, generation, archive_id, chain, size, packed = fields
    url = packed[:size].decode(errors="replace")
    return Evicted(floor, generation, archive_id, chain, url, fall)


class FloorSeen(NamedTuple):
    """The floor of a file. While `fall` is the same, so are the pages below it."""

    floor: int
    fall: int = 0

    def was_above(self, page: int, before: FloorSeen) -> bool:
        """Whether a page that was read after `before`, and before this look, was in the file."""
        return self.floor <= page and self.fall == before.fall


def floor_in(page: bytes | bytearray) -> FloorSeen | None:
    """The floor of a file that begins with `page`, of which `MARKED_BYTES` are enough; None if the
    file is marked and its record is damaged. Neither sum is compared."""
    page = page.ljust(MARKED_BYTES, b"\0")
    magic = page[:HEADER_OFFSET]
    letters, _, fall, floor = _FLOOR.unpack_from(page, EVICTED_OFFSET)
    if letters != _EVICTED_LETTERS:
        return None if magic == EVICTED_MAGIC else FloorSeen(0)
    return FloorSeen(0 if magic == MAGIC else floor, fall)


def put_header(page: bytearray, header: Header) -> None:
    HEADER_STRUCT.pack_into(page, HEADER_OFFSET, PACKET_HEADER, HEADER_SIZE, *header)


def put_record(page: bytearray, record: CommitRecord) -> None:
    """Write the record; its sum covers the magic and the header in `page` too."""
    COMMIT.put(page, RECORD_OFFSET, *_fields_of(record), sum_from=0)


def put_settled(
    page: bytearray,
    header: Header,
    end_sum: EndSum,
    stream_id: bytes,
    epoch: int,
    boot_id: bytes,
    *,
    before: EndSum | None = None,
) -> None:
    """Write a header, and a commit record with an empty range: all entries are on disk. `before`:
    the entries are about to be changed, and that is what is known of them until then."""
    head = Head(header.total_length, header.total_entries)
    put_header(page, header)
    heads, sums = (head, head, head), (end_sum if before is None else before, end_sum, end_sum)
    put_record(page, CommitRecord(stream_id, epoch, boot_id, *heads, *sums))


def settled_page(
    header: Header, end_sum: EndSum, stream_id: bytes, epoch: int, boot_id: bytes
) -> bytearray:
    """The header page that a clean close leaves."""
    page = new_page(header)
    put_settled(page, header, end_sum, stream_id, epoch, boot_id)
    put_synced(page, 0, SyncedHeader(0, stream_id, epoch, header))
    put_mark(page, epoch, Head(*header[3:]))
    return page


def get_record(page: bytes | bytearray) -> CommitRecord | None:
    """The commit record if it fits the header in `page`."""
    fields = COMMIT.get(page, RECORD_OFFSET, sum_from=0)
    return None if fields is None else _record_of(fields)


def put_doubt(page: bytearray, record: CommitRecord) -> Span:
    return _DOUBT.put(page, DOUBT_OFFSET, *_fields_of(record))


def get_doubt(page: bytes | bytearray, record: CommitRecord) -> CommitRecord | None:
    """What the header said before a failed sync, if it was set back to `record`."""
    fields = _DOUBT.get(page, DOUBT_OFFSET)
    if fields is None:
        return None
    before = _record_of(fields)
    same_stream = (before.stream_id, before.epoch) == (record.stream_id, record.epoch)
    return before if same_stream and before.base == record.base == record.after else None


def _fields_of(record: CommitRecord) -> tuple[Any, ...]:
    stream_id, epoch, boot, *heads = record[:6]
    sums = record[6:]
    packed = b"".join(each.chain + each.tail for each in sums)
    ends = [number for head in heads for number in head]
    return sums[-1].chained_from, stream_id, epoch, boot, *ends, packed


def _record_of(fields: list[Any]) -> CommitRecord:
    chained_from, stream_id, epoch, boot, *numbers, packed = fields
    base, mid, after = (Head(*numbers[at : at + 2]) for at in (0, 2, 4))
    hashes = [packed[at : at + HASH_SIZE] for at in range(0, len(packed), HASH_SIZE)]
    sums = [EndSum(hashes[at], chained_from, hashes[at + 1]) for at in (0, 2, 4)]
    return CommitRecord(stream_id, epoch, boot, base, mid, after, sums[0], sums[1], sums[2])


def put_synced(page: bytearray, slot: int, synced: SyncedHeader) -> None:
    sequence, stream_id, epoch, header = synced
    SYNCED.put(page, SLOT_OFFSETS[slot], sequence, stream_id, epoch, header.pack())


def get_synced(page: bytes | bytearray) -> list[SyncedHeader]:
    """The synced headers that are whole, the newest first."""
    found = []
    for start in SLOT_OFFSETS:
        if (fields := SYNCED.get(page, start)) is not None:
            sequence, stream_id, epoch, packed = fields
            found.append(SyncedHeader(sequence, stream_id, epoch, Header.unpack(packed)))
    return sorted(found, reverse=True)


def put_mark(page: bytearray, epoch: int, head: Head) -> None:
    MARK.put(page, MARK_OFFSET, epoch, *head)


def get_mark(page: bytes | bytearray) -> VisibleMark | None:
    fields = MARK.get(page, MARK_OFFSET)
    return None if fields is None else VisibleMark(fields[0], Head(*fields[1:]))


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
        or not _sum_fits(page, MARK_OFFSET, _MARK_END)
    ):
        return None
    length, entries = _HEAD.unpack_from(page, _MARKED_OFFSET)
    after_length, _ = _HEAD.unpack_from(page, _AFTER_OFFSET)
    return None if length > after_length else Head(length, entries)


def put_writer(page: bytearray, writer: Writer) -> Span:
    return WRITER.put(page, WRITER_OFFSET, *writer)


def get_writer(page: bytes | bytearray) -> Writer | None:
    fields = WRITER.get(page, WRITER_OFFSET)
    return None if fields is None else Writer(*fields)


def put_change(page: bytearray, change: Change) -> Span:
    """Append a change to those in the page, and drop the oldest if they are too many."""
    # A change of the same epoch was begun and not completed.
    before = [known for known in get_changes(page) if known.epoch < change.epoch]
    known = [*before, change][-_MAX_CHANGES:]
    packed = b"".join(
        _CHANGE.pack(epoch, start, U64_MAX if stop is None else stop)
        for epoch, start, stop in known
    )
    return _CHANGES.put(page, CHANGES_OFFSET, len(known), packed)


def get_changes(page: bytes | bytearray) -> list[Change]:
    """The newest changes, the newest last; perhaps of an older epoch than the stream's."""
    fields = _CHANGES.get(page, CHANGES_OFFSET)
    if fields is None:
        return []
    count, packed = fields
    return [
        Change(epoch, start, None if stop == U64_MAX else stop)
        for epoch, start, stop in _CHANGE.iter_unpack(packed[: count * _CHANGE.size])
    ]


def put_claim(page: bytearray, claim: Claim) -> Span:
    return _CLAIM.put(page, CLAIM_OFFSET, *claim)


def get_claim(page: bytes | bytearray) -> Claim | None:
    fields = _CLAIM.get(page, CLAIM_OFFSET)
    return None if fields is None else Claim(*fields)


def put_agreement(page: bytearray, agreement: Agreement | None) -> Span:
    """Write the agreement, or remove it."""
    if agreement is not None:
        return _UPSTREAM.put(page, UPSTREAM_OFFSET, *agreement)
    end = UPSTREAM_OFFSET + _UPSTREAM.size
    page[UPSTREAM_OFFSET:end] = bytes(_UPSTREAM.size)
    return UPSTREAM_OFFSET, end


def get_agreement(page: bytes | bytearray) -> Agreement | None:
    fields = _UPSTREAM.get(page, UPSTREAM_OFFSET)
    return None if fields is None else Agreement(*fields)


def put_source(page: bytearray, copy: int, stream_id: bytes, source: PublisherRecord) -> Span:
    """Write one of the two copies of the source.

    The second copy is written when the first is on disk, and a lease is granted when both are.
    So if one copy is damaged, the other one is not older than any lease that was granted.
    """
    return SOURCE.put(page, SOURCE_OFFSETS[copy], stream_id, *source)


def get_sources(page: bytes | bytearray) -> list[tuple[bytes, PublisherRecord] | None]:
    """Both copies, each with its stream id; None for a copy that is damaged. A copy of zeros
    means that there was no source yet, and has the stream id of zeros."""
    found: list[tuple[bytes, PublisherRecord] | None] = []
    for start in SOURCE_OFFSETS:
        if not any(page[start : start + SOURCE.size]):
            found.append((NO_ID, PublisherRecord()))
            continue
        fields = SOURCE.get(page, start)
        found.append(None if fields is None else (fields[0], PublisherRecord(*fields[1:])))
    return found


def get_source(page: bytes | bytearray, stream_id: bytes) -> PublisherRecord | None:
    """The last source of the stream; `PublisherRecord()` if there is none. None if neither copy
    is whole and of this stream, and other bytes are there."""
    copies = get_sources(page)
    if copies == [(NO_ID, PublisherRecord())] * len(SOURCE_OFFSETS):
        return PublisherRecord()
    written = [found[1] for found in copies if found is not None and found[0] == stream_id]
    return max((source for source in written if source != PublisherRecord()), default=None)
