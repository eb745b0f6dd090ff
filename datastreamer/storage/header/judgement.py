"""How much of a stream file to believe after a crash.

Decides and changes nothing: `judge` reads, an open acts. ``docs/FILE.md`` has the rules and the
reasons.
"""

from __future__ import annotations

from typing import NamedTuple

from datastreamer._codec import scan
from datastreamer.errors import (
    BadFileSize,
    CorruptEntries,
    DamagedHeader,
)
from datastreamer.format import (
    ENTRY_HEAD_SIZE,
    HEADER_OFFSET,
    HEADER_PAGE_SIZE,
    PACKET_PADDING,
    PAGE_SIZE,
    Header,
    page_of,
    page_start,
)
from datastreamer.printable import counted
from datastreamer.storage.disk.file_ops import Readable
from datastreamer.storage.header.page import HeaderPage
from datastreamer.storage.header.records import (
    NO_ID,
    CommitRecord,
    Head,
    get_doubt,
)
from datastreamer.storage.header.undo_journal import Undo
from datastreamer.storage.pages._page_sums import PageSums
from datastreamer.storage.pages.hashes import NO_CHAIN, EndSum, last_page
from datastreamer.storage.read.page_scan import doubt


class Judgement(NamedTuple):
    """What an open may believe of a file.

    `head` is the end of the stream, `end_sum` what the record knows of the entries up to it (None:
    nothing). `record` is the commit record if it fits the header, or the
    one from before a failed sync; None if a program that keeps no records wrote the header.
    `head` is less than `record.after` if the bytes after it are not those that were written.
    """

    header: Header
    head: Head
    record: CommitRecord | None
    stream_id: bytes
    epoch: int
    end_sum: EndSum | None


def judge(file: Readable, page: HeaderPage, path: str, header: Header) -> Judgement:
    """Decide where the stream in `file` ends.

    Entries that the record does not know to be on disk are compared with its hashes, also if the
    machine has not restarted: a file system can lose unsynced writes while the kernel runs.

    Raises `DamagedHeader` and `BadFileSize`, which name what was found.
    """
    record = page.record
    _check_size(file.size(), header, path, record)
    head = Head(header.total_length, header.total_entries)
    if record is None:
        return _judge_unrecorded(file, page, path, header, head)
    if record.after != head:
        raise DamagedHeader(path, HEADER_OFFSET, "the commit record is about another header")
    # The process may have ended before it had recovered from a failed sync.
    record = get_doubt(page, record) or record
    reached = longest_whole(file, record)
    return Judgement(
        header._replace(total_length=reached.length, total_entries=reached.entries),
        reached,
        record,
        record.stream_id,
        record.epoch,
        record.sum_at(reached),
    )


def _check_size(size: int, header: Header, path: str, record: CommitRecord | None) -> None:
    """With a `record`, any size is possible that holds what was synced: later growth may not be on
    disk."""
    if (size - HEADER_PAGE_SIZE) % PAGE_SIZE and record is None:
        raise BadFileSize(
            path, size, f"the file's size is {size} bytes, not {HEADER_PAGE_SIZE} + k x {PAGE_SIZE}"
        )
    length, entries = header.total_length, header.total_entries
    if length < HEADER_PAGE_SIZE or length >= 1 << 63:
        raise DamagedHeader(path, 38, f"the header's total length {length} is not possible")
    least = length if record is None else record.base.length
    if least > size:
        raise BadFileSize(path, size, f"the file ends here, but its data ends at byte {least}")
    if entries > (length - HEADER_PAGE_SIZE) // ENTRY_HEAD_SIZE or (
        entries == 0 and length != HEADER_PAGE_SIZE
    ):
        raise DamagedHeader(
            path, 46, f"the header counts {counted(entries)} in {length - HEADER_PAGE_SIZE} bytes"
        )


def _judge_unrecorded(
    file: Readable, page: HeaderPage, path: str, header: Header, head: Head
) -> Judgement:
    """A header that no record confirms: another program's, or a torn one."""
    slots = page.synced
    why = doubt(file, head)
    if why:
        ends = dict.fromkeys((s.header.total_entries, s.header.total_length) for s in slots)
        known = ", ".join(f"entry {entries} at byte {length}" for entries, length in ends)
        raise DamagedHeader(
            path,
            HEADER_OFFSET,
            f"the header says that the stream ends with {counted(head.entries)} at byte "
            f"{head.length}, and its last page does not: {why}; "
            + (f"ends that were on disk: {known}" if known else "no other end is recorded"),
        )
    if slots and slots[0].header[:3] != header[:3]:
        # No program changes these fields.
        version, system_id, stream_type = slots[0].header[:3]
        raise DamagedHeader(
            path,
            HEADER_OFFSET,
            f"the header says version {header.version}, system id {header.system_id}, stream type "
            f"{header.stream_type}; the last one that was on disk says version {version}, system "
            f"id {system_id}, stream type {stream_type}",
        )
    stream_id, epoch = (slots[0].stream_id, slots[0].epoch) if slots else (NO_ID, 0)
    return Judgement(header, head, None, stream_id, epoch, None)


