"""The chain in the commit record decides whose checksums those beside a stream are."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import pytest

from datastreamer import DataStream
from datastreamer.errors import DamagedEntry, DamagedPage
from datastreamer.storage.maintain.check import verify
from datastreamer.storage.maintain.repair import Sources, repair
from datastreamer.storage.maintain.snapshot import snapshot
from datastreamer.storage.pages.sidecar import SumsFile
from datastreamer.storage.write.opening import make_sums
from tests.storage.made import FIRST, PAGE, page_sums
from tests.storage.pages.test_keeping import eventually, fill, made, sidecar
from tests.storage.pages.test_restore import FilePeer


def copy(path: Path, to: Path) -> Path:
    shutil.copyfile(path, to)
    shutil.copyfile(sidecar(path), sidecar(to))
    return to


def grow(path: Path, pages: int, *, seed: int = 0) -> Path:
    with DataStream.open(path, index="memory") as stream:
        fill(stream, pages, seed=seed)
    return path


def flip(path: Path, page: int) -> None:
    content = bytearray(path.read_bytes())
    content[FIRST + page * PAGE + 5000] ^= 1
    path.write_bytes(content)


def read(path: Path) -> None:
    """Every entry, each page compared with its checksum."""
    with DataStream.open(path, read_only=True, index="memory", verify="always") as stream:
        assert len(list(stream.entries())) == stream.total_entries


def notes(path: Path) -> list[str]:
    """What `verify` notes, of checksums only."""
    report = verify(path)
    assert report.ok, report.problems
    return [note for note in report.notes if "index" not in note]


@pytest.fixture
def forks(tmp_path: Path) -> tuple[Path, Path]:
    """Two files of one stream that were continued with other entries, with their checksums."""
    left = made(tmp_path / "left.bin", 3)
    right = copy(left, tmp_path / "right.bin")
    return grow(left, 6), grow(right, 6, seed=1000)


def test_checksums_of_a_fork_are_not_used(forks: tuple[Path, Path]) -> None:
    left, right = forks
    shutil.copyfile(sidecar(right), sidecar(left))
    report = verify(left)
    assert report.ok, report.problems
    assert any("of another copy or state" in note for note in report.notes)
    read(left)
    peer = FilePeer(right)
    before = left.read_bytes()
    assert repair(left, sources=Sources([peer], trust_peer=True)).plan.healthy
    assert left.read_bytes() == before
    assert not peer.asked


def test_a_writer_makes_the_checksums_of_a_fork_again(
    forks: tuple[Path, Path], caplog: pytest.LogCaptureFixture
) -> None:
    left, right = forks
    right_sums = page_sums(left)
    shutil.copyfile(sidecar(right), sidecar(left))
    assert make_sums(left).refuted == ""
    assert "contradicts these checksums" in caplog.text
    assert page_sums(left) == right_sums
    assert notes(left) == []


def test_an_older_file_beside_newer_checksums_is_whole(tmp_path: Path) -> None:
    old = made(tmp_path / "old.bin", 3)
    new = grow(copy(old, tmp_path / "new.bin"), 6)
    shutil.copyfile(sidecar(new), sidecar(old))
    assert verify(old).ok
    read(old)
    grow(old, 6, seed=1000)
    assert verify(old).ok
    assert len(page_sums(old)) == 6


def test_a_file_in_the_place_of_another_one(tmp_path: Path) -> None:
    """Streams without an id are known by their files."""
    paths = [made(tmp_path / f"{name}.bin", 4) for name in "ab"]
    for seed, path in enumerate(paths):
        content = bytearray(path.read_bytes())
        content[64:FIRST] = bytes(FIRST - 64)  # as another program makes it
        path.write_bytes(content)
        sidecar(path).unlink()
        with DataStream.open(path, index="memory") as stream:
            stream.truncate(3)
            fill(stream, 4, seed=1000 * seed)
        assert len(page_sums(path)) == 4
    with open(paths[0], "r+b") as file:
        file.write(paths[1].read_bytes())
    assert verify(paths[0]).ok
    read(paths[0])


def test_an_older_page_with_its_older_record(tmp_path: Path) -> None:
    path = made(tmp_path / "s.bin", 6)
    page, record = slice(FIRST + PAGE, FIRST + 2 * PAGE), slice(512 + 64, 512 + 128)
    old_page, old_record = path.read_bytes()[page], sidecar(path).read_bytes()[record]
    with DataStream.open(path, index="memory") as stream:
        stream.update_entry(4, 1, b"new " * 75_000)
    assert verify(path).ok
    for file, place, old in ((path, page, old_page), (sidecar(path), record, old_record)):
        content = bytearray(file.read_bytes())
        content[place] = old
        file.write_bytes(content)
    report = verify(path)
    assert "pages 0 to 5 together do not match the commit record" in report.problems[0].what
    with pytest.raises(DamagedEntry, match="pages 0 to 5 together"):
        snapshot(path, tmp_path / "copy.bin")


@pytest.mark.parametrize("page", [0, 2, 5])
def test_lost_checksums_do_not_hide_a_flipped_bit(
    tmp_path: Path, page: int, caplog: pytest.LogCaptureFixture
) -> None:
    whole = made(tmp_path / "whole.bin", 6)
    path = copy(whole, tmp_path / "s.bin")
    sidecar(path).unlink()
    assert verify(path).ok
    flip(path, page)
    assert "pages 0 to 5 together do not match" in verify(path).problems[0].what
    # Who makes the checksums again says it, and so does everybody later.
    assert "pages 0 to 5 together do not match" in make_sums(path).refuted
    grow(path, 7)
    with DataStream.open(path, index="memory") as stream:
        eventually(lambda: "pages 0 to 6 together do not match" in caplog.text)
        assert stream._file.records().get(0) is None
    assert "pages 0 to 6 together do not match" in verify(path).problems[0].what
    read(path)  # nothing shows which page it is
    # A server has the checksums that prove which page it is.
    grow(whole, 7)
    plain = repair(path)
    assert not plain.report.ok
    assert plain.plan.steps == []
    done = repair(path, sources=Sources([FilePeer(whole)]))
    assert [(it.page, it.source) for it in done.plan.healed] == [(page, "peer:6900")]
    assert done.report.ok
    assert path.read_bytes()[FIRST:] == whole.read_bytes()[FIRST:]
    assert make_sums(path).refuted == ""
    assert page_sums(path) == page_sums(whole)


def test_a_server_with_other_pages_proves_nothing(forks: tuple[Path, Path]) -> None:
    left, right = forks
    sidecar(left).unlink()
    flip(left, 4)
    before = left.read_bytes()
    done = repair(left, sources=Sources([FilePeer(right)], trust_peer=True))
    assert "do not match the commit record" in done.plan.healed[0].why
    assert left.read_bytes() == before


def test_the_flipped_bit_is_accepted(tmp_path: Path) -> None:
    path = made(tmp_path / "s.bin", 4)
    sidecar(path).unlink()
    flip(path, 1)
    assert make_sums(path, accept=True).refuted == ""
    assert verify(path).ok
    grow(path, 6)
    assert verify(path).ok
    assert len(page_sums(path)) == 6


def test_checksums_that_are_removed_while_the_stream_is_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "s.bin"
    with DataStream.create(path, index="memory") as stream:
        fill(stream, 3)
        sidecar(path).unlink()
        fill(stream, 5)
        assert "was removed; the checksums are made again" in caplog.text
        sums = stream._ensure_writable().sums_completer
        eventually(lambda: not sums.incomplete(5))
        fill(stream, 6)
    assert len(page_sums(path)) == 6
    assert notes(path) == []


def test_accepted_bytes_reach_a_reader_that_is_open(tmp_path: Path) -> None:
    path = made(tmp_path / "s.bin", 4)
    with DataStream.open(path, follow=True, index="memory", verify="always") as reader:
        assert reader.entry(0)
        flip(path, 2)
        with pytest.raises(DamagedPage):
            reader.entry(7)
        make_sums(path, accept=True)
        assert reader.entry(7)


def test_a_page_that_cannot_be_read_ends_no_chain(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The chain in the commit record begins after it, and includes it once it is restored."""
    whole = made(tmp_path / "whole.bin", 5)
    path = copy(whole, tmp_path / "s.bin")
    content = bytearray(path.read_bytes())
    content[64:272] = bytes(208)  # no commit record: another program wrote the stream
    content[FIRST + PAGE : FIRST + 2 * PAGE] = bytes(PAGE)
    path.write_bytes(content)
    sidecar(path).unlink()
    for pages in (6, 7):
        with DataStream.open(path, index="memory") as stream:
            while stream._ensure_writable().sums_completer.complete_page():
                pass
            fill(stream, pages)
    grow(whole, 7)
    assert [problem.where for problem in verify(path).problems] == [f"byte {FIRST + PAGE}"]
    done = repair(path, sources=Sources([FilePeer(whole)], trust_peer=True))
    assert done.report.ok, done.report.problems
    assert "together" not in caplog.text
    assert make_sums(path).refuted == ""
    assert len(page_sums(path)) == 7
    assert notes(path) == []


