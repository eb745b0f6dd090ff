"""A snapshot and the checksums of its stream: damage is noticed, and a change is no damage."""

from __future__ import annotations

import errno
import logging
import os
import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from datastreamer import DataStream
from datastreamer.errors import DamagedPage, FileExists, StreamBusy, StreamFileError
from datastreamer.storage.disk.file_ops import File, OsDisk
from datastreamer.storage.maintain import snapshot as module
from datastreamer.storage.maintain.check import verify
from datastreamer.storage.maintain.snapshot import snapshot
from datastreamer.storage.write.opening import make_sums
from tests.storage.made import (
    FIRST,
    LARGEST,
    PAGE,
    add,
    header_of,
    make,
    page_sums,
    record_of,
    scan_file,
)
from tests.storage.pages.test_flips import entries_at, flips

SIZE = 300_000
"""Three entries of this size in a page."""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Three whole pages of three entries each, and one entry."""
    entries = [[(1, number.to_bytes(4, "big") * (SIZE // 4))] for number in range(10)]
    return make(tmp_path / "stream.bin", *entries)


@pytest.fixture
def out(tmp_path: Path) -> Path:
    (tmp_path / "copies").mkdir()
    return tmp_path / "copies" / "out.bin"


def sidecar(path: Path) -> Path:
    return path.with_name(path.name + ".sums")


def flip(path: Path, offset: int, bit: int = 0) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        (byte,) = file.read(1)
        file.seek(offset)
        file.write(bytes([byte ^ 1 << bit]))


def is_empty(out: Path) -> bool:
    return list(out.parent.iterdir()) == []


# Damage.


@pytest.mark.parametrize("count", [60, pytest.param(2_000, marks=pytest.mark.soak)])
def test_every_flipped_bit_is_noticed(path: Path, out: Path, count: int) -> None:
    content = path.read_bytes()
    named = [entries_at(path, page) for page in range(4)]
    for offset, bit in flips(path, count, seed=3):
        flip(path, offset, bit)
        with pytest.raises(StreamFileError) as failed:
            snapshot(path, out)
        if offset >= FIRST:
            page = (offset - FIRST) // PAGE
            assert isinstance(failed.value, DamagedPage)
            assert failed.value.path == str(path)
            assert (failed.value.page, failed.value.first, failed.value.end) == (page, *named[page])
        assert is_empty(out)
        flip(path, offset, bit)
    assert path.read_bytes() == content
    assert snapshot(path, out).verified == 3


@pytest.mark.parametrize("at", [3, 1000])
@pytest.mark.parametrize("page", [0, 2, 3])
def test_a_damaged_stream_can_be_copied_all_the_same(
    path: Path, out: Path, page: int, at: int
) -> None:
    """Damaged in the length of a page's first entry, or in its data."""
    flip(path, FIRST + page * PAGE + at)
    with pytest.raises(DamagedPage):
        snapshot(path, out)
    taken = snapshot(path, out, verify=False)
    assert (taken.header.total_entries, taken.verified) == (10, 0)
    assert out.read_bytes()[FIRST:] == path.read_bytes()[FIRST : out.stat().st_size]
    # The copy has the checksums of the stream, so its damage is still noticed, and named.
    found, copied = ([(it.where, it.what) for it in verify(p).problems] for p in (path, out))
    assert copied == found != []
    with (
        DataStream.open(out, read_only=True, verify="always") as stream,
        pytest.raises(DamagedPage, match=rf"page {page} \(entr"),
    ):
        assert stream.entry(3 * page).data
    flip(out, FIRST + page * PAGE + at)
    assert verify(out).ok
    assert len(page_sums(out)) == 3


def test_the_copy_of_a_stream_with_a_sealed_page(path: Path, out: Path) -> None:
    """A damaged last page that a writer has left behind stays damaged."""
    flip(path, FIRST + 3 * PAGE + 1000)
    with DataStream.open(path, index="memory") as stream:
        with pytest.raises(DamagedPage, match=r"page 3 \(entry 9\)"):
            stream.snapshot(out)
        assert is_empty(out)
        assert stream.snapshot(out, verify=False).header == stream.header
    (problem,) = verify(out).problems
    assert "page 3 (entry 9)" in problem.what


