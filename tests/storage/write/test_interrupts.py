"""Ctrl-C, and other threads, between the steps of a commit: nothing is lost or renumbered."""

from __future__ import annotations

import contextlib
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from datastreamer import DataStream
from datastreamer.errors import CommitInDoubt, NoOperation, UnknownBookmark
from tests.storage.steps import before_the_report


def commit(stream: DataStream, key: bytes, data: bytes) -> None:
    with stream.atomic_op() as op:
        op.add_bookmark(key)
        op.add_entry(1, data)


def append(stream: DataStream, key: bytes, data: bytes) -> None:
    stream.append(1, data, bookmark=key)


# The two forms of a commit.
Commit = Callable[[DataStream, bytes, bytes], None]
either = pytest.mark.parametrize("commit", [commit, append])


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


@either
def test_an_interrupt_right_behind_the_writes(
    stream: DataStream, monkeypatch: pytest.MonkeyPatch, commit: Commit
) -> None:
    commit(stream, b"a", b"first")
    interrupt_after(monkeypatch, stream._file.file, "commit")
    with pytest.raises(KeyboardInterrupt):
        commit(stream, b"b", b"second")
    monkeypatch.undo()
    with pytest.raises(CommitInDoubt, match="open the stream again"):
        commit(stream, b"c", b"never")
    assert stream.entry(1).data == b"first"
    with pytest.raises(CommitInDoubt, match="open the stream again"):
        stream.close()
    with DataStream.open(stream.path) as again:
        # Readers elsewhere may have seen it: it stays.
        assert [e.data for e in again.entries()] == [b"a", b"first", b"b", b"second"]
        assert again.bookmark(b"b") == 2
        commit(again, b"d", b"third")
        assert again.bookmark(b"d") == 4


def test_an_interrupted_commit_is_not_rolled_back(
    stream: DataStream, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be in the file: the signal's exception goes first, then each call says so."""
    interrupt_after(monkeypatch, stream._file.file, "commit")
    stream.start_atomic_op()
    stream.add_entry(1, b"one")
    with pytest.raises(KeyboardInterrupt):
        stream.commit_atomic_op()
    monkeypatch.undo()
    with pytest.raises(CommitInDoubt, match="may be in the file"):
        stream.rollback_atomic_op()
    with pytest.raises(NoOperation):
        stream.rollback_atomic_op()
    with pytest.raises(CommitInDoubt):
        stream.close()
    with DataStream.open(stream.path) as again:
        assert again.entry(0).data == b"one"


def test_ctrl_c_is_not_masked_by_a_doubt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with (  # noqa: PT012
        pytest.raises(KeyboardInterrupt),
        DataStream.create(tmp_path / "s.bin") as stream,
        stream.atomic_op() as op,
    ):
        op.add_entry(1, b"one")
        interrupt_after(monkeypatch, stream._file.file, "commit")
        op.commit()
    assert stream.closed
    assert caplog.text.count("open the stream again") == 2


@either
def test_an_interrupt_before_the_index_is_notified(
    stream: DataStream, monkeypatch: pytest.MonkeyPatch, commit: Commit
) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    before_the_report(stream, monkeypatch, interrupted)
    with pytest.raises(KeyboardInterrupt):
        commit(stream, b"a", b"first")
    monkeypatch.undo()
    assert stream.bookmark(b"a") == 0
    # It is in the stream, but its caller was not notified.
    with pytest.raises(CommitInDoubt, match="open the stream again"):
        commit(stream, b"a", b"first")
    with pytest.raises(CommitInDoubt, match="open the stream again"):
        stream.close()
    with DataStream.open(stream.path) as again:
        commit(again, b"b", b"second")
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
    # (The first sync of an update comes before it changes anything.)
    begun = pytest.raises(CommitInDoubt, match="open the stream again")
    with begun if change == "truncate" else contextlib.nullcontext():
        stream.close()
    with DataStream.open(stream.path) as again:
        found = [e.data for e in again.entries()]
    assert found in (
        [b"a", b"first", b"b", b"second"],
        [b"a", b"first"] if change == "truncate" else [b"a", b"FIRST", b"b", b"second"],
    )


def test_a_sync_of_another_thread_before_the_index_is_notified(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = DataStream.create(tmp_path / "stream.bin", sync="os")
    found: list[int] = []

    def sync() -> None:
        stream.sync()  # waits until the commit has reported
        stream.bookmarks.wait()

    syncing = threading.Thread(target=sync)

    def elsewhere() -> None:
        syncing.start()
        looking = threading.Thread(target=lambda: found.append(stream.bookmark(b"a")))
        looking.start()
        looking.join()

    before_the_report(stream, monkeypatch, elsewhere)
    commit(stream, b"a", b"first")
    syncing.join()
    monkeypatch.undo()
    assert found == [0]
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


# (A signal may come in a callback of the collector, which can only print it.)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("work", ["truncate", "update", "append", "commit", "not waited"])
def test_real_interrupts_at_any_moment(tmp_path: Path, work: str) -> None:
    """Whenever it comes, bookmarks and entries are those of the file: at once where the stream
    can be written on, and after the next open."""
    choose = random.Random(work)
    path = tmp_path / "s.bin"
    stream, interrupted, longest = DataStream.create(path), 0, 0.002

    def act() -> None:
        if work == "truncate":
            stream.truncate(choose.randrange(1, stream.total_entries))
        elif work == "update":
            stream.update_entry(1, 1, choose.randbytes(5))
        elif work == "append":
            for _ in range(3):
                append(stream, choose.choice([b"a", b"b", b"c", b"n"]), b"event")
        else:
            for _ in range(3):
                with stream.atomic_op() as op:
                    op.add_bookmark(choose.choice([b"a", b"b", b"c", b"n"]))
                    op.add_entry(1, b"event")
                    op.commit(wait=work == "commit")

    try:
        for at in range(120):
            try:
                commit(stream, b"a", b"event")
            except CommitInDoubt:
                with pytest.raises(CommitInDoubt):
                    stream.close()
                stream = DataStream.open(path)
            for key in (b"a", b"b", b"a", b"n"):
                commit(stream, key, b"event")
            if at % 3 == 0:
                stream.bookmarks.wait()
            began = time.monotonic()
            try:
                signal.setitimer(signal.ITIMER_REAL, choose.uniform(1e-5, longest))
                act()
                signal.setitimer(signal.ITIMER_REAL, 0)
                longest = min(0.05, 1.2 * (time.monotonic() - began))
                # Another thread may have received the alarm, and not passed it on yet.
                time.sleep(0.005)
            except KeyboardInterrupt:
                interrupted += 1
            with contextlib.suppress(NoOperation, CommitInDoubt):
                stream.rollback_atomic_op()
            with contextlib.suppress(CommitInDoubt):
                commit(stream, b"n", b"after")
                check_bookmarks(stream)
        with contextlib.suppress(CommitInDoubt):
            stream.close()
        stream = DataStream.open(path)
        check_bookmarks(stream)
        stream.bookmarks.wait()
        check_bookmarks(stream)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        stream.close()
    assert interrupted > 10


@pytest.fixture(autouse=True)
def alarm_is_an_interrupt() -> Iterator[None]:
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    yield
    signal.signal(signal.SIGALRM, before)


def check_bookmarks(stream: DataStream) -> None:
    truth = {e.data: e.number for e in stream.entries() if e.is_bookmark}
    for key in (b"a", b"b", b"c", b"n"):
        if key in truth:
            assert stream.bookmark(key) == truth[key]
        else:
            with pytest.raises(UnknownBookmark):
                stream.bookmark(key)
    assert len(stream.bookmarks) == len(truth)
