"""What checksums say of ranges of entries of an open stream, for other copies of it.

Owns which ranges have a checksum. A server and a relay use it. Changes nothing.
"""

from __future__ import annotations

from datastreamer.format import page_of
from datastreamer.storage.pages.compare import RecordSource
from datastreamer.storage.pages.hashes import last_page
from datastreamer.storage.read.file import StreamFile

Sum = tuple[int, int, bytes]
"""The first entry of a range, the one after its last, and the xxh3 (128 bits) of its entries."""


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
