"""The operations of files and folders, and the writes of a commit, on the real system."""

from __future__ import annotations

import errno
import os
import resource
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from datastreamer._codec import pack_entry
from datastreamer._packer import EntryPacker
from datastreamer.storage.disk._commit import Descriptor, EntriesNotWritten
from datastreamer.storage.disk.file_ops import OsDisk, OsFile, boot_id
from tests.storage.made import PAGE

NOTHING = (0, 0)
linux = pytest.mark.skipif(sys.platform != "linux", reason="eventfd and /dev/full are Linux's")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "file"


@pytest.fixture
def file(path: Path) -> Iterator[OsFile]:
    opened = OsDisk().create(str(path))
    yield opened
    opened.close()


def test_reads_what_is_there(file: OsFile, path: Path) -> None:
    file.write(b"0123456789", 5)
    assert path.read_bytes() == bytes(5) + b"0123456789"
    assert file.read(4, 5) == b"0123"
    assert file.read(100, 13) == b"89"
    assert file.read(1, 15) == b""
    assert file.size() == 15
    file.write(memoryview(bytearray(b"abc")), 0)
    assert file.read(4, 0) == b"abc\0"


def test_a_read_in_pieces(file: OsFile, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system may give less than was asked for, in the middle of a file too."""
    file.write(bytes(range(100)), 0)
    pread = os.pread
    monkeypatch.setattr(os, "pread", lambda fd, size, offset: pread(fd, min(size, 7), offset))
    assert file.read(50, 10) == bytes(range(10, 60))
    assert file.read(500, 90) == bytes(range(90, 100))


def test_a_write_in_pieces(file: OsFile, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pwrite = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: pwrite(fd, data[:7], offset))
    file.write(bytes(range(100)), 3)
    assert path.read_bytes() == bytes(3) + bytes(range(100))


def test_identity(file: OsFile, path: Path) -> None:
    other = OsDisk().open(str(path), write=False)
    assert other.identity() == file.identity()
    assert OsDisk().create(str(path) + "2").identity() != file.identity()
    other.close()


def test_growing_takes_the_space(file: OsFile, path: Path) -> None:
    file.resize(4096 + PAGE)
    assert path.stat().st_size == 4096 + PAGE
    assert path.stat().st_blocks * 512 >= 4096 + PAGE
    file.resize(4096)
    assert path.stat().st_size == 4096


def test_growing_that_fails_leaves_the_size(
    file: OsFile, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file.resize(4096)

    def full(fd: int, start: int, size: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match="No space left"):
        file.resize(4096 + PAGE)
    assert path.stat().st_size == 4096


def test_a_limit_of_the_system(file: OsFile, path: Path) -> None:
    file.resize(4096)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (PAGE, hard))
    try:
        with pytest.raises(OSError, match="File too large"):
            file.resize(4096 + PAGE)
        with pytest.raises(OSError, match="File too large"):
            file.commit(packed(PAGE - 50, b"x" * 100), HEAD, NOTHING, NOTHING, False, ())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert path.stat().st_size <= PAGE


def test_the_lock_is_the_open_file_s(file: OsFile, path: Path) -> None:
    disk = OsDisk()
    one, two = disk.open(str(path), write=True), disk.open(str(path), write=True)
    looking = disk.open(str(path), write=False)
    assert not looking.locked_elsewhere()
    assert one.lock()
    assert one.lock()  # again, by him who has it
    assert not two.lock()
    assert looking.locked_elsewhere()
    assert two.locked_elsewhere()
    assert not one.locked_elsewhere()
    # A POSIX lock would vanish here.
    file.close()
    looking.close()
    assert not two.lock()
    one.unlock()
    assert two.lock()
    assert not one.lock()
    two.close()
    assert one.lock()
    one.close()


def test_create_replaces_nothing(path: Path) -> None:
    path.write_bytes(b"mine")
    with pytest.raises(FileExistsError):
        OsDisk().create(str(path))
    assert path.read_bytes() == b"mine"


def test_publish(tmp_path: Path) -> None:
    disk = OsDisk()
    temporary, name = tmp_path / "t", tmp_path / "n"
    temporary.write_bytes(b"new")
    disk.publish(str(temporary), str(name))
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == {"n": b"new"}
    temporary.write_bytes(b"newer")
    with pytest.raises(FileExistsError):
        disk.publish(str(temporary), str(name))
    assert name.read_bytes() == b"new"
    assert disk.exists(str(name))
    disk.unlink(str(name))
    disk.unlink(str(name))
    assert not disk.exists(str(name))


def test_publish_beside_the_working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("t").write_bytes(b"x")
    OsDisk().publish("t", "n")
    assert Path("n").read_bytes() == b"x"


def test_descriptors_are_not_inherited(file: OsFile, path: Path) -> None:
    opened = OsDisk().open(str(path), write=False)
    assert not os.get_inheritable(file.fileno())
    assert not os.get_inheritable(opened.fileno())
    opened.close()


def test_boot_id() -> None:
    assert len(boot_id()) == 16
    assert boot_id() == boot_id() != bytes(16)


# The writes of a commit.

HEAD = bytes(range(256))
START = 4096 + PAGE - 24


def packed(offset: int, *data: bytes) -> EntryPacker:
    packer = EntryPacker()
    packer.begin(offset, 0)
    packer.add_entries(1, data)
    return packer


def commit(
    file: OsFile | int,
    *,
    data: Sequence[bytes] = (b"first", b"second"),
    before: tuple[int, int] = (16, 40),
    after: tuple[int, int] = (100, 200),
    sync: bool = True,
    wakers: list[int] | None = None,
) -> None:
    fd = file if isinstance(file, int) else file.fileno()
    Descriptor(fd).commit(packed(START, *data), HEAD, before, after, sync, wakers or [])


@pytest.mark.parametrize("sync", [True, False])
def test_a_commit_writes_it_all(file: OsFile, path: Path, sync: bool) -> None:
    commit(file, sync=sync)
    first, second = (pack_entry(at, 1, data) for at, data in enumerate((b"first", b"second")))
    expected = bytearray(4096 + PAGE) + second
    expected[START : START + len(first)] = first
    expected[16:40] = HEAD[16:40]
    expected[100:200] = HEAD[100:200]
    assert path.read_bytes() == expected


@linux
def test_a_commit_wakes(file: OsFile) -> None:
    reading, writing = os.pipe2(os.O_NONBLOCK)
    full_end, full = os.pipe2(os.O_NONBLOCK)
    while True:
        try:
            os.write(full, bytes(4096))
        except BlockingIOError:
            break
    eventfd = os.eventfd(0, os.EFD_NONBLOCK)
    # A full one is awake already; a closed one is no loss.
    commit(file, wakers=[full, 10**6, eventfd, writing])
    assert os.read(reading, 100) == (1).to_bytes(8, "little")
    assert os.eventfd_read(eventfd) == 1
    for fd in (reading, writing, full, full_end, eventfd):
        os.close(fd)


@linux
def test_a_step_that_fails(file: OsFile, path: Path) -> None:
    read_only = OsDisk().open(str(path), write=False)
    reading, pipe = os.pipe()
    eventfd = os.eventfd(0, os.EFD_NONBLOCK)
    cases = [
        (True, read_only.fileno(), {}),
        (False, read_only.fileno(), {"data": ()}),
        (False, pipe, {"data": (), "before": NOTHING, "after": NOTHING}),
        (False, read_only.fileno(), {"data": (), "before": NOTHING}),
    ]
    for entries, fd, options in cases:
        with pytest.raises(OSError, match=r"Bad file descriptor|Invalid argument") as caught:
            commit(fd, wakers=[eventfd], **options)  # type: ignore[arg-type]
        assert isinstance(caught.value, EntriesNotWritten) == entries
        with pytest.raises(BlockingIOError):
            os.eventfd_read(eventfd)
    assert path.read_bytes() == b""
    read_only.close()
    for fd in (reading, pipe, eventfd):
        os.close(fd)


@linux
def test_a_full_disk() -> None:
    fd = os.open("/dev/full", os.O_RDWR)
    with pytest.raises(EntriesNotWritten, match="No space left"):
        commit(fd)
    os.close(fd)


@pytest.mark.parametrize(
    "options",
    [
        {"before": (0, 257)},
        {"before": (-1, 5)},
        {"after": (9, 8)},
        {"after": (2**62, 2**62 + 1)},
    ],
    ids=str,
)
def test_nothing_outside_of_the_page(file: OsFile, path: Path, options: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="outside the page"):
        commit(file, **options)  # type: ignore[arg-type]
    assert path.read_bytes() == b""
