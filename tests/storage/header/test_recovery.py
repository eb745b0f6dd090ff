"""How an open treats a file after a crash, a power cut, damage, or another program.

A power cut is played on a copy of the file: the record is given another boot id, and
what shall not have reached the disk is zeroed. See `made.power_cut`.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from datastreamer import DataStream
from datastreamer.errors import BadFileSize
from datastreamer.storage.header import records
from datastreamer.storage.header.records import Head
from tests.storage.made import (
    FIRST,
    MODES,
    ONE,
    OTHER_BOOT,
    PAGE,
    THREE,
    TWO,
    Item,
    add,
    bookmarks_of,
    copied,
    header_of,
    items,
    make,
    power_cut,
    record_of,
    scan_file,
    sides,
    sum_at,
)


def in_the_middle(tmp_path: Path, *operations: list[Item], sync: Any = "commit") -> Path:
    """A copy of a stream's file directly after these commits, while the stream is open."""
    path = tmp_path / "open.bin"
    with DataStream.create(path, sync=sync, index="memory") as stream:
        add(stream, *operations)
        return copied(path, "found.bin")


# No power cut.


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("sync", ["commit", "os"])
def test_a_killed_writer_loses_nothing(tmp_path: Path, sync: Any, mode: dict[str, Any]) -> None:
    path = in_the_middle(tmp_path, ONE, TWO, sync=sync)
    assert record_of(path).base != record_of(path).after
    with DataStream.open(path, **mode) as stream:
        assert items(stream) == ONE + TWO
        assert stream.bookmark(b"k") == 3
    assert sides(path) == []


