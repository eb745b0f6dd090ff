"""When a page is compared with its checksum: by where it comes from, and again after changes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from datastreamer import DataStream
from datastreamer.errors import BadArgument, DamagedPage
from tests.storage.made import FIRST, PAGE, FaultyDisk, evict

SIZE = 300_000


def fill(stream: DataStream, pages: int, *, seed: int = 0) -> None:
    """Three entries a page, one an operation, until the stream has that many whole pages."""
    while stream.header.total_length <= FIRST + pages * PAGE:
        with stream.atomic_op() as op:
            op.add_entry(1, (stream.total_entries + seed).to_bytes(4, "big") * (SIZE // 4))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    made = tmp_path / "s.bin"
    with DataStream.create(made, index="memory") as stream:
        fill(stream, 3)
    return made


def flip(path: Path, page: int) -> None:
    """Change a bit of an entry in a page; the page is in the page cache then."""
    fd = os.open(path, os.O_RDWR)
    try:
        at = FIRST + page * PAGE + 5000
        byte = os.pread(fd, 1, at)[0]
        os.pwrite(fd, bytes([byte ^ 16]), at)
        os.fsync(fd)
    finally:
        os.close(fd)


@pytest.mark.parametrize("mode", [{"read_only": True}, {"follow": True}, {"index": "memory"}])
def test_cold_compares_what_comes_from_the_disk(path: Path, mode: dict[str, Any]) -> None:
    flip(path, 1)
    path.read_bytes()
    with DataStream.open(path, verify="cold", **mode) as stream:
        assert len([*stream.entries()]) == stream.total_entries
    evict(path)
    with DataStream.open(path, verify="cold", **mode) as stream:
        with pytest.raises(DamagedPage, match=r"page 1 \(entries 3 to 5\)"):
            list(stream.entries())
        assert stream.entry(0).number == 0


def test_cold_is_the_default(path: Path) -> None:
    flip(path, 1)
    evict(path)
    with DataStream.open(path, read_only=True) as stream, pytest.raises(DamagedPage):
        stream.entry(4)


def test_never_compares_nothing(path: Path) -> None:
    flip(path, 1)
    evict(path)
    with DataStream.open(path, read_only=True, verify="never") as stream:
        assert stream.entry(4).number == 4


def test_always_compares_each_page_once(path: Path) -> None:
    with DataStream.open(path, read_only=True, verify="always") as stream:
        assert stream.entry(4).number == 4
        flip(path, 1)
        assert stream.entry(5).number == 5  # of the same page
        flip(path, 2)
        with pytest.raises(DamagedPage):
            stream.entry(7)


@pytest.mark.parametrize("writer", [True, False])
def test_changed_pages_are_compared_again(path: Path, writer: bool) -> None:
    with DataStream.open(path, index="memory", verify="always") as stream:
        other = stream
        if not writer:
            other = DataStream.open(path, follow=True, index="memory", verify="always")
        with other:
            assert len([*other.entries()]) == other.total_entries
            stream.truncate(2)
            fill(stream, 3, seed=70)
            stream.update_entry(4, 1, bytes(SIZE))
            other.refresh()
            found = [entry.data[:4] for entry in other.entries()]
            assert found[3] == (73).to_bytes(4, "big")
            assert found[4] == bytes(4)
            flip(path, 1)
            stream.update_entry(7, 1, bytes(SIZE))
            other.refresh()
            with pytest.raises(DamagedPage):
                other.entry(3)


def test_a_follower_compares_new_pages(path: Path) -> None:
    with (
        DataStream.open(path, index="memory") as stream,
        DataStream.open(path, follow=True, index="memory", verify="always") as follower,
    ):
        assert len([*follower.entries()]) == follower.total_entries
        fill(stream, 8)
        flip(path, 4)
        follower.refresh()
        with pytest.raises(DamagedPage, match="page 4 "):
            follower.entry(13)
        assert follower.entry(16).number == 16


def test_other_values_are_refused(path: Path) -> None:
    with pytest.raises(BadArgument, match='verify is "cold", "always" or "never", not \'maybe\''):
        DataStream.open(path, verify="maybe")  # type: ignore[arg-type]


@pytest.mark.parametrize("step", ["data", "header", "sync", "mark"])
def test_a_reader_that_opens_within_a_commit(tmp_path: Path, step: str) -> None:
    """The header may be ahead of what is visible."""
    path, disk = tmp_path / "busy.bin", FaultyDisk()
    with DataStream.create(path, index="memory", disk=disk) as stream:
        fill(stream, 3)
        seen: list[int] = []

        def read() -> None:
            with DataStream.open(path, read_only=True, index="memory", verify="always") as reader:
                assert len([*reader.entries()]) == reader.total_entries
                seen.append(reader.total_entries)

        before = stream.total_entries
        disk.before[f"commit {step}"] = read
        fill(stream, 4)
        assert set(seen) <= {*range(before, stream.total_entries + 1)}
        assert seen


def test_a_damaged_page_stays_doubtful_over_changes(path: Path) -> None:
    """The comparison has left it in the page cache, where pages are not compared again."""
    flip(path, 1)
    evict(path)
    with DataStream.open(path, index="memory") as stream:
        for data in (b"1", b"2"):
            with pytest.raises(DamagedPage):
                stream.entry(4)
            stream.update_entry(0, 1, data * SIZE)
        with pytest.raises(DamagedPage):
            stream.entry(4)
        flip(path, 1)
        assert stream.entry(4).number == 4


def test_a_page_is_doubtful_before_others_are_read_ahead(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread that reads it then must not take it for one that was in memory."""
    flip(path, 1)
    evict(path)
    with DataStream.open(path, read_only=True) as stream:
        advise, read = os.posix_fadvise, stream._file._data.read
        found: list[bool] = []

        def advised(fd: int, offset: int, size: int, advice: int) -> None:
            advise(fd, offset, size, advice)
            if offset == FIRST + PAGE and not found:
                path.read_bytes()
                found.append(False)
                with pytest.raises(DamagedPage):
                    read(10, FIRST + PAGE)
                found.append(True)

        monkeypatch.setattr(os, "posix_fadvise", advised)
        read(10, FIRST)
        for _ in range(2):
            with pytest.raises(DamagedPage):
                read(10, FIRST + PAGE)
        assert found == [False, True]
