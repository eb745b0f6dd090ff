"""A reassembly that begins at a time, of files and servers."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from datastreamer.consumer.blocking_reassembly import BlockingReassembly
from datastreamer.errors import NotSupported, TimeUnknown, UsageError
from datastreamer.reassembly import pack_message
from datastreamer.selection.times import moment_of
from datastreamer.service.embedded import StreamServer
from datastreamer.storage.stream import DataStream
from tests.cli.verbs.test_reassemble import messages_of
from tests.network.stub import Stub, StubServer, handler, sample
from tests.network.timed import Clock, ms


def write(path: Path, *payloads: tuple[int, float | None]) -> Path:
    """Payloads, each committed at a time, in seconds after seven; None: it is not known."""
    with DataStream.create(path, sync="os", index="memory") as stream:
        relay = Clock(stream).stream.parts.relay
        for number, seconds in payloads:
            first = stream.total_entries
            with stream.atomic_op() as op:
                op.add_entries(0x10, [pack_message(*each) for each in messages_of(number)])
            if seconds is not None:
                relay.put_time_marks([(first, ms(seconds))], 1000, stream.total_entries)
    return path


PAYLOADS = [(1, 0.0), (2, 60.0), (3, 120.0), (4, 180.0)]


def delivered(source: Any, seconds: float, **options: Any) -> tuple[list[int], BlockingReassembly]:
    """The payloads from a time on, and the reassembly."""
    start = moment_of(ms(seconds))
    with BlockingReassembly([source], start=start, **options) as payloads:
        return [int(each.id[:16]) for each in payloads], payloads


@pytest.mark.parametrize("kind", ["file", "server"])
def test_from_a_time_on(kind: str, tmp_path: Path) -> None:
    path = write(tmp_path / "made.bin", *PAYLOADS)
    with StreamServer(path, host="127.0.0.1", port=0, in_process=True) as server:
        source: Any = path if kind == "file" else ("127.0.0.1", server.port)
        for seconds, first in [(-5.0, 1), (0.0, 1), (30.0, 2), (60.0, 2), (150.0, 4), (300.0, 5)]:
            found, payloads = delivered(source, seconds)
            assert (found, payloads.errors) == (list(range(first, 5)), {})


@pytest.mark.parametrize("kind", ["file", "server"])
def test_a_time_that_is_not_known(kind: str, tmp_path: Path) -> None:
    path = write(tmp_path / "made.bin", (1, None), (2, 60.0))
    with StreamServer(path, host="127.0.0.1", port=0, in_process=True) as server:
        source: Any = path if kind == "file" else ("127.0.0.1", server.port)
        with pytest.raises(TimeUnknown):
            delivered(source, 0.0)
        assert delivered(source, 60.5)[0] == [2]


def test_a_server_without_times() -> None:
    with (
        StubServer(*[handler(Stub(sample(20))) for _ in range(3)]) as server,
        pytest.raises(NotSupported, match="does not report when entries were committed"),
    ):
        delivered(("127.0.0.1", server.port), 0.0)


def test_it_follows(tmp_path: Path) -> None:
    path = write(tmp_path / "made.bin", *PAYLOADS[:2])
    start = moment_of(ms(90.0))
    with (
        DataStream.open(path, sync="os", index="memory") as stream,
        BlockingReassembly([path], start=start, follow=True) as payloads,
    ):
        assert payloads.next(0.2) is None
        stream.append_many(0x10, [pack_message(*each) for each in messages_of(3)])
        assert int(next(payloads).id[:16]) == 3  # type: ignore[arg-type]


def test_wrong_starts(tmp_path: Path) -> None:
    for start in (datetime(2026, 11, 29), "2026-11-29", 1.5):
        with pytest.raises(UsageError):
            BlockingReassembly([tmp_path / "x.bin"], start=start, follow=True)  # type: ignore[arg-type]
