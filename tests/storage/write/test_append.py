"""`append` and `append_many`: one call, one atomic operation."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any, Literal

import pytest

from datastreamer import DataStream
from datastreamer.errors import (
    BadBookmark,
    BadEntryType,
    CommitInDoubt,
    EntryTooLarge,
    LeaseHeld,
    OperationOpen,
    StreamClosed,
    StreamReadOnly,
    UnknownBookmark,
    WriteFailed,
)
from datastreamer.storage.maintain.check import verify
from tests.storage.made import BOOKMARK, FaultyDisk, power_cut, scan_file

Sync = Literal["commit", "os"] | int


def items(path: Path) -> list[tuple[int, bytes]]:
    return [(entry.type, entry.data) for entry in scan_file(path)]


@pytest.mark.parametrize("sync", ["commit", "os", 50])
@pytest.mark.parametrize("index", ["memory", "lmdb"])
def test_one_entry_an_operation(tmp_path: Path, sync: Sync, index: Any) -> None:
    path = tmp_path / "s.bin"
    with (
        DataStream.create(path, sync=sync, index=index) as stream,
        DataStream.open(path, follow=True, index="memory") as follower,
    ):
        for number in range(0, 30, 2):
            key = number.to_bytes(4, "big")
            assert stream.append(7, b"data", bookmark=key) == number + 1
            assert stream.bookmark(key) == number
            assert follower.refresh()
            assert follower.total_entries == number + 2
        assert stream.append(8, bytearray(b"x")) == 30
        assert stream.append(2**32 - 1, memoryview(b"")) == 31
        assert stream.bookmark((4).to_bytes(4, "big")) == 4
    assert verify(path).ok
    assert items(path)[28:] == [
        (BOOKMARK, b"\0\0\0\x1c"),
        (7, b"data"),
        (8, b"x"),
        (2**32 - 1, b""),
    ]


def test_many(tmp_path: Path) -> None:
    path = tmp_path / "s.bin"
    with DataStream.create(path, sync="os", index="memory") as stream:
        assert stream.append_many(1, [b"a", b"b"]) == range(2)
        assert stream.append_many([4, 5], iter([b"c", bytearray(b"d")])) == range(2, 4)
        assert stream.append_many(1, (), bookmark=b"key") == range(5, 5)
        assert stream.append_many(1, [bytes(300_000)] * 30, bookmark=b"more") == range(6, 36)
        assert stream.append_many(1, []) == range(36, 36)
        assert stream.bookmark(b"key") == 4
        assert stream.bookmark(b"more") == 5
        assert stream.total_entries == 36
    assert items(path)[:5] == [(1, b"a"), (1, b"b"), (4, b"c"), (5, b"d"), (BOOKMARK, b"key")]
    assert verify(path).ok


def test_what_is_refused_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "s.bin"
    with DataStream.create(path, sync="os", index="memory") as stream:
        stream.append(1, b"first")
        for arguments, bookmark, error in [
            ((BOOKMARK, b""), None, BadEntryType),
            ((-1, b""), None, BadEntryType),
            ((1, bytes((1 << 20) - 16)), b"key", EntryTooLarge),
            ((1, "text"), b"key", TypeError),
            ((1, b"data"), bytes(17), BadBookmark),
            ((1, b"data"), b"", BadBookmark),
        ]:
            with pytest.raises(error):
                stream.append(*arguments, bookmark=bookmark)  # type: ignore[arg-type]
            with pytest.raises(UnknownBookmark):
                stream.bookmark(b"key")
            assert stream.append(1, b"next") == stream.total_entries - 1
        with pytest.raises(BadEntryType):
            stream.append_many([1, BOOKMARK], [b"", b""], bookmark=b"key")
        with pytest.raises(ValueError, match="1 types for 2 entries"):
            stream.append_many([1], [b"", b""])
        assert stream.total_entries == 7
    assert verify(path).ok


def test_the_error_is_that_of_one_entry(tmp_path: Path) -> None:
    with DataStream.create(tmp_path / "s.bin", sync="os", index="memory") as stream:
        for types in ([5], (5,)):
            with pytest.raises(TypeError):
                stream.append(types, b"x")  # type: ignore[arg-type]
        with pytest.raises(EntryTooLarge) as caught:
            stream.append(1, bytes(1 << 20))
        assert "item" not in str(caught.value)
        assert stream.total_entries == 0


def test_beside_a_publisher(tmp_path: Path) -> None:
    """The operation of the lease's holder goes on."""
    with DataStream.create(tmp_path / "s.bin", sync="os", index="memory") as stream:
        lease = object()
        stream.parts.writer.lend(lease)
        for publishers in (False, True):
            if publishers:
                stream.start_atomic_op(lease=lease)
                stream.add_entry(1, b"the publisher's")
            with pytest.raises(LeaseHeld):
                stream.append(1, b"mine")
            with pytest.raises(LeaseHeld):
                stream.append_many(1, [b"mine"])
        stream.commit_atomic_op()
        stream.parts.writer.end_lease(lease)
        assert stream.append(1, b"mine") == 1
    assert items(tmp_path / "s.bin") == [(1, b"the publisher's"), (1, b"mine")]


