"""The hashes of ranges of entries, by which two copies of a stream are compared.

Owns what is hashed: the packed entries without padding, so that the hash is the same wherever
the entries are in a file; and which ranges have a checksum. Changes nothing.
"""

from __future__ import annotations

from xxhash import xxh3_128

from datastreamer.format import page_of
from datastreamer.storage.pages.compare import RecordSource
from datastreamer.storage.pages.hashes import Sum, last_page
from datastreamer.storage.read.file import StreamFile
from datastreamer.storage.read.reader import Reader

_PART = 1 << 20


def sums_from(file: StreamFile, number: int, most: int) -> tuple[list[Sum], Sum | None]:
    """The checksums of consecutive whole pages, at most `most` and up to the first that has none,
    from the one on that holds entry `number`; and that of the last page's entries up to the head
    (None: it is not known or not reached).

    Entry `number` is committed, or the next one. Raises what the reader does.
    """
    head, end_sum = file.end_sum()
    records = file.records()
    if records is None or not head.entries:
        return [], None
    last = last_page(head.length)
    page = last if number >= head.entries else page_with(file, records, number, last)
    first = records.first_number(page) or (file.reader.first_number(page) if page else 0)
    found: list[Sum] = []
    for record in records.get_many(page, min(page + most, last)):
        if record is None:
            break
        found.append((first, record.next_number, record.digest))
        first = record.next_number
    if page + len(found) < last or end_sum is None:
        return found, None
    return found, (first, head.entries, end_sum.tail)


def page_with(file: StreamFile, records: RecordSource, number: int, last: int) -> int:
    """The page that holds a committed entry: by the records alone if all that are needed are
    there, since damage in the stream does not hide them."""
    low, high = 0, last
    while low < high:
        middle = (low + high) // 2
        record = records.get(middle)
        if record is None:
            return page_of(file.reader.cursor(number).offset)
        if number < record.next_number:
            high = middle
        else:
            low = middle + 1
    return low


def hash_range(reader: Reader, first: int, end: int, most_bytes: int) -> tuple[int, bytes]:
    """The xxh3 (128 bits) of the entries from `first` up to `end`, or to where about `most_bytes`
    are hashed; at least one. Gives where that ends, and the digest.

    `first` is committed. Raises what the reader does.
    """
    hasher, left, number = xxh3_128(), most_bytes, first
    for batch in reader.batches(first, end, min(_PART, most_bytes)):
        hasher.update(batch.packed())
        number = batch.next_number
        left -= batch.nbytes
        if left <= 0:
            break
    return number, hasher.digest()
