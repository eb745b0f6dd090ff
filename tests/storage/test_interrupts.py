"""Ctrl-C, and other threads, between the steps of a commit: nothing is lost or renumbered."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from datastreamer import DataStream
from datastreamer.errors import CommitInDoubt


def commit(stream: DataStream, key: bytes, data: bytes) -> None:
    with stream.atomic_op() as op:
        op.add_bookmark(key)
        op.add_entry(1, data)


@pytest.fixture
def stream(tmp_path: Path) -> DataStream:
    return DataStream.create(tmp_path / "stream.bin")


def interrupt_after(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> None:
    """The call is made in full, and the signal's exception comes at its return."""
    real = getattr(owner, name)

    def interrupted(*words: Any, **named: Any) -> None:
        real(*words, **named)
        raise KeyboardInterrupt

    monkeypatch.setattr(owner, name, interrupted)


def test_an_interrupt_right_behind_the_writes(
    stream: DataStream, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit(stream, b"a", b"first")
    interrupt_after(monkeypatch, stream._file.file, "commit")
    with pytest.raises(KeyboardInterrupt):
        commit(stream, b"b", b"second")
    monkeypatch.undo()
    with pytest.raises(CommitInDoubt, match="open the stream again"):
        commit(stream, b"c", b"never")
    assert stream.entry(1).data == b"first"
    stream.close()
    with DataStream.open(stream.path) as again:
        # Readers elsewhere may have seen it: it stays.
        assert [e.data for e in again.entries()] == [b"a", b"first", b"b", b"second"]
        assert again.bookmark(b"b") == 2
        commit(again, b"d", b"third")
        assert again.bookmark(b"d") == 4


def test_an_interrupt_before_the_index_is_told(
    stream: DataStream, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*words: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(stream.bookmarks, "committed", interrupted)
    with pytest.raises(KeyboardInterrupt):
        commit(stream, b"a", b"first")
    monkeypatch.undo()
    assert stream.bookmark(b"a") == 0
    commit(stream, b"b", b"second")
    assert stream.bookmark(b"b") == 2
    stream.close()
    with DataStream.open(stream.path) as again:
        again.bookmarks.wait()
        assert again.bookmark(b"a") == 0
        assert again.bookmark(b"b") == 2


@pytest.mark.parametrize("change", ["truncate", "update"])
def test_an_interrupt_in_a_change(
    stream: DataStream, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    commit(stream, b"a", b"first")
    commit(stream, b"b", b"second")
    interrupt_after(monkeypatch, stream._file.file, "sync")
    changes = {
        "truncate": lambda: stream.truncate(2),
        "update": lambda: stream.update_entry(1, 1, b"FIRST"),
    }
    with pytest.raises(KeyboardInterrupt):
        changes[change]()
    monkeypatch.undo()
    stream.close()
    with DataStream.open(stream.path) as again:
        found = [e.data for e in again.entries()]
    assert found in (
        [b"a", b"first", b"b", b"second"],
        [b"a", b"first"] if change == "truncate" else [b"a", b"FIRST", b"b", b"second"],
    )


def test_a_sync_of_another_thread_before_the_index_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = DataStream.create(tmp_path / "stream.bin", sync="os")
    keeper = stream.bookmarks
    real = keeper.committed

    def late(*words: Any) -> None:
        def elsewhere() -> None:
            stream.sync()
            keeper.wait()

        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        real(*words)

    monkeypatch.setattr(keeper, "committed", late)
    commit(stream, b"a", b"first")
    monkeypatch.undo()
    assert stream.bookmark(b"a") == 0
    stream.close()
    with DataStream.open(stream.path) as again:
        assert again.bookmark(b"a") == 0


def test_a_reader_that_begins_in_the_middle_of_a_change_waits(
    stream: DataStream, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit(stream, b"a", b"first")
    reading, done = threading.Event(), []

    def read() -> None:
        reading.set()
        done.append(stream.entry(1).data)

    thread = threading.Thread(target=read)
    real = stream._file.file.write

    def write(data: Any, offset: int) -> None:
        real(data, offset)
        if bytes(data) == b"FIRST":
            thread.start()
            reading.wait()
            assert done == []

    monkeypatch.setattr(stream._file.file, "write", write)
    stream.update_entry(1, 1, b"FIRST")
    thread.join()
    assert done == [b"FIRST"]
    stream.close()