# A power cut.


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("sync", ["commit", "os"])
def test_everything_was_on_disk(tmp_path: Path, sync: Any, mode: dict[str, Any]) -> None:
    path = power_cut(in_the_middle(tmp_path, ONE, TWO, THREE, sync=sync), tmp_path / "p.bin")
    with DataStream.open(path, **mode) as stream:
        assert items(stream) == ONE + TWO + THREE
    assert sides(path) == []


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("lost", ["all", "a byte in the middle", "the last byte", "a head"])
def test_the_last_commit_was_not_on_disk(
    tmp_path: Path, mode: dict[str, Any], lost: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Under "commit" that is one operation at most, and its commit had not returned."""
    found = in_the_middle(tmp_path, ONE, TWO, THREE)
    record = record_of(found)
    start, end = record.base.length, record.after.length
    assert record.base == Head(start, 4)
    assert record.after == Head(end, 6)
    span = {
        "all": (start, end),
        "a byte in the middle": (start + 17, start + 18),
        "the last byte": (end - 1, end),
        "a head": (end - 17, end - 12),
    }[lost]
    path = power_cut(found, tmp_path / "p.bin", span)
    before = path.read_bytes()
    with DataStream.open(path, **mode) as stream:
        assert items(stream) == ONE + TWO
        assert (stream.header.total_length, stream.header.total_entries) == (start, 4)
        assert stream.bookmark(b"k") == 3
        assert not stream.refresh()
        assert stream.total_entries == 4
    if "index" not in mode:
        assert path.read_bytes() == before
        assert sides(path) == []
        return
    (side,) = sides(path)
    assert side.read_bytes() == before[:FIRST] + before[start:end]
    assert header_of(side)[-2:] == (end, 6)
    assert sorted(p.name for p in tmp_path.iterdir() if p.suffix != ".pages") == [
        "found.bin",
        "open.bin",
        "p.bin",
        side.name,
    ]
    (logged,) = [r for r in caplog.records if r.levelno == logging.WARNING]
    text = logged.getMessage()
    assert text.startswith(
        f"{path}: entries 4 to 5 (bytes {start} to {end}) did not reach the disk before the power "
        f"cut; the stream is truncated to 4 entries"
    )
    assert str(side) in text
    assert header_of(path)[-2:] == (start, 4)


def test_a_failed_sync_without_a_recovery(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """There was no power cut; the open names the bytes that the system lost."""
    path = make(tmp_path / "s.bin", ONE)
    content, record = bytearray(path.read_bytes()), record_of(path)
    head = record.after
    lost = Head(head.length + 100, head.entries + 1)
    records.put_doubt(content, record._replace(mid=lost, after=lost))
    path.write_bytes(content)
    with DataStream.open(path, index="memory") as stream:
        assert items(stream) == ONE
    (side,) = sides(path)
    (logged,) = [r for r in caplog.records if r.levelno == logging.WARNING]
    assert logged.getMessage().startswith(
        f"{path}: entries 2 to 2 (bytes {head.length} to {lost.length}) did not reach the disk "
        f"after a sync that failed; the stream is truncated to 2 entries"
    )
    assert str(side) in logged.getMessage()


def test_a_lost_byte_that_was_zero(tmp_path: Path) -> None:
    """The lost byte has the same value."""
    found = in_the_middle(tmp_path, ONE, [(1, b"ends in a zero\0")])
    end = record_of(found).after.length
    path = power_cut(found, tmp_path / "p.bin", (end - 1, end))
    with DataStream.open(path) as stream:
        assert stream.total_entries == 3


def test_appends_after_a_recovery(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    found = in_the_middle(tmp_path, ONE, TWO)
    record = record_of(found)
    path = power_cut(found, tmp_path / "p.bin", (record.base.length, record.after.length))
    with DataStream.open(path) as stream:
        assert stream.stream_id == record.stream_id
        assert stream.epoch == record.epoch + 1
        add(stream, THREE)
        assert items(stream) == ONE + THREE
    with DataStream.open(path) as stream:
        assert items(stream) == ONE + THREE
        assert stream.epoch == record.epoch + 1
    assert len(sides(path)) == 1
    assert bookmarks_of(scan_file(path)) == {b"k": 0}


def test_under_os_everything_since_the_last_sync_may_be_lost(tmp_path: Path) -> None:
    path = tmp_path / "open.bin"
    with DataStream.create(path, sync="os", index="memory") as stream:
        add(stream, ONE)
        stream.sync()
        synced = stream.header.total_length
        add(stream, TWO, THREE)
        found = copied(path, "found.bin")
    record = record_of(found)
    assert (record.base, record.after.entries) == (Head(synced, 2), 6)
    whole = power_cut(found, tmp_path / "w.bin")
    with DataStream.open(whole) as stream:
        assert items(stream) == ONE + TWO + THREE
    torn = power_cut(found, tmp_path / "t.bin", (synced + 40, synced + 41))
    with DataStream.open(torn) as stream:
        assert items(stream) == ONE
    (side,) = sides(torn)
    assert len(side.read_bytes()) == FIRST + record.after.length - synced


@pytest.mark.parametrize(
    ("lost", "left"), [(None, 6), ("second", 4), ("first", 2), ("both", 2)], ids=str
)
def test_two_segments(tmp_path: Path, lost: str | None, left: int) -> None:
    """A sync that ran beside commits leaves base < mid < after: the longest whole prefix."""
    found = in_the_middle(tmp_path, ONE, TWO, THREE)
    content = bytearray(found.read_bytes())
    record = record_of(found)
    entries = scan_file(found)
    base, mid, after = Head(entries[2].offset, 2), Head(entries[4].offset, 4), record.after

    page = content[:FIRST]
    records.put_record(
        page,
        record._replace(
            base=base,
            mid=mid,
            after=after,
            base_sum=sum_at(content, base),
            mid_sum=sum_at(content, mid),
        ),
    )
    content[:FIRST] = page
    found.write_bytes(content)
    spans = {
        None: [],
        "first": [(base.length + 17, base.length + 20)],
        "second": [(mid.length + 17, mid.length + 20)],
    }
    spans["both"] = spans["first"] + spans["second"]
    path = power_cut(found, tmp_path / "p.bin", *spans[lost])
    with DataStream.open(path, read_only=True) as stream:
        assert stream.total_entries == left
    with DataStream.open(path) as stream:
        assert items(stream) == (ONE + TWO + THREE)[:left]
    assert len(sides(path)) == (left < 6)


@pytest.mark.parametrize("lost", ["nothing", "first page", "second page", "padding mark"])
def test_over_a_page_s_end(tmp_path: Path, lost: str) -> None:
    """The hash leaves out padding, whose bytes have no meaning."""
    big = [(1, b"a" * 700_000)], [(2, b"b" * 300_000), (3, b"c" * 300_000)]
    found = in_the_middle(tmp_path, *big)
    record = record_of(found)
    padding = (record.base.length + 300_017, FIRST + PAGE)
    content = bytearray(found.read_bytes())
    assert content[padding[0]] == 0
    content[padding[0] + 1 : padding[1]] = b"\x02stale".ljust(padding[1] - padding[0] - 1, b"!")
    if lost == "padding mark":
        content[padding[0]] = 2
    found.write_bytes(content)
    spans = {"first page": [(padding[0] - 9, padding[0])], "second page": [(FIRST + PAGE, 2**21)]}
    path = power_cut(found, tmp_path / "p.bin", *spans.get(lost, []))
    with DataStream.open(path) as stream:
        assert stream.total_entries == (3 if lost == "nothing" else 1)


def test_an_operation_written_in_parts_is_removed_as_a_whole(tmp_path: Path) -> None:
    path = tmp_path / "open.bin"
    with DataStream.create(path, index="memory") as stream:
        add(stream, ONE, [(1, bytes([n]) * 500_000) for n in range(1, 20)])
        found = copied(path, "found.bin")
    record = record_of(found)
    assert record.after.length > 9 * PAGE
    with DataStream.open(power_cut(found, tmp_path / "whole.bin")) as stream:
        assert stream.total_entries == 21
    early = FIRST + 100_000  # in a part that was written long before the commit
    with DataStream.open(power_cut(found, tmp_path / "torn.bin", (early, early + 1))) as stream:
        assert items(stream) == ONE


def test_the_hash_of_a_commit_repeated_after_a_failed_write(tmp_path: Path) -> None:
    """The second attempt does not add the operation to the hash again."""
    import errno

    from datastreamer.errors import WriteFailed
    from tests.storage.made import FaultyDisk

    disk, path = FaultyDisk(), tmp_path / "open.bin"
    with DataStream.create(path, index="memory", disk=disk) as stream:
        stream.start_atomic_op()
        for n in range(1, 14):
            stream.add_entry(n, bytes([n]) * 500_000)
        disk.faults = {"commit data": errno.EIO}
        for _ in range(2):
            with pytest.raises(WriteFailed):
                stream.commit_atomic_op()
        disk.faults = {}
        stream.commit_atomic_op()
        found = copied(path, "found.bin")
    with DataStream.open(power_cut(found, tmp_path / "p.bin")) as stream:
        assert stream.total_entries == 13


def test_a_sync_during_an_operation_written_in_parts(tmp_path: Path) -> None:
    """It moves the head that is known to be on disk; a new hash begins there."""
    path = tmp_path / "open.bin"
    with DataStream.create(path, sync="os", index="memory") as stream:
        add(stream, ONE)
        stream.start_atomic_op()
        for n in range(1, 12):
            stream.add_entry(n, bytes([n]) * 600_000)
        stream.sync()
        base = Head(stream.header.total_length, 2)
        for n in range(12, 20):
            stream.add_entry(n, bytes([n]) * 600_000)
        stream.commit_atomic_op()
        add(stream, TWO)
        found = copied(path, "found.bin")
    assert record_of(found).base == base
    with DataStream.open(power_cut(found, tmp_path / "whole.bin")) as stream:
        assert stream.total_entries == 2 + 19 + 2
    early = FIRST + 100_000
    with DataStream.open(power_cut(found, tmp_path / "torn.bin", (early, early + 1))) as stream:
        assert items(stream) == ONE


def test_a_power_cut_while_the_file_grew(tmp_path: Path) -> None:
    """A power cut may leave any size; a writer rounds it up."""
    found = in_the_middle(tmp_path, ONE, TWO)
    path = power_cut(found, tmp_path / "p.bin", change=lambda c: c.__delitem__(slice(50_000, None)))
    with DataStream.open(path, read_only=True) as stream:
        assert items(stream) == ONE + TWO
    assert path.stat().st_size == 50_000
    with DataStream.open(path) as stream:
        assert items(stream) == ONE + TWO
        assert stream.file_size == FIRST + PAGE


def test_a_power_cut_before_the_size_was_on_disk(tmp_path: Path) -> None:
    found = in_the_middle(tmp_path, ONE, TWO)
    base = record_of(found).base.length
    path = power_cut(
        found, tmp_path / "p.bin", change=lambda c: c.__delitem__(slice(base + 5, None))
    )
    with DataStream.open(path, read_only=True) as stream:
        assert items(stream) == ONE
    with DataStream.open(path) as stream:
        assert items(stream) == ONE
        add(stream, THREE)
        assert items(stream) == ONE + THREE
    (side,) = sides(path)
    assert len(side.read_bytes()) == FIRST + 5


def test_synced_data_that_is_not_there_is_damage(tmp_path: Path) -> None:
    """A power cut does not remove synced data: this is an incomplete copy."""
    for found in (make(tmp_path / "closed.bin", ONE, TWO), in_the_middle(tmp_path, ONE, TWO)):
        cut = record_of(found).base.length - 1
        path = power_cut(
            found, tmp_path / "p.bin", change=lambda c, cut=cut: c.__delitem__(slice(cut, None))
        )
        for mode in MODES:
            with pytest.raises(BadFileSize, match="the file ends here, but its data ends at byte"):
                DataStream.open(path, **mode)
        assert path.stat().st_size == cut


def test_a_clean_close_leaves_nothing_to_judge(tmp_path: Path) -> None:
    path = make(tmp_path / "s.bin", ONE, TWO, sync="os")
    record = record_of(path)
    assert record.base == record.mid == record.after == Head(*header_of(path)[-2:])
    assert record.boot_id != OTHER_BOOT
    # Whatever is in the data: it was synced, so a power cut cannot have done it.
    changed = power_cut(path, tmp_path / "p.bin", (FIRST + 20, FIRST + 21))
    with DataStream.open(changed) as stream:
        assert stream.total_entries == 4
    assert sides(changed) == []


def test_an_empty_stream_after_a_power_cut(tmp_path: Path) -> None:
    path = power_cut(in_the_middle(tmp_path), tmp_path / "p.bin")
    with DataStream.open(path) as stream:
        assert stream.total_entries == 0
        add(stream, ONE)
    lost = power_cut(in_the_middle(tmp_path / "..", ONE) if False else path, tmp_path / "q.bin")
    with DataStream.open(lost) as stream:
        assert items(stream) == ONE


def test_the_very_first_commit_is_lost(tmp_path: Path) -> None:
    found = in_the_middle(tmp_path, ONE)
    path = power_cut(found, tmp_path / "p.bin", (FIRST, FIRST + 30))
    with DataStream.open(path) as stream:
        assert (stream.total_entries, stream.header.total_length) == (0, FIRST)


def test_without_a_boot_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Zeros mean unknown: then every open checks the entries."""
    from datastreamer.storage.read import file
    from datastreamer.storage.write import opening
    from datastreamer.storage.write import owned_file as owned

    for module in (file, opening, owned):
        monkeypatch.setattr(module, "boot_id", lambda: bytes(16))
    found = in_the_middle(tmp_path, ONE, TWO)
    base, _, after = record_of(found)[3:6]
    assert record_of(found).boot_id == bytes(16)
    path = power_cut(found, tmp_path / "p.bin", (base.length, after.length), boot=bytes(16))
    with DataStream.open(path) as stream:
        assert items(stream) == ONE


def test_a_crash_in_recovery(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The side file is durable before anything is removed; the next open repeats the recovery."""
    from datastreamer.storage.write.owned_file import OwnedFile

    found = in_the_middle(tmp_path, ONE, TWO)
    record = record_of(found)
    path = power_cut(found, tmp_path / "p.bin", (record.base.length, record.after.length))
    before = path.read_bytes()

    def crash(self: OwnedFile) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(OwnedFile, "write_clean", crash)
        with pytest.raises(KeyboardInterrupt):
            DataStream.open(path)
    assert path.read_bytes()[:1584] == before[:1584]
    assert len(sides(path)) == 1
    with DataStream.open(path) as stream:
        assert items(stream) == ONE
    assert len(sides(path)) == 2
