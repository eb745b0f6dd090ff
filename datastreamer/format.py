"""The numbers of the stream format, on disk and on the wire, and their grammar.

All integers are big-endian and unsigned.

Stream file::

    file    = header-page *data-page          ; size is always 4096 + k x 1 MiB
    header-page = magic header *OCTET         ; 4096 bytes
    magic   = "polygonDATSTREAM"              ; 16 bytes
    header  = %x01 u32(38) u8(version) u64(system id) u64(stream type)
              u64(total length) u64(total entries)
    data-page = *entry [%x00 *OCTET]          ; 1 MiB; %x00 starts the padding
    entry   = %x02 u32(17 + n) u32(type) u64(number) n*OCTET

An entry never spans two pages; a page that is exactly full has no padding.

Wire::

    request = u64(command) u64(stream type) parameters
    result  = %xff u32(9 + n) u32(error) n*OCTET
    answer  = %xfe u32(17 + n) u32(type) u64(number) n*OCTET
    range   = result u64(last) *entry         ; the answer to a RangeBookmark
    capabilities = %xfd u32(49) u32(revision) u64(features) 16OCTET(stream id)
              u64(epoch) u32(most entries) u32(most bytes)  ; may grow at the end
    batch   = %xfb u32(25 + n) u32(count) u64(first) u64(total entries) *entry
    chosen  = %xfa u32(41 + n) u32(count) u64(first) u64(next) u64(total entries)
              u64(epoch) *entry               ; filtered: numbers have gaps
    lease   = %xf8 u32(57) u64(epoch) u64(total entries) 16OCTET(stream id)
              u32(milliseconds) u32(most bytes) u32(most underway)
              u64(largest operation)               ; may grow at the end
    receipt = %xf9 u32(25) u64(first) u32(count) u64(total entries)
    page-sums = %xf3 u32(65 + 32 x n) 16OCTET(stream id) u64(epoch) u32(n)
              n*range-sum range-sum           ; the last one: the last page
    range-sum = u64(first) u64(next) 16OCTET(xxh3 of the entries)
    times   = %xf2 u32(25 + 16 x n) u64(resolution) u64(next) u32(n) n*mark
    mark    = u64(entry) u64(Unix milliseconds)
"""

from __future__ import annotations

import struct
from typing import Final, NamedTuple

MAGIC: Final = b"polygonDATSTREAM"
# Of a file whose first pages are in an archive alone; other programs refuse it.
EVICTED_MAGIC: Final = b"datastreamEVICTD"
MAGICS: Final = (MAGIC, EVICTED_MAGIC)
HEADER_PAGE_SIZE: Final = 4096
PAGE_SIZE: Final = 1 << 20
HEADER_OFFSET: Final = len(MAGIC)
HEADER_SIZE: Final = 38

PACKET_PADDING: Final = 0x00
PACKET_HEADER: Final = 0x01
PACKET_ENTRY: Final = 0x02
PACKET_TIMES: Final = 0xF2
PACKET_PAGE_SUMS: Final = 0xF3
PACKET_RANGE_HASH: Final = 0xF4
PACKET_FOLLOW: Final = 0xF5
PACKET_CHANGE: Final = 0xF6
PACKET_COMMIT: Final = 0xF7
PACKET_CHOSEN: Final = 0xFA
PACKET_RECEIPT: Final = 0xF9
PACKET_LEASE: Final = 0xF8
PACKET_BATCH: Final = 0xFB
PACKET_CAPABILITIES: Final = 0xFD
PACKET_ANSWER: Final = 0xFE
PACKET_RESULT: Final = 0xFF

ENTRY_HEAD_SIZE: Final = 17
MAX_DATA_SIZE: Final = PAGE_SIZE - ENTRY_HEAD_SIZE
TYPE_BOOKMARK: Final = 0xB0
TYPE_NOT_FOUND: Final = 0xFFFFFFFF
MAX_BOOKMARK_SIZE: Final = 16
U32_MAX: Final = 0xFFFFFFFF
U64_MAX: Final = 0xFFFFFFFFFFFFFFFF

STREAM_TYPE_SEQUENCER: Final = 1
DEFAULT_PORT: Final = 6900

