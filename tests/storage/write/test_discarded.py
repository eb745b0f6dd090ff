"""The close of a stream with an open atomic operation reports the entries that it discards."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import NoReturn

import pytest

from datastreamer import DataStream, StreamServer

DISCARDED = "2 entries are discarded"


def begin(stream: DataStream) -> None:
    stream.start_atomic_op()
    stream.add_bookmark(b"key")
    stream.add_entry(2, b"data")


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING]


def test_a_close_reports_what_it_discards(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "s.bin"
    stream = DataStream.create(path, index="memory")
    stream.append(1, b"committed")
    begin(stream)
    with pytest.warns(ResourceWarning, match=DISCARDED) as caught:
        stream.close()
    assert caught[0].filename == __file__
    assert [str(path) in each and DISCARDED in each for each in warnings_in(caplog)] == [True]
    with DataStream.open(path, read_only=True) as again:
        assert again.total_entries == 1


def test_the_entries_of_a_large_operation_count(tmp_path: Path) -> None:
    stream = DataStream.create(tmp_path / "s.bin", index="memory")
    stream.start_atomic_op()
    stream.add_entries(2, [bytes(500_000)] * 7)
    with pytest.warns(ResourceWarning, match="7 entries are discarded"):
        stream.close()


def test_an_error_of_the_warning_leaves_nothing_open(tmp_path: Path) -> None:
    path = tmp_path / "s.bin"
    stream = DataStream.create(path, index="memory")
    begin(stream)
    with pytest.raises(ResourceWarning, match=DISCARDED):  # warnings are errors in these tests
        stream.close()
    assert stream.closed
    DataStream.open(path, index="memory").close()


def test_leaving_the_block_reports_it_too(tmp_path: Path) -> None:
    with (
        pytest.warns(ResourceWarning, match=DISCARDED),
        DataStream.create(tmp_path / "s.bin", index="memory") as stream,
    ):
        begin(stream)


@pytest.mark.parametrize("in_process", [True, False])
def test_a_server_that_is_closed_reports_it(tmp_path: Path, in_process: bool) -> None:
    server = StreamServer(tmp_path / "s.bin", port=0, in_process=in_process, index="memory")
    begin(server.stream)
    with pytest.warns(ResourceWarning, match=DISCARDED):
        server.close()


def test_nothing_is_discarded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Committed, rolled back, or empty: there is nothing to say."""
    with DataStream.create(tmp_path / "s.bin", index="memory") as stream:
        begin(stream)
        stream.commit_atomic_op()
        begin(stream)
        stream.rollback_atomic_op()
        stream.start_atomic_op()
    assert warnings_in(caplog) == []


def fail_in(opened: DataStream | StreamServer) -> NoReturn:
    with opened:
        begin(opened if isinstance(opened, DataStream) else opened.stream)
        raise ZeroDivisionError


def test_an_exception_has_said_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As at the end of `with stream.atomic_op()`, it rolls back."""
    with pytest.raises(ZeroDivisionError):
        fail_in(DataStream.create(tmp_path / "s.bin", index="memory"))
    with pytest.raises(ZeroDivisionError):
        fail_in(StreamServer(tmp_path / "t.bin", port=0, in_process=True, index="memory"))
    assert warnings_in(caplog) == []


def test_a_publisher_sends_again_what_is_discarded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lease = object()
    stream = DataStream.create(tmp_path / "s.bin", index="memory")
    stream.parts.writer.lend(lease)
    stream.start_atomic_op(lease=lease)
    stream.add_entry(2, b"data")
    stream.close()
    assert warnings_in(caplog) == []
