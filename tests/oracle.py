"""The codec again, in a few lines of `struct`: what the compiled one is compared with."""

from __future__ import annotations

import struct
from typing import NamedTuple

HEAD = struct.Struct(">BIIQ")
PAGE = 1 << 20


class Found(NamedTuple):
    entries: list[tuple[int, int, int, int]]  # offset, bytes of data, type, number
    end: int
    needed: int
    stopped_at: int


class Damage(Exception):
    """Its first argument is the offset."""


def pack(number: int, kind: int, data: bytes, packet: int = 2) -> bytes:
    return HEAD.pack(packet, 17 + len(data), kind, number) + data


def scan(data: bytes, due: int | None, file_offset: int | None) -> Found:
    entries: list[tuple[int, int, int, int]] = []
    at = end = 0
    while at < len(data):
        room = 2 * PAGE if file_offset is None else PAGE - (file_offset + at - 4096) % PAGE
        if data[at] != 2 and file_offset is None:
            return Found(entries, end, 0, data[at])
        if data[at] == 0 and room < PAGE:
            at += room
            continue
        if data[at] != 2 or room < 17:
            raise Damage(at)
        if len(data) - at < 17:
            return Found(entries, end, at + 17 - end, -1)
        _, length, kind, number = HEAD.unpack_from(data, at)
        due = number if due is None else due
        if not 17 <= length <= min(PAGE, room) or number != due or due == 2**64 - 1:
            raise Damage(at)
        if length > len(data) - at:
            return Found(entries, end, at + length - end, -1)
        entries.append((at, length - 17, kind, number))
        at = end = at + length
        due += 1
    return Found(entries, end, 0, -1)


def lay_out(
    entries: list[tuple[int, bytes]], total_length: int, number: int
) -> tuple[dict[int, bytes], int]:
    """Append (type, data) to a file: the bytes by file offset, and the new total length."""
    pieces: dict[int, bytes] = {}
    for kind, data in entries:
        room = PAGE - (total_length - 4096) % PAGE
        if 17 + len(data) > room:
            pieces[total_length] = b"\0"
            total_length += room
        pieces[total_length] = pack(number, kind, data)
        total_length += 17 + len(data)
        number += 1
    return pieces, total_length
