"""A header page that may be damaged: what it says, and what of that can be proven.

The commit record's sum covers magic and header, so where those were damaged (or written by
a program that keeps no records) the header it was made with can be found again: it is one
of the ends that synced headers and mark name. Knows bytes only; changes nothing.
"""

from __future__ import annotations

from typing import NamedTuple

from datastreamer.format import (
    HEADER_OFFSET,
    HEADER_PAGE_SIZE,
    HEADER_STRUCT,
    MAGIC,
    Header,
)
from datastreamer.storage.header import records
from datastreamer.storage.header.records import CommitRecord, Head, SyncedHeader, VisibleMark

# Name, offset and size of each record, as docs/FILE.md has them.
_RECORD = ("commit record", records.RECORD_OFFSET, 128)
_SLOTS = [("synced header", offset, 96) for offset in records.SLOT_OFFSETS]
_MARK = ("visible mark", records.MARK_OFFSET, 48)
_WRITER = ("writer", records.WRITER_OFFSET, 64)
_SOURCES = [("source", offset, records.SOURCE_SIZE) for offset in records.SOURCE_OFFSETS]


class Front(NamedTuple):
    """What stands in the first 4096 bytes.

    `raw` is the header as it stands, whatever its fixed fields say; `wrong` what is not
    possible in it: byte and sentence. `record` fits the header as it stands; `proven` is the
    header that the record was made with where another stands there now, and `record` fits
    that one then. `broken` are records whose sums do not fit: name and byte.
    """

    raw: Header
    wrong: list[tuple[int, str]]
    record: CommitRecord | None
    proven: Header | None
    slots: list[SyncedHeader]
    mark: VisibleMark | None
    broken: list[tuple[str, int]]

    @property
    def fits(self) -> bool:
        """Whether the commit record vouches for the header as it stands."""
        return self.record is not None and self.proven is None

    @property
    def known(self) -> Header | None:
        """A header that our records vouch for, at least for what the stream is."""
        if self.proven is not None:
            return self.proven
        return self.slots[0].header if self.slots else None

    @property
    def vouched(self) -> list[Head]:
        """Ends that our records name, the best first."""
        heads = [] if self.record is None else [self.record.after]
        others = [Head(*slot.header[3:]) for slot in self.slots]
        if self.mark is not None:
            others.append(self.mark.head)
        return heads + sorted(others, reverse=True)


def read_front(page: bytes) -> Front:
    """Take a header page of 4096 bytes apart. Raises nothing, whatever stands in it."""
    raw = Header(*HEADER_STRUCT.unpack_from(page, HEADER_OFFSET)[2:])
    wrong = []
    if page[:HEADER_OFFSET] != MAGIC:
        wrong.append((0, f"the file begins with {page[:HEADER_OFFSET]!r}, not with {MAGIC!r}"))
    try:
        Header.unpack(page[HEADER_OFFSET:])
    except ValueError as error:
        wrong.append((HEADER_OFFSET, str(error)))
    slots, mark = records.get_synced(page), records.get_mark(page)
    record, proven = records.get_record(page), None
    if record is None:
        ends = [Head(*slot.header[3:]) for slot in slots]
        ends += [Head(*raw[3:])] + ([] if mark is None else [mark.head])
        kinds = [slot.header[:3] for slot in slots] + [raw[:3]]
        for candidate in [Header(*kind, *end) for kind in kinds for end in ends]:
            copy = bytearray(page)
            copy[:HEADER_OFFSET] = MAGIC
            records.put_header(copy, candidate)
            record = records.get_record(copy)
            if record is not None:
                proven = candidate
                break
    broken = _broken_records(page, record)
    return Front(raw, wrong, record, proven, slots, mark, broken)


def _broken_records(page: bytes, record: CommitRecord | None) -> list[tuple[str, int]]:
    found = []
    for name, offset, size in (_RECORD, *_SLOTS, _MARK, _WRITER, *_SOURCES):
        alone = bytearray(HEADER_PAGE_SIZE)
        alone[offset : offset + size] = page[offset : offset + size]
        if not any(alone):
            continue
        if name == "commit record":
            whole = record is not None
        elif name == "synced header":
            whole = bool(records.get_synced(alone))
        elif name == "visible mark":
            whole = records.get_mark(alone) is not None
        elif name == "source":
            whole = None not in records.get_sources(alone)
        else:
            whole = records.get_writer(alone) is not None
        if not whole:
            found.append((name, offset))
    return found
