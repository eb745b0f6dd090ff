"""Whom the kernel was only pointed to a file's bytes for keeps them, whatever is written there.

`sendfile` over TCP to a peer on the same machine: what the peer has not read yet is the file's
own memory still, also when it is acknowledged, and also when the connection is reset.
"""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from datastreamer.format import HEADER_PAGE_SIZE
from datastreamer.storage.maintain.check import verify
from datastreamer.storage.stream import DataStream

SIZE = 4000
COUNT = 400
CUT = 20


@pytest.fixture(autouse=True)
def direct_writes(tmp_path: Path) -> None:
    """Where a direct write puts what is in memory out of use."""
    kind = subprocess.run(
        ["stat", "-f", "-c", "%T", tmp_path], capture_output=True, text=True, check=False
    ).stdout.strip()
    if kind not in ("ext2/ext3", "xfs", "overlayfs"):
        pytest.skip(f"the temporary folder is on {kind or 'an unknown file system'}")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "s.bin"
    with DataStream.create(path, version=1, system_id=1, sync="os") as stream:
        fill(stream, b"old")
    return path


def fill(stream: DataStream, what: bytes, *, spilling: bool = False) -> None:
    with stream.atomic_op() as op:
        for number in range(stream.total_entries, COUNT):
            op.add_entry(7, (b"%s %d" % (what, number)).ljust(SIZE, b"."))
            if spilling and number % 100 == 0:
                op.spill()


class Pointed:
    """A peer that has not read what it was sent."""

    def __init__(self, path: Path, upto: int) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            self.peer = socket.create_connection(listener.getsockname())
            self.sender, _ = listener.accept()
        self.sender.setblocking(False)
        self.due = b""
        with open(path, "rb") as file:
            while len(self.due) < upto:
                at = HEADER_PAGE_SIZE + len(self.due)
                try:
                    count = os.sendfile(self.sender.fileno(), file.fileno(), at, 65536)
                except BlockingIOError:
                    break
                self.due += os.pread(file.fileno(), count, at)
        assert len(self.due) > 2 * CUT * SIZE

    def found(self) -> bytes:
        found = b""
        while len(found) < len(self.due):
            found += self.peer.recv(1 << 20)
        return found

    def close(self) -> None:
        self.peer.close()
        self.sender.close()


@pytest.fixture
def pointed(path: Path) -> Iterator[Pointed]:
    pointed = Pointed(path, 300 * SIZE)
    yield pointed
    pointed.close()


def check(path: Path, what: bytes) -> None:
    with DataStream.open(path, read_only=True) as stream:
        data = [entry.data[: len(what)] for batch in stream.batches(0) for entry in batch]
    assert data == [b"old"[: len(what)]] * CUT + [what] * (COUNT - CUT)
    report = verify(path)
    assert report.ok
    assert report.entries == COUNT


@pytest.mark.parametrize("spilling", [False, True])
def test_a_truncation(path: Path, pointed: Pointed, spilling: bool) -> None:
    with DataStream.open(path, sync="os") as stream:
        stream.truncate(CUT)
        fill(stream, b"new", spilling=spilling)
    assert pointed.found() == pointed.due
    check(path, b"new")


def test_a_truncation_and_a_writer_behind_it(path: Path, pointed: Pointed) -> None:
    with DataStream.open(path, sync="os") as stream:
        stream.truncate(CUT)
    with DataStream.open(path, sync="os") as stream:
        fill(stream, b"new")
    assert pointed.found() == pointed.due
    check(path, b"new")


def test_two_truncations(path: Path, pointed: Pointed) -> None:
    with DataStream.open(path, sync="os") as stream:
        stream.truncate(200)
        stream.truncate(CUT)
        fill(stream, b"new")
    assert pointed.found() == pointed.due
    check(path, b"new")


def test_an_update(path: Path, pointed: Pointed) -> None:
    new = b"new".ljust(SIZE, b"!")
    with DataStream.open(path, sync="os") as stream:
        for number in (0, CUT, 200):
            stream.update_entry(number, 7, new)
            assert stream.entry(number).data == new
    assert pointed.found() == pointed.due
    assert verify(path).ok


def test_what_was_rolled_back_stays_until_something_is_written(path: Path) -> None:
    before = path.read_bytes()
    with DataStream.open(path, sync="os") as stream:
        stream.truncate(CUT)
    assert path.read_bytes()[4096:] == before[4096:]
