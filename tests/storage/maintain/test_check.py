"""What `verify` finds; `test_damage.py` tests damaged bytes.

A living writer, the index, entries that were not synced, notes, and its own bounds.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import threading
from pathlib import Path

import pytest

from datastreamer import DataStream
from datastreamer._codec import EntryBatch
from datastreamer.errors import FileMissing, NotAStream, StreamBusy
from datastreamer.storage.bookmarks import audit
from datastreamer.storage.bookmarks.interface import Watermark
from datastreamer.storage.bookmarks.lmdb import LmdbIndex
from datastreamer.storage.disk.access import Access
from datastreamer.storage.disk.file_ops import OsDisk, OsFile
from datastreamer.storage.header import undo_journal as journal
from datastreamer.storage.header.undo_journal import Undo
from datastreamer.storage.maintain import report as report_module
from datastreamer.storage.maintain.check import examine, verify
from datastreamer.storage.maintain.repair import repair
from datastreamer.storage.write.opening import make_sums
from tests.conftest import Golden
from tests.storage.made import (
    BOOKMARK,
    FIRST,
    HEADER,
    PAGE,
    Item,
    add,
    copied,
    half_update,
    header_of,
    make,
    power_cut,
    scan_file,
    trace_of,
)

ONE: list[Item] = [(BOOKMARK, b"k"), (1, b"one")]
TWO: list[Item] = [(2, b"two" * 100), (BOOKMARK, b"k")]
THREE: list[Item] = [(3, b"three"), (BOOKMARK, b"other"), (3, b"")]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A closed stream of seven entries, with its index."""
    return make(tmp_path / "stream.bin", ONE, TWO, THREE)


def has_note(report: report_module.Report, text: str) -> bool:
    return any(text in note for note in report.notes)


def test_a_whole_stream(path: Path) -> None:
    before = trace_of(path.parent)
    report = verify(path)
    assert report.as_dict() == {
        "ok": True,
        "entries": 7,
        "bookmarks": 3,
        "pages": 1,
        "problems": [],
        "notes": [],
    }
    assert trace_of(path.parent) == before


def test_an_empty_stream(tmp_path: Path) -> None:
    report = verify(make(tmp_path / "empty.bin"))
    assert (report.ok, report.entries, report.pages) == (True, 0, 0)


def test_every_golden_file(golden: Golden) -> None:
    """None of them is damaged; each has the counts of a scan."""
    for name in golden.names():
        path = golden.unpack(name)
        report = verify(path)
        assert report.ok, (name, report)
        assert report.entries == header_of(path)[-1] == len(scan_file(path))
        assert has_note(report, "there is no bookmark index")


def test_the_real_stream(real_stream: Path) -> None:
    report = verify(real_stream)
    assert (report.ok, report.entries, report.bookmarks) == (True, 34_723, 11_420)


