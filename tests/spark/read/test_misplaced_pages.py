"""A page at the place of another: FAILFAST returns each entry of a range once, or raises."""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Any, Final

import pytest

from datastreamer import DataStream
from datastreamer.errors import DamagedFile
from datastreamer.format import PAGE_SIZE, page_start
from tests.arrow.damage import without_checksums
from tests.spark.read.reading import Query

PAGES: Final = 5


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A stream of five pages, without checksums."""
    path = tmp_path_factory.mktemp("whole") / "stream.bin"
    sizes = random.Random(5)
    with DataStream.create(path, sync="os", index="memory") as stream:
        while stream.header.total_length < page_start(PAGES) - PAGE_SIZE // 2:
            with stream.atomic_op() as op:
                op.add_entry(1, sizes.randbytes(sizes.randrange(20_000)))
    without_checksums(path)
    return path


def outcome(path: Path, **options: Any) -> list[int] | None:
    """The numbers of the entries of a query in mode FAILFAST; None if it raises."""
    try:
        return [row["number"] for row in Query(path=path, **options).rows()]
    except DamagedFile:
        return None


@pytest.mark.parametrize("part_bytes", ["1m", "1g"])
@pytest.mark.parametrize(("to", "source"), [*itertools.permutations(range(PAGES), 2)])
def test_no_entry_comes_twice(
    whole: Path, tmp_path: Path, to: int, source: int, part_bytes: str
) -> None:
    content = bytearray(whole.read_bytes())
    place, page = page_start(to), page_start(source)
    content[place : place + PAGE_SIZE] = content[page : page + PAGE_SIZE]
    path = tmp_path / "damaged.bin"
    path.write_bytes(content)
    total = len(Query(path=whole).rows())
    chance, raised = random.Random(f"{to} {source}"), 0
    for turn in range(12):
        start, stop = sorted(chance.sample(range(total + 1), 2))
        stop = total if turn % 3 == 0 else stop
        found = outcome(path, startingOffset=start, endingOffset=stop, partitionBytes=part_bytes)
        assert found in (None, list(range(start, stop)))
        raised += found is None
    assert raised


def test_a_page_too_early_is_reported_in_the_range(whole: Path, tmp_path: Path) -> None:
    """Also where the numbers continue before the range."""
    content = bytearray(whole.read_bytes())
    content[page_start(1) : page_start(2)] = content[page_start(2) : page_start(3)]
    path = tmp_path / "damaged.bin"
    path.write_bytes(content)
    sizes = [len(batch) for batch in Query(path=whole).batches()]
    start = sum(sizes[:2]) + 3
    assert outcome(path, startingOffset=start) is None
    tolerant = Query(path=path, startingOffset=start, mode="PERMISSIVE").rows()
    assert any(row["error"] for row in tolerant)