COMMAND_START: Final = 1
COMMAND_STOP: Final = 2
COMMAND_HEADER: Final = 3
COMMAND_START_BOOKMARK: Final = 4
COMMAND_ENTRY: Final = 5
COMMAND_BOOKMARK: Final = 6
COMMAND_RANGE_BOOKMARK: Final = 7
COMMAND_CAPABILITIES: Final = 0x1000
COMMAND_BATCH_READ: Final = 0x1001
COMMAND_FILTERED_READ: Final = 0x1002
COMMAND_FILTERED_START: Final = 0x1003
COMMAND_FILTERED_START_BOOKMARK: Final = 0x1004
COMMAND_COMMIT_START: Final = 0x1005
COMMAND_FOLLOW_START: Final = 0x1006
COMMAND_RANGE_HASH: Final = 0x1007
COMMAND_AUTHENTICATE: Final = 0x1008
COMMAND_CLIENT_NAME: Final = 0x100F
COMMAND_PAGE_SUMS: Final = 0x1009
COMMAND_SELECTED_READ: Final = 0x100A
COMMAND_SELECTED_START: Final = 0x100B
COMMAND_SELECTED_START_BOOKMARK: Final = 0x100C
COMMAND_ENTRY_AT_TIME: Final = 0x100D
COMMAND_TIME_MARKS: Final = 0x100E
COMMAND_PUBLISH: Final = 0x1010
COMMAND_PUBLISH_ADD: Final = 0x1011
COMMAND_PUBLISH_COMMIT: Final = 0x1012
COMMAND_PUBLISH_ROLLBACK: Final = 0x1013
COMMAND_PUBLISH_WHERE: Final = 0x1014
COMMAND_HEAD_SIZE: Final = 16

RESULT_HEAD_SIZE: Final = 9
RESULT_OK: Final = 0
RESULT_ALREADY_STARTED: Final = 1
RESULT_ALREADY_STOPPED: Final = 2
RESULT_BAD_FROM_ENTRY: Final = 3
RESULT_BAD_FROM_BOOKMARK: Final = 4
RESULT_BAD_TO_BOOKMARK: Final = 5
RESULT_INVALID_COMMAND: Final = 9
RESULT_NOT_ALLOWED: Final = 16
RESULT_SOURCE_BUSY: Final = 17
RESULT_FENCED: Final = 18
RESULT_NO_LEASE: Final = 19
RESULT_PAST_THE_END: Final = 20
RESULT_OTHER_ENTRIES: Final = 21
RESULT_BAD_OPERATION: Final = 22
RESULT_TOO_LARGE: Final = 23
RESULT_NOT_WRITTEN: Final = 24
RESULT_IN_DOUBT: Final = 25
RESULT_TOO_SLOW: Final = 26
RESULT_DAMAGED: Final = 27
RESULT_TIME_UNKNOWN: Final = 28
RESULT_ARCHIVED: Final = 29

RESULT_TEXTS: Final[dict[int, str]] = {
    RESULT_OK: "OK",
    RESULT_ALREADY_STARTED: "Already started",
    RESULT_ALREADY_STOPPED: "Already stopped",
    RESULT_BAD_FROM_ENTRY: "Bad from entry",
    RESULT_BAD_FROM_BOOKMARK: "Bad from bookmark",
    RESULT_BAD_TO_BOOKMARK: "Bad to bookmark",
    RESULT_INVALID_COMMAND: "Invalid command",
    RESULT_NOT_ALLOWED: "Not allowed",
    RESULT_SOURCE_BUSY: "Another source holds the lease",
    RESULT_FENCED: "Fenced",
    RESULT_NO_LEASE: "No lease",
    RESULT_PAST_THE_END: "Past the end",
    RESULT_OTHER_ENTRIES: "Other entries",
    RESULT_BAD_OPERATION: "Bad operation",
    RESULT_TOO_LARGE: "Too large",
    RESULT_NOT_WRITTEN: "Not written",
    RESULT_IN_DOUBT: "In doubt",
    RESULT_TOO_SLOW: "Too slow",
    RESULT_DAMAGED: "Damaged",
    RESULT_TIME_UNKNOWN: "Time unknown",
    RESULT_ARCHIVED: "Archived entries cannot be read now",
}

