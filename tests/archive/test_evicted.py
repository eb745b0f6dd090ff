"""Files whose first pages are in their archive alone."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from datastreamer import DataStream
from datastreamer.archive import eviction, options
from datastreamer.archive.beside import archiving
from datastreamer.cli.main import main
from datastreamer.errors import EvictedEntry
from datastreamer.format import MAGIC, PAGE_SIZE, page_start
from datastreamer.storage.bookmarks.builder import IndexBuilder
from datastreamer.storage.bookmarks.keeper import bookmarks_of
from datastreamer.storage.header.page import HeaderPage
from datastreamer.storage.objects.manifest import Row
from datastreamer.storage.objects.opened import OpenArchive
from datastreamer.storage.read.evicted import EvictedPages
from datastreamer.storage.stream import _open_streams
from datastreamer.storage.write.background import Syncer
from datastreamer.storage.write.floor import Floor
from tests.archive.evicting import (
    entries,
    everything,
    evict,
    fields,
    marked_copy,
    pushed,
)
from tests.archive.stores import fill


def test_all_entries_are_read(marked: Path, twin: Path) -> None:
    assert os.stat(marked).st_blocks * 512 <= os.stat(twin).st_size - 6 * PAGE_SIZE + 65536
    page = HeaderPage(marked.read_bytes()[:4096])
    assert page.marked
    assert page.evicted is not None
    assert page.evicted.floor == 6
    assert marked.read_bytes()[4096 : page_start(6)] == bytes(6 * PAGE_SIZE)
    assert entries(marked) == entries(twin)
    with DataStream.open(marked, read_only=True) as stream:
        floor = stream.floor
        assert stream.reader.cursor(floor).offset == page_start(6)
    with DataStream.open(twin, read_only=True) as stream:
        assert stream.floor == 0
        assert stream.reader.cursor(floor).offset == page_start(6)


def test_a_reader_from_before_the_mark(twin: Path, tmp_path: Path, url: str) -> None:
    """It reads no zeros, though it never looks at the header again."""
    path = marked_copy(twin, tmp_path / "marked" / "s.bin", url)
    with (
        DataStream.open(path, read_only=True) as still,
        DataStream.open(path, follow=True) as follower,
        DataStream.open(path, sync="os") as stream,
    ):
        wanted = everything(stream)
        assert still.entry(5) == follower.entry(5)
        evict(stream, url, 4)
        assert everything(stream) == everything(still) == everything(follower) == wanted
        for reader in (stream, still, follower):
            for number in range(0, stream.total_entries, 7):
                assert fields(reader.entry(number)) == wanted[number]
        evict(stream, url, 7)
        fill(stream, 1)
        follower.refresh()
        assert everything(follower) == everything(stream)


def test_without_its_archive(marked: Path, twin: Path, tmp_path: Path) -> None:
    (tmp_path / "archive").rename(tmp_path / "away")
    wanted = entries(twin)
    with DataStream.open(marked, read_only=True) as stream:
        for number in (0, 5):
            with pytest.raises(
                EvictedEntry, match=f"entry {number} is in the stream's archive alone"
            ):
                stream.entry(number)
        last = len(wanted) - 1
        assert fields(stream.entry(last)) == wanted[last]
    # It is written as before.
    with DataStream.open(marked) as stream:
        number = stream.append(2, b"more")
        assert stream.entry(number).data == b"more"
    (tmp_path / "away").rename(tmp_path / "archive")
    assert entries(marked)[:-1] == wanted


@pytest.mark.parametrize("verify", ["never", "cold"])
@pytest.mark.parametrize("sums", [True, False])
def test_an_archive_with_another_history(
    verify: Any, sums: bool, marked: Path, twin: Path, tmp_path: Path, url: str
) -> None:
    """It was taken over, and what it had before is pruned: its pages are not the file's."""
    other, kept = tmp_path / "other.bin", entries(twin)
    with DataStream.open(twin, read_only=True) as stream:
        stream.snapshot(other)
    with DataStream.open(other, sync="os") as stream:
        stream.truncate(5)
        fill(stream, 8, seed=99)
    pushed(other, url, takeover=True)
    for manifest in sorted((tmp_path / "archive" / "m").iterdir())[:-1]:
        manifest.unlink()
    if not sums:
        marked.with_name("s.bin.sums").unlink()
    for _ in range(2):
        with DataStream.open(marked, read_only=True, verify=verify) as stream:
            for number in (0, 5, 60):
                with pytest.raises(EvictedEntry, match="has no history"):
                    stream.entry(number)
            assert [fields(each) for each in stream.entries(stream.floor)] == kept[stream.floor :]
        assert main(["archive", "restore", url, str(marked), "--in-place"]) == 1