def test_no_regular_file(tmp_path: Path) -> None:
    with pytest.raises(FileMissing):
        verify(tmp_path / "absent")
    with pytest.raises(NotAStream, match="folder"):
        verify(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(NotAStream, match="pipe"):
        verify(tmp_path / "pipe")


def test_progress(path: Path) -> None:
    reported: list[tuple[int, int]] = []
    verify(path, progress=lambda done, total: reported.append((done, total)))
    total = header_of(path)[-2] - FIRST
    assert reported == [(total, total)]


# Beside a writer.


def test_up_to_what_is_visible(tmp_path: Path) -> None:
    path = tmp_path / "live.bin"
    with DataStream.create(path) as stream:
        assert verify(path).entries == 0
        add(stream, ONE, TWO)
        stream.start_atomic_op()
        stream.add_entry(1, b"not committed")
        report = verify(path)
        assert (report.ok, report.entries, report.problems) == (True, 4, [])
        stream.rollback_atomic_op()
        content = bytearray(path.read_bytes())
        content[FIRST] = 9
        damaged = tmp_path / "damaged.bin"
        damaged.write_bytes(content)
        with DataStream.open(damaged):
            (problem,) = verify(damaged).problems
            assert problem.repair.startswith(
                "a relay and `serve --heal` restore the page once it is read; if not, stop process "
                f"{os.getpid()}, the relay, server or other program that writes this file, then: "
                "run `datastreamer repair "
            )


def test_while_a_writer_is_busy(tmp_path: Path) -> None:
    """No commit, truncation or update of a healthy writer looks like damage."""
    path = tmp_path / "busy.bin"
    ending = threading.Event()
    with DataStream.create(path, sync="os") as stream:
        add(stream, *[[(BOOKMARK, b"%d" % n), (1, b"x" * 5000)] for n in range(300)])

        def write() -> None:
            n = 0
            while not ending.is_set():
                add(stream, [(BOOKMARK, b"%d" % n), (1, b"y" * (n % 7000))])
                n += 1
                if n % 40 == 0:
                    stream.truncate(stream.total_entries - 60)
                if n % 25 == 0:
                    stream.update_entry(101, 1, b"%d" % (n % 10) * 5000)

        writer = threading.Thread(target=write)
        writer.start()
        try:
            reports = [verify(path) for _ in range(20)]
        finally:
            ending.set()
            writer.join()
    assert [report.problems for report in reports] == [[]] * 20
    assert [report for report in reports if report.entries < 400] == []


def test_pages_that_are_updated_in_each_pass(tmp_path: Path) -> None:
    """The commit record has the chain from before the update of a page that is read later."""
    path, left = tmp_path / "busy.bin", 2
    with DataStream.create(path, index="memory", sync="os") as stream:
        add(stream, *[[(1, b"x" * 500_000)]] * 7)

        def change(done: int, size: int) -> None:
            nonlocal left
            if left and done < 2 << 20:
                left -= 1
                stream.update_entry(5, 1, bytes([left]) * 500_000)

        assert verify(path, progress=change).problems == []
    assert left == 0


def test_a_file_that_is_truncated_all_the_time(tmp_path: Path) -> None:
    """The entries that no truncation removed are checked, and the report names their end."""
    path, looks = tmp_path / "busy.bin", []
    with DataStream.create(path, index="memory") as stream:
        add(stream, ONE, TWO, THREE)

        def change(done: int, size: int) -> None:
            looks.append(done)
            stream.truncate(2)
            add(stream, TWO, THREE)

        report = verify(path, progress=change)
        assert report.ok
        assert has_note(report, "entries from 2 on were truncated while they were checked")
        assert report.entries == 2
        assert len(looks) == 2
        assert verify(path).entries == stream.total_entries


@pytest.mark.parametrize("damaged", [0, 1])
def test_damage_in_a_file_that_is_truncated_all_the_time(tmp_path: Path, damaged: int) -> None:
    path = tmp_path / "busy.bin"
    with DataStream.create(path, index="memory") as stream:
        add(stream, *[[(number, bytes(600_000))] for number in (1, 2, 3)])

        def change(done: int, size: int) -> None:
            stream.truncate(2)
            add(stream, [(4, bytes(done % 1000))])

        with path.open("r+b") as file:
            file.seek(FIRST + damaged * PAGE)
            file.write(b"\x07")
        problems = verify(path, progress=change).problems
        assert f"byte {FIRST + damaged * PAGE}" in [problem.where for problem in problems]


def test_a_file_that_is_truncated_ever_lower(tmp_path: Path) -> None:
    """That is not damage, but it is not known to be whole either."""
    path = tmp_path / "busy.bin"
    with DataStream.create(path, index="memory") as stream:
        add(stream, [(1, b"x")] * 100)

        def change(done: int, size: int) -> None:
            stream.truncate(stream.total_entries - 1)

        with pytest.raises(StreamBusy, match=r"busy: .*truncated or updated 10 times during 10"):
            verify(path, progress=change)


def test_updates_do_not_repeat_the_check(tmp_path: Path) -> None:
    path, looks = tmp_path / "busy.bin", []
    with DataStream.create(path) as stream:
        add(stream, ONE, TWO, THREE)
        number = next(entry.number for entry in scan_file(path) if entry.type != BOOKMARK)
        old = stream.entry(number)

        def change(done: int, size: int) -> None:
            looks.append(done)
            stream.update_entry(number, old.type, bytes(reversed(old.data)))

        report = verify(path, progress=change)
        assert (report.ok, report.entries, len(looks)) == (True, stream.total_entries, 1)


@pytest.mark.parametrize("step", ["remove", "clear"])
def test_an_index_that_is_truncated_meanwhile(
    tmp_path: Path, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The index is truncated before the stream, and an empty one is filled again."""
    path, real = tmp_path / "busy.bin", audit.IndexAudit.feed
    with DataStream.create(path) as stream:
        add(stream, [(BOOKMARK, b"one")], [(BOOKMARK, b"two")], [(BOOKMARK, b"three")])
        stream.bookmarks.wait()
        index, passes = stream.bookmarks.trusted.index, []
        assert index is not None

        def feed(self: audit.IndexAudit, page: int, batch: EntryBatch) -> None:
            passes.append(batch)
            if len(passes) == 1 and step == "remove":
                mark = Watermark(stream.reader.cursor(1).offset, 1, b"")
                index.remove([(b"two", 1), (b"three", 2)], mark)
            elif len(passes) == 1:
                index.clear()
            real(self, page, batch)

        monkeypatch.setattr(audit.IndexAudit, "feed", feed)
        report = verify(path)
        assert len(passes) == 2
        assert report.problems == []


# Entries that may not be on disk.


def in_the_middle(tmp_path: Path) -> Path:
    path = tmp_path / "open.bin"
    with DataStream.create(path, index="memory") as stream:
        add(stream, ONE, TWO, THREE)
        return copied(path, "found.bin")


@pytest.mark.parametrize("boot", ["same", "another"])
def test_an_unsynced_tail(tmp_path: Path, boot: str) -> None:
    path = in_the_middle(tmp_path)
    if boot == "another":
        path = power_cut(path, tmp_path / "cut.bin")
    report = verify(path)
    assert report.ok
    assert has_note(report, "entries 4 to 6 were not yet known to be on disk; they are whole")


@pytest.mark.parametrize("boot", ["same", "another"])
def test_a_flipped_bit_that_a_hash_covers(tmp_path: Path, boot: str) -> None:
    path = in_the_middle(tmp_path)
    content = bytearray(path.read_bytes())
    at = content.index(b"three")
    content[at] ^= 1
    path.write_bytes(content)
    if boot == "another":
        path = power_cut(path, tmp_path / "cut.bin")
    report = verify(path)
    (problem,) = report.problems
    assert problem.where == f"byte {scan_file(path)[4].offset}"
    assert "entries 4 to 6 are not what was committed" in problem.what
    assert problem.repair == "the next open for writing, or repair, truncates to 4 entries"


# Another program.


def as_another_program(path: Path, entries: int) -> None:
    """Truncate as a program does that keeps no records."""
    content = bytearray(path.read_bytes())
    fields = HEADER.unpack_from(content, 16)
    HEADER.pack_into(content, 16, *fields[:5], scan_file(path)[entries].offset, entries)
    path.write_bytes(content)


def test_a_header_of_another_program(path: Path) -> None:
    as_another_program(path, 4)
    report = verify(path)
    assert (report.ok, report.entries) == (True, 4)
    assert has_note(report, "keeps no commit record")
    assert has_note(report, "belongs to another file, or another program has changed")
    assert has_note(report, "bytes after the end")


def test_pages_that_another_program_may_have_changed(tmp_path: Path) -> None:
    path = make(tmp_path / "s.bin", *[[(1, bytes(600_000))] for _ in range(4)])
    as_another_program(path, 3)
    with path.open("r+b") as file:
        for page in (0, 1):
            file.seek(FIRST + page * PAGE + 100)
            file.write(b"changed")
    report = verify(path)
    assert report.ok
    assert has_note(report, "do not match their checksums (pages 0, 1) were changed by it or are")


@pytest.mark.parametrize("at", [70, 100, 250])
def test_a_damaged_commit_record(path: Path, at: int) -> None:
    """It has the checksum of the last page."""
    content = bytearray(path.read_bytes())
    content[at] ^= 4
    path.write_bytes(content)
    report = verify(path)
    (problem,) = report.problems
    run = f"run `datastreamer repair {path} --from HOST:PORT`"
    assert problem.repair == f"{run}: it writes the records again; entries stay as they are"
    assert has_note(report, "the last page was checked only by its form: its checksum is in the")
    repair(path)
    assert not has_note(verify(path), "only by its form")


def test_odd_bookmarks_are_not_damage(path: Path) -> None:
    """Entries of the bookmarks' type with other lengths are legal from elsewhere."""
    content = bytearray(path.read_bytes())
    (entry,) = [it for it in scan_file(path) if it.data == b"two" * 100]
    content[entry.offset + 5 : entry.offset + 9] = BOOKMARK.to_bytes(4, "big")
    path.write_bytes(content)
    make_sums(path, accept=True)
    report = verify(path)
    assert (report.ok, report.bookmarks) == (True, 3)
    assert has_note(report, "1 entries have the bookmarks' type")


# The index.


def index_of(path: Path) -> Path:
    return Path(f"{path}.index")


Pairs = list[tuple[bytes, int]]


def change_index(path: Path, *, add: Pairs, remove: Pairs) -> None:
    index = LmdbIndex(str(index_of(path)), True, Access.private())
    mark = index.watermark()
    assert mark is not None
    index.remove(remove, mark)
    index.add(add, mark)
    index.close()


def test_no_index(path: Path) -> None:
    shutil.rmtree(index_of(path))
    report = verify(path)
    assert report.ok
    assert has_note(report, "there is no bookmark index")


def test_a_lagging_index(path: Path, tmp_path: Path) -> None:
    shutil.copytree(index_of(path), tmp_path / "kept")
    with DataStream.open(path) as stream:
        add(stream, ONE)
    shutil.rmtree(index_of(path))
    shutil.copytree(tmp_path / "kept", index_of(path))
    report = verify(path)
    assert report.ok
    assert has_note(report, "the bookmark index lags by 2 entries")


def test_the_index_of_another_file(path: Path, tmp_path: Path) -> None:
    other = make(tmp_path / "other.bin", ONE, TWO, THREE)
    shutil.rmtree(index_of(path))
    shutil.copytree(index_of(other), index_of(path))
    report = verify(path)
    assert report.ok
    assert has_note(report, "belongs to another file")


def test_an_index_that_lacks_a_bookmark(path: Path) -> None:
    change_index(path, add=[], remove=[(b"k", 3)])
    (problem,) = verify(path).problems
    assert problem.where == str(index_of(path))
    assert problem.what == "the index lacks entry 3 for the bookmark 0x6b"
    assert problem.repair == f"run `datastreamer reindex {path}`"


@pytest.mark.parametrize(("key", "n"), [(b"k", 1), (b"new", 0), (b"k", 6), (b"k", 99)])
def test_an_index_with_a_wrong_bookmark(path: Path, key: bytes, n: int) -> None:
    change_index(path, add=[(key, n)], remove=[])
    (problem,) = verify(path).problems
    assert problem.what == f"the index wrongly lists entry {n} for the bookmark 0x{key.hex()}"


@pytest.fixture
def paged(tmp_path: Path) -> Path:
    """Four pages with two bookmarks each."""
    folder = tmp_path / "paged"
    folder.mkdir()
    sizes = 400_000, PAGE - 400_000 - 4 * 17 - 2 * 5 - 9
    marks = [[(BOOKMARK, b"key %d" % n), (1, bytes(sizes[n % 2]))] for n in range(8)]
    return make(folder / "s.bin", *marks)


def change_key(path: Path, number: int) -> None:
    """Change a bookmark's key in the file; the inode stays."""
    with path.open("r+b") as file:
        file.seek(scan_file(path)[number].offset + 17)
        file.write(b"K")


@pytest.mark.parametrize("page", [0, 1, 3])
def test_bookmarks_in_a_damaged_page(paged: Path, page: int) -> None:
    """The index has them, and the file does not: that is no fault of the index."""
    change_key(paged, 4 * page)
    report = verify(paged)
    (problem,) = report.problems
    assert problem.what.startswith(f"page {page} (entries {4 * page} to {4 * page + 3}): ")
    assert has_note(report, f"the bookmarks in page {page} were not compared with the index")
    done = repair(paged)
    assert (done.plan.steps, done.plan.lost) == ([], [(4 * page, 4 * page + 4)])
    with DataStream.open(paged, read_only=True) as stream:
        assert stream.bookmarks.newest(b"key %d" % (2 * page)) == 4 * page


def test_a_wrong_index_beside_damaged_pages(paged: Path) -> None:
    for page in (0, 2):
        change_key(paged, 4 * page)
    change_index(paged, add=[(b"new", 5), (b"new", 9)], remove=[(b"key 3", 6), (b"key 5", 10)])
    report = verify(paged)
    assert [it.what for it in report.problems if "index" in it.what] == [
        "the index lacks entry 6 for the bookmark 0x6b65792033",
        "the index wrongly lists entry 5 for the bookmark 0x6e6577",
    ]
    assert has_note(report, "the bookmarks in pages 0, 2 were not compared with the index")


def test_an_index_that_lacks_one_and_has_a_wrong_one(path: Path) -> None:
    change_index(path, add=[(b"k", 2)], remove=[(b"k", 3)])
    assert len(verify(path).problems) == 2


def test_an_index_with_many_wrong_bookmarks(path: Path, monkeypatch) -> None:
    monkeypatch.setattr(audit, "_MAX_PROBLEMS", 4)
    change_index(path, add=[(b"new", n) for n in range(10)], remove=[])
    report = verify(path)
    assert len(report.problems) == 4
    assert has_note(report, "6 more problems")


def test_an_index_with_a_flipped_bit(path: Path) -> None:
    data = index_of(path) / "data.mdb"
    content = bytearray(data.read_bytes())
    at = -1
    while (at := content.find(b"\x01k" + bytes(7), at + 1)) >= 0:  # in each state
        content[at + 1] ^= 1
    data.write_bytes(content)
    (problem,) = verify(path).problems
    assert "the checksum of a block does not match" in problem.what
    assert problem.repair == f"run `datastreamer reindex {path}`"


@pytest.mark.parametrize("damage", ["zeros", "cut", "text"])
def test_an_index_that_cannot_be_read(path: Path, damage: str) -> None:
    data = index_of(path) / "data.mdb"
    size = data.stat().st_size
    if damage == "cut":
        os.truncate(data, 8192)
    else:
        data.write_bytes(bytes(size) if damage == "zeros" else b"no index" * 1000)
    report = verify(path)
    assert [problem.repair for problem in report.problems] == [f"run `datastreamer reindex {path}`"]
    assert report.entries == 7


# Limits.


def test_an_update_under_way_is_a_note(path: Path) -> None:
    undo = Undo(bytes(16), 0, bytes(38), 4096, b"old", b"new")
    journal.put(OsDisk(), str(path), undo, Access.private())
    report = verify(path)
    assert report.ok
    assert has_note(report, "an update was under way")


def test_half_an_update(path: Path) -> None:
    with DataStream.open(path) as stream:
        add(stream, [(1, b"o" * 2000)])
    entry = scan_file(path)[-1]
    half_update(path, entry.offset + 17, b"o" * 2000, b"n" * 2000)
    (problem,) = verify(path).problems
    assert problem.where == f"byte {entry.offset + 17}"
    assert "half of an update" in problem.what
    assert problem.repair.startswith("repair")


def test_it_continues_with_the_next_page(tmp_path: Path) -> None:
    path = make(tmp_path / "pages.bin", [(1, b"x" * 400_000) for _ in range(20)])
    content = bytearray(path.read_bytes())
    for page in (1, 4, 5):
        content[FIRST + page * PAGE] = 9
    path.write_bytes(content)
    report = verify(path)
    assert [(problem.where, problem.what.split("; ")[1]) for problem in report.problems] == [
        (f"byte {FIRST + PAGE}", "entries 2 to 3 cannot be read"),
        (f"byte {FIRST + 4 * PAGE}", "entries 8 to 9 cannot be read"),
        (f"byte {FIRST + 5 * PAGE}", "entries 10 to 11 cannot be read"),
    ]
    assert report.entries == 14
    run = f"run `datastreamer repair {path} --from HOST:PORT`"
    helps = f"{run}: it restores the page from a server of the same stream"
    assert {problem.repair for problem in report.problems} == {helps}


def test_the_number_of_problems_is_limited(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(report_module, "_MOST_PROBLEMS", 2)
    path = make(tmp_path / "pages.bin", [(1, b"x" * 600_000) for _ in range(6)])
    content = bytearray(path.read_bytes())
    for page in range(5):
        content[FIRST + page * PAGE] = 9
    path.write_bytes(content)
    report = verify(path)
    assert len(report.problems) == 2
    assert has_note(report, "3 more problems")


class Unreadable(OsFile):
    """A disk with a bad sector in its second page."""

    def read(self, size: int, offset: int) -> bytes:
        if offset <= FIRST + PAGE + 5 < offset + size:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return super().read(size, offset)


def test_a_page_that_the_system_cannot_read(tmp_path: Path) -> None:
    path = make(tmp_path / "pages.bin", [(1, b"x" * 600_000) for _ in range(3)])
    file = Unreadable(os.open(path, os.O_RDONLY))
    try:
        report = examine(file, str(path), OsDisk()).report
    finally:
        file.close()
    (problem,) = report.problems
    assert problem.where == f"byte {FIRST + PAGE}"
    assert "cannot read the page: Input/output error; entries 1 to 2 cannot be read" in problem.what
    assert problem.repair.startswith(
        "none: restore from a copy, or copy the stream from a server: "
    )


@pytest.mark.skipif(os.geteuid() != 0, reason="gives an index to another user: needs root")
@pytest.mark.parametrize("live", [False, True])
@pytest.mark.parametrize("kind", ["pipe", "folder"])
def test_an_index_of_another_user_is_no_problem(tmp_path: Path, kind: str, live: bool) -> None:
    """It is not read, whatever its content."""
    path = make(tmp_path / "s.bin", [(1, b"x")], index="memory")
    folder = tmp_path / "s.bin.index"
    folder.mkdir()
    data = folder / "data.mdb"
    if kind == "pipe":
        os.mkfifo(data)
    else:
        data.mkdir()
    for each in (folder, data):
        os.chown(each, 4000, 4000)
    with contextlib.ExitStack() as stack:
        if live:
            stack.enter_context(DataStream.open(path, index="memory"))
        report = verify(path)
    assert report.problems == []
    assert any("belongs to user 4000" in note for note in report.notes)
