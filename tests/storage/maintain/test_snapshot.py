"""A copy of a stream that others write: whole, of one moment, and independent."""

from __future__ import annotations

import errno
import os
import struct
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from datastreamer import DataStream
from datastreamer.errors import (
    DamagedEntry,
    FileExists,
    FileMissing,
    NotAStream,
    StreamBusy,
    StreamFileError,
    WriteFailed,
)
from datastreamer.storage.disk.access import Access
from datastreamer.storage.disk.file_ops import OsDisk
from datastreamer.storage.header import records
from datastreamer.storage.header import undo_journal as journal
from datastreamer.storage.header.undo_journal import Undo
from datastreamer.storage.maintain import snapshot as module
from datastreamer.storage.maintain.check import verify
from datastreamer.storage.maintain.snapshot import snapshot
from datastreamer.storage.pages import copy as copy_sums
from tests.conftest import Golden
from tests.storage.made import (
    BOOKMARK,
    FIRST,
    LARGEST,
    PAGE,
    FaultyDisk,
    add,
    bookmarks_of,
    header_of,
    make,
    page_sums,
    power_cut,
    scan_file,
    sum_at,
    trace_of,
)

SMALL = [(BOOKMARK, b"key"), (1, b"one"), (2, bytes(200))]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return make(tmp_path / "stream.bin", SMALL)


@pytest.fixture
def out(tmp_path: Path) -> Path:
    (tmp_path / "copies").mkdir()
    return tmp_path / "copies" / "out.bin"


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PAUSE_SECONDS", 0)


