"""Searches the file for selected entries, a bounded part at a time.

Reads the parts, which compiled code searches, and checks padding and the end of the data. The
caller passes the head.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from datastreamer._filtered import Choice
from datastreamer.errors import CorruptEntries, DamagedEntry
from datastreamer.format import (
    ENTRY_HEAD_SIZE,
    ENTRY_HEAD_STRUCT,
    PACKET_ENTRY,
    page_of,
    page_start,
)
from datastreamer.storage.header.records import Head
from datastreamer.storage.read.batch_bounds import short

SLICE_BYTES = 1 << 20
"""The part of the file that one call searches, or a little more."""

# The size of a read, which fits into a processor's cache.
_READ_BYTES = 256 * 1024


class Wanted(NamedTuple):
    """What to search for, from entry `number` on, at or after file offset `offset`, up to entry
    `stop` or the head, within limits. If `alone` (nothing was found before), the first match is
    included even if it exceeds `most_bytes`."""

    offset: int
    number: int
    stop: int
    choice: Choice
    most_entries: int
    most_bytes: int
    alone: bool = True


class Matches(NamedTuple):
    """What was found up to entry `number`, at or after file offset `offset`: a number of entries in
    `size` bytes, which are `data`, or if that is None, the file from `start` to `offset`. `full`:
    a limit ended the search, or a run that has to be sent alone."""

    entries: int
    size: int
    data: bytes | None
    start: int
    offset: int
    number: int
    full: bool
    scanned: int


def look(wanted: Wanted, head: Head, path: str, read: Callable[[int, int], bytes]) -> Matches:
    """The matches of `wanted` in the next 1 MiB of the file. At least one entry is examined if any
    is committed there; none after damage, which raises `DamagedEntry` only if it comes first."""
    offset, number, stop, choice, most, left, alone = wanted
    stop = min(stop, head.entries)
    entries = size = scanned = 0
    parts: list[bytes] = []
    full = False
    while number < stop and scanned < SLICE_BYTES and not full:
        committed = min(page_start(page_of(offset) + 1), head.length) - offset
        if committed <= 0:
            if number > wanted.number:
                break
            raise DamagedEntry(path, offset, short(number, head))
        near = read(min(committed, _READ_BYTES), offset)
        try:
            end, behind, count, data, start, full, padding = choice.gather(
                near,
                number,
                file_offset=offset,
                committed=committed,
                stop=stop,
                most_entries=most - entries,
                most_bytes=left - size,
                alone=alone and not entries,
            )
        except CorruptEntries as error:
            if number > wanted.number:
                break
            raise DamagedEntry(path, offset + error.offset, error.reason) from None
        scanned += end
        if data is None:
            place = offset + start
            offset += end
            return Matches(count, offset - place, None, place, offset, behind, True, scanned)
        if count:
            parts.append(data)
            entries, size = entries + count, size + len(data)
        if behind == number and not padding and not full:
            if number > wanted.number:
                break
            raise DamagedEntry(path, offset, short(number, head))
        offset, number = offset + end, behind
        if padding and number < stop:
            following = page_start(page_of(offset) + 1)
            if following >= head.length or not _begins_with(read, following, number):
                if number > wanted.number:
                    break
                words = f"padding, but the next page does not begin with entry {number}"
                raise DamagedEntry(path, offset, words)
            offset = following
    joined = parts[0] if len(parts) == 1 else b"".join(parts)
    return Matches(entries, size, joined, offset, offset, number, full, scanned)


def _begins_with(read: Callable[[int, int], bytes], offset: int, number: int) -> bool:
    head = read(ENTRY_HEAD_SIZE, offset)
    if len(head) < ENTRY_HEAD_SIZE:
        return False
    packet, _, _, found = ENTRY_HEAD_STRUCT.unpack(head)
    return bool(packet == PACKET_ENTRY and found == number)
