"""The index follows its file, and look-ups are right at any time, whatever its state.

Where a look-up has to happen before the index has caught up, the keeper's thread is
held at a gate, and let go when the test says so.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from datastreamer import DataStream
from datastreamer.errors import UnknownBookmark
from datastreamer.storage.bookmarks import builder, keeper, lmdb, recent, registry
from datastreamer.storage.bookmarks._at_hand import NotAtHandError
from datastreamer.storage.bookmarks._blocks import DamagedBlockError
from datastreamer.storage.bookmarks.builder import IndexBuilder
from datastreamer.storage.bookmarks.interface import Watermark
from datastreamer.storage.bookmarks.keeper import BookmarkKeeper
from datastreamer.storage.bookmarks.memory import MemoryIndex
from datastreamer.storage.disk.access import Access
from datastreamer.storage.header.records import Head
from tests.storage.bookmarks.keeping import (
    HISTORY,
    PATIENCE,
    Gate,
    check,
    check_index,
    index_of,
    known_of,
    operation,
)
from tests.storage.made import BOOKMARK, add, bookmarks_of, make, scan_file

# Damage to the index of a closed stream.


def delete(path: Path) -> None:
    shutil.rmtree(index_of(path))


def write_garbage(path: Path) -> None:
    (index_of(path) / "data.mdb").write_bytes(b"this was an index once. " * 1000)


def empty_the_file(path: Path) -> None:
    (index_of(path) / "data.mdb").write_bytes(b"")


def cut_short(path: Path) -> None:
    data = index_of(path) / "data.mdb"
    data.write_bytes(data.read_bytes()[:8192])


def zero_its_pages(path: Path) -> None:
    data = index_of(path) / "data.mdb"
    content = data.read_bytes()
    data.write_bytes(content[:8192] + bytes(len(content) - 8192))


def put_that_of_another_stream(path: Path) -> None:
    other = make(
        path.with_name("other.bin"), operation(b"old", b"alien"), operation(b"twice", b"x", b"7")
    )
    shutil.rmtree(index_of(path))
    shutil.copytree(index_of(other), index_of(path))


def put_one_of_another_layout(path: Path) -> None:
    delete(path)
    index = registry.index_opener("lmdb")(str(path), True, Access.private())
    with mock.patch.object(lmdb, "_LAYOUT", 3):
        index.add([(b"old", 3), (b"stranger", 1)], Watermark(5000, 4, b"another"))
    index.close()


def damage_its_watermark(path: Path) -> None:
    data = bytearray((index_of(path) / "data.mdb").read_bytes())
    at = -1
    while (at := data.find(b"\xff" * 26, at + 1)) >= 0:
        data[at + 26 + 8] ^= 1
    (index_of(path) / "data.mdb").write_bytes(data)


DAMAGES = [
    delete,
    write_garbage,
    empty_the_file,
    cut_short,
    zero_its_pages,
    put_that_of_another_stream,
    put_one_of_another_layout,
    damage_its_watermark,
]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_index_is_built_again_in_the_background(
    tmp_path: Path, gate: Gate, damage: Callable[[Path], None]
) -> None:
    gate.open = True
    path = make(tmp_path / "s.bin", *HISTORY)
    known = known_of(path)
    check_index(path, known)
    damage(path)
    gate.open = False
    with DataStream.open(path) as stream:
        gate.wait_for_arrival()
        check(stream, known)
        gate.pass_all()
        stream.bookmarks.wait()
        assert stream.bookmarks.lag() == 0
        check(stream, known)
        assert len(stream.bookmarks) == len(known)
    check_index(path, known)


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("mode", [{"read_only": True}, {"follow": True}])
def test_readers_with_a_damaged_index(
    tmp_path: Path, damage: Callable[[Path], None], mode: dict[str, Any]
) -> None:
    path = make(tmp_path / "s.bin", *HISTORY)
    known = known_of(path)
    damage(path)
    with DataStream.open(path, **mode) as stream:
        check(stream, known)
        check(stream, known)
        assert len(stream.bookmarks) == len(known)


@pytest.mark.parametrize("stop_after", [0, 1, 2, 3])
def test_right_at_every_stage_of_a_catch_up(tmp_path: Path, gate: Gate, stop_after: int) -> None:
    gate.open = True
    path = make(tmp_path / "s.bin", *HISTORY)
    known = known_of(path)
    delete(path)
    gate.open = False
    with DataStream.open(path) as stream:
        gate.wait_for_arrival()
        for _ in range(stop_after):
            gate.pass_one()
        assert bool(stream.bookmarks.lag() < stream.total_entries) == bool(stop_after)
        assert stream.bookmarks.lag() > 0
        assert stream.bookmarks.unread() > 0
        check(stream, known)
        # A bookmark that is committed meanwhile is newer than those in the index and in the gap.
        add(stream, operation(b"twice", b"3", b"new"))
        known |= {b"twice": 38, b"3": 40, b"new": 42}
        check(stream, known)
        gate.pass_all()
        stream.bookmarks.wait()
        assert (stream.bookmarks.lag(), stream.bookmarks.unread()) == (0, 0)
        check(stream, known)
    check_index(path, known)


@pytest.mark.parametrize("stop_after", [0, 1, 2, 3])
@pytest.mark.parametrize("number", [0, 1, 3, 4, 15, 34, 36])
def test_truncation_during_a_catch_up(
    tmp_path: Path, gate: Gate, stop_after: int, number: int
) -> None:
    gate.open = True
    path = make(tmp_path / "s.bin", *HISTORY)
    known = known_of(path)
    delete(path)
    gate.open = False
    with DataStream.open(path) as stream:
        gate.wait_for_arrival()
        for _ in range(stop_after):
            gate.pass_one()
        entries = scan_file(path)
        stream.truncate(number)
        left = bookmarks_of(entries[:number])
        check(stream, left)
        for key in known.keys() - left.keys():
            with pytest.raises(UnknownBookmark):
                stream.bookmark(key)
        # Append beyond the old end: other entries have the old numbers.
        add(stream, operation(b"other", *(b"o%d" % n for n in range(30))))
        known = known_of(path)
        check(stream, known)
        gate.pass_all()
        stream.bookmarks.wait()
        check(stream, known)
        assert stream.bookmarks.lag() == 0
        assert len(stream.bookmarks) == len(known)
    check_index(path, known)


def test_continues_from_its_watermark(tmp_path: Path, gate: Gate) -> None:
    """A lagging index, for example of a killed process, is not built again."""
    gate.open = True
    path = make(tmp_path / "s.bin", *HISTORY)
    saved = tmp_path / "saved"
    shutil.copytree(index_of(path), saved)
    with DataStream.open(path) as stream:
        before = stream.total_entries
        add(stream, operation(b"twice", b"more"))
    shutil.rmtree(index_of(path))
    shutil.copytree(saved, index_of(path))
    gate.open = False
    with DataStream.open(path) as stream:
        gate.wait_for_arrival()
        assert stream.bookmarks.lag() == stream.total_entries - before == 4
        check(stream, known_of(path))
        gate.pass_all()
        stream.bookmarks.wait()
        assert stream.bookmarks.lag() == 0
    check_index(path, known_of(path))


def test_an_index_ahead_of_the_file(tmp_path: Path) -> None:
    """An older state of the file was restored in place, without the index."""
    path = make(tmp_path / "s.bin", HISTORY[0])
    older = path.read_bytes()
    with DataStream.open(path) as stream:
        add(stream, HISTORY[2])
    path.write_bytes(older)
    with DataStream.open(path) as stream:
        check(stream, {b"old": 0, b"twice": 2})
        with pytest.raises(UnknownBookmark):
            stream.bookmark(b"last")
        add(stream, operation(b"x", b"y", b"z"))
        check(stream, known_of(path))
    check_index(path, known_of(path))


def test_another_history_of_the_same_length(tmp_path: Path) -> None:
    path = make(tmp_path / "s.bin", operation(b"one", b"two"))
    other = make(tmp_path / "o.bin", operation(b"eno", b"owt"))
    header = path.read_bytes()[:4096]
    path.write_bytes(header + other.read_bytes()[4096:])
    with DataStream.open(path) as stream:
        check(stream, {b"eno": 0, b"owt": 2})
        with pytest.raises(UnknownBookmark):
            stream.bookmark(b"one")


def test_a_copied_stream_does_not_trust_the_copied_index(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = make(tmp_path / "s.bin", *HISTORY)
    copy = tmp_path / "copy.bin"
    shutil.copyfile(path, copy)
    shutil.copytree(index_of(path), index_of(copy))
    with caplog.at_level(logging.INFO), DataStream.open(copy) as stream:
        check(stream, known_of(path))
    assert "the bookmark index belongs to another file; it is rebuilt" in caplog.text


# While the stream is written.


def test_a_folder_that_is_removed_under_the_writer(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = make(tmp_path / "s.bin", *HISTORY)
    with DataStream.open(path) as stream:
        delete(path)
        check(stream, known_of(path))
        add(stream, operation(b"twice", b"more"))
        stream.bookmarks.wait()
        check(stream, known_of(path))
        stream.truncate(5)
        check(stream, known_of(path))
    assert [r for r in caplog.records if r.levelno >= logging.WARNING] == []
    with DataStream.open(path) as stream:
        stream.bookmarks.wait()
        check(stream, known_of(path))
    check_index(path, known_of(path))


def test_in_another_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The index is beside the stream, whatever folder the process changes to."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(tmp_path)
    with DataStream.create("s.bin") as stream, DataStream.open("s.bin", follow=True) as follower:
        monkeypatch.chdir(elsewhere)
        add(stream, *HISTORY)
        stream.bookmarks.wait()
        follower.refresh()
        known = known_of(tmp_path / "s.bin")
        check(follower, known)
        assert follower.bookmarks.lag() == 0
        stream.truncate(5)
    check_index(tmp_path / "s.bin", known_of(tmp_path / "s.bin"))
    assert list(elsewhere.iterdir()) == []


def test_after_a_close_the_index_is_complete(tmp_path: Path, gate: Gate) -> None:
    gate.open = True
    path = make(tmp_path / "s.bin", *HISTORY)
    gate.open = False
    with DataStream.open(path) as stream:
        gate.wait_for_arrival()
        assert (stream.bookmarks.lag(), stream.bookmarks.unread()) == (0, 0)
        gate.pass_all()


def test_only_what_is_on_disk_is_indexed(tmp_path: Path) -> None:
    path = tmp_path / "s.bin"
    with DataStream.create(path, sync="os") as stream:
        add(stream, operation(b"a", b"b"))
        stream.bookmarks.wait()
        assert stream.bookmarks.lag() == 4
        check(stream, {b"a": 0, b"b": 2})
        stream.sync()
        stream.bookmarks.wait()
        assert stream.bookmarks.lag() == 0
        add(stream, operation(b"b"))
        stream.bookmarks.wait()
        assert stream.bookmarks.lag() == 2
        check(stream, {b"a": 0, b"b": 4})


def test_a_rebuild_indexes_only_what_is_on_disk(tmp_path: Path) -> None:
    with DataStream.create(tmp_path / "s.bin", sync="os") as stream:
        add(stream, operation(b"a", b"b"))
        stream.sync()
        add(stream, operation(b"b", b"c"))
        stream.bookmarks.rebuild()
        assert stream.bookmarks.lag() == 4
        check(stream, {b"a": 0, b"b": 4, b"c": 6})
        add(stream, operation(b"d"))
        stream.bookmarks.wait()
        assert stream.bookmarks.lag() == 6
        stream.sync()
        stream.bookmarks.wait()
        assert stream.bookmarks.lag() == 0
        check(stream, {b"a": 0, b"b": 4, b"c": 6, b"d": 8})
        assert len(stream.bookmarks) == 4


def test_rolled_back_bookmarks_are_never_seen(tmp_path: Path) -> None:
    with DataStream.create(tmp_path / "s.bin") as stream:
        add(stream, operation(b"k"))
        stream.start_atomic_op()
        stream.add_bookmark(b"k")
        stream.add_bookmark(b"new")
        check(stream, {b"k": 0})
        with pytest.raises(UnknownBookmark):
            stream.bookmark(b"new")
        stream.rollback_atomic_op()
        stream.bookmarks.wait()
        check(stream, {b"k": 0})
        assert len(stream.bookmarks) == 1


def test_after_a_truncation_the_older_duplicate_is_found(tmp_path: Path) -> None:
    path = tmp_path / "s.bin"
    with DataStream.create(path) as stream:
        add(stream, operation(b"k", size=10), operation(b"k", size=10))
        stream.bookmarks.wait()
        add(stream, operation(b"k", b"x", size=10))  # these are only in memory
        for number, want in [(5, 4), (4, 2), (3, 2), (1, 0)]:
            stream.truncate(number)
            assert stream.bookmark(b"k") == want
            with pytest.raises(UnknownBookmark):
                stream.bookmark(b"x")
            stream.bookmarks.wait()
            assert stream.bookmark(b"k") == want
        stream.truncate(0)
        with pytest.raises(UnknownBookmark):
            stream.bookmark(b"k")
        assert len(stream.bookmarks) == 0
        add(stream, operation(b"x", b"k", size=10))
        check(stream, {b"x": 0, b"k": 2})
    check_index(path, {b"x": 0, b"k": 2})


def test_the_index_is_truncated_before_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make(tmp_path / "s.bin", *HISTORY)
    seen: list[Watermark | None] = []
    with DataStream.open(path) as stream:
        changes = stream._ensure_writable().changes
        truncate = changes.truncate

        def looked_at(head: Head, settle: Callable[[], None]) -> None:
            index = registry.index_opener("lmdb")(str(path), False, Access.private())
            seen.append(index.watermark())
            index.close()
            truncate(head, settle)

        monkeypatch.setattr(changes, "truncate", looked_at)
        stream.truncate(4)
        assert seen[0] is not None
        assert (seen[0].length, seen[0].entries) == (stream.header.total_length, 4)


def test_a_wrong_index_is_noticed_and_built_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its watermark matches the file, its content does not."""
    path = make(tmp_path / "s.bin", *HISTORY)
    index = registry.index_opener("lmdb")(str(path), True, Access.private())
    mark = index.watermark()
    assert mark is not None
    index.add([(b"old", 33), (b"phantom", 5), (b"beyond", 10**6)], mark)
    index.close()
    with DataStream.open(path) as stream:
        assert stream.bookmark(b"old") == 0
        assert "the bookmark index is wrong and is rebuilt" in caplog.text
        for key in (b"phantom", b"beyond"):
            with pytest.raises(UnknownBookmark):
                stream.bookmark(key)
        stream.bookmarks.wait()
        check(stream, known_of(path))
    check_index(path, known_of(path))


