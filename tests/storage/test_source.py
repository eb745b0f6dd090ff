"""The last epoch of a stream's source, over kills and power cuts at any step."""

from __future__ import annotations

import errno
import random
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from datastreamer.errors import DamagedFile
from datastreamer.storage.source import SECTOR, SUFFIX, Source, SourceFile
from tests.storage.lab.disk import Gone, Interruption, SimDisk, Unsettled

STREAM = b"s" * 16
SOURCES = [Source(number, bytes([number]) * 16) for number in range(1, 6)]
PATH = "folder/s.bin"


def test_what_is_put_is_there(tmp_path: Path) -> None:
    path = str(tmp_path / "s.bin")
    assert SourceFile(path, STREAM).last == Source()
    for source in SOURCES:
        SourceFile(path, STREAM).put(source)
        assert SourceFile(path, STREAM).last == source
    assert (tmp_path / f"s.bin{SUFFIX}").stat().st_size == 2 * SECTOR


def test_that_of_another_stream_is_not_looked_at(tmp_path: Path) -> None:
    path = str(tmp_path / "s.bin")
    for source in SOURCES:
        SourceFile(path, b"t" * 16).put(source)
    file = SourceFile(path, STREAM)
    assert file.last == Source()
    file.put(Source(1, b"1" * 16))
    assert SourceFile(path, STREAM).last == Source(1, b"1" * 16)


@pytest.mark.parametrize("damaged", SOURCES[:2])
def test_where_one_sector_is_damaged_the_other_counts(tmp_path: Path, damaged: Source) -> None:
    path = tmp_path / "s.bin"
    file = SourceFile(str(path), STREAM)
    for source in SOURCES[:2]:
        file.put(source)
    beside = Path(file.path)
    content = beside.read_bytes()
    assert content.count(damaged.source_id) == 1
    beside.write_bytes(content.replace(damaged.source_id, b"x" * 16))
    [other] = {*SOURCES[:2]} - {damaged}
    assert SourceFile(str(path), STREAM).last == other


def test_without_a_whole_sector_nobody_publishes(tmp_path: Path) -> None:
    path = tmp_path / "s.bin"
    SourceFile(str(path), STREAM).put(SOURCES[0])
    beside = Path(f"{path}{SUFFIX}")
    for content in (b"", b"x" * 100, bytes(2 * SECTOR), beside.read_bytes()[:SECTOR]):
        beside.write_bytes(content)
        with pytest.raises(DamagedFile, match=r"remove the file when no source is running"):
            SourceFile(str(path), STREAM)


@given(
    done=st.integers(0, 3),
    after=st.integers(0, 12),
    torn=st.sampled_from([0.0, 0.1, 0.5, 0.97]),
    error=st.sampled_from([None, errno.ENOSPC, errno.EIO]),
    power=st.booleans(),
    seed=st.integers(0, 1 << 16),
)
def test_an_epoch_that_was_put_is_never_gone(
    done: int, after: int, torn: float, error: int | None, power: bool, seed: int
) -> None:
    """And one whose put was cut off is there, or the one before it."""
    disk = SimDisk()
    process = disk.process()
    file = SourceFile(PATH, STREAM, process)
    for source in SOURCES[:done]:
        file.put(source)
    before = SOURCES[done - 1] if done else Source()
    process.interruption = Interruption(after, error, torn=torn, lasting=error is not None)
    returned = False
    try:
        file.put(SOURCES[done])
        returned = True
    except (Gone, OSError):
        pass
    process.end()
    if power:
        luck = random.Random(seed)

        def choose(things: Sequence[Unsettled]) -> list[int]:
            return [luck.randrange(thing.versions) for thing in things]

        disk = disk.power_cut(choose)
    again = SourceFile(PATH, STREAM, disk.process())
    allowed = [SOURCES[done]] if returned else [before, SOURCES[done]]
    assert again.last in allowed
    again.put(SOURCES[done + 1])
    assert SourceFile(PATH, STREAM, disk.process()).last == SOURCES[done + 1]
