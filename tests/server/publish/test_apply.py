"""The Result of an operation if the server's disk fails: in doubt, or not written if no part of it
is in the stream."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from pathlib import Path

import pytest

from datastreamer import DataStream
from datastreamer._codec import pack_entry
from datastreamer.errors import CommitInDoubt
from datastreamer.format import RESULT_IN_DOUBT, RESULT_NOT_WRITTEN
from datastreamer.protocol.publish.messages import Commit
from datastreamer.server.publish.apply import OperationRefused, PublishedOperation, commit_together
from tests.storage.made import FaultyDisk, items

LEASE = object()
# The header of a commit that does not wait cannot be written, and what is there cannot be undone.
REFUSED = dict.fromkeys(["commit mark", "write", "sync"], errno.EIO)


@pytest.fixture
def disk() -> FaultyDisk:
    return FaultyDisk()


@pytest.fixture
def stream(tmp_path: Path, disk: FaultyDisk) -> Iterator[DataStream]:
    # Under "os" header and mark are one write.
    with DataStream.create(tmp_path / "s.bin", sync="os", index="memory", disk=disk) as stream:
        stream.parts.writer.lend(LEASE)
        yield stream
        disk.faults = {}


def commit(stream: DataStream, first: int = 0) -> None:
    operation = PublishedOperation(stream, LEASE, first, 1000)
    operation.add(pack_entry(first, 1, b"data"))
    operation.commit(1)


def refused(stream: DataStream) -> int:
    with pytest.raises(OperationRefused) as caught:
        commit(stream)
    return caught.value.number


def test_in_doubt_until_the_header_is_back(stream: DataStream, disk: FaultyDisk) -> None:
    disk.faults = REFUSED
    assert refused(stream) == RESULT_IN_DOUBT
    # Sent again on the same connection: the one before may still be on disk.
    assert refused(stream) == RESULT_IN_DOUBT
    assert not stream.atomic_op().is_open
    disk.faults = {"commit data": errno.ENOSPC}
    # The header is put back first: nothing of it is anywhere now.
    assert refused(stream) == RESULT_NOT_WRITTEN
    disk.faults = {}
    commit(stream)
    assert items(stream) == [(1, b"data")]


def test_operations_that_come_together(stream: DataStream, disk: FaultyDisk) -> None:
    disk.faults = REFUSED
    commits = [Commit(n, 1, pack_entry(n, 1, b"data")) for n in range(3)]
    assert commit_together(stream, LEASE, commits) is None
    assert not stream.atomic_op().is_open
    assert refused(stream) == RESULT_IN_DOUBT
    disk.faults = {}
    assert commit_together(stream, LEASE, commits) is not None
    assert len(items(stream)) == 3


def test_a_lease_that_is_withdrawn_in_doubt(stream: DataStream, disk: FaultyDisk) -> None:
    """It is over nevertheless; the next holder receives the facts."""
    disk.faults = REFUSED
    stream.start_atomic_op(lease=LEASE)
    stream.add_entry(1, b"data")
    with pytest.raises(CommitInDoubt):
        stream.commit_atomic_op(wait=False)
    with pytest.raises(CommitInDoubt, match="whether the operation from entry 0 on"):
        stream.parts.writer.end_lease(LEASE)
    another = object()
    stream.parts.writer.lend(another)
    with pytest.raises(OperationRefused) as caught:
        PublishedOperation(stream, another, 0, 1000)
    assert caught.value.number == RESULT_IN_DOUBT
    disk.faults = {}
    PublishedOperation(stream, another, 0, 1000).roll_back()
    assert items(stream) == []


def test_a_rollback_that_is_asked_for(stream: DataStream, disk: FaultyDisk) -> None:
    """Of an operation that was never committed: nothing can be in doubt, whatever the disk does."""
    operation = PublishedOperation(stream, LEASE, 0, 1000)
    operation.add(pack_entry(0, 1, b"data"))
    disk.faults = REFUSED
    operation.roll_back()
    disk.faults = {}
    stream.sync()
    assert items(stream) == []
