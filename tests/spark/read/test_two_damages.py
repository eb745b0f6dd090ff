"""Two damaged pages in a row, the first with false padding: only what is damaged is lost."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any, Final

import pytest

from datastreamer import DataStream
from datastreamer.format import page_start
from tests import oracle
from tests.arrow.damage import without_checksums
from tests.spark.read.reading import Query

SECOND: Final = {
    "packet type": (0, b"\x77"),
    "padding": (0, b"\x00"),
    "length too large": (1, b"\xff" * 4),
    "length too small": (1, (16).to_bytes(4, "big")),
    "number": (9, b"\x01" * 8),
    "zeros": (0, bytes(100_000)),
}
"""Of the second page: where in an entry's head, and what."""


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, list[Any]]:
    """A stream of six pages of small entries, and its entries."""
    path = tmp_path_factory.mktemp("whole") / "small.bin"
    sizes = random.Random(3)
    with DataStream.create(path, system_id=7, sync="os", index="memory") as stream:
        while stream.header.total_length < page_start(5) + 300_000:
            with stream.atomic_op() as op:
                for _ in range(200):
                    op.add_entry(1, sizes.randbytes(sizes.randrange(20, 400)))
        total = stream.header.total_length
    without_checksums(path)
    content = path.read_bytes()
    entries = oracle.scan(content[page_start(0) : total], 0, page_start(0)).entries
    return content, entries


def page_of(entry: Any) -> int:
    return int(entry[0] >> 20)


@pytest.mark.parametrize(
    ("part_bytes", "second"),
    [
        # Each damage with one size of parts; the soak tests have all pairs.
        pytest.param(part_bytes, second, marks=() if (i + j) % 3 == 0 else pytest.mark.soak)
        for i, part_bytes in enumerate(["1m", "2m", "1g"])
        for j, second in enumerate(SECOND)
    ],
)
def test_entries_before_the_second_damage_remain(
    whole: tuple[bytes, list[Any]], tmp_path: Path, second: str, part_bytes: str
) -> None:
    content, entries = whole
    chance = random.Random(f"{second} {part_bytes}")
    for page in (0, 1, 2, 3):
        damaged = bytearray(content)
        lost: set[int] = set()
        for at, (offset, put) in ((page, (0, b"\x00")), (page + 1, SECOND[second])):
            own = [entry for entry in entries if page_of(entry) == at]
            first = chance.randrange(2, len(own))
            begin = page_start(0) + own[first][0] + offset
            end = min(begin + len(put), page_start(at + 1))
            damaged[begin:end] = put[: end - begin]
            lost |= {entry[3] for entry in own[first:]}
        path = tmp_path / "damaged.bin"
        path.write_bytes(damaged)
        dropping = Query(path=path, mode="DROPMALFORMED", partitionBytes=part_bytes).rows()
        good = [entry[3] for entry in entries if entry[3] not in lost]
        assert [row["number"] for row in dropping] == good
        rows = Query(path=path, mode="PERMISSIVE", partitionBytes=part_bytes).rows()
        assert [row for row in rows if row.pop("error") is None] == dropping
        assert reported(path, part_bytes) == sorted(lost)


def reported(path: Path, part_bytes: str) -> list[int]:
    """The entries that errors call lost."""
    found: list[int] = []
    for row in Query(path=path, mode="PERMISSIVE", partitionBytes=part_bytes).rows():
        if row["error"] is not None:
            which = re.search(r"entr(?:y|ies) (\d+)(?: to (\d+))? cannot be read", row["error"])
            assert which is not None, row["error"]
            assert row["number"] == int(which[1])
            found += range(int(which[1]), int(which[2] or which[1]) + 1)
    return sorted(found)