def test_killed_while_chains_are_made_again(tmp_path: Path) -> None:
    """After an update the chains that follow are written later: a kill in between is no damage."""
    path = made(tmp_path / "s.bin", 6)
    with DataStream.open(path, index="memory") as stream:
        keeper = stream._file.sums
        keeper.on_doubt = lambda: None
        keeper._next_doubtful = lambda: None
        stream.update_entry(1, 1, b"new " * 75_000)
        killed = copy(path, tmp_path / "killed.bin")
    assert verify(killed).ok
    assert make_sums(killed).refuted == ""
    assert len(page_sums(killed)) == 6
    assert notes(killed) == []


def test_chains_that_cannot_be_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A refusal of the system ends the use of the checksums, not the completion or the stream."""
    with DataStream.open(made(tmp_path / "s.bin", 6), index="memory") as stream:

        def refuse(file: SumsFile, first: int, stop: int) -> bytes:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        monkeypatch.setattr(SumsFile, "packed", refuse)
        sums = stream._file.sums
        sums.rechain(1)
        sums.write_chains(6)
        assert (sums.rechain_at, sums.usable) == (None, False)
        assert "checksums cannot be written" in caplog.text
        total = stream.total_entries
        stream.append(1, b"goes on")
        assert stream.total_entries == total + 1