FEATURE_RANGE_BOOKMARK: Final = 1 << 0
FEATURE_BATCH_READ: Final = 1 << 1
FEATURE_FILTERS: Final = 1 << 3
FEATURE_COMMITS: Final = 1 << 4
FEATURE_CHANGES: Final = 1 << 5
FEATURE_AUTHENTICATE: Final = 1 << 6
FEATURE_PAGE_SUMS: Final = 1 << 7
FEATURE_SELECTIONS: Final = 1 << 8
FEATURE_TIMES: Final = 1 << 9
MAX_CLAUSES: Final = 64
FEATURE_PUBLISH: Final = 1 << 2
STREAM_ID_SIZE: Final = 16
CAPABILITIES_REVISION: Final = 1

HEADER_STRUCT: Final = struct.Struct(">BIBQQQQ")
ENTRY_HEAD_STRUCT: Final = struct.Struct(">BIIQ")
RESULT_HEAD_STRUCT: Final = struct.Struct(">BII")
CAPABILITIES_STRUCT: Final = struct.Struct(">BIIQ16sQII")
BATCH_HEAD_STRUCT: Final = struct.Struct(">BIIQQ")
BATCH_HEAD_SIZE: Final = BATCH_HEAD_STRUCT.size
CHOSEN_HEAD_STRUCT: Final = struct.Struct(">BIIQQQQ")
CHOSEN_HEAD_SIZE: Final = CHOSEN_HEAD_STRUCT.size
COMMIT_STRUCT: Final = struct.Struct(">BIQ")
FOLLOW_STRUCT: Final = struct.Struct(">BIB16sQQ")
CHANGE_STRUCT: Final = struct.Struct(">BIQQQ")
CHANGE_SIZE: Final = CHANGE_STRUCT.size
RANGE_HASH_STRUCT: Final = struct.Struct(">BIQQQ16s")
MAX_HASH_BYTES: Final = 64 << 20
PAGE_SUMS_STRUCT: Final = struct.Struct(">BI16sQI")
RANGE_SUM_STRUCT: Final = struct.Struct(">QQ16s")
MAX_SUMS_PAGES: Final = 4096
TIMES_STRUCT: Final = struct.Struct(">BIQQI")
TIME_MARK_STRUCT: Final = struct.Struct(">QQ")
MAX_TIME_MARKS: Final = 256


class Header(NamedTuple):
    """The header entry: the stream's identity and how far it is committed.

    ``total_length`` is the file offset after the committed data (4096 in an empty stream),
    ``total_entries`` the number of committed entries.
    """

    version: int = 1
    system_id: int = 0
    stream_type: int = STREAM_TYPE_SEQUENCER
    total_length: int = HEADER_PAGE_SIZE
    total_entries: int = 0

    def pack(self) -> bytes:
        """Encode the 38 bytes, which are the same in the file and on the wire."""
        return HEADER_STRUCT.pack(PACKET_HEADER, HEADER_SIZE, *self)

    @classmethod
    def unpack(cls, data: bytes | bytearray | memoryview) -> Header:
        """Decode 38 bytes. Raises `ValueError`, which names the wrong field."""
        packet, length, *fields = HEADER_STRUCT.unpack_from(data)
        if packet != PACKET_HEADER:
            raise ValueError(f"the header's packet type is {packet}, not {PACKET_HEADER}")
        if length != HEADER_SIZE:
            raise ValueError(f"the header's length is {length}, not {HEADER_SIZE}")
        return cls(*fields)


def page_of(offset: int) -> int:
    """The number, from 0, of the data page that holds the byte at `offset`."""
    return (offset - HEADER_PAGE_SIZE) // PAGE_SIZE


def page_start(page: int) -> int:
    """The file offset of data page number `page`."""
    return HEADER_PAGE_SIZE + page * PAGE_SIZE


def pages_for(total_length: int) -> int:
    """The number of data pages that the bytes before `total_length` occupy."""
    return -(-(total_length - HEADER_PAGE_SIZE) // PAGE_SIZE)
