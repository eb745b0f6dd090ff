"""Flips bits of an index and looks up bookmarks, in a process that this may end.

``python -m tests.storage.bookmarks.flipping FOLDER SEED COUNT open|running``: makes a stream
with an index in FOLDER, and prints each of COUNT flips and what came of it, as JSON, a line each:
the bit's number and "began", then the first wrong answer, or null.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import sys
from pathlib import Path

from datastreamer import DataStream
from datastreamer.errors import UnknownBookmark

KEYS = 3000


def key(number: int) -> bytes:
    """The key of a block number: consecutive numbers are not adjacent in the order of keys."""
    return b"\x08\x02\x10" + number.to_bytes(3, "little")


def make(path: Path) -> dict[bytes, int]:
    """A stream whose index was written in several steps, with keys that occur several times."""
    known = {}
    drawn = random.Random(7)
    with DataStream.create(path) as stream:
        for start in range(0, KEYS, KEYS // 6):
            with stream.atomic_op() as op:
                for number in range(start, start + KEYS // 6):
                    known[key(number)] = op.add_bookmark(key(number))
                    again = key(drawn.randrange(number + 1))
                    known[again] = op.add_bookmark(again)
            stream.bookmarks.wait()
    return known


def wrong(stream: DataStream, known: dict[bytes, int], drawn: random.Random) -> str | None:
    """The first wrong answer. In random order: the first look-up that reads the damage has the
    index built again."""
    asked = list(known)
    drawn.shuffle(asked)
    for wanted in asked:
        try:
            found = stream.bookmark(wanted)
        except UnknownBookmark:
            return f"0x{wanted.hex()} is unknown"
        if found != known[wanted]:
            return f"0x{wanted.hex()} is {found}, not {known[wanted]}"
    return None


def flip(path: Path, bit: int) -> None:
    with path.open("r+b", buffering=0) as file:
        file.seek(bit // 8)
        [byte] = file.read(1)
        file.seek(bit // 8)
        file.write(bytes([byte ^ 1 << bit % 8]))


def main(folder: str, seed: str, count: str, how: str) -> None:
    path = Path(folder) / "s.bin"
    known = make(path)
    data = path.with_name("s.bin.index") / "data.mdb"
    whole = data.read_bytes()
    end = len(whole.rstrip(b"\0"))
    drawn = random.Random(int(seed))
    for _ in range(int(count)):
        bit = drawn.randrange(end * 8)
        print(json.dumps([bit, "began"]), flush=True)
        if how == "open":
            flip(data, bit)
            with DataStream.open(path, read_only=True) as stream:
                answer = wrong(stream, known, drawn)
            with DataStream.open(path) as stream:
                answer = answer or wrong(stream, known, drawn)
        else:
            with DataStream.open(path) as stream:
                assert wrong(stream, known, drawn) is None
                flip(data, bit)
                answer = wrong(stream, known, drawn)
        shutil.rmtree(data.parent)
        os.mkdir(data.parent)
        data.write_bytes(whole)
        print(json.dumps([bit, answer]), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
