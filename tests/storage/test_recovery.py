"""What an open makes of a file after a crash, a power cut, damage, or another program.

A power cut is played on a copy of the file: the record is given another boot id, and
what shall not have reached the disk is zeroed. See `made.power_cut`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from datastreamer import DataStream
from datastreamer.errors import (
    BadFileSize,
    DamagedEntry,
    DamagedFile,
    DamagedHeader,
    NotAStream,
    StreamFileError,
    WrongStreamType,
)
from datastreamer.storage import record as records
from datastreamer.storage.record import Head
from tests.conftest import Golden
from tests.storage.made import (
    BOOKMARK,
    FIRST,
    HEADER,
    OTHER_BOOT,
    PAGE,
    Item,
    add,
    bookmarks_of,
    copied,
    header_of,
    items,
    make,
    power_cut,
    scan_file,
)

ONE: list[Item] = [(BOOKMARK, b"k"), (1, b"one")]
TWO: list[Item] = [(2, b"two" * 100), (BOOKMARK, b"k")]
THREE: list[Item] = [(3, b"three"), (3, b"")]
MODES: list[dict[str, Any]] = [{"read_only": True}, {"follow": True}, {"index": "memory"}]


def record_of(path: Path) -> records.CommitRecord:
    record = records.get_record(path.read_bytes()[:4096])
    assert record is not None
    return record


def in_the_middle(tmp_path: Path, *operations: list[Item], sync: Any = "commit") -> Path:
    """A stream's file while it is open, right after these commits: nobody closed it."""
    path = tmp_path / "open.bin"
    with DataStream.create(path, sync=sync, index="memory") as stream:
        add(stream, *operations)
        return copied(path, "found.bin")


def sides(path: Path) -> list[Path]:
    return sorted(path.parent.glob(f"{path.name}.*.cut"))


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


@pytest.mark.parametrize("sync", ["commit", "os"])
def test_the_hash_is_not_judged_under_the_same_boot(tmp_path: Path, sync: Any) -> None:
    """What was changed without a power cut is damage, and not ours to take back."""
    path = in_the_middle(tmp_path, ONE, TWO, sync=sync)
    content = bytearray(path.read_bytes())
    at = content.index(b"twotwo")
    content[at : at + 3] = b"TWO"
    path.write_bytes(content)
    # To go on behind it would vouch for it.
    with pytest.raises(DamagedEntry, match=r"entries \d to 3 are not what was written.*repair"):
        DataStream.open(path)
    assert path.read_bytes() == content
    assert sides(path) == []


