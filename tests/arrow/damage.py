"""A file of a hundred pages, and damage of every kind to one of them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from datastreamer import DataStream
from datastreamer.format import PAGE_SIZE, page_start
from datastreamer.zkevm import encode, events

PAGES: Final = 100
HOW: Final = (
    *("head", "packet type", "padding too early", "number", "length too large"),
    *("length too small", "a byte too long", "a byte too short", "the last a byte too short"),
    *("number of the first", "zeros", "noise"),
)
CASES: Final = (
    *((50, how) for how in HOW),
    *((0, how) for how in ("head", "padding too early", "a byte too short", "zeros")),
    *((99, how) for how in ("number", "a byte too long", "the last a byte too short", "zeros")),
    *((49, how) for how in ("length too large", "padding too early", "zeros")),
)
"""Pages and what is damaged in them: the first, some in the middle, the last."""


def write_pages(path: Path) -> None:
    """Pages of five blocks each, with padding behind them; blocks have their entry's number. Only
    the last page has a checksum, that of the commit record."""
    number = 0
    with DataStream.create(path, version=3, system_id=7, sync="os", index="memory") as stream:
        while stream.header.total_length <= page_start(PAGES - 1):
            with stream.atomic_op() as op:
                for _ in range(5):
                    block = events.L2Block(number, 1, block_info_root=b"\xab" * 199_000)
                    op.add_entry(*encode(block, version=3))
                    number += 1
        assert stream.header.total_entries == 5 * PAGES
    without_checksums(path)


def without_checksums(path: Path) -> None:
    """Remove the checksums of a stream's whole pages: only the format shows damage there."""
    path.with_name(path.name + ".sums").unlink()


@contextlib.contextmanager
def damaged(path: Path, page: int, how: str) -> Iterator[range]:
    """The file with one page damaged; gives the entries that are lost by that."""
    first, after = 5 * page, 5 * page + 5
    number = {
        **dict.fromkeys(("number of the first", "zeros", "noise"), first),
        "the last a byte too short": after - 1,
    }.get(how, first + 2)
    with DataStream.open(path, read_only=True) as stream:
        at = stream.reader.cursor(number).offset
        length = 17 + len(stream.entry(number).data)
    # Packet type, length, type, number.
    offset, content = {
        "head": (at, b"\xee" * 17),
        "packet type": (at, b"\x77"),
        "padding too early": (at, b"\x00"),
        "number": (at + 9, (number + 1).to_bytes(8, "big")),
        "number of the first": (at + 9, (number + 1).to_bytes(8, "big")),
        "length too large": (at + 1, b"\xff" * 4),
        "length too small": (at + 1, (16).to_bytes(4, "big")),
        "a byte too long": (at + 1, (length + 1).to_bytes(4, "big")),
        "a byte too short": (at + 1, (length - 1).to_bytes(4, "big")),
        "the last a byte too short": (at + 1, (length - 1).to_bytes(4, "big")),
        "zeros": (at, bytes(PAGE_SIZE - 100_000)),
        "noise": (at, b"\x77" * (PAGE_SIZE - 100_000)),
    }[how]
    if page == PAGES - 1:
        number = first
    with path.open("r+b") as file:
        file.seek(offset)
        whole = file.read(len(content))
        file.seek(offset)
        file.write(content)
        file.flush()
        try:
            yield range(number, after)
        finally:
            file.seek(offset)
            file.write(whole)
