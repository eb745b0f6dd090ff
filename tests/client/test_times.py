"""Reading from a time on: every kind of client, servers that know times and that do not."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from datastreamer.errors import BadArgument, NotSupported, TimeUnknown, UsageError
from datastreamer.position import Position
from datastreamer.protocol.commands import CapabilitiesQuery, MarksQuery, TimeQuery
from datastreamer.protocol.following import encode_times
from datastreamer.protocol.messages import OK, Capabilities, encode_result
from datastreamer.selection.times import TimeMarks
from datastreamer.service.embedded import StreamServer
from datastreamer.storage.stream import DataStream
from tests.client.test_batch_reads import SOON, asked, opened
from tests.client.test_resume_every_client import behind
from tests.client.test_several_servers import client_of, serving
from tests.network.drivers import client_of_kind, kinds
from tests.network.fixtures import over_loopback
from tests.network.proxy import Fault
from tests.network.stub import Stub, StubServer, handler, sample
from tests.network.timed import COMMITS, PLACES, SEVEN, TOTAL, ms, timed

HUNDRED = sample(100)
METHODS = ["entries", "batches", "read_batches"]


class Timing(Stub):
    """An entry a second since seven; of those from `known` on nothing is known."""

    known = 0

    def answer(self, event: Any) -> bytes:
        total = len(self.entries)
        match event:
            case CapabilitiesQuery():
                return OK + Capabilities(3 | 1 << 9, b"s" * 16, 4, *self.limits).pack()
            case TimeQuery(time):
                if time < ms(self.known):
                    return encode_result(28, "Time unknown: it is not known")
                return OK + encode_times(TimeMarks(next=min(total, -(-(time - SEVEN) // 1000))))
            case MarksQuery(first):
                numbers = range(max(first, self.known), total)[:50]
                marks = [(number, ms(number)) for number in numbers]
                end = numbers.stop if numbers else first
                return OK + encode_times(TimeMarks(marks, 1000, end))
        return super().answer(event)


class Later(Timing):
    known = 50


@kinds
async def test_the_entry_at_a_time(kind: str, stream: DataStream) -> None:
    clock = timed(stream)
    async with over_loopback(stream) as rig, opened(kind, rig.address[1]) as client:
        for seconds, number in PLACES:
            assert await client.entry_at(ms(seconds)) == number
        for moment in ("2026-11-29T07:01:00Z", "2026-11-29T08:01:00+01:00"):
            assert await client.entry_at(moment) == 5
        assert await client.entry_at(datetime(2026, 11, 29, 7, 1, tzinfo=UTC)) == 5
        assert await client.entry_at("2026-11-29") == 0
        assert await client.entry_at("2027-01-01") == TOTAL
        marks = [(first, ms(seconds)) for first, seconds in COMMITS]
        assert await client.time_marks(0) == TimeMarks(marks, 1000, TOTAL)
        assert await client.time_marks(4) == TimeMarks(marks[1:], 1000, TOTAL)
        for wrong in ("7 o'clock", 1.5, datetime(2026, 11, 29)):
            with pytest.raises(BadArgument, match="is not a time"):
                await client.entry_at(wrong)
        clock.commit(1, 5000.0)
        assert await client.entry_at(ms(4999.0)) == TOTAL


@kinds
@pytest.mark.parametrize("method", METHODS)
def test_reading_from_a_time_on(kind: str, method: str, tmp_path: Path) -> None:
    path = tmp_path / "timed.bin"
    with DataStream.create(path, sync="os", index="memory") as stream:
        timed(stream)
    with (
        StreamServer(path, host="127.0.0.1", port=0, in_process=True) as server,
        client_of_kind(kind, "127.0.0.1", server.port) as client,
    ):

        def numbers(**options: Any) -> list[int]:
            found = list(getattr(client, method)(**options))
            if method == "entries":
                return [entry.number for entry in found]
            return [entry.number for batch in found for entry in batch]

        for seconds, number in PLACES:
            expected = list(range(number, TOTAL))
            assert numbers(from_time=ms(seconds), stop=TOTAL) == expected
        assert numbers(from_time="2026-11-29T07:01:00Z", stop=7) == [5, 6]
        assert numbers(from_time="2026-11-29T07:01:00Z", types=[1], stop=TOTAL) == [6, 9]
        # An end before the entry at that time is no error: nobody knew.
        assert numbers(from_time=ms(60), stop=3) == []
        for others in ({"from_entry": 3}, {"from_position": Position(3, b"", None)}):
            if method != "read_batches" or "from_entry" not in others:
                with pytest.raises(UsageError, match="pass only one of"):
                    numbers(from_time=SEVEN, stop=TOTAL, **others)


@kinds
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("old", ["without", "refused", "closed", "fatal", "turned off"])
async def test_a_server_without_times_is_refused_by_name(kind: str, method: str, old: str) -> None:
    habits = {} if old in ("without", "turned off") else {"extensions": old}
    stubs = [(Timing if old == "turned off" else Stub)(HUNDRED, **habits) for _ in range(4)]
    options = {"batch_reads": False} if old == "turned off" else {}
    with StubServer(*map(handler, stubs)) as server:
        async with opened(kind, server.port, backoff=SOON, **options) as client:
            says = f"^127.0.0.1:{server.port} does not report when entries were committed"
            with pytest.raises(NotSupported, match=says):
                await client.listed(method, from_time=SEVEN)
            with pytest.raises(NotSupported, match=says):
                await client.entry_at(SEVEN)
            # The client can be used.
            assert await client.entry(7) == HUNDRED[7]
    assert not asked(stubs, TimeQuery)


@kinds
@pytest.mark.parametrize("method", METHODS)
async def test_a_time_that_is_not_known(kind: str, method: str) -> None:
    with StubServer(handler(Later(HUNDRED))) as server:
        async with opened(kind, server.port, backoff=SOON) as client:
            with pytest.raises(TimeUnknown) as caught:
                await client.listed(method, from_time=ms(49))
            assert str(caught.value) == f"127.0.0.1:{server.port}: it is not known"
            assert await client.entry_at(ms(50)) == 50
            assert await client.entry(7) == HUNDRED[7]


@kinds
@pytest.mark.parametrize("method", METHODS)
def test_of_several_servers_one_that_knows_answers(kind: str, method: str) -> None:
    old, later, knows = serving(HUNDRED), serving(HUNDRED, Later), serving(HUNDRED, Timing)
    with client_of(kind, old, later, knows) as client:
        found = list(getattr(client, method)(from_time=ms(20), stop=30))
        if method != "entries":
            found = [entry for batch in found for entry in batch]
        assert found == HUNDRED[20:30]
        assert client.entry_at(ms(20)) == 20
        assert client.peer == f"127.0.0.1:{knows.port}"
    old, later = serving(HUNDRED), serving(HUNDRED, Later)
    with client_of(kind, old, later) as client:
        with pytest.raises((TimeUnknown, NotSupported)) as caught:
            client.entry_at(ms(20))
        assert "asked 2 servers" in str(caught.value)
        assert "does not report when" in str(caught.value)
        assert "it is not known" in str(caught.value)


@kinds
@pytest.mark.parametrize("passes", [60, 130, 150, 170, 400, 1000])
def test_a_lost_connection(kind: str, passes: int) -> None:
    """The time is asked for again while nothing came; then it continues with the next entry."""
    lossy = behind(*[Timing(HUNDRED) for _ in range(5)], faults=(Fault(passes),))
    with lossy, client_of_kind(kind, "127.0.0.1", lossy.port, backoff=SOON) as client:
        entries = list(client.entries(from_time=ms(20), stop=40))
    assert entries == HUNDRED[20:40]