COMMANDS = [
    *("cat {} --json", "cat {} --from 3 --to 9", "tail {} -n 3", "entry {} 4", "verify {}"),
    *("export {} {out}", "bookmark {} 0x39393030", "sums {}", "reindex {}"),
]


def test_snapshots(marked: Path, twin: Path, tmp_path: Path) -> None:
    copy, whole = tmp_path / "copy.bin", tmp_path / "whole.bin"
    assert main(["snapshot", str(marked), str(copy)]) == 0
    assert main(["snapshot", str(marked), str(whole), "--whole"]) == 0
    assert entries(copy) == entries(whole) == entries(twin)
    assert copy.read_bytes()[4096 : page_start(6)] == bytes(6 * PAGE_SIZE)
    assert whole.read_bytes()[:16] == MAGIC
    for path in (copy, whole):
        assert main(["verify", str(path)]) == 0
    with DataStream.open(copy) as stream:
        assert stream.append(2, b"more") == len(entries(twin))


def test_every_command(
    marked: Path, twin: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for words in COMMANDS:
        said = []
        for path in (twin, marked):
            out = path.with_name("out")
            code = main([each.format(path, out=out) for each in words.split()])
            text = [each.replace(str(path.parent), "") for each in capfd.readouterr()]
            said.append((code, *text))
        assert said[0] == said[1]


@pytest.mark.parametrize("page", [0, 2, 5])
def test_a_truncation_to_below_the_floor(page: int, marked: Path, twin: Path) -> None:
    for path in (marked, twin):
        with DataStream.open(path, sync="os") as stream:
            stream.truncate(page * 44 + 7)
            assert stream.parts.pages.floor_page <= page
            fill(stream, 2.5, seed=3)
            stream.truncate(stream.total_entries - 3)
            stream.append(2, b"more")
    assert entries(marked) == entries(twin)


def _without(monkeypatch: pytest.MonkeyPatch, archive: Path, locks: list[bool]) -> None:
    """A change fetches what it needs first: then the archive goes, and until then nobody has to
    wait."""
    read, opened = Floor._read, EvictedPages._opened

    def read_last(self: Floor, page: int) -> bytes:
        found = read(self, page)
        archive.rename(archive.with_name("away"))
        return found

    def opened_without_lock(self: EvictedPages) -> Any:
        locks.extend(each._writer.owned.lock._is_owned() for each in _open_streams if each._writer)
        return opened(self)

    monkeypatch.setattr(Floor, "_read", read_last)
    monkeypatch.setattr(EvictedPages, "_opened", opened_without_lock)


@pytest.mark.parametrize("page", [0, 1, 2, 3, 4])
def test_a_truncation_whose_archive_goes(
    page: int, marked: Path, twin: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    locks: list[bool] = []
    # The index asks for nothing before.
    monkeypatch.setattr(IndexBuilder, "start", lambda self, **_: None)
    with (
        DataStream.open(marked, sync="os", index="memory") as stream,
        DataStream.open(twin, sync="os") as other,
    ):
        number = other.reader.first_number(page) + 1
        with monkeypatch.context() as patches:
            _without(patches, tmp_path / "archive", locks)
            stream.truncate(number)
        other.truncate(number)
        for each in (stream, other):
            each.append(2, b"more")
            assert each.parts.pages.floor_page <= page
        assert locks
        assert not any(locks)
        (tmp_path / "away").rename(tmp_path / "archive")
        assert everything(stream) == everything(other)


def test_the_index_after_a_truncation_whose_archive_goes(
    marked: Path, twin: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A truncation needs its last page only; the index is made once the archive answers."""
    with DataStream.open(marked, sync="os") as stream, DataStream.open(twin, sync="os") as other:
        stream.bookmarks.wait()
        with monkeypatch.context() as patches:
            _without(patches, tmp_path / "archive", [])
            stream.truncate(100)
        other.truncate(100)
        for each in (stream, other):
            with each.atomic_op() as op:
                op.add_bookmark(b"late")
            assert each.bookmark(b"late") == 100
        (tmp_path / "away").rename(tmp_path / "archive")
        time.sleep(2.1)  # it is not asked again before
        assert everything(stream) == everything(other)
        stream.bookmarks.wait()
        assert stream.bookmarks.lag() <= 1
        for key, number in bookmarks_of(other.batches()).items():
            assert stream.bookmark(key) == number


def test_checksums_are_made_once_the_archive_answers(
    marked: Path, twin: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    marked.with_name("s.bin.sums").unlink()
    marked.with_name("s.bin.pages").unlink()
    (tmp_path / "archive").rename(tmp_path / "away")
    asked: list[float] = []
    monkeypatch.setattr(Syncer, "request", lambda self, seconds=0.0, **_: asked.append(seconds))
    with DataStream.open(marked) as stream:
        completer = stream._ensure_writable().sums_completer
        completer._take_turn()  # its thread must not end
        assert asked[-1] > asked[0]
        (tmp_path / "away").rename(tmp_path / "archive")
        time.sleep(2.1)  # it is not asked again before
        while completer.incomplete(stream._ensure_writable().end.sums.page):
            completer._take_turn()
        assert everything(stream) == entries(twin)
        assert stream.parts.pages.chain_before(6) == stream.parts.pages.mark.chain
    assert main(["verify", str(marked)]) == 0


def test_an_update_waits_without_the_lock(
    marked: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    locks: list[bool] = []
    # It would open the archive.
    monkeypatch.setattr(IndexBuilder, "start", lambda self, **_: None)
    with DataStream.open(marked, sync="os") as stream:
        old = next(each for each in entries(marked) if each[0] > stream.floor - 20 and each[1] == 2)
        _without(monkeypatch, tmp_path / "archive", locks)
        stream.update_entry(old[0], 2, b"x" * len(old[2]))
        assert stream.entry(old[0]).data == b"x" * len(old[2])
    assert locks
    assert not any(locks)


def test_a_truncation_to_nothing(marked: Path, twin: Path) -> None:
    with DataStream.open(marked) as stream:
        stream.truncate(0)
        stream.append(2, b"first")
    assert marked.read_bytes()[:16] == MAGIC
    assert [data for _, _, data in entries(marked)] == [b"first"]


@pytest.mark.parametrize("number", [3, 100, 200])
def test_an_update_of_an_evicted_entry(number: int, marked: Path, twin: Path) -> None:
    for path in (marked, twin):
        with DataStream.open(path, sync="os") as stream:
            while stream.entry(number).type == 176 or not stream.entry(number).data:
                number += 1
            before = stream.entry(number)
            stream.update_entry(number, before.type, b"x" * len(before.data))
            fill(stream, 1, seed=5)
    assert entries(marked) == entries(twin)
    with DataStream.open(marked, sync="os") as stream:
        assert stream.parts.pages.floor_page <= number // 40


def test_a_restore_without_the_first_pages(marked: Path, twin: Path, url: str) -> None:
    made = marked.with_name("made.bin")
    command = ["archive", "restore", url, str(made)]
    assert main([*command, "--from-page", "99"]) == 1
    assert main([*command, "--from-page", "5"]) == 0
    assert made.read_bytes()[4096 : page_start(5)] == bytes(5 * PAGE_SIZE)
    assert entries(made) == entries(twin)
    assert main(["verify", str(made)]) == 0
    with DataStream.open(made) as stream:
        stream.bookmarks.wait()
        assert stream.parts.pages.floor_page == 5
        assert stream.append(2, b"more") == len(entries(twin))


def test_a_restore_in_place(
    marked: Path, twin: Path, url: str, capfd: pytest.CaptureFixture[str]
) -> None:
    command = ["archive", "restore", url, str(marked), "--in-place"]
    assert main(command) == 0
    assert "6 pages fetched" in capfd.readouterr().err
    page = HeaderPage(marked.read_bytes()[:4096])
    assert page[:16] == MAGIC
    assert page.record is not None
    assert not page.marked
    assert page.floor == 0
    assert entries(marked) == entries(twin)
    assert main(["verify", str(marked)]) == 0
    assert main(command) == 0
    assert "0 pages fetched" in capfd.readouterr().err
    assert main([*command, "--to-entry", "3"]) == 2
    # What is left of the mark is repaired like the other records.
    with marked.open("r+b") as file:
        file.seek(1664 + 60)
        file.write(b"\xff")
    assert main(["verify", str(marked)]) == 3
    assert main(["repair", str(marked), "--yes"]) == 0
    assert main(["verify", str(marked)]) == 0
    assert entries(marked) == entries(twin)


def test_retention(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages are evicted while entries are appended and read, by other processes too."""
    monkeypatch.setattr(eviction, "_BATCH", 2)
    monkeypatch.setattr(eviction, "_NEVER", 3)
    monkeypatch.setattr(eviction, "_SETTLE_SECONDS", 0.05)
    monkeypatch.setattr(options, "LEAST_RETENTION", 1)
    path, url = tmp_path / "s.bin", (tmp_path / "archive").as_uri()
    chosen = options.ArchiveOptions(url, interval=0.1, local_retention=4 * PAGE_SIZE)
    with DataStream.create(path, sync="os") as stream:
        with archiving(stream, chosen):
            for seed in range(12):
                fill(stream, 1, seed)
            wanted = everything(stream)
            until = time.monotonic() + 60
            while stream.parts.pages.floor_page < 9:
                assert time.monotonic() < until
                time.sleep(0.05)
                assert everything(stream) == wanted
        assert os.stat(path).st_blocks * 512 < 8 * PAGE_SIZE
        assert everything(stream) == wanted
    with DataStream.open(path, sync="os") as stream, archiving(stream, chosen):
        fill(stream, 2, 99)
        until = time.monotonic() + 60
        while stream.parts.pages.floor_page < 11:
            assert time.monotonic() < until
            time.sleep(0.05)
        assert everything(stream)[: len(wanted)] == wanted


@pytest.mark.parametrize("updated", [False, True])
def test_an_index_is_made_from_the_archive(
    updated: bool, twin: Path, tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From its lists of bookmarks; after an update some rows name a part of an object, whose pages
    are read."""
    path = tmp_path / "marked" / "s.bin"
    path.parent.mkdir()
    with DataStream.open(twin, read_only=True) as stream:
        stream.snapshot(path)
    pushed(path, url, segment_pages=2)
    with DataStream.open(path, sync="os") as stream:
        if updated:
            number = stream.reader.first_number(3) + 2
            before = stream.entry(number)
            assert not before.is_bookmark
            stream.update_entry(number, before.type, bytes(len(before.data)))
            pushed(path, url, segment_pages=2)
        evict(stream, url, 6)
    shutil.rmtree(path.with_name("s.bin.index"))
    asked: list[tuple[int, int]] = []
    whole = OpenArchive.fetched

    def fetched(self: OpenArchive, row: Row, first: int, stop: int, **last: bool) -> Any:
        asked.append((first, stop))
        return whole(self, row, first, stop, **last)

    monkeypatch.setattr(OpenArchive, "fetched", fetched)
    with DataStream.open(twin, read_only=True) as old, DataStream.open(path) as stream:
        stream.bookmarks.wait()
        # Page 3 has an object of its own, and page 2 a part of one.
        assert asked == ([(2, 3)] if updated else [])
        wanted = bookmarks_of(old.reader.batches(0))
        assert len(stream.bookmarks) == len(wanted)
        for key, number in wanted.items():
            assert stream.bookmarks.newest(key) == number


@pytest.mark.parametrize(
    "how",
    ["below the floor", "at the floor", "after an update", "after all came back", "old folder"],
)
def test_a_truncation_after_an_index_was_made_from_the_archive(
    how: str, tmp_path: Path, url: str
) -> None:
    """Its lists have the newest entry of a key in each segment; a truncation leaves an older one,
    which is found again."""
    path = tmp_path / "s.bin"
    with DataStream.create(path, sync="os") as stream:
        for seed in range(30):
            with stream.atomic_op() as op:
                op.add_bookmark(b"again")
            fill(stream, 0.3, seed)
        again = [number for key, number in keys(stream) if key == b"again"]
    pushed(path, url, segment_pages=4)
    with DataStream.open(path, sync="os") as stream:
        evict(stream, url, 8)
    index = path.with_name("s.bin.index")
    shutil.rmtree(index)
    with DataStream.open(path) as stream:
        stream.bookmarks.wait()
        assert stream.bookmark(b"again") == again[-1]
        floor = stream.floor
    shutil.copytree(index, tmp_path / "kept")
    assert main(["verify", str(path)]) == 0
    if how in ("after all came back", "old folder"):
        assert main(["archive", "restore", url, str(path), "--in-place"]) == 0
    if how == "old folder":
        # As after a power cut that takes what was removed back.
        shutil.rmtree(index)
        (tmp_path / "kept").rename(index)
    with DataStream.open(path) as stream:
        if how == "after an update":
            number = again[0] + 1
            stream.update_entry(number, 2, bytes(len(stream.entry(number).data)))
        elif how == "at the floor":
            stream.truncate(floor)
            again = [number for number in again if number < floor]
            stream.bookmarks.wait()
        elif how != "below the floor":
            stream.bookmarks.wait()
        for at in range(len(again) - 2, 0, -3):
            stream.truncate(again[at] + 1)
            assert stream.bookmark(b"again") == again[at]
            stream.truncate(again[at])
            assert stream.bookmark(b"again") == again[at - 1]
        stream.bookmarks.wait()
        assert sorted(keys(stream)) == sorted(stream.bookmarks.trusted.index.everything())


def test_an_index_stays_when_its_file_is_evicted(
    twin: Path, tmp_path: Path, url: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    with DataStream.open(marked_copy(twin, tmp_path / "s.bin", url, 3, 5)) as stream:
        assert stream.bookmarks.trusted.indexed.entries == stream.total_entries
    assert "rebuilt" not in caplog.text


def keys(stream: DataStream) -> list[tuple[bytes, int]]:
    return [pair for batch in stream.batches() for pair in batch.bookmarks()]
