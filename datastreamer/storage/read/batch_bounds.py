"""As many entries as limits allow: their number, their size, their end.

Reads bytes once and counts in C; does not read a page that fits as a whole. The caller passes the
head and the spans.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import NamedTuple

from datastreamer._pages import walk
from datastreamer.errors import CorruptEntries, DamagedEntry
from datastreamer.format import ENTRY_HEAD_SIZE, PACKET_PADDING, page_of, page_start
from datastreamer.storage.header.records import Head
from datastreamer.storage.read.spans import Span

KEPT_BYTES = 128 * 1024
"""A portion of at most this size includes its bytes; a larger one is not kept in memory."""

# Bytes to read beyond the estimate, so that a second read is rare.
_SLACK = 1024


class Portion(NamedTuple):
    """A number of whole entries, in `size` bytes without padding, up to entry `number` at or after
    file offset `offset`; `data` has the bytes if they are few, else it is None."""

    entries: int
    size: int
    offset: int
    number: int
    data: bytes | None


class Measure(NamedTuple):
    """The limits, from entry `number` on, at or after file offset `offset`. `likely` estimates the
    size of an entry, so that neither too little nor too much is read."""

    offset: int
    number: int
    most_entries: int
    most_bytes: int
    likely: int


def take(
    wanted: Measure,
    head: Head,
    path: str,
    read: Callable[[int, int], bytes],
    span: Callable[[int, int], Span],
) -> Portion:
    """The entries within `wanted`. At least one if any is committed there, whatever its size; none
    after damage, which raises `DamagedEntry` only if it comes first."""
    offset, number, most, left, _ = wanted
    place, first = offset, number
    stop = min(head.entries, number + most)
    size = need = 0
    parts: list[bytes] | None = []
    while number < stop:
        until = min(page_start(page_of(offset) + 1), head.length)
        likely = (stop - number) * wanted.likely * 9 // 8 + _SLACK
        if KEPT_BYTES < until - offset <= min(left, likely):
            whole = None
            with contextlib.suppress(DamagedEntry):  # what precedes it is still valid
                whole = span(offset, number)
            length = 0 if whole is None else whole.end - whole.start
            if whole is not None and whole.next.number <= stop and 0 < length <= left:
                size, left, parts = size + length, left - length, None
                offset, number = whole.next
                place, need = offset, 0
                continue
        near = read(min(until - offset, max(need, min(left, likely))), offset)
        try:
            end, behind = walk(near, number, file_offset=offset, max_entries=stop - number)
        except CorruptEntries as error:
            end, behind = walk(near, number, file_offset=offset, end=error.offset)
            if not end and not size:
                raise DamagedEntry(path, offset + error.offset, error.reason) from None
            stop = behind
        if end:
            if parts is not None:
                parts.append(near[:end])
            size, left = size + end, left - end
            offset, number = offset + end, behind
            place = offset
        if number == stop:
            break
        rest, before = near[end : end + ENTRY_HEAD_SIZE], 0 if end else need
        if rest[:1] == bytes([PACKET_PADDING]):
            offset, need = page_start(page_of(offset) + 1), 0
            if offset >= head.length:
                raise DamagedEntry(path, place, short(number, head))
            continue
        whole_head = len(rest) == ENTRY_HEAD_SIZE
        need = int.from_bytes(rest[1:5], "big") if whole_head else ENTRY_HEAD_SIZE
        if need > left and size:
            break
        if need <= before:
            raise DamagedEntry(path, offset, short(number, head))
    data = None
    if parts is not None and size <= KEPT_BYTES:
        data = parts[0] if len(parts) == 1 else b"".join(parts)
    return Portion(number - first, size, place, number, data)


def short(number: int, head: Head) -> str:
    """The message for data that ends before entry `number`."""
    return f"the data ends before entry {number}, the header counts {head.entries}"
