"""`FILE.pages` read by a few lines of `struct`, and what it has to say by a slow decoder of the
stream: nothing here is the package's, but for the entries' own scan in `tests/storage/made.py`.
"""

from __future__ import annotations

import struct
from itertools import pairwise
from pathlib import Path
from typing import Any

import xxhash

from tests.storage.made import FIRST, PAGE, scan_file

NONE = 2**64 - 1
UNKNOWN = 2**48 - 1
# (event type, number of the field), in the order of the record's pairs.
FIELDS = [(1, 1), (2, 1), (2, 2), (2, 3), (6, 1), (3, 1), (4, 1), (5, 1), (5, 2)]


def varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]  # IndexError: cut off
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value & NONE, at
        shift += 7
        if shift == 70:
            raise ValueError("a varint is too long")


def message(data: bytes, at: int = 0, group: int | None = None) -> tuple[dict[int, int], int]:
    """The varint fields of a protobuf message, the last value of each, and where it ends."""
    found: dict[int, int] = {}
    while group is not None or at < len(data):
        tag, after = varint(data, at)
        if after - at > 5 or tag > 0xFFFFFFFF or (not tag >> 3 and group is None):
            raise ValueError("no tag")
        number, wire, at = tag >> 3, tag & 7, after
        if wire == 0:
            found[number], at = varint(data, at)
        elif wire == 2:
            size, after = varint(data, at)
            if after - at > 5 or size > 0x7FFFFFFF:
                raise ValueError("no length")
            at = after + size
        elif wire == 3:
            _, at = message(data, at, number)
        elif wire == 4:
            if number != group:
                raise ValueError("another group ends")
            return found, at
        elif wire in (1, 5):
            at += 8 if wire == 1 else 4
        else:
            raise ValueError("no wire type")
        if at > len(data):
            raise ValueError("cut off")
    return found, at


class Page:
    """The record of one page, taken apart."""

    def __init__(self, packed: bytes, page: int, stream_id: bytes) -> None:
        assert len(packed) == 1024, "cut off"
        (stored,) = struct.unpack_from(">Q", packed, 1016)
        summed = packed[:1016] + page.to_bytes(8, "big") + stream_id
        assert stored == xxhash.xxh3_64_intdigest(summed), f"the record of page {page} is torn"
        assert packed[1000:1016] == bytes(16)
        self.digest = packed[:16]
        self.first, self.covered, self.entries, self.flags = struct.unpack_from(">QIII", packed, 16)
        self.type_count, count, self.resolution = struct.unpack_from(">HHQ", packed, 36)
        numbers = struct.unpack_from(">18Q", packed, 48)
        self.ranges = list(zip(numbers[::2], numbers[1::2], strict=True))
        pairs = struct.unpack_from(">24I", packed, 192)
        self.types = dict(zip(pairs[::2], pairs[1::2], strict=True))
        self.listed = [*pairs[: 2 * min(self.type_count, 12) : 2]]
        assert not any(pairs[2 * len(self.listed) :])
        assert count <= 89
        marks = [int.from_bytes(packed[at : at + 8], "big") for at in range(288, 1000, 8)]
        assert not any(marks[count:])
        self.marks = [(self.first + (mark >> 48), mark & UNKNOWN) for mark in marks[:count]]

    @property
    def end(self) -> int:
        return self.first + self.entries


def records(path: Path) -> list[Page | None]:
    """The records beside a stream; None where there is none that is whole."""
    sidecar = path.with_name(path.name + ".pages")
    packed = sidecar.read_bytes() if sidecar.exists() else b""
    stream_id = packed[16:32]
    header = b"DSpages_" + struct.pack(">II", 1, 0) + stream_id
    if packed[:40] != header + xxhash.xxh3_64_digest(header):
        return []
    found: list[Page | None] = []
    for at in range(512, len(packed), 1024):
        try:
            found.append(Page(packed[at : at + 1024], len(found), stream_id))
        except AssertionError:
            found.append(None)
    return found


def expected(path: Path) -> list[dict[str, Any]]:
    """What each page of a stream holds, the last one too."""
    content, pages = path.read_bytes(), {}
    for entry in scan_file(path):
        pages.setdefault((entry.offset - FIRST) // PAGE, []).append(entry)
    found = []
    for page in range(len(pages)):
        start = FIRST + page * PAGE
        entries = pages[page]
        stop = entries[-1].offset + 17 + len(entries[-1].data)
        ranges, readable, types = [(NONE, 0)] * len(FIELDS), True, {}
        for entry in entries:
            types[entry.type] = types.get(entry.type, 0) + 1
            watched = [at for at, (kind, _) in enumerate(FIELDS) if kind == entry.type]
            try:
                values = message(entry.data)[0] if watched else {}
            except (ValueError, IndexError):
                readable = False
                continue
            for at in watched:
                value, (least, greatest) = values.get(FIELDS[at][1], 0), ranges[at]
                ranges[at] = min(least, value), max(greatest, value)
        found.append(
            {
                "digest": xxhash.xxh3_128_digest(content[start:stop]),
                "first": entries[0].number,
                "covered": stop - start,
                "entries": len(entries),
                "flags": 1 if readable else 3,
                "ranges": ranges if readable else [(0, NONE)] * len(FIELDS),
                "types": types if len(types) <= 12 else None,
            }
        )
    return found


def compare(path: Path, *, complete: bool = True) -> list[Page | None]:
    """Compare the records of whole pages with the stream; `complete`: each has one."""
    found, known = records(path), expected(path)
    whole = _last_page(path)
    assert len(found) <= len(known) or not any(found[len(known) :])
    for page, want in enumerate(known[:whole]):
        have = found[page] if page < len(found) else None
        if have is None or have.digest != want["digest"] or not have.flags & 1:
            assert not complete, f"page {page} has no summary"
            continue
        for name in ("first", "covered", "entries", "flags", "ranges"):
            assert getattr(have, name) == want[name], (page, name)
        if want["types"] is None:
            assert have.type_count == 0xFFFF
            assert not have.types.keys() - {0}
        else:
            assert have.type_count == len(want["types"])
            assert have.listed == sorted(want["types"])
            assert {kind: have.types[kind] for kind in have.listed} == want["types"]
    for each in found:
        if each is not None:
            entries, times = [it[0] for it in each.marks], [it[1] for it in each.marks]
            assert entries == sorted(set(entries))
            known = [ms for ms in times if ms != UNKNOWN]
            assert known == sorted(known)
            assert (UNKNOWN, UNKNOWN) not in pairwise([UNKNOWN, *times])
    return found


def _last_page(path: Path) -> int:
    length = int.from_bytes(path.read_bytes()[38:46], "big")
    return max(0, (length - FIRST - 1) // PAGE)