def test_a_list_that_grows_meanwhile(tmp_path: Path) -> None:
    """During the commit another thread changes the list."""
    with DataStream.create(tmp_path / "s.bin", index="memory") as stream:
        data = [b"a", b"b"]
        stream.commit_guard = lambda: data.append(b"c")
        for _ in range(3):
            first, size = stream.total_entries, len(data)
            assert stream.append_many(1, data) == range(first, first + size)
            assert stream.total_entries == first + size < first + len(data)


def test_not_within_an_operation(tmp_path: Path) -> None:
    with DataStream.create(tmp_path / "s.bin", sync="os", index="memory") as stream:
        with stream.atomic_op() as op:
            op.add_entry(1, b"of the operation")
            with pytest.raises(OperationOpen):
                stream.append(1, b"")
            with pytest.raises(OperationOpen):
                stream.append_many(1, [b""])
            op.add_entry(1, b"of the operation, too")
        assert stream.total_entries == 2
        reader = DataStream.open(tmp_path / "s.bin", read_only=True)
        with reader, pytest.raises(StreamReadOnly):
            reader.append(1, b"")
    with pytest.raises(StreamClosed):
        stream.append(1, b"")


def test_the_guard_is_called_for_what_may_be_committed(tmp_path: Path) -> None:
    with DataStream.create(tmp_path / "s.bin", sync="os", index="memory") as stream:
        calls: list[int] = []
        stream.append(1, b"the first takes the steps")
        stream.commit_guard = lambda: calls.append(stream.total_entries)
        stream.start_atomic_op()
        with pytest.raises(OperationOpen):
            stream.append(1, b"")
        assert not calls
        stream.rollback_atomic_op()
        stream.append(1, b"in one call")
        assert calls == [1]


@pytest.mark.parametrize("call", ["append", "append_many"])
def test_before_it_is_initialised(call: str) -> None:
    stream = DataStream.__new__(DataStream)
    with pytest.raises(AttributeError):
        getattr(stream, call)(1, b"")


@pytest.mark.parametrize("sync", ["commit", "os"])
def test_a_full_disk(tmp_path: Path, sync: Sync) -> None:
    path, disk = tmp_path / "s.bin", FaultyDisk()
    with DataStream.create(path, sync=sync, index="memory", disk=disk) as stream:
        stream.append(1, b"first")
        disk.faults["commit data"] = errno.ENOSPC
        with pytest.raises(WriteFailed, match="No space"):
            stream.append(1, b"lost", bookmark=b"lost")
        assert stream.total_entries == 1
        disk.faults.clear()
        assert stream.append(1, b"second") == 1
        with pytest.raises(UnknownBookmark):
            stream.bookmark(b"lost")
    assert items(path) == [(1, b"first"), (1, b"second")]


def test_a_sync_that_fails(tmp_path: Path) -> None:
    """The operation is rolled back, or doubt is reported; the next one works."""
    path, disk = tmp_path / "s.bin", FaultyDisk()
    with DataStream.create(path, index="memory", disk=disk) as stream:
        stream.append(1, b"first")
        disk.faults["commit sync"] = errno.EIO
        with pytest.raises((WriteFailed, CommitInDoubt)):
            stream.append(1, b"lost")
        disk.faults.clear()
        assert stream.append(1, b"second") == 1
    assert items(path) == [(1, b"first"), (1, b"second")]


def test_durable_on_return(tmp_path: Path) -> None:
    path = tmp_path / "s.bin"
    with DataStream.create(path, index="memory") as stream:
        stream.append(1, b"kept", bookmark=b"key")
        after = power_cut(path, tmp_path / "after.bin")
    with DataStream.open(after, index="memory") as stream:
        assert stream.total_entries == 2