# A power cut.


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("sync", ["commit", "os"])
def test_all_of_it_had_arrived(tmp_path: Path, sync: Any, mode: dict[str, Any]) -> None:
    path = power_cut(in_the_middle(tmp_path, ONE, TWO, THREE, sync=sync), tmp_path / "p.bin")
    with DataStream.open(path, **mode) as stream:
        assert items(stream) == ONE + TWO + THREE
    assert sides(path) == []


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("lost", ["all", "a byte in the middle", "the last byte", "a head"])
def test_the_last_commit_had_not(
    tmp_path: Path, mode: dict[str, Any], lost: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Under "commit" it is one operation at most, and its caller never heard of success."""
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
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "found.bin",
        "open.bin",
        "p.bin",
        side.name,
    ]
    (told,) = [r for r in caplog.records if r.levelno == logging.WARNING]
    text = told.getMessage()
    assert text.startswith(
        f"{path}: entries 4 to 5 (bytes {start} to {end}) did not reach the disk before the power "
        f"cut; the stream goes back to 4 entries"
    )
    assert str(side) in text
    assert header_of(path)[-2:] == (start, 4)


def test_a_sync_that_failed_and_was_not_got_over(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """No power was cut, and nothing says so; the bytes that the system lost are named."""
    path = make(tmp_path / "s.bin", ONE)
    content, record = bytearray(path.read_bytes()), record_of(path)
    head = record.after
    lost = Head(head.length + 100, head.entries + 1)
    records.put_doubt(content, record._replace(mid=lost, after=lost, first_hash=1))
    path.write_bytes(content)
    with DataStream.open(path, index="memory") as stream:
        assert items(stream) == ONE
    (side,) = sides(path)
    (told,) = [r for r in caplog.records if r.levelno == logging.WARNING]
    assert told.getMessage().startswith(
        f"{path}: entries 2 to 2 (bytes {head.length} to {lost.length}) did not reach the disk "
        f"after a sync that failed; the stream goes back to 2 entries"
    )
    assert str(side) in told.getMessage()


def test_the_last_byte_of_an_entry_that_is_zero_anyway(tmp_path: Path) -> None:
    """Nothing was lost that anybody could tell."""
    found = in_the_middle(tmp_path, ONE, [(1, b"ends in a zero\0")])
    end = record_of(found).after.length
    path = power_cut(found, tmp_path / "p.bin", (end - 1, end))
    with DataStream.open(path) as stream:
        assert stream.total_entries == 3


def test_goes_on_after_going_back(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
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


def test_under_os_all_since_the_last_sync_may_go(tmp_path: Path) -> None:
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

    def hashed(start: Head, stop: Head) -> int:
        return int(records.xxh3_64_intdigest(bytes(content[start.length : stop.length])))

    page = content[:FIRST]
    records.put_record(
        page,
        record._replace(
            base=base,
            mid=mid,
            after=after,
            first_hash=hashed(base, mid),
            second_hash=hashed(mid, after),
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
    """The hash goes over padding, whose bytes behind the mark mean nothing."""
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


def test_a_spilled_operation_goes_back_as_a_whole(tmp_path: Path) -> None:
    path = tmp_path / "open.bin"
    with DataStream.create(path, index="memory") as stream:
        add(stream, ONE, [(1, bytes([n]) * 500_000) for n in range(1, 20)])
        found = copied(path, "found.bin")
    record = record_of(found)
    assert record.after.length > 9 * PAGE
    with DataStream.open(power_cut(found, tmp_path / "whole.bin")) as stream:
        assert stream.total_entries == 21
    early = FIRST + 100_000  # in what was spilled long before the commit
    with DataStream.open(power_cut(found, tmp_path / "torn.bin", (early, early + 1))) as stream:
        assert items(stream) == ONE


def test_a_commit_made_again_after_a_failed_write_is_hashed_right(tmp_path: Path) -> None:
    """The second try may not add the operation to the hash a second time."""
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


def test_a_sync_in_the_middle_of_a_spilled_operation(tmp_path: Path) -> None:
    """It moves the head that is known to be on disk: the hash begins anew from there."""
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
    """A size out of form is what a power cut may leave; a writer rounds it up."""
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
    """A power cut does not take what was synced: this is half a copy."""
    for found in (make(tmp_path / "closed.bin", ONE, TWO), in_the_middle(tmp_path, ONE, TWO)):
        cut = record_of(found).base.length - 1
        path = power_cut(
            found, tmp_path / "p.bin", change=lambda c, cut=cut: c.__delitem__(slice(cut, None))
        )
        for mode in MODES:
            with pytest.raises(BadFileSize, match="the file ends there, its data only at byte"):
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


def test_where_nobody_tells_the_boot_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Zeros mean unknown: then every open judges."""
    from datastreamer.storage import file, owned, writer

    for module in (file, owned, writer):
        monkeypatch.setattr(module, "boot_id", lambda: bytes(16))
    found = in_the_middle(tmp_path, ONE, TWO)
    base, _, after = record_of(found)[3:6]
    assert record_of(found).boot_id == bytes(16)
    path = power_cut(found, tmp_path / "p.bin", (base.length, after.length), boot=bytes(16))
    with DataStream.open(path) as stream:
        assert items(stream) == ONE


def test_a_crash_in_recovery(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The side file is there before anything is forgotten; the next open does it again."""
    from datastreamer.storage.writer import StreamWriter

    found = in_the_middle(tmp_path, ONE, TWO)
    record = record_of(found)
    path = power_cut(found, tmp_path / "p.bin", (record.base.length, record.after.length))
    before = path.read_bytes()

    def crash(self: StreamWriter) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(StreamWriter, "_write_clean", crash)
        with pytest.raises(KeyboardInterrupt):
            DataStream.open(path)
    assert path.read_bytes()[:1584] == before[:1584]
    assert len(sides(path)) == 1
    with DataStream.open(path) as stream:
        assert items(stream) == ONE
    assert len(sides(path)) == 2


# Headers that no record vouches for.


def rewritten(path: Path, length: int, entries: int) -> None:
    """What a program that knows no records does to the header."""
    content = bytearray(path.read_bytes())
    fields = [*header_of(path)]
    fields[-2:] = [length, entries]
    content[16:54] = HEADER.pack(*fields)
    path.write_bytes(content)


@pytest.mark.parametrize("mode", MODES)
def test_another_program_went_on(tmp_path: Path, mode: dict[str, Any]) -> None:
    path = make(tmp_path / "s.bin", ONE, TWO)
    entries = scan_file(path)
    stream_id = record_of(path).stream_id
    # It truncated to two entries, and appended one.
    content = bytearray(path.read_bytes())
    at = entries[2].offset
    packed = b"\2" + (20).to_bytes(4, "big") + (9).to_bytes(4, "big") + (2).to_bytes(8, "big")
    content[at : at + 20] = packed + b"abc"
    path.write_bytes(content)
    rewritten(path, at + 20, 3)
    with DataStream.open(path, **mode) as stream:
        assert items(stream) == [*ONE, (9, b"abc")]
        assert stream.stream_id == stream_id
        assert stream.bookmark(b"k") == 0
        if stream.writable:
            assert stream.epoch == 1
            add(stream, THREE)
            assert items(stream) == [*ONE, (9, b"abc"), *THREE]
    assert sides(path) == []


def test_another_program_truncated_to_a_page_s_start(tmp_path: Path) -> None:
    """The total then counts the padding before it, and the entries end earlier."""
    path = make(tmp_path / "s.bin", [(1, b"a" * 700_000)], [(2, b"b" * 400_000)])
    rewritten(path, FIRST + PAGE, 1)
    for mode in MODES:
        with DataStream.open(path, **mode) as stream:
            assert items(stream) == [(1, b"a" * 700_000)]
            assert stream.reader.cursor(1) == (FIRST + PAGE, 1)
    with DataStream.open(path) as stream:
        add(stream, [(3, b"c")])
        assert stream.reader.cursor(1) == (FIRST + PAGE, 1)


@pytest.mark.parametrize(
    ("length", "entries"),
    [(0, 1), (0, -1), (1, 0), (-1, 0), (17, 1), (-17, -1), (1000, 0)],
    ids=str,
)
@pytest.mark.parametrize("mode", MODES)
def test_a_torn_header_is_refused(
    tmp_path: Path, mode: dict[str, Any], length: int, entries: int
) -> None:
    """It names the ends that are known to have been on disk."""
    path = make(tmp_path / "s.bin", ONE, [(1, b"x" * 900_000)], [(2, b"y" * 900_000)])
    total, count = header_of(path)[-2:]
    rewritten(path, total + length, count + entries)
    before = path.read_bytes()
    with pytest.raises(DamagedHeader) as caught:
        DataStream.open(path, **mode)
    assert caught.value.path == str(path)
    assert caught.value.offset == 16
    said = str(caught.value)
    assert f"ends with {count + entries} entries at byte {total + length}" in said
    assert said.endswith(f"ends that were on disk: entry 4 at byte {total}")
    assert path.read_bytes() == before


def test_candidates_are_the_last_two_synced_ends(tmp_path: Path) -> None:
    path = tmp_path / "s.bin"
    with DataStream.create(path) as stream:
        ends = []
        for operation in (ONE, TWO, THREE):
            add(stream, operation)
            ends.append((stream.total_entries, stream.header.total_length))
        found = copied(path, "found.bin")
    rewritten(found, ends[-1][1] + 1, ends[-1][0])
    with pytest.raises(DamagedHeader) as caught:
        DataStream.open(found)
    want = ", ".join(f"entry {entries} at byte {length}" for entries, length in ends[:0:-1])
    assert str(caught.value).endswith(f"ends that were on disk: {want}")


def test_a_header_that_no_slot_helps(tmp_path: Path, golden: Golden) -> None:
    path = golden.unpack("small")
    rewritten(path, 4849, 15)
    with pytest.raises(DamagedHeader, match="no other end is recorded"):
        DataStream.open(path)


def test_a_record_about_another_header(tmp_path: Path) -> None:
    """Its sum fits, its end does not: nobody of ours writes that."""
    path = make(tmp_path / "s.bin", ONE, TWO)
    content = bytearray(path.read_bytes())
    page = content[:FIRST]
    records.put_record(page, record_of(path)._replace(after=Head(FIRST + 18, 1)))
    content[:FIRST] = page
    path.write_bytes(content)
    with pytest.raises(DamagedHeader, match="the commit record is about another header"):
        DataStream.open(path)


# Damaged files that the reference was tried on: what each is to us.

OPENED: dict[str, tuple[type[StreamFileError] | None, str]] = {
    "open: good": (None, ""),
    "open: empty file (0 bytes)": (NotAStream, "no stream file: it is empty"),
    "open: 15 bytes": (NotAStream, "does not begin with polygonDATSTREAM"),
    "open: 4095 bytes": (NotAStream, "the header page is cut at byte 4095"),
    "open: header page only, totalLength says 4849": (
        BadFileSize,
        "at byte 4096: the file ends there, its data only at byte 4849",
    ),
    "open: one byte missing at the end": (
        BadFileSize,
        r"at byte 1052671: the file's size is 1052671 bytes, not 4096 \+ k x 1048576",
    ),
    "open: one byte more at the end": (BadFileSize, "the file's size is 1052673 bytes"),
    "open: wrong magic": (NotAStream, "does not begin with polygonDATSTREAM"),
    "open: header packetType 2": (DamagedHeader, "at byte 16: the header's packet type is 2"),
    "open: headerLength 39": (DamagedHeader, "at byte 16: the header's length is 39, not 38"),
    "open: streamType 2 in the file": (WrongStreamType, "the stream is of type 2, not 1"),
    "open: version 9 in the file": (None, ""),
    "open: totalLength past the file": (BadFileSize, "its data only at byte 1052673"),
    "open: totalLength 2^64-1": (DamagedHeader, "at byte 38: .* 18446744073709551615 is not"),
    "open: totalLength 0": (DamagedHeader, "at byte 38: the header's total length 0 is not"),
    "open: totalLength 4095": (DamagedHeader, "at byte 38: the header's total length 4095 is"),
    "open: totalEntries 17 (one too many)": (DamagedHeader, "17 entries at byte 4849"),
    "open: totalEntries 15 (one too few)": (DamagedHeader, "15 entries at byte 4849"),
    "open: entry 3: packetType 9": (DamagedHeader, "at byte 4149: packet type 9"),
    "open: entry 3: packetType 0": (DamagedHeader, "at byte 4149: there is padding"),
    "open: entry 3: length 16": (DamagedHeader, "at byte 4149: entry length 16"),
    "open: entry 3: length 0xffffffff": (DamagedHeader, "at byte 4149: entry length 4294967295"),
    "open: entry 3: number 4": (DamagedHeader, "at byte 4149: entry number 4 where 3 is due"),
}


def opened_cases(golden: Golden) -> dict[str, dict[str, Any]]:
    import json

    cases = json.loads((golden.folder / "api.json").read_text())
    return {case["name"]: case for case in cases if case["name"].startswith("open: ")}


def test_the_cases_are_all_there_are(golden: Golden) -> None:
    assert opened_cases(golden).keys() == OPENED.keys()


def case_file(golden: Golden, name: str) -> Path:
    """The file of a case: small.bin, cut or changed as it says."""
    told = opened_cases(golden)[name]["file"]
    content = bytearray(golden.content("small")[: FIRST + PAGE])
    if "patch_hex" in told:
        patch = bytes.fromhex(told["patch_hex"])
        content[told["patch_offset"] : told["patch_offset"] + len(patch)] = patch
    size = told.get("size", len(content))
    path = golden.scratch / "case.bin"
    path.write_bytes(content[:size].ljust(size, b"\0"))
    return path


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", OPENED)
def test_opening(golden: Golden, name: str, mode: dict[str, Any]) -> None:
    path = case_file(golden, name)
    before = path.read_bytes()
    error, says = OPENED[name]
    if error is None:
        with DataStream.open(path, stream_type=1, **mode) as stream:
            assert stream.header.version == (9 if "version 9" in name else 2)
            assert stream.total_entries == 16
        return
    with pytest.raises(error, match=says) as caught:
        DataStream.open(path, stream_type=1, **mode)
    assert str(caught.value).startswith(f"{path}: ")
    assert str(caught.value).count("\n") == 0
    if isinstance(caught.value, DamagedFile):
        assert f"at byte {caught.value.offset}: " in str(caught.value)
    assert path.read_bytes() == before
    assert [p.name for p in path.parent.iterdir()] == ["case.bin"]


@pytest.mark.parametrize(
    ("patch", "says"),
    [
        ((0, b"\x09"), "packet type 9 is neither"),
        ((0, b"\x00"), "the page ends before entry 3, and entry 7 is due"),
        ((1, b"\x00\x00\x00\x10"), "entry length 16 does not"),
        ((1, b"\xff\xff\xff\xff"), "entry length 4294967295 is above"),
        ((9, (4).to_bytes(8, "big")), "entry number 4 where 3 is due"),
    ],
)
def test_damage_that_only_reading_finds(
    golden: Golden, patch: tuple[int, bytes], says: str
) -> None:
    """Where our record vouches for the header, the entries are not walked on open."""
    path = golden.unpack("small")
    with DataStream.open(path):
        pass
    content = bytearray(path.read_bytes())
    at, change = 4149 + patch[0], patch[1]
    content[at : at + len(change)] = change
    path.write_bytes(content)
    with DataStream.open(path, read_only=True) as stream:
        assert stream.total_entries == 16
        # What stands before the damage is read as ever.
        assert stream.entry(2).data == b"\xfc"
        assert stream.reader.cursor(2).offset == 4131
        assert stream.reader.first_event(0).number == 1
        started = iter(stream.entries())
        assert [next(started).number for _ in range(3)] == [0, 1, 2]
        calls: list[Callable[[], object]] = [
            lambda: next(started),
            lambda: stream.entry(3),
            lambda: stream.entry(15),
            lambda: stream.reader.cursor(15),
            lambda: list(stream.entries()),
            lambda: list(stream.entries(3)),
            lambda: stream.bookmark(b"xxxx"),
        ]
        for call in calls:
            with pytest.raises(DamagedEntry) as caught:
                call()
            assert caught.value.path == str(path)
            assert caught.value.offset == 4149
        with pytest.raises(DamagedEntry, match=f"at byte 4149: .*{says}"):
            stream.entry(7)


@pytest.mark.parametrize("offset", [21, 29, 37], ids=["version", "system id", "stream type"])
def test_a_damaged_identity_is_not_taken_for_another_program(tmp_path: Path, offset: int) -> None:
    path = tmp_path / "stream.bin"
    with DataStream.create(path, version=2, system_id=7) as stream, stream.atomic_op() as op:
        op.add_entry(1, b"data")
    content = bytearray(path.read_bytes())
    content[offset] ^= 0x40
    path.write_bytes(content)
    for read_only in (True, False):
        with pytest.raises(DamagedHeader, match="version 2, system id 7, stream type 1"):
            DataStream.open(path, read_only=read_only)
    assert path.read_bytes() == content
