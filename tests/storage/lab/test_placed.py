"""Huge operations on the simulated disk: their bytes come late, and nothing goes by that."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest import mock

import pytest

from datastreamer import DataStream
from datastreamer._packer import EntryPacker
from datastreamer.errors import WriteFailed
from datastreamer.storage.write import sync_policy as durable
from datastreamer.storage.write.uncommitted import UncommittedSpace
from tests.storage.lab.background import Background
from tests.storage.lab.cuts import Cut
from tests.storage.lab.disk import Interruption, Process, SimDisk
from tests.storage.lab.model import booted
from tests.storage.made import Item, items

PATH = "/simulated/stream.bin"
SPILL = 100_000


@pytest.fixture
def process() -> Iterator[Process]:
    disk = SimDisk()
    with booted(lambda: disk.boot):
        yield disk.process()


@pytest.fixture
def stream(process: Process) -> Iterator[DataStream]:
    with DataStream.create(PATH, index="memory", disk=process) as stream:
        EntryPacker.__init__(stream._op, SPILL)
        yield stream


def huge(first: int) -> list[Item]:
    """In five parts: the first one is late, the second one quick; the third one finds the thread
    busy."""
    return [(n % 5, bytes([n]) * 130_000) for n in range(first, first + 5)]


def begin(stream: DataStream, entries: list[Item]) -> None:
    stream.start_atomic_op()
    for kind, data in entries:
        stream.add_entry(kind, data)


def rolled_back_and_on(stream: DataStream) -> None:
    begin(stream, huge(1))
    stream.rollback_atomic_op()
    begin(stream, huge(20))
    stream.commit_atomic_op()
    assert items(stream) == huge(20)


def test_what_is_rolled_back_is_not_written_over_what_comes_behind_it(stream: DataStream) -> None:
    rolled_back_and_on(stream)


def test_it_would_be(stream: DataStream) -> None:
    """Were it not waited for."""

    def forgets(self: UncommittedSpace, *, wanted: bool) -> None:
        for placing in self._placing:
            if wanted:
                placing.finish()
        self._placing.clear()

    with (
        mock.patch.object(UncommittedSpace, "finish_placing", forgets),
        pytest.raises(AssertionError),
    ):
        rolled_back_and_on(stream)


@pytest.mark.parametrize("after", range(3))
def test_a_refusal_is_reported_until_it_is_over(
    stream: DataStream, process: Process, after: int
) -> None:
    """And the operation continues where it was, or is committed with all that it has."""
    entries, reported = huge(1), 0

    def until_it_is_over(call: Callable[[], object]) -> int:
        try:
            call()
        except WriteFailed:
            with pytest.raises(WriteFailed, match="No space left"):
                call()
            assert stream.total_entries == 0
            process.interruption = None
            call()
            return 1
        return 0

    stream.start_atomic_op()
    process.interruption = Interruption(after, errno.ENOSPC, lasting=True, only="place")
    for kind, data in entries:
        reported += until_it_is_over(partial(stream.add_entry, kind, data))
    reported += until_it_is_over(stream.commit_atomic_op)
    assert reported == (after < 2)
    assert items(stream) == entries


def test_a_sync_fails_right_before_the_commit(process: Process) -> None:
    """What it left clean of the parts is not on disk, and no later sync brings it there."""
    with mock.patch.object(durable, "Syncer", Background().syncer):
        stream = DataStream.create(PATH, index="memory", disk=process)
    EntryPacker.__init__(stream._op, SPILL)
    writer = stream._ensure_writable()
    prepare = writer.prepare

    def late(*arguments: Any) -> bool:
        process.interruption = Interruption(0, errno.EIO, only="sync")
        writer.durability.sync_in_background()  # in a thread of its own
        assert writer.end.failures == 1
        return prepare(*arguments)

    begin(stream, [(7, b"before")])
    stream.commit_atomic_op(wait=False)
    begin(stream, huge(1))
    with (
        mock.patch.object(writer, "prepare", late),
        pytest.raises(WriteFailed, match="no longer in memory; roll it back"),
    ):
        stream.commit_atomic_op()
    stream.rollback_atomic_op()
    begin(stream, huge(20))
    stream.commit_atomic_op()
    process.end()
    disk = process.disk.power_cut(Cut("nothing arrived"))
    with booted(lambda: disk.boot):
        with DataStream.open(PATH, index="memory", disk=disk.process()) as again:
            assert items(again) == [(7, b"before"), *huge(20)]
        stream._abandon()