def test_a_copy_that_its_disk_changes(path: Path, out: Path, monkeypatch: Any) -> None:
    real = module._copy_data

    def copy(source: File, target: File, *rest: Any) -> Any:
        done = real(source, target, *rest)
        target.write(b"\xff", FIRST + PAGE + 500)
        return done

    monkeypatch.setattr(module, "_copy_data", copy)
    with pytest.raises(DamagedPage, match="page 1") as failed:
        snapshot(path, out)
    assert failed.value.path == str(out)
    assert is_empty(out)


# Checksums of the copy.


def test_the_checksums_of_the_copy_are_those_of_the_stream(path: Path, out: Path) -> None:
    path.chmod(0o600)
    assert snapshot(path, out).verified == 3
    assert page_sums(out) == page_sums(path)
    assert sidecar(out).stat().st_mode & 0o777 == 0o600
    assert record_of(out).after_sum == record_of(path).after_sum
    with DataStream.open(out, index="memory", verify="always") as stream:
        add(stream, [(1, b"one more")])
        stream.truncate(5)
        assert len([*stream.entries()]) == 5
    assert len(page_sums(out)) == 1


def test_pages_without_a_checksum_get_one(path: Path, out: Path) -> None:
    content = sidecar(path).read_bytes()
    sidecar(path).write_bytes(content[: 512 + 64] + bytes(64) + content[512 + 128 :])
    assert snapshot(path, out).verified == 2
    assert [each._replace(chain=b"") for each in page_sums(out)]
    # They are unknown in a copy that was not read, until its writer makes them.
    unread = out.with_name("unread.bin")
    snapshot(path, unread, verify=False)
    assert any("1 page (1) has no checksum" in note for note in verify(unread).notes)
    assert make_sums(unread).made == 1
    assert page_sums(unread) == page_sums(out)
    sidecar(path).unlink()
    other = out.with_name("other.bin")
    assert snapshot(path, other).verified == 0
    assert page_sums(other) == page_sums(out)


def test_a_stream_without_an_id(tmp_path: Path, out: Path, golden: Any) -> None:
    """Its checksums are about one file: those of the copy are about the copy."""
    content = bytearray(make(tmp_path / "own.bin", [(1, b"\1" * LARGEST)] * 3).read_bytes())
    content[64:FIRST] = bytes(FIRST - 64)
    path = tmp_path / "foreign.bin"
    path.write_bytes(content)
    snapshot(path, out)
    assert not [note for note in verify(out).notes if "checksum" in note]
    flip(out, FIRST + 100)
    (problem,) = verify(out).problems
    assert "page 0 (entry 0)" in problem.what


def test_pages_of_a_foreign_writer_are_not_called_damaged(path: Path, out: Path) -> None:
    flip(path, FIRST + PAGE + 1000)
    flip(path, 100)  # the commit record does not fit the header any more
    assert snapshot(path, out).verified == 0
    assert verify(out).ok


# What is beside the copy.


def test_what_a_killed_snapshot_left_is_removed(path: Path, out: Path) -> None:
    left = out.with_name("out.bin.sums.0123abcd.new")
    left.write_bytes(b"half")
    sidecar(out).write_bytes(sidecar(path).read_bytes())
    snapshot(path, out)
    assert sorted(out.parent.iterdir()) == [out, out.with_name("out.bin.pages"), sidecar(out)]
    assert page_sums(out) == page_sums(path)


@pytest.mark.parametrize("kind", ["text", "link"])
def test_another_file_in_the_place_of_the_checksums(path: Path, out: Path, kind: str) -> None:
    if kind == "text":
        sidecar(out).write_text("notes")
    else:
        sidecar(out).symlink_to(sidecar(path))
    with pytest.raises(FileExists, match=r"out\.bin\.sums: is in the place of the copy's"):
        snapshot(path, out)
    assert list(out.parent.iterdir()) == [sidecar(out)]
    assert sidecar(path).exists()


