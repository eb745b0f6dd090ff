"""Reads of the disk, whatever the page cache holds."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from datastreamer.format import PAGE_SIZE
from datastreamer.storage.disk import uncached
from datastreamer.storage.disk.file_ops import OsDisk, OsFile
from datastreamer.storage.disk.uncached import UncachedFile

SIZE = 2 * PAGE_SIZE + 1000


@pytest.fixture
def file(tmp_path: Path) -> Iterator[OsFile]:
    path = tmp_path / "file"
    path.write_bytes(os.urandom(SIZE))
    opened = OsDisk().open(str(path), write=True)
    opened.sync()
    yield opened
    opened.close()


@pytest.mark.parametrize("direct", [uncached._DIRECT, 0, 1 << 40], ids=["yes", "no", "refused"])
def test_it_reads_what_the_file_holds(
    file: OsFile, monkeypatch: pytest.MonkeyPatch, direct: int
) -> None:
    if direct > 1 << 32:  # the descriptor is opened, and the read fails
        monkeypatch.setattr(uncached, "_BLOCK", 1)
    else:
        monkeypatch.setattr(uncached, "_DIRECT", direct)
    whole = file.read(SIZE, 0)
    disk = UncachedFile(file, lambda start, count: True)
    for size, offset in ((PAGE_SIZE, 0), (PAGE_SIZE, 4096), (4096, 8192), (17, 5), (3, SIZE - 2)):
        assert disk.read(size, offset) == whole[offset : offset + size]
    assert disk.read(PAGE_SIZE, 2 * PAGE_SIZE) == whole[2 * PAGE_SIZE :], "the end of the file"
    assert disk.read(4096, 4 * PAGE_SIZE) == b""
    assert disk.size() == SIZE
    file.write(b"new", 4096)  # not synced
    assert disk.read(4096, 4096)[:3] == b"new"
    disk.close()
    disk.close()


def test_only_what_was_not_resident_is_evicted(
    file: OsFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uncached, "_DIRECT", 0)
    evicted = []
    monkeypatch.setattr(os, "posix_fadvise", lambda fd, start, *_: evicted.append(start))
    disk = UncachedFile(file, lambda start, count: start == 0)
    evicted.clear()  # the advice not to read ahead
    disk.read(4096, 0)
    disk.read(4096, 8192)
    assert evicted == [8192]
    disk.close()


def test_errors_of_the_disk_are_raised(file: OsFile, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = UncachedFile(file, lambda start, count: True)
    if disk._fd < 0:
        pytest.skip("this file system has no direct reads")

    def fail(*what: object) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(OSError, match="Input/output"):
        disk.read(4096, 0)
    disk.close()