def longest_whole(file: Readable, record: CommitRecord) -> Head:
    """The last of the record's heads up to which the entries in the file are whole.

    If entries before `base` are damaged, those after it cannot be compared with the hashes: their
    form alone decides, so that damage removes nothing that was acknowledged.
    """
    base, mid, after = record.base, record.mid, record.after
    if after == base:
        return after
    sums = sums_up_to(file, base, record.base_sum)
    if not _reach(file, base, mid, sums, record.mid_sum):
        return base
    return after if _reach(file, mid, after, sums, record.after_sum) else mid


def _reach(
    file: Readable, start: Head, stop: Head, sums: PageSums | None, expected: EndSum
) -> bool:
    """Whether the entries from `start` to `stop` are whole; `sums` are the hashes up to `start`."""
    if not add_entries(file, start, stop, sums):
        return False
    return sums is None or sums.sum() == expected


def sums_up_to(file: Readable, head: Head, known: EndSum | None) -> PageSums | None:
    """The hashes of the entries up to `head`; the last page is read.

    `known` is what a record says of them (None: nothing is known). None if the entries in the last
    page are others: the page is damaged.
    """
    if known is None:
        return hash_last_page(file, head)
    sums = hash_last_page(file, head, known.chain, known.chained_from)
    return sums if sums is not None and sums.sum() == known else None


def hash_last_page(
    file: Readable, head: Head, chain: bytes = NO_CHAIN, chained_from: int | None = None
) -> PageSums | None:
    """The hashes of the entries up to `head`, compared with nothing; None if no entries end there.

    `chain` is that over the pages before the last one, from `chained_from` on (None: unknown).
    """
    start = page_start(last_page(head.length))
    near = file.read(min(head.length - start, PAGE_SIZE), start)
    return _hash_content(near, head, chain, chained_from)


def last_page_matches(content: bytes, head: Head, known: EndSum) -> bool:
    """Whether the entries of the last page, of which `content` was read up to `head`, are those
    that a record knows."""
    sums = _hash_content(content, head, known.chain, known.chained_from)
    return sums is not None and sums.sum() == known


def _hash_content(
    near: bytes, head: Head, chain: bytes, chained_from: int | None
) -> PageSums | None:
    page = last_page(head.length)
    start = page_start(page)
    try:
        batch = scan(near, None, file_offset=start)
    except CorruptEntries:
        return None
    sums = PageSums(page, chain=chain, chained_from=chained_from)
    if batch:
        sums.add(memoryview(near)[: batch.end], start)
    ends = batch.end == len(near) or near[batch.end] == PACKET_PADDING
    return sums if ends and (batch.next_number if batch else 0) == head.entries else None


def add_entries(file: Readable, start: Head, stop: Head, sums: PageSums | None) -> bool:
    """Add the entries between two heads to the hashes, if there are any; False if they are not
    whole."""
    offset, number = start
    while offset < stop.length:
        near = file.read(min(page_start(page_of(offset) + 1), stop.length) - offset, offset)
        try:
            batch = scan(near, number, file_offset=offset)
        except CorruptEntries:
            return False
        if not batch:
            if number == stop.entries or not near or near[0]:
                return False
            offset = page_start(page_of(offset) + 1)
            continue
        if sums is not None:
            sums.add(memoryview(near)[batch.start : batch.end], offset + batch.start)
        offset, number = offset + batch.end, batch.next_number
    return (offset, number) == tuple(stop)


def undone_by(undo: Undo, file: Readable, page: HeaderPage) -> bytes | None:
    """The bytes in the place of the journal's update, perhaps old and new ones; None if the journal
    does not match the file."""
    record = page.record
    if (
        record is None
        or record.stream_id != undo.stream_id
        or not undo.epoch <= record.epoch <= undo.epoch + 1
        or page.header_bytes != undo.header
    ):
        return None
    return undo.found_in(file)


def shown(page: HeaderPage, judged: Judgement, boot: bytes) -> Head:
    """The end for a reader that opens the file, beside a writer or without one.

    What the record does not know to be on disk is not visible after the writer's mark, unless the
    machine has restarted since: then what is in the file is on disk.
    """
    record, mark = judged.record, page.mark
    if record is None or record.boot_id != boot:
        return judged.head
    if mark is None or mark.epoch > record.epoch:
        return min(judged.head, record.base)
    if mark.epoch < record.epoch:
        # A truncation or update is under way, or was interrupted: its result is on disk.
        return judged.head
    return min(judged.head, max(mark.head, record.base))


def as_shown(page: HeaderPage, judged: Judgement, boot: bytes) -> Judgement:
    """What `judged` says, for such a reader."""
    head = shown(page, judged, boot)
    if head == judged.head or judged.record is None:
        return judged._replace(head=head)
    return judged._replace(head=head, end_sum=judged.record.sum_at(head))
