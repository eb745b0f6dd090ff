"""A reader beside a writer: it sees what is committed, all of it, and nothing else."""

from __future__ import annotations

import contextlib
import errno
from pathlib import Path
from typing import Any

import pytest

import datastreamer
from datastreamer import DataStream, Entry
from datastreamer.errors import (
    CommitInDoubt,
    NotFound,
    StreamReadOnly,
    UnknownBookmark,
    UnknownEntry,
)
from datastreamer.storage.header.page import HeaderPage
from datastreamer.storage.header.records import Change, put_change
from tests.storage.made import (
    BOOKMARK,
    FIRST,
    HEADER,
    ONE,
    OTHER_BOOT,
    TWO,
    FaultyDisk,
    add,
    copied,
    header_of,
    items,
    make,
    power_cut,
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "s.bin"


def test_a_follower_sees_commits_when_it_looks(path: Path) -> None:
    with DataStream.create(path) as stream, DataStream.open(path, follow=True) as follower:
        assert not follower.writable
        assert follower.stream_id == stream.stream_id
        assert not follower.refresh()
        add(stream, ONE)
        assert follower.total_entries == 0
        assert follower.refresh()
        assert not follower.refresh()
        assert items(follower) == ONE
        assert follower.header == stream.header
        assert follower.bookmark(b"k") == 0
        with pytest.raises(StreamReadOnly):
            follower.start_atomic_op()
        stream.update_entry(1, 1, b"new")
        assert follower.refresh()
        assert follower.epoch == stream.epoch == 1
        assert follower.entry(1).data == b"new"
        stream.truncate(1)
        assert follower.refresh()
        assert (follower.epoch, follower.total_entries) == (2, 1)
        # Back and on beyond where it was, between two looks.
        stream.truncate(0)
        add(stream, TWO, TWO)
        assert follower.refresh()
        assert (follower.epoch, items(follower)) == (3, TWO + TWO)


def test_a_follower_that_has_not_looked(path: Path) -> None:
    """What was truncated and written anew looks damaged to it; it looks again, and knows."""
    with (
        DataStream.create(path, index="memory") as stream,
        DataStream.open(path, follow=True) as follower,
    ):
        add(stream, *[[(n, b"x" * 500_000)] for n in range(6)], [(BOOKMARK, b"k")])
        follower.refresh()
        follower.entry(6)
        iteration = follower.entries()
        assert [next(iteration).number for _ in range(2)] == [0, 1]
        stream.truncate(1)
        add(stream, *[[(n, b"y" * 400_001)] for n in range(1, 5)], [(BOOKMARK, b"k"), (9, b"z")])
        with pytest.raises(NotFound, match="was removed by a truncation during the read"):
            list(iteration)
        assert follower.epoch == 1
        stream.truncate(1)
        add(stream, *[[(n, b"z" * 300_002)] for n in range(1, 5)], [(9, b"z"), (BOOKMARK, b"k")])
        assert follower.entry(4).data == b"z" * 300_002  # though the other is still there
        assert follower.epoch == 2
        assert follower.bookmark(b"k") == 6
        stream.truncate(1)
        add(stream, *[[(n, b"w" * 200_003)] for n in range(1, 8)], [(BOOKMARK, b"k")])
        assert follower.bookmark(b"k") == 8
        assert items(follower) == items(stream)


def test_a_follower_that_has_not_looked_sees_nothing_uncommitted(path: Path) -> None:
    """Truncated, and a huge operation placed where it still counts entries."""
    with (
        DataStream.create(path, index="memory") as stream,
        DataStream.open(path, follow=True) as follower,
    ):
        add(stream, [(1, b"seen" * 1000) for _ in range(300)])
        follower.refresh()
        iteration = follower.entries()
        next(iteration)
        stream.truncate(0)
        stream.start_atomic_op()
        for _ in range(1500):
            stream.add_entry(1, b"none" * 1000)
        stream._op.spill()
        assert b"none" in path.read_bytes()
        with pytest.raises(UnknownEntry, match="the stream holds none"):
            follower.entry(150)
        seen: list[Entry] = []
        with pytest.raises(NotFound):
            seen.extend(iteration)
        assert all(entry.data == b"seen" * 1000 for entry in seen)
        assert items(follower) == []
        stream.rollback_atomic_op()


@pytest.mark.parametrize("how", ["follow", "read_only"])
def test_an_iteration_does_not_mix_two_histories(path: Path, how: str) -> None:
    """Entries of the same sizes: nothing looks damaged."""
    with DataStream.create(path, index="memory") as stream, contextlib.ExitStack() as stack:
        add(stream, [(1, b"before")] * 100)
        follower = stack.enter_context(DataStream.open(path, **{how: True}))
        batches = follower.batches(max_bytes=500)
        assert {entry.data for entry in next(batches)} == {b"before"}
        stream.truncate(5)
        add(stream, [(1, b"after!")] * 95)
        with pytest.raises(NotFound, match="was removed by a truncation during the read"):
            next(batches)
        assert {entry.data for entry in follower.entries(5)} == {b"after!"}


@pytest.mark.parametrize("data", [b"x" * 500_000, b""])
def test_a_snapshot_that_is_truncated_is_not_damaged(path: Path, data: bytes) -> None:
    with DataStream.create(path, index="memory") as stream:
        add(stream, *[[(n, b"x" * 500_000)] for n in range(6)])
        with DataStream.open(path, read_only=True) as reader:
            batches = reader.batches()
            first = next(batches)
            stream.truncate(1)
            add(stream, [(7, data)] * 4, [(7, b"y" * 300_000)])
            with pytest.raises(NotFound, match="was removed by a truncation during the read"):
                next(batches)
            assert first.next_number == 2


def test_a_snapshot_continues_over_changes_ahead_of_it(path: Path) -> None:
    with DataStream.create(path) as stream:
        add(stream, [(1, b"%02d" % number) for number in range(40)])
        with DataStream.open(path, read_only=True) as reader:
            batches = reader.batches(0, 20, max_bytes=100)
            seen = len(next(batches))
            stream.truncate(30)
            add(stream, [(1, b"new")] * 30)
            assert seen + sum(len(batch) for batch in batches) == 20


def test_read_only_stays_as_it_was(path: Path) -> None:
    with DataStream.create(path) as stream:
        add(stream, ONE)
        with DataStream.open(path, read_only=True) as reader:
            add(stream, TWO)
            assert not reader.refresh()
            assert items(reader) == ONE
            assert reader.bookmark(b"k") == 0
            with pytest.raises(UnknownEntry):
                reader.entry(2)


@pytest.mark.parametrize("sync", ["commit", "os"])
def test_uncommitted_bytes_are_never_seen(path: Path, sync: Any) -> None:
    """Not of a huge operation that was placed already, not when it is rolled back."""
    with (
        DataStream.create(path, sync=sync, index="memory") as stream,
        DataStream.open(path, follow=True, index="memory") as follower,
    ):
        add(stream, ONE)
        follower.refresh()
        stream.start_atomic_op()
        for n in range(20):
            stream.add_entry(n, bytes([n]) * 600_000)
        assert b"\x09" * 600_000 in path.read_bytes()
        assert not follower.refresh()
        assert items(follower) == ONE
        stream.rollback_atomic_op()
        add(stream, TWO)
        assert follower.refresh()
        assert items(follower) == ONE + TWO


def test_nothing_is_seen_before_it_is_on_disk(path: Path) -> None:
    """Under "commit": the header is there before the sync, the visible mark after it."""
    disk = FaultyDisk()
    with (
        DataStream.create(path, index="memory", disk=disk) as stream,
        DataStream.open(path, follow=True) as follower,
    ):
        add(stream, ONE)
        follower.refresh()
        seen: list[tuple[str, int, int]] = []

        def look(step: str) -> None:
            with DataStream.open(path, follow=True) as new:
                follower.refresh()
                assert new.total_entries == follower.total_entries
                seen.append((step, header_of(path)[-1], follower.total_entries))

        for step in ("data", "header", "sync", "mark"):
            disk.before[f"commit {step}"] = lambda step=step: look(step)  # type: ignore[misc]
        add(stream, TWO)
        disk.before.clear()
        assert seen == [("data", 2, 2), ("header", 2, 2), ("sync", 4, 2), ("mark", 4, 2)]
        assert follower.refresh()
        assert items(follower) == ONE + TWO


def test_a_commit_in_doubt_is_not_seen(path: Path) -> None:
    disk = FaultyDisk()
    with (
        DataStream.create(path, index="memory", disk=disk) as stream,
        DataStream.open(path, follow=True) as follower,
    ):
        add(stream, ONE)
        disk.faults = dict.fromkeys(["commit sync", "sync"], errno.EIO)
        with pytest.raises(CommitInDoubt):
            add(stream, TWO)
        disk.faults = {}
        follower.refresh()
        assert items(follower) == ONE


def test_in_the_middle_of_a_truncation(path: Path) -> None:
    """The header goes back first; a follower goes with it, and knows that it went."""
    disk = FaultyDisk()
    with (
        DataStream.create(path, index="memory", disk=disk) as stream,
        DataStream.open(path, follow=True) as follower,
    ):
        add(stream, ONE, TWO)
        follower.refresh()
        seen: list[tuple[int, int]] = []

        def look() -> None:
            follower.refresh()
            seen.append((follower.total_entries, follower.epoch))

        disk.before["sync"] = look
        stream.truncate(1)
        disk.before.clear()
        assert seen == [(1, 1)]
        assert not follower.refresh() or follower.epoch == 1
        assert items(follower) == ONE[:1]


def test_a_torn_header_page_is_read_again(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While one of ours writes, a record that does not fit is a read in the middle."""
    with (
        DataStream.create(path, index="memory") as stream,
        DataStream.open(path, follow=True) as follower,
    ):
        add(stream, ONE)
        follower.refresh()
        old = path.read_bytes()[:FIRST]
        add(stream, TWO)
        new = path.read_bytes()[:FIRST]
        file = follower._file.file
        read = file.read

        def torn(times: int) -> None:
            left = [times]

            def once(size: int, offset: int) -> bytes:
                if offset == 0 and left[0]:
                    left[0] -= 1
                    return new[:54] + old[54:]  # the header of one, the record of the other
                return read(size, offset)

            monkeypatch.setattr(file, "read", once)

        torn(10**9)
        assert not follower.refresh()
        assert items(follower) == ONE
        torn(3)
        assert follower.refresh()
        assert items(follower) == ONE + TWO


def test_a_writer_that_knows_no_records(path: Path) -> None:
    """It writes data, then the header: followers go by the header then."""
    make(path, ONE, TWO)
    packed = b"".join(
        b"\2" + (20).to_bytes(4, "big") + kind.to_bytes(4, "big") + number.to_bytes(8, "big") + data
        for kind, number, data in [(7, 4, b"abc"), (8, 5, b"def")]
    )

    def foreign(offset: int, data: bytes) -> None:
        with path.open("r+b") as file:
            file.seek(offset)
            file.write(data)

    def header(length: int, entries: int) -> None:
        foreign(16, HEADER.pack(*header_of(path)[:-2], length, entries))

    with DataStream.open(path, follow=True) as follower:
        end = follower.header.total_length
        foreign(end, packed)
        assert not follower.refresh()
        header(end + 40, 6)
        assert follower.refresh()
        assert not follower.refresh()
        assert items(follower)[4:] == [(7, b"abc"), (8, b"def")]
        assert follower.epoch == 0
        header(end + 20, 5)
        assert follower.refresh()
        assert follower.total_entries == 5
        taken = follower.epoch
        assert taken > 1 << 50
        header(FIRST, 0)
        assert follower.refresh()
        assert (items(follower), follower.epoch) == ([], taken + 1)
        with pytest.raises(UnknownBookmark):
            follower.bookmark(b"k")
        # One of ours takes over, and is followed.
        with DataStream.open(path) as stream:
            follower.refresh()
            add(stream, ONE)
            assert follower.refresh()
            assert items(follower) == ONE
            assert follower.bookmark(b"k") == 0


def test_what_an_open_found_to_be_lost_does_not_come_back(path: Path) -> None:
    """A follower of a file that was not recovered yet, after a power cut."""
    with DataStream.create(path, sync="os", index="memory") as stream:
        add(stream, ONE)
        stream.sync()
        base = stream.header.total_length
        add(stream, TWO)
        found = copied(path, "found.bin")
    cut = power_cut(found, path.with_name("cut.bin"), (base, base + 30))
    with DataStream.open(cut, follow=True) as follower:
        for _ in range(3):
            assert not follower.refresh()
            assert items(follower) == ONE
        with DataStream.open(cut) as stream:
            assert items(stream) == ONE
            follower.refresh()
            assert items(follower) == ONE
            add(stream, [(9, b"new")])
            assert follower.refresh()
            assert items(follower) == [*ONE, (9, b"new")]


def test_a_reader_while_a_writer_has_yet_to_recover(path: Path) -> None:
    """The lock is held, but the record is of another boot: it was not recovered yet."""
    with DataStream.create(path, sync="os", index="memory") as stream:
        add(stream, ONE)
        stream.sync()
        base = stream.header.total_length
        add(stream, TWO)
        found = copied(path, "found.bin")
    cut = power_cut(found, path.with_name("cut.bin"), (base, base + 30), boot=OTHER_BOOT)
    file = datastreamer.storage.disk.file_ops.OsDisk().open(str(cut), write=True)  # type: ignore[attr-defined]
    assert file.lock()
    for mode in ({"read_only": True}, {"follow": True}):
        with DataStream.open(cut, **mode) as reader:
            assert items(reader) == ONE
    file.close()


def test_a_follower_opened_after_a_writer_was_killed(path: Path) -> None:
    """The header may be ahead of the mark: what is behind it may not be on disk, and is for
    the next writer to see to."""
    disk = FaultyDisk()
    with DataStream.create(path, index="memory", disk=disk) as stream:
        add(stream, ONE)
        disk.before["commit mark"] = lambda: copied(path, "killed.bin")
        add(stream, TWO)
        disk.before.clear()
    killed = path.with_name("killed.bin")
    with DataStream.open(killed, follow=True) as follower:
        assert items(follower) == ONE
        assert not follower.refresh()
        with DataStream.open(killed) as stream:
            follower.refresh()
            assert items(follower) == items(stream) == ONE + TWO
            assert follower.epoch == 0


def test_a_follower_is_notified_of_changes(path: Path) -> None:
    with DataStream.create(path) as stream, DataStream.open(path, follow=True) as follower:
        add(stream, ONE, TWO)
        follower.refresh()
        assert follower.changes_since(follower.epoch) == []
        epoch = follower.epoch
        stream.update_entry(1, 1, b"new")
        follower.refresh()
        assert follower.changes_since(epoch) == [Change(1, 1, 2)]
        stream.truncate(3)
        add(stream, ONE)
        stream.truncate(2)
        follower.refresh()
        both = [Change(2, 3, None), Change(3, 2, None)]
        assert follower.changes_since(epoch) == [Change(1, 1, 2), *both]
        assert follower.changes_since(epoch + 1) == both
        assert follower.changes_since(3) == []
        assert follower.changes_since(7) is None


def test_an_iteration_continues_over_changes_ahead_of_it(path: Path) -> None:
    with DataStream.create(path) as stream, DataStream.open(path, follow=True) as follower:
        add(stream, [(1, b"%02d" % number) for number in range(40)])
        follower.refresh()
        entries = follower.entries()
        batches = follower.batches(max_bytes=100)
        assert [next(entries).number for _ in range(3)] == [0, 1, 2]
        assert next(batches).next_number < 30
        stream.update_entry(39, 1, b"xx")
        first = next(batches).first_number
        rest = [entry.data for batch in batches for entry in batch]
        assert rest[-1] == b"xx"
        assert first + len(rest) <= 40
        behind = follower.batches(max_bytes=100)
        next(behind)
        stream.truncate(30)
        add(stream, [(1, b"new")])
        assert max(batch.next_number for batch in behind) == 31
        behind = follower.batches(max_bytes=100)
        next(behind)
        stream.truncate(1)
        with pytest.raises(NotFound, match="removed by a truncation"):
            next(behind)


def test_an_epoch_far_ahead_is_of_no_publisher(path: Path) -> None:
    """Another file was copied over it, maybe."""
    page = bytearray(4096)
    put_change(page, Change(2**63, 0, None))
    assert HeaderPage(page).changes_between(0, 2**63) is None


def test_a_follower_that_slept_too_long_is_not_notified(path: Path) -> None:
    with DataStream.create(path) as stream, DataStream.open(path, follow=True) as follower:
        add(stream, ONE)
        for turn in range(17):  # one more than the page has room for
            stream.update_entry(1, 1, b"%03d" % turn)
        follower.refresh()
        assert follower.epoch == 17
        assert follower.changes_since(0) is None


def test_what_a_recovery_removed_is_reported(path: Path) -> None:
    """What the page says of an epoch that never existed is not used for it."""
    with DataStream.create(path, sync="os") as stream:
        add(stream, ONE)
        stream.sync()
        end = stream.header.total_length
        add(stream, TWO)

        def begun(content: bytearray) -> None:
            put_change(content, Change(1, 3, None))

        left = power_cut(path, path.with_name("left.bin"), (end, end + 100), change=begun)
    with DataStream.open(left, follow=True) as follower:
        epoch = follower.epoch
        with DataStream.open(left) as stream:
            assert stream.epoch == epoch + 1
            assert stream.total_entries == len(ONE)
        follower.refresh()
        assert follower.epoch == epoch + 1
        assert follower.changes_since(epoch) == [Change(epoch + 1, len(ONE), None)]


def test_who_came_while_a_failed_sync_was_got_over_learns_whose_stream_it_is(path: Path) -> None:
    """No page is whole at that time: what it says is believed, not yet whose it is."""
    disk = FaultyDisk()
    opened: list[DataStream] = []
    syncs = 0

    def sync() -> None:
        nonlocal syncs
        syncs += 1
        disk.faults = {"sync": errno.EIO} if syncs == 1 else {}
        if syncs == 2:
            opened.append(DataStream.open(path, follow=True, index="memory"))

    with DataStream.create(path, sync="os", index="memory", disk=disk) as writer:
        add(writer, ONE, TWO)
        writer.truncate(1)
        add(writer, TWO)
        disk.before["sync"] = sync
        writer.sync()
        disk.before.clear()
        [reader] = opened
        with reader:
            for _ in range(2):
                add(writer, TWO)
                reader.refresh()
            assert reader.total_entries == writer.total_entries
            assert (reader.stream_id, reader.epoch) == (writer.stream_id, writer.epoch)
