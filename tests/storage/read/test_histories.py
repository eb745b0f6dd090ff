"""Readers in other threads beside a truncation: one history or the other, never both."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from datastreamer import DataStream
from datastreamer.errors import NotFound, StreamClosed
from datastreamer.storage.disk import file_ops as disk_module
from datastreamer.storage.read import file as file_module


def fill(stream: DataStream, first: int, count: int, what: bytes, filler: int = 0) -> None:
    with stream.atomic_op() as op:
        for number in range(first, first + count):
            op.add_entry(1, what + b"%04d" % number + bytes(filler))


def another_history(stream: DataStream) -> None:
    """Fewer bytes for the same numbers: what is known of the pages is wrong now."""
    stream.truncate(50)
    fill(stream, 50, 150, b"new")


@pytest.fixture
def writer(tmp_path: Path) -> DataStream:
    stream = DataStream.create(tmp_path / "s.bin", sync="os", index="memory")
    fill(stream, 0, 200, b"old", 190)
    return stream


def held_up(owner: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], None]:
    """Calls of `name` by a thread called "late" wait; gives a function that runs another
    work meanwhile."""
    real = getattr(owner, name)
    there, go_on = threading.Event(), threading.Event()

    def late(*words: Any) -> Any:
        if threading.current_thread().name == "late":
            there.set()
            assert go_on.wait(20)
        return real(*words)

    def beside(work: Callable[[], object]) -> None:
        assert there.wait(20)
        try:
            work()
        finally:
            go_on.set()

    monkeypatch.setattr(owner, name, late)
    return beside


def test_what_was_looked_up_before_a_truncation_is_not_kept(
    writer: DataStream, monkeypatch: pytest.MonkeyPatch
) -> None:
    beside = held_up(writer.reader.state.pages, "near", monkeypatch)
    found = []
    thread = threading.Thread(target=lambda: found.append(writer.entry(40).data[:7]), name="late")
    thread.start()
    beside(lambda: another_history(writer))
    thread.join()
    assert found == [b"old0040"]
    for number in (50, 100, 150, 199):
        assert writer.entry(number).data == b"new%04d" % number
        assert writer.reader.packed(number)[17:] == b"new%04d" % number
    assert [e.data for e in writer.entries(100, 102)] == [b"new0100", b"new0101"]


def test_a_refresh_that_another_thread_has_not_finished(
    writer: DataStream, monkeypatch: pytest.MonkeyPatch
) -> None:
    with DataStream.open(writer.path, follow=True, index="memory") as follower:
        assert follower.entry(150).data[:7] == b"old0150"
        another_history(writer)
        beside = held_up(file_module, "_is_another_history", monkeypatch)
        thread = threading.Thread(target=follower.refresh, name="late")
        thread.start()
        found = []

        def read() -> None:
            follower.refresh()
            found.append(follower.entry(150).data[:7])

        reader = threading.Thread(target=read)
        beside(reader.start)
        thread.join()
        reader.join()
        assert found == [b"new0150"]
        assert follower.epoch == writer.epoch


def test_data_between_bookmarks_of_one_history(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with DataStream.create(tmp_path / "s.bin", sync="os", index="memory") as writer:

        def write(what: bytes, events: int) -> None:
            with writer.atomic_op() as op:
                for block in range(4):
                    op.add_bookmark(b"b%d" % block)
                    for _ in range(events):
                        op.add_entry(1, what + b"%d " % block)

        write(b"old", 3)
        with DataStream.open(writer.path, follow=True, index="memory") as follower:
            real, asked = follower.bookmark, []

            def bookmark(key: bytes) -> int:
                number = real(key)
                asked.append(key)
                if len(asked) == 1:
                    writer.truncate(0)
                    write(b"new", 1)
                return number

            monkeypatch.setattr(follower, "bookmark", bookmark)
            assert follower.data_between_bookmarks(b"b1", b"b3") == b"new1 new2 "
            assert len(asked) == 4


def test_an_iteration_ends_where_its_history_does(writer: DataStream) -> None:
    entries = writer.batches(max_bytes=4096)
    first = next(entries)
    assert first.next_number < 50
    # Behind the cursor: the iteration does not notice.
    writer.truncate(100)
    fill(writer, 100, 100, b"new")
    second = next(entries)
    assert second.first_number == first.next_number
    # Before it.
    writer.truncate(5)
    fill(writer, 5, 195, b"new", 190)
    with pytest.raises(NotFound, match="was removed by a truncation during the read"):
        next(entries)


def test_a_number_of_a_closed_file_that_another_got(tmp_path: Path) -> None:
    """A read that was in progress at the close is of no other file."""
    names = [tmp_path / "a.bin", tmp_path / "b.bin"]
    for name in names:
        with DataStream.create(name, index="memory") as stream, stream.atomic_op() as op:
            op.add_entries(1, [name.name.encode()] * 10)
    stream = DataStream.open(names[0], read_only=True, index="memory")
    other = os.open(names[1], os.O_RDONLY)
    real = os.pread

    def pread(fd: int, size: int, offset: int) -> bytes:
        stream.close()
        os.dup2(other, fd)
        return real(fd, size, offset)

    fd = stream.fileno()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(disk_module.os, "pread", pread)
        with pytest.raises(StreamClosed):
            stream.entry(3)
    os.close(fd)
    os.close(other)
    with pytest.raises(StreamClosed):
        stream.entry(3)
