"""Stream files of several pages, and random damage to copies of them."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator
from pathlib import Path

from datastreamer import DataStream
from datastreamer.format import HEADER_PAGE_SIZE, PAGE_SIZE
from datastreamer.zkevm import encode, events
from datastreamer.zkevm.bookmark_keys import BookmarkName, key_of


def write_stream(path: Path, chance: random.Random, pages: int, version: int = 3) -> None:
    """Entries of all sizes: blocks, transactions, other events, bookmarks, and no events at all."""
    number = 0
    with DataStream.create(path, version=version, system_id=7, sync="os", index="memory") as made:
        while made.header.total_length < HEADER_PAGE_SIZE + (pages - 0.5) * PAGE_SIZE:
            with made.atomic_op() as op:
                for _ in range(40):
                    number += 1
                    if version == 1:
                        op.add_bookmark(key_of(1, BookmarkName("block", number)))
                    else:
                        for kind, data in _block(number, chance):
                            if kind == 0xB0:
                                op.add_bookmark(data)
                            else:
                                op.add_entry(kind, data)
                    size = chance.choice((0, 1, 15, 500, 40_000, 200_000))
                    op.add_entry(9, chance.randbytes(size))


def _block(number: int, chance: random.Random) -> Iterator[tuple[int, bytes]]:
    """A block of one transaction; batches have three blocks."""
    if number % 3 == 0:
        yield 0xB0, key_of(3, BookmarkName("batch", number // 3))
        yield encode(events.BatchStart(number // 3, 1, 9, 7), version=3)
    yield 0xB0, key_of(3, BookmarkName("block", number))
    debug = chance.choice((None, "", "a note: \N{SNOWMAN}"))
    time = chance.getrandbits(34)
    yield encode(events.L2Block(number, number // 3, time, hash=b"h" * 32, debug=debug), version=3)
    data = chance.randbytes(chance.choice((0, 200, 5_000)))
    share = chance.getrandbits(8)
    yield encode(events.Transaction(number, 0, bool(number % 2), data, share), version=3)
    yield encode(events.L2BlockEnd(number), version=3)


def damaged_copy(source: Path, target: Path, chance: random.Random) -> None:
    """A copy with one to three damages; half of the copies come without checksums of pages."""
    content = bytearray(source.read_bytes())
    for _ in range(chance.randint(1, 3)):
        _damage(content, chance)
    target.write_bytes(content)
    if chance.random() < 0.5:
        shutil.copy(f"{source}.sums", f"{target}.sums")


def _damage(content: bytearray, chance: random.Random) -> None:
    if len(content) <= HEADER_PAGE_SIZE + PAGE_SIZE:
        return
    pages = (len(content) - HEADER_PAGE_SIZE) // PAGE_SIZE
    start = HEADER_PAGE_SIZE + chance.randrange(pages) * PAGE_SIZE
    kind = chance.randrange(10)
    if kind < 4:
        # In a head: entries begin with 2, four bytes of length, and two zeros of the type.
        at = content.find(b"\x00\x00\x00", chance.randrange(start, start + PAGE_SIZE))
        at = max(HEADER_PAGE_SIZE, at + chance.randrange(-4, 14))
        content[at] = chance.choice((0, 1, 2, 0x80, 0xFF, content[at] ^ 1))
    elif kind == 4:
        content[start + chance.randrange(17)] ^= 1 << chance.randrange(8)
    elif kind == 5:
        content[chance.randrange(start, start + PAGE_SIZE)] ^= 1 << chance.randrange(8)
    elif kind == 6:
        at = chance.randrange(start, start + PAGE_SIZE)
        end = chance.choice((at + 20, at + 5_000, start + PAGE_SIZE))
        end = min(end, len(content))
        content[at:end] = bytes(end - at)
    elif kind == 7:
        other = HEADER_PAGE_SIZE + chance.randrange(pages) * PAGE_SIZE
        content[start : start + PAGE_SIZE] = content[other : other + PAGE_SIZE]
    elif kind == 8:
        content[16 + chance.randrange(38)] ^= 1 << chance.randrange(8)
    else:
        del content[chance.randrange(start, len(content)) :]