def test_rebuild(tmp_path: Path) -> None:
    path = make(tmp_path / "s.bin", *HISTORY)
    with DataStream.open(path) as stream:
        add(stream, operation(b"fresh"))
        stream.bookmarks.rebuild()
        assert stream.bookmarks.lag() == 0
        check(stream, known_of(path))


def test_many_waiting_bookmarks_are_written_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread writes after some seconds, or when this number of bookmarks wakes it."""
    monkeypatch.setattr(recent, "FLUSH_KEYS", 3)
    monkeypatch.setattr(builder, "_FLUSH_SECONDS", 3600.0)
    written = threading.Event()
    flush = IndexBuilder._flush

    def noted(self: IndexBuilder) -> None:
        flush(self)
        if self._trusted.indexed.entries:
            written.set()

    monkeypatch.setattr(IndexBuilder, "_flush", noted)
    with DataStream.create(tmp_path / "s.bin") as stream:
        add(stream, [(BOOKMARK, b"1"), (BOOKMARK, b"2")])
        assert stream.bookmarks.lag() == 2
        add(stream, [(BOOKMARK, b"3")])
        assert written.wait(PATIENCE)


def test_bookmarks_that_are_not_on_disk_do_not_wake_the_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recent, "FLUSH_KEYS", 3)
    with DataStream.create(tmp_path / "s.bin", sync="os") as stream, monkeypatch.context() as patch:
        woken: list[int] = []
        patch.setattr(stream.bookmarks.trusted.changed, "notify", lambda: woken.append(1))
        for _ in range(5):
            add(stream, [(BOOKMARK, b"k"), (1, b"")])
        assert woken == []
        stream.sync()
        add(stream, [(BOOKMARK, b"k"), (1, b"")])
        assert woken == [1]


def test_no_write_during_a_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make(tmp_path / "s.bin", *HISTORY)
    with DataStream.open(path, index="memory") as stream:
        stream.bookmarks.wait()
        held = []

        def count(index: MemoryIndex, length: Any = MemoryIndex.__len__) -> int:
            held.append(stream.bookmarks.trusted.writing.locked())  # type: ignore[attr-defined]
            return int(length(index))

        monkeypatch.setattr(MemoryIndex, "__len__", count)
        assert len(stream.bookmarks) == len(known_of(path))
        assert held == [True]


# Readers.


def test_a_reader_without_an_index_keeps_one_in_memory(tmp_path: Path, gate: Gate) -> None:
    gate.open = True
    path = make(tmp_path / "s.bin", *HISTORY, index="memory")
    known = known_of(path)
    gate.open = False
    with DataStream.open(path, read_only=True) as stream:
        assert stream.bookmark(b"old") == 0  # the first look-up scans the file
        assert stream.bookmarks.lag() == stream.total_entries
        assert stream.bookmarks.builder.thread is None
        check(stream, known)
        gate.wait_for_arrival()
        check(stream, known)
        gate.pass_all()
        stream.bookmarks.wait()
        assert (stream.bookmarks.lag(), stream.bookmarks.unread()) == (0, 0)
        check(stream, known)
    assert not index_of(path).exists()


@pytest.mark.parametrize("asked_before", [False, True])
@pytest.mark.parametrize("index", ["lmdb", "memory"])
def test_a_follower(tmp_path: Path, index: str, asked_before: bool) -> None:
    path = tmp_path / "s.bin"
    with (
        DataStream.create(path, index=index) as stream,
        DataStream.open(path, follow=True) as follower,
    ):

        def same() -> None:
            follower.refresh()
            known = known_of(path)
            check(follower, known)
            assert len(follower.bookmarks) == len(known)

        if asked_before:
            with pytest.raises(UnknownBookmark):
                follower.bookmark(b"old")
        add(stream, *HISTORY)
        same()
        stream.bookmarks.wait()  # now some of the bookmarks are in the index
        add(stream, operation(b"twice", b"after"))
        same()
        stream.truncate(5)
        same()
        with pytest.raises(UnknownBookmark):
            follower.bookmark(b"after")
        add(stream, operation(b"twice"), *HISTORY)
        stream.bookmarks.wait()
        same()
        # Truncate, and append beyond the old end, between two refreshes.
        stream.truncate(3)
        add(stream, operation(*(b"n%d" % n for n in range(40))))
        same()
        stream.truncate(0)
        same()
        assert len(follower.bookmarks) == 0


def test_a_follower_begins_with_the_writer_s_index(tmp_path: Path) -> None:
    """Also if it is still empty: the follower builds no index in memory."""
    path = tmp_path / "s.bin"
    with (
        DataStream.create(path) as stream,
        DataStream.open(path, follow=True) as follower,
    ):
        with pytest.raises(UnknownBookmark):
            follower.bookmark(b"old")
        add(stream, *HISTORY)
        stream.bookmarks.wait()
        follower.refresh()
        check(follower, known_of(path))
        assert follower.bookmarks.lag() == 0
        assert follower.bookmarks.builder.thread is None


def test_a_follower_that_opened_before_the_writer(tmp_path: Path) -> None:
    path = make(tmp_path / "s.bin", *HISTORY)
    with DataStream.open(path, follow=True) as follower:
        check(follower, known_of(path))
        with DataStream.open(path) as stream:
            add(stream, operation(b"twice", b"next"))
            follower.refresh()
            check(follower, known_of(path))
            stream.bookmarks.wait()
            check(follower, known_of(path))
            assert follower.bookmarks.lag() == 0


def test_a_catch_up_beside_a_writer_that_truncates(tmp_path: Path, gate: Gate) -> None:
    """The target of the follower's thread no longer exists; the thread ends nevertheless."""
    gate.open = True
    path = make(tmp_path / "s.bin", *HISTORY, index="memory")
    gate.open = False
    with (
        DataStream.open(path, index="memory") as stream,
        DataStream.open(path, follow=True) as follower,
    ):
        for key in (b"old", b"twice"):
            follower.bookmark(key)
        gate.wait_for_arrival()  # the follower's thread; the writer's keeper has nothing to do
        stream.truncate(15)
        follower._file.refresh()  # the head has moved, and the keeper has not noticed yet
        gate.pass_all()
        follower.bookmarks.wait()
        check(follower, known_of(path))
        check(follower, known_of(path))


