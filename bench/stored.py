"""Large stream files that take little disk: sparse, with only what is read written.

A page holds one short entry, then padding, as far as a reader sees: the entry's bytes
are written and the rest of the page is a hole. Entry numbers are page numbers.
"""

from __future__ import annotations

import os
from pathlib import Path

from xxhash import xxh3_128_digest

from datastreamer.format import (
    HEADER_PAGE_SIZE,
    PACKET_ENTRY,
    PAGE_SIZE,
    Header,
    page_start,
)
from datastreamer.storage.bookmarks.interface import Watermark
from datastreamer.storage.bookmarks.lmdb import LmdbIndex, index_folder
from datastreamer.storage.bookmarks.trust import fingerprint
from datastreamer.storage.disk.access import Access
from datastreamer.storage.disk.file_ops import boot_id
from datastreamer.storage.header import records
from datastreamer.storage.header.records import Head
from datastreamer.storage.pages.hashes import NO_CHAIN, EndSum
from datastreamer.storage.read.file import StreamFile

_HEAD = 17


def entry_head(number: int) -> bytes:
    """An entry without data, of type 1."""
    numbers = _HEAD.to_bytes(4, "big") + (1).to_bytes(4, "big") + number.to_bytes(8, "big")
    return bytes([PACKET_ENTRY]) + numbers


def sparse_stream(path: Path, pages: int, *, filled: bool = True) -> Path:
    """A stream of `pages` pages, closed cleanly, with an index that is up to date.

    Not `filled`: only the last two pages' entries are there, which is all that an open and a
    look-up of the newest entry need.
    """
    head = Head(page_start(pages - 1) + _HEAD, pages)
    header = Header(1, 1101, 1, *head)
    end_sum = EndSum(NO_CHAIN, pages - 1, xxh3_128_digest(entry_head(pages - 1)))
    page = records.new_page(header)
    records.put_settled(page, header, end_sum, b"sparse stream id", 0, boot_id())
    records.put_mark(page, 0, head)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
    try:
        os.ftruncate(fd, HEADER_PAGE_SIZE + pages * PAGE_SIZE)
        os.pwrite(fd, page, 0)
        for number in range(pages) if filled else range(max(0, pages - 2), pages):
            os.pwrite(fd, entry_head(number), page_start(number))
        os.fsync(fd)
    finally:
        os.close(fd)
    file = StreamFile.open(path)
    identity = fingerprint(file.file, file.stream_id, file.epoch, head.length)
    index = LmdbIndex(index_folder(str(path)), True, Access.private())
    index.add([], Watermark(head.length, head.entries, identity))
    index.close()
    file.close()
    return path
