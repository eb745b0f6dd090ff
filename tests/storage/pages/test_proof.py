"""What is not proven never makes a page damaged, and is never a reason to write."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from datastreamer import DataStream
from datastreamer.errors import DamagedPage
from datastreamer.storage.maintain.check import verify
from datastreamer.storage.pages.restore_open import heal_page
from tests.storage.made import FIRST, PAGE, FaultyDisk, page_sums, scan_file
from tests.storage.pages.test_chain import copy, flip, grow, read
from tests.storage.pages.test_keeping import SIZE, eventually, fill, made, sidecar
from tests.storage.pages.test_restore import FilePeer


@pytest.fixture
def forks(tmp_path: Path) -> tuple[Path, Path]:
    """A stream of six pages, and a copy that was continued from page 1 on with other entries. The
    stream was copied over it; the sidecar of the other history, of four pages, remained there."""
    left = made(tmp_path / "left.bin", 1)
    right = copy(left, tmp_path / "right.bin")
    grow(left, 6)
    grow(right, 4, seed=1000)
    (tmp_path / "other").mkdir()
    other = copy(right, tmp_path / "other" / "right.bin")
    shutil.copyfile(left, right)
    return right, other


def of_a_longer_one(path: Path, other: Path) -> None:
    """The sidecar has more pages than the stream, and the record of its last page is torn."""
    grow(other, 9, seed=1000)
    content = bytearray(sidecar(other).read_bytes())
    content[512 + 5 * 64 + 20 : 512 + 6 * 64] = bytes(44)
    sidecar(path).write_bytes(content)


SIDECARS: dict[str, Callable[[Path, Path], None]] = {
    "shorter": lambda path, other: None,
    "longer": of_a_longer_one,
}


@pytest.mark.parametrize("put", SIDECARS.values(), ids=SIDECARS)
def test_a_reader_and_a_foreign_sidecar(
    forks: tuple[Path, Path], put: Callable[[Path, Path], None]
) -> None:
    path, other = forks
    put(path, other)
    assert verify(path).ok
    read(path)


@pytest.mark.parametrize("put", SIDECARS.values(), ids=SIDECARS)
def test_a_writer_and_a_foreign_sidecar(
    forks: tuple[Path, Path],
    put: Callable[[Path, Path], None],
    caplog: pytest.LogCaptureFixture,
) -> None:
    path, other = forks
    put(path, other)
    with DataStream.open(path, index="memory", verify="always") as stream:
        assert len([*stream.entries()]) == stream.total_entries
        sums = stream._ensure_writable().sums_completer
        eventually(lambda: not sums.incomplete(6))
    assert not any("damaged;" in line or "do not match" in line for line in caplog.messages)
    assert len(page_sums(path)) == 6


@pytest.mark.parametrize("put", SIDECARS.values(), ids=SIDECARS)
def test_nothing_is_restored_by_a_foreign_sidecar(
    forks: tuple[Path, Path], put: Callable[[Path, Path], None]
) -> None:
    """The server has the other history, so its entries match the sidecar."""
    path, other = forks
    put(path, other)
    before, peer = path.read_bytes(), FilePeer(other)
    with DataStream.open(path, index="memory") as stream:
        owned = stream._ensure_writable().owned
        stream._ensure_writable().sums_completer.stop()
        for page in range(6):
            assert heal_page(owned, stream.bookmarks, page, [peer]) is None
    assert path.read_bytes()[FIRST : FIRST + 6 * PAGE] == before[FIRST : FIRST + 6 * PAGE]
    assert verify(path).ok


def test_a_restoration_beside_a_truncation(tmp_path: Path) -> None:
    """The answer has the page as it was before: it must not be written any more."""
    path = made(tmp_path / "s.bin", 4)
    whole = copy(path, tmp_path / "whole.bin")
    flip(path, 1)
    with DataStream.open(path, index="memory", verify="never") as stream:
        owned = stream._ensure_writable().owned

        class ChangingPeer(FilePeer):
            def entries(self, first: int, stop: int, most: int) -> bytes:
                answer = super().entries(first, stop, most)
                stream.truncate(3)
                fill(stream, 4, seed=90)
                return answer

        healed = heal_page(owned, stream.bookmarks, 1, [ChangingPeer(whole)])
        assert healed is not None
        assert "truncated or updated meanwhile" in healed.why
        assert stream.entry(3).data[:4] == (93).to_bytes(4, "big")
    assert verify(path).ok


# Padding.


def lose_padding(path: Path, page: int, *, mark: bool = False) -> None:
    """Old bytes that became padding did not reach the disk; with `mark` the mark neither."""
    last = [it for it in scan_file(path) if (it.offset - FIRST) // PAGE == page][-1]
    stop = last.offset + 17 + len(last.data)
    content = bytearray(path.read_bytes())
    for at in range(stop + (not mark), FIRST + (page + 1) * PAGE):
        content[at] ^= 0x5A
    path.write_bytes(content)


def test_padding_is_no_damage(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = made(tmp_path / "s.bin", 4)
    lose_padding(path, 1)
    report = verify(path)
    assert report.ok, report.problems
    read(path)
    with DataStream.open(path, index="memory", verify="always") as stream:
        assert len([*stream.entries()]) == stream.total_entries
        stream.update_entry(4, 1, b"new " * (SIZE // 4))
        stream.truncate(10)
    assert not [each for each in caplog.records if each.levelno >= logging.WARNING]


def test_a_wrong_mark_is_restored_without_a_server(tmp_path: Path) -> None:
    path = made(tmp_path / "s.bin", 4)
    before = path.read_bytes()
    lose_padding(path, 1, mark=True)
    assert not verify(path).ok
    with pytest.raises(DamagedPage, match=r"page 1 .*padding mark"):
        read(path)
    with DataStream.open(path, index="memory") as stream:
        owned = stream._ensure_writable().owned
        healed = heal_page(owned, stream.bookmarks, 1, [])
        assert healed is not None
        assert healed.source
    assert verify(path).ok
    assert path.read_bytes()[FIRST:] == before[FIRST:]


# The journal.


def test_readers_of_an_interrupted_update_of_the_last_page(tmp_path: Path) -> None:
    path = made(tmp_path / "s.bin", 2)
    states = killed_in_an_update(path, 6)
    assert len(states) > 8
    for state in states:
        report = verify(state)
        if not report.ok:
            assert "half of an update" in report.problems[0].what
            continue
        read(state)
        with DataStream.open(state, index="memory", verify="always") as stream:
            assert len([*stream.entries()]) == stream.total_entries


@pytest.mark.parametrize("page", [0, 1])
def test_readers_of_an_interrupted_update_of_a_whole_page(tmp_path: Path, page: int) -> None:
    path = made(tmp_path / "s.bin", 3)
    for state in killed_in_an_update(path, 3 * page + 1):
        if verify(state).ok:
            read(state)


def killed_in_an_update(path: Path, number: int) -> list[Path]:
    """Copies of the stream and its other files at each step of the update of an entry."""
    disk, states = FaultyDisk(), []

    def keep() -> None:
        folder = path.parent / f"state {len(states)}"
        folder.mkdir()
        for each in path.parent.glob(f"{path.name}*"):
            shutil.copyfile(each, folder / each.name)
        states.append(folder / path.name)

    with DataStream.open(path, index="memory", disk=disk) as stream:
        disk.before = {"write": keep, "sync": keep}
        stream.update_entry(number, 1, b"new " * (SIZE // 4))
        disk.before = {}
    return states