def test_a_crash_leaves_no_checksums_without_their_copy(path: Path, out: Path) -> None:
    published: list[tuple[str, bool]] = []

    class Watched(OsDisk):
        def publish(self, temporary: str, path: str) -> None:
            published.append((path, sidecar(out).exists()))
            super().publish(temporary, path)

    snapshot(path, out, disk=Watched())
    times = str(out.with_name("out.bin.pages"))
    assert published == [(str(out), False), (str(sidecar(out)), False), (times, True)]


def test_a_copy_without_checksums_is_a_copy(
    path: Path, out: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Full(OsDisk):
        def publish(self, temporary: str, path: str) -> None:
            if path != str(out):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            super().publish(temporary, path)

    with caplog.at_level(logging.WARNING):
        snapshot(path, out, disk=Full())
    assert any("out.bin.sums cannot be made" in message for message in caplog.messages)
    assert any("and times, cannot be copied" in message for message in caplog.messages)
    assert list(out.parent.iterdir()) == [out]
    assert verify(out).ok


# Beside a writer.


def while_it_is_compared(monkeypatch: pytest.MonkeyPatch, change: Callable[[], None]) -> None:
    """Change the stream after it was copied, before the copy is compared."""
    real = module.doubt

    def doubt(*arguments: Any) -> str:
        change()
        return real(*arguments)

    monkeypatch.setattr(module, "doubt", doubt)


@pytest.mark.parametrize("with_checksums", [True, False])
def test_a_change_after_the_copy_is_no_damage(
    path: Path, out: Path, monkeypatch: pytest.MonkeyPatch, with_checksums: bool
) -> None:
    before = scan_file(path)
    with DataStream.open(path, index="memory") as stream:

        def change() -> None:
            stream.update_entry(1, 1, b"new " * (SIZE // 4))
            stream.truncate(4)
            add(stream, *[[(2, bytes(SIZE))]] * 9)

        while_it_is_compared(monkeypatch, change)
        # Page 0 was updated, page 1 truncated, page 2 appended again.
        assert snapshot(path, out, verify=with_checksums).verified == 0
    assert scan_file(out) == before
    assert verify(out).ok
    make_sums(out)
    assert len(page_sums(out)) == 3


def test_damage_is_noticed_beside_changes_of_other_pages(
    path: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flip(path, FIRST + PAGE + 1000)
    with DataStream.open(path, index="memory", verify="never") as stream:

        def change() -> None:
            stream.update_entry(1, 1, b"new " * (SIZE // 4))
            stream.truncate(7)

        while_it_is_compared(monkeypatch, change)
        with pytest.raises(DamagedPage, match=r"page 1 \(entries 3 to 5\)"):
            snapshot(path, out)
    assert is_empty(out)


def test_beside_a_writer_that_changes_everything(tmp_path: Path, out: Path) -> None:
    """Each copy is whole, and none is called damaged."""
    source = random.Random(5)
    path = make(tmp_path / "busy.bin", *[[(1, bytes(SIZE))]] * 14)
    done = threading.Event()

    def write() -> None:
        with DataStream.open(path, index="memory", sync="os") as stream:
            while not done.is_set():
                number = source.randrange(stream.total_entries)
                stream.update_entry(number, 1, source.randbytes(4) * (SIZE // 4))
                if source.random() < 0.3:
                    stream.truncate(source.randrange(3, stream.total_entries))
                while stream.total_entries < 14:
                    add(stream, [(1, source.randbytes(4) * (SIZE // 4))])

    writer = threading.Thread(target=write)
    writer.start()
    made = 0
    try:
        for _ in range(25):
            try:
                snapshot(path, out)
            except StreamBusy:
                continue
            made += 1
            assert verify(out).ok
            if header_of(out)[-2] > FIRST + PAGE:
                page_sums(out)
            assert header_of(out)[-1] == len(scan_file(out))
            out.unlink()
            sidecar(out).unlink(missing_ok=True)
    finally:
        done.set()
        writer.join()
    assert made
