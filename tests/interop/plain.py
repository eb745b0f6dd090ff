"""A stream file read with struct alone, and streams generated from a seed.

Belongs to no implementation: what both are compared with.
"""

from __future__ import annotations

import hashlib
import random
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

PAGE = 1 << 20
BOOKMARK = 0xB0
Step = tuple[Any, ...]


class Plain(NamedTuple):
    """A committed entry: its offset in the file, and its content."""

    offset: int
    number: int
    type: int
    data: bytes

    @property
    def packed(self) -> bytes:
        head = struct.pack(">BIIQ", 2, 17 + len(self.data), self.type, self.number)
        return head + self.data


def header(path: Path) -> dict[str, int]:
    with path.open("rb") as file:
        magic, packet, length, *fields = struct.unpack(">16sBIBQQQQ", file.read(54))
    assert (magic, packet, length) == (b"polygonDATSTREAM", 1, 38)
    names = ("version", "system_id", "stream_type", "total_length", "total_entries")
    return dict(zip(names, fields, strict=True))


def scan(path: Path) -> list[Plain]:
    """Every committed entry of the file."""
    end = header(path)["total_length"]
    with path.open("rb") as file:
        content = file.read(end)
    entries = []
    offset = 4096
    while offset < end:
        if content[offset] == 0:
            offset += PAGE - (offset - 4096) % PAGE
            continue
        packet, length, kind, number = struct.unpack_from(">BIIQ", content, offset)
        assert (packet, number) == (2, len(entries)), f"at byte {offset}"
        entries.append(Plain(offset, number, kind, content[offset + 17 : offset + length]))
        offset += length
    assert len(entries) == header(path)["total_entries"]
    return entries


def digest(entries: list[Plain]) -> str:
    return hashlib.sha256(b"".join(entry.packed for entry in entries)).hexdigest()


def keys(entries: list[Plain]) -> dict[bytes, int]:
    """What a bookmark index of these entries holds."""
    return {e.data: e.number for e in entries if e.type == BOOKMARK and 1 <= len(e.data) <= 16}


def generated(seed: int, operations: int = 12, *, rollbacks: bool = True) -> Iterator[Step]:
    """Steps of a writer: ``("start_op",)``, ``("bookmark", key)``, ``("entry", type,
    data)``, ``("commit",)``, ``("rollback",)``. Sizes from nothing to a whole page;
    keys are used again. An operation that is rolled back has no bookmark: the
    reference would keep it in its index."""
    choose = random.Random(seed)
    known = [choose.randbytes(choose.randint(1, 16)) for _ in range(5)]
    for _ in range(operations):
        yield ("start_op",)
        committed = not rollbacks or choose.random() < 0.8
        for _ in range(choose.randint(0, 8)):
            if committed and choose.random() < 0.3:
                fresh = choose.randbytes(choose.randint(1, 16))
                yield ("bookmark", choose.choice([*known, fresh]))
                continue
            size = choose.choice([0, 1, 17, 200, 5_000, 90_000, 400_000, PAGE - 17])
            kind = choose.choice([0, 1, 2, 0xAF, 0xB1, 0xFFFFFFFE])
            yield ("entry", kind, choose.randbytes(size))
        yield ("commit" if committed else "rollback",)
