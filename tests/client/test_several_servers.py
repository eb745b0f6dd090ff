"""Every kind of client with several servers of one stream, any of which may fail at any moment."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest

from datastreamer._codec import Entry
from datastreamer.client.upstream import Upstream
from datastreamer.errors import (
    BadFromBookmark,
    ConnectFailed,
    ConnectionLost,
    HistoryChanged,
    UnknownEntry,
    UsageError,
)
from datastreamer.protocol.commands import BatchQuery, CapabilitiesQuery, EntryQuery
from datastreamer.protocol.messages import encode_result
from datastreamer.protocol.resume import Rollback
from tests.client.test_resume import THOUSAND, Another, Closing, rewritten
from tests.client.test_resume_every_client import AT_ONCE, behind, gather
from tests.network.drivers import client_of_kind, kinds
from tests.network.proxy import End, Fault, FaultyServer
from tests.network.stub import Stub, key
from tests.ports import free_port

pytestmark = kinds

HUNDRED = THOUSAND[:100]
MANY = 60


class Damaged(Stub):
    """Its copy of all entries is damaged."""

    def answer(self, event: Any) -> bytes:
        if isinstance(event, EntryQuery | BatchQuery):
            return encode_result(27)
        return super().answer(event)


class Brief(Stub):
    """Answers one query for an entry, or `most`."""

    def __init__(self, entries: list[Entry], most: int = 1) -> None:
        super().__init__(entries)
        self.most = most

    def answer(self, event: Any) -> bytes:
        self.closed = sum(isinstance(each, EntryQuery) for each in self.seen) > self.most
        return b"" if self.closed else super().answer(event)


class Fatal(Stub):
    """It is killed when it is asked what it supports."""

    def answer(self, event: Any) -> bytes:
        self.closed = isinstance(event, CapabilitiesQuery)
        return b"" if self.closed else super().answer(event)


def failing(entries: list[Entry], *faults: Fault) -> FaultyServer:
    """A server whose connections fail so, one after the other, and then no more."""
    return behind(*[Stub(entries) for _ in range(len(faults) + MANY)], faults=faults)


def serving(entries: list[Entry], kind: type[Stub] = Stub, **habits: Any) -> FaultyServer:
    """A server that does not fail."""
    return behind(*[kind(entries, **habits) for _ in range(MANY)])


@contextmanager
def client_of(kind: str, *servers: FaultyServer, **options: Any) -> Iterator[Any]:
    options = {"backoff": AT_ONCE, **options}
    with ExitStack() as stack:
        for server in servers:
            stack.enter_context(server)
        addresses = [("127.0.0.1", server.port) for server in servers]
        yield stack.enter_context(client_of_kind(kind, addresses, **options))


def name(server: FaultyServer) -> str:
    return f"127.0.0.1:{server.port}"


QUERIES: list[tuple[Callable[[Any], Any], Any]] = [
    (lambda client: client.entry(50), THOUSAND[50]),
    (lambda client: client.bookmark(key(50)), THOUSAND[51]),
    (lambda client: list(client.batch_read(50, 5)), THOUSAND[50:55]),
    (lambda client: list(client.entries_by_number([3, 70, 4])), [THOUSAND[n] for n in (3, 70, 4)]),
    (lambda client: list(client.entries(from_entry=50, stop=60)), THOUSAND[50:60]),
    (lambda client: list(client.entries(from_bookmark=key(50), stop=60)), THOUSAND[50:60]),
]
queries = pytest.mark.parametrize("query, answer", QUERIES)


@queries
def test_what_a_server_does_not_hold_yet_the_next_is_asked(
    kind: str, query: Callable[[Any], Any], answer: Any
) -> None:
    short, long = serving(THOUSAND[:30]), serving(HUNDRED)
    with client_of(kind, short, long) as client:
        assert client.peer == name(short)
        assert query(client) == answer
        assert client.peer == name(long)


@pytest.mark.parametrize("query, answer", [QUERIES[0], QUERIES[3], QUERIES[4]])
def test_a_server_that_does_not_answer_in_time(
    kind: str, query: Callable[[Any], Any], answer: Any
) -> None:
    silent = failing(HUNDRED, *[Fault(60, End.HALF_OPEN)] * MANY)
    with client_of(kind, silent, serving(HUNDRED), timeout=0.3) as client:
        assert query(client) == answer


def test_a_server_that_refuses(kind: str) -> None:
    damaged, whole = serving(HUNDRED, Damaged), serving(HUNDRED)
    with client_of(kind, damaged, whole) as client:
        assert client.entry(50) == HUNDRED[50]
    with client_of(kind, serving(HUNDRED, Damaged), serving(HUNDRED)) as client:
        assert list(client.batch_read(50, 5)) == HUNDRED[50:55]
    old = serving(HUNDRED, extensions="refused")
    with client_of(kind, old, serving(HUNDRED)) as client:
        found = [entry for batch in client.between_bookmarks(key(10), key(20)) for entry in batch]
        assert found == HUNDRED[10:21]
        assert client.capabilities().batch_reads


def test_the_first_that_can_be_reached_is_used(kind: str) -> None:
    with serving(HUNDRED) as server:
        addresses = ["127.0.0.1", Upstream("127.0.0.1", server.port)]
        with client_of_kind(kind, addresses, free_port()) as client:
            assert client.peer == name(server)
            assert client.entry(7) == HUNDRED[7]


def test_an_error_says_what_each_server_said(kind: str) -> None:
    short, damaged = serving(HUNDRED[:30]), serving(HUNDRED, Damaged)
    with client_of(kind, short, damaged) as client:
        with pytest.raises(UnknownEntry) as unknown:
            client.entry(30)
        assert unknown.value.number == 30
        assert str(unknown.value) == (
            f"asked 2 servers: {name(short)}: no entry 30: the stream holds 0 to 29; "
            f"{name(damaged)}: the server refused Entry 30: Damaged (error 27)"
        )
        assert client.entry(29) == HUNDRED[29]


def test_none_can_be_reached(kind: str) -> None:
    ports = free_port(), free_port()
    message = "^asked 2 servers: " + "; ".join(
        f"cannot connect to 127.0.0.1:{port}: Connection refused" for port in ports
    )
    addresses = [("127.0.0.1", port) for port in ports]
    with pytest.raises(ConnectFailed, match=message), client_of_kind(kind, addresses):
        pass
    for wrong in ([], [("127.0.0.1", 0)], [7]):
        with pytest.raises(UsageError), client_of_kind(kind, wrong):
            pass


def test_answers_are_of_one_history(kind: str) -> None:
    """A query that goes to another server is answered only if that holds what was read last."""
    gone = behind(Brief(HUNDRED), ends=True)
    with client_of(kind, gone, serving(rewritten(HUNDRED, 40, 41))) as client:
        assert client.entry(40) == HUNDRED[40]
        with pytest.raises(HistoryChanged, match="entry 40 is not the one") as changed:
            client.entry(41)
        assert changed.value.first_differing == 40
        assert client.entry(41) == HUNDRED[41]
    gone = behind(Brief(HUNDRED), ends=True)
    with client_of(kind, gone, serving(HUNDRED[:40])) as client:
        assert client.entry(40) == HUNDRED[40]
        # It lags, which is no other history.
        assert client.entry(3) == HUNDRED[3]


def test_the_highest_entry_of_the_history_counts(kind: str) -> None:
    gone = behind(Brief(HUNDRED, 2), ends=True)
    with client_of(kind, gone, serving(rewritten(HUNDRED, 40, 100))) as client:
        assert client.entry(40) == HUNDRED[40]
        assert client.entry(3) == HUNDRED[3]
        with pytest.raises(HistoryChanged, match="entry 40 is not the one"):
            client.entry(41)


@pytest.mark.parametrize("types", [None, set(range(7))])
def test_the_history_includes_what_was_streamed(kind: str, types: Any) -> None:
    gone = behind(Brief(HUNDRED, 0), ends=True)
    with client_of(kind, gone, serving(rewritten(HUNDRED, 40, 100))) as client:
        with client.entries(stop=60, types=types) as entries:
            assert list(entries)[-1] == HUNDRED[59]
        with pytest.raises(HistoryChanged, match="entry 59 is not the one"):
            client.entry(3)


def test_servers_that_are_killed_when_they_are_asked_what_they_support(kind: str) -> None:
    """That proves nothing about what they support."""
    first = behind(*[Fatal(HUNDRED) for _ in range(2)], *[Stub(HUNDRED) for _ in range(MANY)])
    second = behind(Fatal(HUNDRED), *[Stub(HUNDRED) for _ in range(MANY)])
    with client_of(kind, first, second) as client:
        assert list(client.batch_read(50, 5, fallback=False)) == HUNDRED[50:55]
    first = behind(*[Fatal(HUNDRED) for _ in range(3)], *[Stub(HUNDRED) for _ in range(MANY)])
    with client_of(kind, first, failing(HUNDRED, *[Fault(0, End.RESET)] * MANY)) as client:
        with pytest.raises(ConnectionLost):
            client.batch_read(50, 5, fallback=False)
        assert list(client.batch_read(50, 5, fallback=False)) == HUNDRED[50:55]


def test_a_server_of_another_stream_is_passed_over(kind: str) -> None:
    message = r"no entry 20.*serves another stream"
    with (
        client_of(kind, serving(HUNDRED[:10]), serving(HUNDRED, Another)) as client,
        pytest.raises(UnknownEntry, match=message),
    ):
        client.entry(20)
    servers = serving(HUNDRED[:10]), serving(HUNDRED, Another), serving(HUNDRED)
    with client_of(kind, *servers) as client:
        assert client.entry(20) == HUNDRED[20]


@pytest.mark.parametrize("method", ["entries", "batches"])
def test_a_streaming_continues_on_the_next_server(
    kind: str, method: str, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = behind(Closing(THOUSAND[:600])), serving(THOUSAND)
    seen: list[Entry] = []
    with client_of(kind, first, second) as client:
        gather(getattr(client, method)(from_entry=5, stop=1000), seen)
    assert seen == THOUSAND[5:]
    assert [record.getMessage() for record in caplog.records] == [
        f"lost the connection to {name(first)}, trying again: {name(first)} closed the connection",
        f"connected to {name(second)}, continuing at entry 600",
    ]


def test_a_server_that_lags_is_passed_over(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    servers = behind(Closing(THOUSAND[:600])), serving(THOUSAND[:590]), serving(THOUSAND)
    seen: list[Entry] = []
    with client_of(kind, *servers) as client:
        gather(client.batches(stop=1000), seen)
        assert client.peer == name(servers[2])
    assert seen == THOUSAND


def test_a_history_that_all_servers_have_lost(kind: str) -> None:
    """All hold fewer entries than were received: these were truncated."""
    with client_of(kind, serving(THOUSAND)) as client, client.entries(stop=600) as entries:
        list(entries)
        position = entries.position
    servers = [serving(THOUSAND[:total]) for total in (550, 560, 540)]
    message = "holds 560 entries, and entries 560 to 599, which were received, are missing"
    with client_of(kind, *servers) as client, pytest.raises(HistoryChanged, match=message):
        list(client.entries(from_position=position))
    servers = [serving(THOUSAND[:total]) for total in (550, 560, 540)]

    def stop(rollback: Rollback) -> None:
        raise LookupError(rollback.to_entry)

    with client_of(kind, *servers) as client, pytest.raises(LookupError, match="560"):
        list(client.entries(from_position=position, on_rollback=stop))


def test_the_server_that_sent_entries_has_truncated_them(kind: str) -> None:
    """Whatever the others say."""
    first = behind(Closing(THOUSAND[:600]), *[Stub(THOUSAND[:550]) for _ in range(MANY)])
    message = "holds 550 entries, and entries 550 to 599, which were received, are missing"
    with (
        client_of(kind, first, behind(ends=True)) as client,
        pytest.raises(HistoryChanged, match=message),
    ):
        list(client.entries())


def test_another_history_is_not_passed_over(kind: str) -> None:
    other = rewritten(THOUSAND, 550, 900)
    rollbacks: list[Rollback] = []

    def servers() -> tuple[FaultyServer, ...]:
        return behind(Closing(THOUSAND[:600])), serving(other), serving(THOUSAND)

    with (
        client_of(kind, *servers()) as client,
        pytest.raises(HistoryChanged, match="entry 550 is not the one"),
    ):
        list(client.entries())
    with client_of(kind, *servers()) as client:
        last = list(client.entries(stop=1000, on_rollback=rollbacks.append))[-450:]
    assert last == other[550:]
    assert [(each.to_entry, each.from_entry) for each in rollbacks] == [(550, 600)]


def test_it_leaves_a_server_that_falls_behind(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    slow, fast = serving(THOUSAND[:600]), serving(THOUSAND)
    with client_of(kind, slow, fast, heartbeat=0.01, max_lag=399) as client:
        assert list(client.entries(stop=1000)) == THOUSAND
        assert client.peer == name(fast)
    said = f"{name(slow)} holds 600 entries, and {name(fast)} holds 1000"
    left, joined = [record.getMessage() for record in caplog.records]
    assert left == f"{name(slow)}, trying again: {said}"
    assert joined.startswith(f"connected to {name(fast)}, continuing at entry ")


METHODS: dict[str, Callable[[Any], Iterator[Any]]] = {
    "entries": lambda client: client.entries(stop=300),
    "batches": lambda client: client.batches(from_bookmark=key(0), stop=300),
    "read_batches": lambda client: client.read_batches(stop=300, max_count=7),
    "entries_by_number": lambda client: client.entries_by_number(range(300), window=20),
}
ENDS = [End.CLOSE, End.RESET, End.HALF_OPEN]


@pytest.mark.parametrize("method", METHODS)
def test_servers_fail_at_any_moment(kind: str, method: str) -> None:
    """Without a gap or a repeated entry, also if servers lag."""
    chance = random.Random(f"{kind} {method}")
    entries = THOUSAND[:300]

    def unsteady() -> FaultyServer:
        totals = sorted(chance.choices(range(100, 301), k=15))
        stubs = [Stub(entries[:total]) for total in totals]
        faults = [Fault(chance.randrange(40, 9000), chance.choice(ENDS)) for _ in stubs]
        return behind(*stubs, *[Stub(entries) for _ in range(MANY)], faults=tuple(faults))

    seen: list[Entry] = []
    servers = [unsteady() for _ in range(3)]
    with client_of(kind, *servers, heartbeat=0.02, timeout=0.1, max_lag=50) as client:
        while len(seen) < 300:
            try:
                gather(METHODS[method](client), seen)
            except (ConnectionLost, UnknownEntry, BadFromBookmark):
                # What no server could answer; queries are not repeated without an end.
                seen.clear()
    assert seen == entries
