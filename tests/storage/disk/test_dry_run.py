"""Changes of a dry run are read back, and the files stay as they are."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from datastreamer.storage.disk.dry_run import DryRun
from datastreamer.storage.disk.file_ops import OsDisk
from tests.storage.made import trace_of

SIZE = 300_000


@pytest.mark.parametrize("seed", range(20))
def test_what_is_written_is_read_back(tmp_path: Path, seed: int) -> None:
    source = random.Random(seed)
    path = tmp_path / "file"
    model = bytearray(source.randbytes(SIZE))
    path.write_bytes(model)
    before = trace_of(tmp_path)
    disk = DryRun(OsDisk())
    for _ in range(40):
        # Files that are opened later have the changes too.
        file = disk.open(str(path), write=source.random() < 0.5)
        offset = source.randrange(SIZE + 100_000)
        if source.random() < 0.3:
            file.resize(offset)
            model = model[:offset].ljust(offset, b"\0")
        else:
            data = source.randbytes(source.choice((1, 5_000, 150_000)))
            file.write(data, offset)
            model = model.ljust(offset, b"\0")
            model[offset : offset + len(data)] = data
        file.sync()
        assert file.size() == len(model)
        for _ in range(10):
            start, size = source.randrange(SIZE + 100_000), source.randrange(200_000)
            assert file.read(size, start) == model[start : start + size]
        assert file.read(1 << 30, 0) == model
        file.close()
    assert trace_of(tmp_path) == before


def test_no_file_is_made_renamed_or_removed(tmp_path: Path) -> None:
    path = str(tmp_path / "file")
    Path(path).write_bytes(b"as it was")
    before = trace_of(tmp_path)
    disk = DryRun(OsDisk())
    for change in (
        lambda: disk.create(f"{path}.new"),
        lambda: disk.publish(path, f"{path}.other"),
        lambda: disk.unlink(path),
    ):
        with pytest.raises(OSError, match="Read-only file system"):
            change()
    assert disk.exists(path)
    assert disk.beside(path) == [path]
    assert disk.identity(path) == OsDisk().identity(path)
    assert trace_of(tmp_path) == before
