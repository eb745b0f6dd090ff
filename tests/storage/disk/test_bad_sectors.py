"""Reads around sectors that a disk cannot read."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from datastreamer.storage.disk.bad_sectors import read_around
from tests.storage.made import FaultyDisk

CONTENT = bytes(range(256)) * 100


@pytest.fixture
def disk(tmp_path: Path) -> FaultyDisk:
    (tmp_path / "file").write_bytes(CONTENT)
    return FaultyDisk()


def test_only_their_blocks_are_zeros(
    disk: FaultyDisk, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = read_around(disk.open(str(tmp_path / "file"), write=False), "name")
    assert file.read(len(CONTENT) + 9, 0) == CONTENT
    disk.bad_sectors = {8192 + 512}
    found = file.read(len(CONTENT) + 9, 100)
    assert found == CONTENT[100:8192] + bytes(4096) + CONTENT[12288:]
    assert file.read(50, 8190) == CONTENT[8190:8192] + CONTENT[8192:8240]
    assert file.read(50, 8700) == bytes(50)
    assert file.read(50, len(CONTENT)) == b""
    [line] = [record.getMessage() for record in caplog.records if "8192" in record.getMessage()]
    assert line == "name: the disk cannot read bytes 8192 to 12287: Input/output error"
    file.close()


def test_other_errors_are_raised(disk: FaultyDisk, tmp_path: Path) -> None:
    plain = disk.open(str(tmp_path / "file"), write=False)
    file = read_around(plain, "name")

    def refuse(size: int, offset: int) -> bytes:
        raise OSError(errno.ESTALE, "stale")

    plain.read = refuse  # type: ignore[method-assign]
    with pytest.raises(OSError, match="stale"):
        file.read(1, 0)
    plain.close()
