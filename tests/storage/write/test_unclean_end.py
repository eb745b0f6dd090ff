"""An open after an end that was no clean close: it may be that readers saw what is lost."""

from __future__ import annotations

import errno
import logging
from pathlib import Path
from typing import Any

import pytest

from datastreamer import DataStream
from datastreamer.errors import CommitInDoubt
from datastreamer.storage.header import records
from datastreamer.storage.header.records import Agreement, Change, Writer
from tests.storage.lab.model import abandon
from tests.storage.made import FaultyDisk

LOSING: list[Any] = ["os", 50]


def killed(path: Path, sync: Any, *, count: int = 3, index: Any = "memory") -> int:
    """A stream with `count` entries whose writer was killed; returns its epoch."""
    stream = DataStream.create(path, sync=sync, index=index)
    for number in range(count):
        stream.append(1, b"%d" % number, bookmark=b"key %d" % number)
    stream.bookmarks.wait()
    epoch = stream.epoch
    abandon(stream)
    return epoch


@pytest.mark.parametrize("sync", ["commit", *LOSING])
def test_a_clean_close_keeps_the_epoch(tmp_path: Path, sync: Any) -> None:
    path = tmp_path / "s.bin"
    epochs = []
    for _ in range(3):
        with DataStream.open_or_create(path, sync=sync, index="memory") as stream:
            stream.append(1, b"data")
            epochs.append(stream.epoch)
    assert epochs == [0, 0, 0]


@pytest.mark.parametrize("sync", LOSING)
def test_after_another_end_the_epoch_rises_once(tmp_path: Path, sync: Any) -> None:
    """The recovered end is recorded as a truncation to there: nobody who has less is affected."""
    path = tmp_path / "s.bin"
    epoch = killed(path, sync)
    for _ in range(2):
        with DataStream.open(path, sync="commit", index="memory") as stream:
            assert stream.epoch == epoch + 1
            changes = [Change(epoch + 1, 6, None)]
            assert stream.recorded_changes(epoch) == changes
    with DataStream.open(path, follow=True, index="memory") as reader:
        assert reader.total_entries == 6


def test_under_commit_nothing_that_was_seen_is_lost(tmp_path: Path) -> None:
    path = tmp_path / "s.bin"
    epoch = killed(path, "commit")
    with DataStream.open(path, index="memory") as stream:
        assert stream.epoch == epoch


@pytest.mark.parametrize("after", ["commit", "os"])
def test_an_end_after_the_recovery_itself(tmp_path: Path, after: Any) -> None:
    """Its epoch may be lost like the entries, so the next open raises it, too."""
    path = tmp_path / "s.bin"
    epoch = killed(path, "os")
    abandon(DataStream.open(path, sync=after, index="memory"))
    with DataStream.open(path, index="memory") as stream:
        assert stream.epoch == epoch + 2


def test_a_policy_that_is_set_later(tmp_path: Path) -> None:
    path = tmp_path / "s.bin"
    stream = DataStream.create(path, index="memory")
    stream.sync_policy = "os"
    stream.append(1, b"data")
    stream.sync_policy = 20
    epoch = stream.epoch
    abandon(stream)
    with DataStream.open(path, index="memory") as stream:
        assert stream.epoch == epoch + 1


def test_a_policy_is_not_set_before_the_file_says_so(tmp_path: Path) -> None:
    disk = FaultyDisk()
    with DataStream.create(tmp_path / "s.bin", index="memory", disk=disk) as stream:
        disk.faults["sync"] = errno.EIO
        with pytest.raises(CommitInDoubt):
            stream.sync_policy = "os"
        disk.faults.clear()
        assert stream.sync_policy == "commit"
        stream.append(1, b"data")
        stream.sync_policy = "os"
        assert stream.sync_policy == "os"


def test_a_writer_of_an_older_version(tmp_path: Path) -> None:
    """It wrote zeros there."""
    path = tmp_path / "s.bin"
    epoch = killed(path, "os")
    page = bytearray(path.read_bytes())
    writer = records.get_writer(page)
    assert writer is not None
    assert (writer.open, writer.may_lose) == (True, True)
    records.put_writer(page, Writer(writer.pid, writer.boot_id))
    path.write_bytes(page)
    with DataStream.open(path, index="memory") as stream:
        assert stream.epoch == epoch


def test_the_index_continues(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    path = tmp_path / "s.bin"
    epoch = killed(path, "os", count=50, index="lmdb")
    caplog.clear()
    with DataStream.open(path, sync="os") as stream:
        assert stream.epoch == epoch + 1
        assert stream.bookmark(b"key 7") == 14
    assert [each for each in caplog.messages if "rebuilt" in each] == []


def test_a_relay_agrees_as_before(tmp_path: Path) -> None:
    path = tmp_path / "s.bin"
    agreement = Agreement(b"upstream".ljust(16), 7, 0, 2, 5, 1)
    with DataStream.create(path, sync="os", index="memory") as stream:
        stream.parts.relay.put_agreement(agreement)
    epoch = agreement.own_epoch
    abandon(DataStream.open(path, sync="os", index="memory"))
    with DataStream.open(path, index="memory") as stream:
        assert stream.epoch == epoch + 1
        assert stream.parts.relay.agreement == agreement._replace(own_epoch=epoch + 1)