def check(out: Path) -> None:
    """The copy is as a clean close leaves it, and nothing else is beside it."""
    content = out.read_bytes()
    length, entries = header_of(out)[-2:]
    record = records.get_record(content)
    assert record is not None
    sums = out.with_name("out.bin.sums")
    whole = max(0, (length - FIRST - 1) // PAGE)
    times = out.with_name("out.bin.pages")
    if not entries:
        assert not times.exists()
    assert {*out.parent.iterdir()} - {times} == ({out, sums} if whole else {out})
    if whole:
        assert len(page_sums(out)) == whole
        report = verify(out)
        assert report.ok
        assert not any("checksum" in note for note in report.notes)
    assert record.after_sum == sum_at(content, (length, entries))
    assert record.base == record.mid == record.after == (length, entries)
    (synced,) = records.get_synced(content)
    assert (synced.stream_id, synced.epoch) == (record.stream_id, record.epoch)
    mark = records.get_mark(content)
    assert mark == (record.epoch, (length, entries))
    assert records.get_writer(content) is None
    assert (len(content) - FIRST) % PAGE == 0
    assert length < len(content) <= length + PAGE
    assert not any(content[length:])
    # After a restart the result is the same.
    later = power_cut(out, out.with_name("later.bin"))
    before, names = scan_file(out), set(out.parent.iterdir())
    with DataStream.open(later) as stream:
        assert stream.total_entries == entries
        assert stream.epoch == record.epoch
    assert scan_file(later) == before
    # Its writer makes the checksums that are missing, unless it is closed before it comes to it.
    new = {p.name for p in set(out.parent.iterdir()) - names} - {
        "later.bin.sums",
        "later.bin.pages",
    }
    assert new == {"later.bin.index"}


@pytest.mark.parametrize(
    "operations, pages",
    [
        ([], 1),
        ([SMALL], 1),
        ([[(1, bytes(LARGEST - 17 - 1))]], 1),
        ([[(1, b"\1" * LARGEST)]], 2),
        ([[(1, b"\1" * LARGEST)] * 3, SMALL], 4),
        ([[(1, b"\1" * (LARGEST - 100))], [(2, b"\2" * 200)]], 2),
    ],
    ids=["empty", "small", "nearly a page", "a full page", "four pages", "padding"],
)
def test_a_copy(tmp_path: Path, out: Path, operations: Any, pages: int) -> None:
    path = make(tmp_path / "stream.bin", *operations, version=3, system_id=7, stream_type=2)
    taken = snapshot(path, out)
    assert (taken.header, taken.size) == (header_of(out)[2:], out.stat().st_size)
    assert header_of(out) == header_of(path)
    assert out.stat().st_size == FIRST + pages * PAGE
    check(out)
    assert scan_file(out) == scan_file(path)


def test_the_copy_can_be_written(path: Path, out: Path) -> None:
    snapshot(path, out)
    with DataStream.open(path) as stream, DataStream.open(out) as copy:
        assert copy.stream_id == stream.stream_id
        with copy.atomic_op() as op:
            op.add_bookmark(b"another")
        assert copy.bookmark(b"another") == 3
        assert copy.bookmark(b"key") == 0
        assert stream.total_entries == 3
    assert bookmarks_of(scan_file(out)) == {b"key": 0, b"another": 3}


def test_the_stream_is_not_touched(path: Path, out: Path) -> None:
    before = trace_of(path.parent)
    snapshot(path, out)
    after = trace_of(path.parent)
    assert {name: after[name] for name in before if "copies" not in name} == {
        name: before[name] for name in before if "copies" not in name
    }


@pytest.mark.parametrize("sync", ["commit", "os"])
def test_beside_its_writer(path: Path, out: Path, sync: Any) -> None:
    with DataStream.open(path, sync=sync) as stream:
        with stream.atomic_op() as op:
            op.add_entry(3, b"committed")
        with stream.atomic_op() as op:
            op.add_entries(1, [bytes(1000)] * 10_000)  # enough to be written before the commit
            assert snapshot(path, out).header.total_entries == 4
            check(out)
        assert stream.total_entries == 10_004
    assert scan_file(out) == scan_file(path)[:4]


def test_only_what_readers_see_is_copied(path: Path, out: Path) -> None:
    """Under "commit" the header is ahead of the disk while the sync runs."""
    disk = FaultyDisk()
    taken = []
    with DataStream.open(path, disk=disk) as stream:
        disk.before["commit sync"] = lambda: taken.append(snapshot(path, out))
        with stream.atomic_op() as op:
            op.add_entry(3, b"on its way")
    assert [it.header.total_entries for it in taken] == [3]
    check(out)


def test_while_it_is_written(path: Path, out: Path) -> None:
    """Every copy is a prefix that ends with an operation."""

    def write() -> None:
        with DataStream.open(path, sync="os") as stream:
            for number in range(300):
                with stream.atomic_op() as op:
                    op.add_bookmark(b"%d" % number)
                    op.add_entries(1, [b"%3d" % number * 3000] * 2)

    writer = threading.Thread(target=write)
    writer.start()
    taken = []
    try:
        while writer.is_alive() and len(taken) < 20:
            taken.append((snapshot(path, out).header.total_entries, scan_file(out)))
            out.unlink()
    finally:
        writer.join()
    whole = scan_file(path)
    assert taken
    for count, entries in taken:
        assert count % 3 == 0
        assert entries == whole[:count]


@pytest.mark.parametrize("name", ["boundary", "rollback", "pages", "truncated", "empty"])
def test_files_of_the_reference(golden: Golden, out: Path, name: str) -> None:
    path = golden.unpack(name)
    snapshot(path, out)
    check(out)
    assert header_of(out) == header_of(path)
    assert scan_file(out) == scan_file(path)


# Truncations and updates during the copy.


def before_it_ends(monkeypatch: pytest.MonkeyPatch, *steps: Callable[[], object]) -> list[int]:
    """Run each step between a copy of the data and the check of the epoch after it."""
    real, left, tries = module._copy_data, list(steps), [0]

    def copy(*arguments: Any) -> Any:
        done = real(*arguments)
        tries[0] += 1
        if left:
            left.pop(0)()
        return done

    monkeypatch.setattr(module, "_copy_data", copy)
    return tries


def test_what_changed_is_copied_again(
    path: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with DataStream.open(path) as stream:

        def change() -> None:
            stream.update_entry(1, 1, b"two")
            stream.truncate(2)
            add(stream, [(7, b"new")] * 9, [(7, bytes(LARGEST - 17))] * 3)
            stream.update_entry(3, 7, b"old")

        tries = before_it_ends(monkeypatch, change)
        snapshot(path, out)
        assert tries == [1]
    check(out)
    assert scan_file(out) == scan_file(path)
    assert [entry.data for entry in scan_file(out)][1:4] == [b"two", b"new", b"old"]


def test_after_an_update_the_copy_has_the_stream_s_end(
    path: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There was no moment with the new bytes and without the entries appended before them."""
    with DataStream.open(path) as stream:

        def change() -> None:
            add(stream, [(7, b"appended")])
            stream.update_entry(1, 1, b"two")

        before_it_ends(monkeypatch, change)
        assert snapshot(path, out).header.total_entries == 4
    check(out)
    assert scan_file(out) == scan_file(path)


def test_more_changes_than_the_header_page_names(
    path: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with DataStream.open(path) as stream:

        def change() -> None:
            for number in range(20):
                stream.update_entry(1, 1, b"%03d" % number)

        tries = before_it_ends(monkeypatch, change)
        snapshot(path, out)
        assert tries == [2]
    assert scan_file(out) == scan_file(path)


class Restless:
    """Changes the stream each time a snapshot checks for changes."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, change: Callable[[], object], looks: float = 1e9
    ) -> None:
        self.looks = 0
        real = module.ChangeWatch.look

        def look(watch: module.ChangeWatch) -> None:
            self.looks += 1
            if self.looks <= looks:
                change()
            real(watch)

        monkeypatch.setattr(module.ChangeWatch, "look", look)


@pytest.mark.parametrize("depth", [1, 3])
def test_a_stream_that_is_truncated_all_the_time(
    path: Path, out: Path, monkeypatch: pytest.MonkeyPatch, depth: int
) -> None:
    """The copy ends at the lowest truncation, after which the stream held exactly that."""
    with DataStream.open(path) as stream:
        add(stream, *[[(7, b"%d" % number)] * 3 for number in range(20)])
        before = scan_file(path)

        def change() -> None:
            stream.truncate(stream.total_entries - depth)
            add(stream, [(8, b"another")] * depth)

        restless = Restless(monkeypatch, change)
        count = snapshot(path, out).header.total_entries
        assert restless.looks >= module._ROUNDS
    check(out)
    assert count == len(before) - depth
    assert scan_file(out) == before[:count]


def test_a_stream_that_is_truncated_ever_lower(
    path: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with DataStream.open(path) as stream:
        add(stream, [(7, bytes(number)) for number in range(100)])
        before = scan_file(path)
        Restless(monkeypatch, lambda: stream.truncate(stream.total_entries - 1), looks=60)
        count = snapshot(path, out).header.total_entries
        assert stream.total_entries == len(before) - 60
    check(out)
    assert scan_file(out) == before[:count]


def test_an_append_does_not_repeat_the_copy(
    path: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with DataStream.open(path) as stream:

        def append() -> None:
            with stream.atomic_op() as op:
                op.add_entry(7, b"new")

        tries = before_it_ends(monkeypatch, append)
        assert snapshot(path, out).header.total_entries == 3
        assert tries == [1]


def test_a_stream_that_is_updated_all_the_time(
    path: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with DataStream.open(path) as stream:
        restless = Restless(monkeypatch, lambda: stream.update_entry(1, 1, b"two"))
        with pytest.raises(StreamBusy, match="busy: the stream was truncated or updated") as caught:
            snapshot(path, out)
        assert f"updated {restless.looks} times during 10 tries" in str(caught.value)
    assert list(out.parent.iterdir()) == []


def test_a_change_under_way(path: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PATIENCE_SECONDS", 0)
    disk, outcomes = FaultyDisk(), []
    before = scan_file(path)

    def copy() -> None:
        try:
            snapshot(path, out)
        except StreamFileError as error:
            outcomes.append(str(error))
        else:
            outcomes.append("")
            assert scan_file(out) == before
            out.unlink()

    with DataStream.open(path, disk=disk) as stream:
        disk.before["sync"] = copy
        stream.update_entry(1, 1, b"two")
        disk.before.clear()
        # The last sync is that of the new bytes.
        assert "busy: a truncation or update is under way" in outcomes[-1]
        snapshot(path, out)
    assert scan_file(out)[1].data == b"two"


def test_a_change_that_a_crash_interrupted(path: Path, out: Path) -> None:
    """The next writer undoes it, and until then the bytes may still change."""
    entry = scan_file(path)[2]
    with DataStream.open(path, read_only=True) as stream:
        undo = Undo(
            stream.stream_id,
            stream.epoch,
            stream.header.pack(),
            entry.offset + 17,
            bytes(200),
            b"2" * 200,
        )
    journal.put(OsDisk(), str(path), undo, Access.private())
    with pytest.raises(StreamFileError, match="open it for writing once"):
        snapshot(path, out)
    DataStream.open(path).close()
    snapshot(path, out)
    assert scan_file(out) == scan_file(path)


def test_another_program_truncates(
    golden: Golden, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It keeps no epoch: the header's totals are lower, or the copy's end does not match."""
    path = golden.unpack("small")
    entries = scan_file(path)
    header = path.read_bytes()[16:54]

    def truncate_last() -> None:
        with path.open("r+b") as file:
            file.seek(38)
            file.write(struct.pack(">QQ", entries[5].offset, 5))

    tries = before_it_ends(monkeypatch, truncate_last)
    assert snapshot(path, out).header.total_entries == 5
    assert tries == [2]
    assert header != path.read_bytes()[16:54]
    assert scan_file(out) == entries[:5]


def test_another_program_truncates_and_appends(
    golden: Golden, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its header has higher totals than the first one read, and other bytes before them."""
    path = golden.unpack("small")
    real, tries = module._copy_data, [0]

    def copy(*arguments: Any) -> Any:
        tries[0] += 1
        path.write_bytes(golden.content("duplicates"))
        return real(*arguments)

    assert len(golden.entries("duplicates")) > len(golden.entries("small"))
    monkeypatch.setattr(module, "_copy_data", copy)
    snapshot(path, out)
    assert tries == [2]
    assert header_of(out) == header_of(path)
    assert scan_file(out) == scan_file(path)


def test_damage_beside_a_writer_that_appends(
    path: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a truncation or update a mismatch is damage, however the header moves."""
    with DataStream.open(path) as stream:
        content = bytearray(path.read_bytes())
        with path.open("r+b") as file:
            file.seek(FIRST)
            file.write(b"\x07")
        assert content[FIRST] != 7
        before_it_ends(monkeypatch, *[lambda: add(stream, [(7, b"new")])] * 20)
        with pytest.raises(DamagedEntry):
            snapshot(path, out)


# How the bytes are copied.


def _no(number: int) -> Callable[..., Any]:
    def fail(*_: Any) -> Any:
        raise OSError(number, os.strerror(number))

    return fail


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.EXDEV, errno.EOPNOTSUPP, errno.EINVAL])
def test_a_system_that_cannot_copy(
    path: Path, out: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    monkeypatch.setattr(os, "copy_file_range", _no(number), raising=False)
    assert snapshot(path, out).means == "read and write"
    check(out)
    assert scan_file(out) == scan_file(path)


def test_a_system_that_stops_in_the_middle(
    tmp_path: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make(tmp_path / "stream.bin", [(1, b"\1" * LARGEST)] * 3)
    steps = iter([PAGE, 0])

    def some(source: int, target: int, count: int, at: int, to: int) -> int:
        return os.pwrite(target, os.pread(source, next(steps), at), to)

    monkeypatch.setattr(os, "copy_file_range", some, raising=False)
    assert snapshot(path, out).means == "read and write"
    assert scan_file(out) == scan_file(path)


def test_progress(tmp_path: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make(tmp_path / "stream.bin", [(1, b"\1" * LARGEST)] * 3)
    monkeypatch.setattr(module, "_PART", PAGE)
    monkeypatch.setattr(copy_sums, "_MANY", 1)
    reported: list[tuple[int, int]] = []
    snapshot(path, out, advance=lambda done, total: reported.append((done, total)))
    total = FIRST + 3 * PAGE
    assert reported == [(FIRST + n * PAGE, total) for n in (1, 2, 3, 1, 2)]
    reported.clear()
    snapshot(path, out.with_name("2"), advance=lambda *at: reported.append(at), verify=False)
    assert reported == [(FIRST + n * PAGE, total) for n in (1, 2, 3)]


# Errors.


def test_it_never_replaces_a_file(path: Path, out: Path) -> None:
    out.write_text("another file")
    with pytest.raises(FileExists, match="choose another path"):
        snapshot(path, out)
    with pytest.raises(FileExists):
        snapshot(path, path)
    assert out.read_text() == "another file"
    assert list(out.parent.iterdir()) == [out]


def test_another_process_makes_the_file_first(
    path: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before_it_ends(monkeypatch, lambda: out.write_text("made meanwhile"))
    with pytest.raises(FileExists):
        snapshot(path, out)
    assert out.read_text() == "made meanwhile"
    assert list(out.parent.iterdir()) == [out]


def test_no_stream_to_copy(tmp_path: Path, out: Path) -> None:
    with pytest.raises(FileMissing):
        snapshot(tmp_path / "missing", out)
    (tmp_path / "text").write_text("text")
    with pytest.raises(NotAStream):
        snapshot(tmp_path / "text", out)
    assert list(out.parent.iterdir()) == []


def test_no_folder_for_the_copy(path: Path, tmp_path: Path) -> None:
    with pytest.raises(FileMissing, match="no such folder"):
        snapshot(path, tmp_path / "no" / "out.bin")


@pytest.mark.parametrize("fault", ["write", "sync", "resize"])
def test_a_disk_that_refuses(path: Path, out: Path, fault: str) -> None:
    disk = FaultyDisk()
    disk.faults[fault] = errno.ENOSPC
    with pytest.raises(WriteFailed, match="cannot be made: No space left on device"):
        snapshot(path, out, disk=disk)
    assert list(out.parent.iterdir()) == []


def test_an_interrupt_leaves_nothing(
    path: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    before_it_ends(monkeypatch, interrupt)
    with pytest.raises(KeyboardInterrupt):
        snapshot(path, out)
    assert list(out.parent.iterdir()) == []


def test_it_is_on_disk_before_it_has_its_name(path: Path, out: Path) -> None:
    seen: list[str] = []

    class Watched(FaultyDisk):
        def meet(self, what: str, size: int = 0) -> None:
            seen.append(what)

        def publish(self, temporary: str, path: str) -> None:
            seen.append("publish")
            OsDisk.publish(self, temporary, path)

    snapshot(path, out, disk=Watched())
    named = seen.index("publish") + 1
    assert seen[:named][-4:] == ["sync", "write", "sync", "publish"]


@pytest.fixture
def read_only_file(path: Path) -> Iterator[Path]:
    path.chmod(0o444)
    path.parent.chmod(0o755)
    yield path
    path.chmod(0o644)


def test_a_file_that_is_read_only(read_only_file: Path, out: Path) -> None:
    snapshot(read_only_file, out)
    with DataStream.open(out) as stream:
        assert stream.total_entries == 3