def test_look_ups_in_threads_beside_appends_and_truncations(tmp_path: Path) -> None:
    """No look-up fails; each returns a number that was right at some moment."""
    with DataStream.create(tmp_path / "s.bin", sync="os", index="memory") as stream:
        add(stream, [(BOOKMARK, b"base"), (1, b"")])
        stop = threading.Event()
        failed: list[BaseException] = []

        def ask() -> None:
            try:
                while not stop.is_set():
                    assert stream.bookmark(b"base") == 0
                    with contextlib.suppress(UnknownBookmark):
                        assert stream.bookmark(b"k") >= 2
            except BaseException as error:  # noqa: BLE001
                failed.append(error)

        threads = [threading.Thread(target=ask) for _ in range(2)]
        for thread in threads:
            thread.start()
        for round_ in range(60):
            add(stream, *[[(BOOKMARK, b"k"), (1, bytes(round_ * 50))] for _ in range(10)])
            if round_ % 3 == 2:
                stream.truncate(2)
        stop.set()
        for thread in threads:
            thread.join()
        assert failed == []


def test_long_scans_take_turns(tmp_path: Path, gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients that look up bookmarks during a catch-up do not all slow it down at once."""
    gate.open = True
    path = make(tmp_path / "s.bin", *HISTORY, index="memory")
    gate.open = False
    monkeypatch.setattr(keeper, "_LONG_SCAN", 0)
    known, at_once, most = known_of(path), [0], [0]
    scan = BookmarkKeeper._scan_gap
    both = threading.Barrier(4)

    def counted(self: BookmarkKeeper, *what: Any) -> int | None:
        at_once[0] += 1
        most[0] = max(most[0], at_once[0])
        try:
            return scan(self, *what)
        finally:
            at_once[0] -= 1

    def ask(stream: DataStream) -> None:
        both.wait(PATIENCE)
        for _ in range(20):
            check(stream, known)

    monkeypatch.setattr(BookmarkKeeper, "_scan_gap", counted)
    with DataStream.open(path) as stream:
        gate.wait_for_arrival()
        threads = [threading.Thread(target=ask, args=(stream,)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE)
        gate.pass_all()
    assert most == [1]


@pytest.mark.parametrize("index", ["lmdb", "memory"])
def test_look_ups_that_follow_each_other(tmp_path: Path, index: str) -> None:
    """They see one state, and answer correctly if bookmarks leave the memory meanwhile."""
    path = make(tmp_path / "s.bin", *HISTORY)
    with DataStream.open(path, index=index) as stream:
        bookmarks = stream.bookmarks
        bookmarks.wait()
        add(stream, operation(b"twice", b"new"))
        for _ in range(2):
            known = known_of(path)
            look_ups = bookmarks.at_hand(1 << 20)
            assert {key: look_ups.newest(key) for key in known} == known
            assert look_ups.newest(b"unknown") is None
            bookmarks.wait()
            for key in (b"twice", b"new", b"unknown"):
                with contextlib.suppress(NotAtHandError):
                    assert look_ups.newest(key) == known.get(key)
            look_ups.end()
            add(stream, operation(b"twice", b"newer"))


@pytest.mark.parametrize("how", ["damaged", "without an index", "being truncated"])
def test_look_ups_that_need_more(tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def damaged(reading: lmdb._LmdbReading, _: bytes) -> None:
        reading.failed(DamagedBlockError("today"))

    path = make(tmp_path / "s.bin", *HISTORY)
    with DataStream.open(path, index="lmdb") as stream:
        bookmarks = stream.bookmarks
        bookmarks.wait()
        if how == "without an index":
            bookmarks.trusted.drop()
        elif how == "being truncated":
            bookmarks.trusted.recent.unfinished = True
        else:
            monkeypatch.setattr(lmdb._LmdbReading, "newest", damaged)
        with pytest.raises(NotAtHandError):
            bookmarks.at_hand(1 << 20).newest(b"old")
        monkeypatch.undo()
        check(stream, known_of(path))
