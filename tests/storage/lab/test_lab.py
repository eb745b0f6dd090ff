"""Streams under every crash that the simulated disk knows."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import shutil
import tempfile
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from datastreamer import DataStream
from datastreamer.errors import FileMissing
from tests.storage.lab.cuts import MODES, Cut
from tests.storage.lab.disk import Gone, Interruption, SimDisk
from tests.storage.lab.machine import Laboratory
from tests.storage.lab.model import booted, plain, put
from tests.storage.lab.recovering import PATH
from tests.storage.made import items, scan_file

TestLaboratory = Laboratory.TestCase
TestLaboratory.settings = settings(
    max_examples=12,
    stateful_step_count=30,
    deadline=None,
    # A failure is reported as it was found: to shrink it takes longer than a test may.
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
    # Drawing is quick; it is each example that is long.
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


class WithLmdb(Laboratory):
    """The index is in a real folder, and outlives crashes of the simulated disk."""

    index = "lmdb"

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="lab"))
        self.path = str(self.folder / "stream.bin")
        super().__init__()

    def teardown(self) -> None:
        super().teardown()
        shutil.rmtree(self.folder)


TestWithLmdb = WithLmdb.TestCase
TestWithLmdb.settings = settings(TestLaboratory.settings, max_examples=5)


@pytest.mark.soak
@pytest.mark.parametrize("machine, minutes", [(Laboratory, 40), (WithLmdb, 10)])
def test_for_long(machine: type[Laboratory], minutes: int) -> None:
    """In rounds of fresh examples: memory grew by about a megabyte with each of one long run."""
    long = settings(TestLaboratory.settings, max_examples=50, stateful_step_count=60)
    end = time.monotonic() + minutes * 60
    while time.monotonic() < end:
        run_state_machine_as_test(machine, settings=long)
        gc.collect()


@pytest.mark.parametrize("cut", [None, *MODES])
def test_every_crash_while_a_stream_is_made(
    cut: str | None,
) -> None:
    """There is no stream, or there is a whole one; and one can be made again."""
    for after in range(100):
        if made(after, cut):
            return
    raise AssertionError("a stream takes more than a hundred operations to make")


def made(after: int, cut: str | None) -> bool:
    """Whether the stream was made before the crash in operation `after`."""
    disk, done = SimDisk(), False
    with booted(lambda: disk.boot):
        process = disk.process()
        process.interruption = Interruption(after)
        with contextlib.suppress(Gone):
            DataStream.create(PATH, index="memory", disk=process).close()
            done = True
        if cut is not None:
            disk = disk.power_cut(Cut(cut, after))
        process = disk.process()
        try:
            stream = DataStream.open(PATH, index="memory", disk=process)
        except FileMissing:
            assert not done
            stream = DataStream.create(PATH, index="memory", disk=process)
        with stream:
            assert stream.total_entries == 0
            with stream.atomic_op() as op:
                op.add_entry(1, b"one")
    return done


def test_a_file_that_shrank_has_no_pages_behind_its_end() -> None:
    """Of a sync that failed: nothing of them is left that the system could drop."""
    disk = SimDisk()
    process = disk.process()
    file = process.create(PATH)
    file.resize(8192)
    file.write(b"a" * 8192, 0)
    process.interruption = Interruption(0, errno.EIO, only="sync")
    file.resize(4096)
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        file.sync()
    disk.evict(PATH, Cut("nothing arrived"))
    assert file.size() == 4096


def test_it_writes_what_the_real_disk_gets(tmp_path: Path) -> None:
    """The simulated disk in place of the real one: the same file, records apart."""
    real, disk = tmp_path / "stream.bin", SimDisk()
    operations = [[(1, b"a" * 5000), (0xB0, b"key")], [(2, bytes(1 << 20)[:-17]), (3, b"")]]
    for path, options in ((str(real), {}), (PATH, {"disk": disk.process()})):
        with DataStream.create(path, index="memory", sync="os", **options) as stream:
            for operation in operations:
                with stream.atomic_op():
                    for item in operation:
                        put(stream, item)
            found = items(stream)
        assert found == [item for operation in operations for item in operation]
    image = disk.image(PATH)
    content = real.read_bytes()
    assert image.size == len(content)
    assert image.read(54, 0) == content[:54]
    assert image.read(image.size, 4096) == content[4096:]
    assert plain(image) == [(e.type, e.data) for e in scan_file(real)]
