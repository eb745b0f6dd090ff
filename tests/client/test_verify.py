"""What a server serves, checked from outside."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from datastreamer._codec import Entry
from datastreamer.client.blocking_client import BlockingClient
from datastreamer.client.verify import verify_server
from datastreamer.format import TYPE_BOOKMARK
from datastreamer.protocol.commands import BookmarkQuery
from datastreamer.protocol.messages import NOT_FOUND, OK
from datastreamer.protocol.server import Event
from datastreamer.service.embedded import StreamServer
from datastreamer.storage.maintain.report import Problem, Report
from tests.network.stub import Stub, StubServer, handler, key, sample


def checked(stub: Stub, most: int = 1000) -> Report:
    with (
        StubServer(handler(stub)) as server,
        BlockingClient("127.0.0.1", server.port, resume=False) as client,
    ):
        return verify_server(client, most=most)


class Misled(Stub):
    """Leads somewhere else from the bookmark of entry 20."""

    def __init__(self, answer: bytes) -> None:
        super().__init__(sample(50))
        self.misled = answer

    def answer(self, event: Event) -> bytes:
        if isinstance(event, BookmarkQuery) and event.key == key(20):
            return OK + self.misled
        return super().answer(event)


def test_a_server_in_order() -> None:
    assert checked(Stub(sample(50))) == Report(entries=50, bookmarks=5)
    assert checked(Stub([])) == Report()


def test_a_bookmark_that_leads_elsewhere() -> None:
    wanted = "its event is entry 21"
    for answer, message in (
        (sample(50)[31].pack(0xFE), f"it leads to entry 31, and {wanted}"),
        (
            Entry(21, 3, b"another").pack(0xFE),
            "it leads to entry 21 with other data than that entry has",
        ),
        (NOT_FOUND, "it is not found, and entry 21 is its event"),
    ):
        report = checked(Misled(answer))
        (problem,) = report.problems
        where = f"bookmark 0x{key(20).hex()}"
        assert problem == Problem(where, message, "reindex the server's file")
        assert (report.ok, report.entries, report.bookmarks) == (False, 50, 5)


def test_what_came_meanwhile_is_no_fault() -> None:
    assert checked(Misled(Entry(50, 3, b"new").pack(0xFE))).ok


@pytest.mark.parametrize(
    ("spoil", "where"),
    [
        (lambda entries: entries.pop(30), "entry 30"),
        (lambda entries: entries.insert(30, entries[29]), "entry 30"),
    ],
)
def test_entries_out_of_order(spoil: Callable[[list[Entry]], object], where: str) -> None:
    entries = sample(50)
    spoil(entries)
    stub = Stub(entries, header_total=50)
    report = checked(stub)
    assert not report.ok
    (problem,) = report.problems
    assert problem.where == where
    assert problem.repair == "none from here: verify the server's file"


def test_bookmarks_more_than_once_and_without_an_event(tmp_path: Path) -> None:
    with StreamServer(tmp_path / "s.bin", host="127.0.0.1", port=0, sync="os") as server:
        with server.stream.atomic_op() as op:
            for mark in (b"a", b"b", b"a"):
                op.add_bookmark(mark)
                op.add_bookmark(b"beside")
                op.add_entry(3, mark)
            op.add_bookmark(b"b")
            op.add_bookmark(b"last")
        with BlockingClient("127.0.0.1", server.port) as client:
            assert verify_server(client) == Report(entries=11, bookmarks=8, notes=NOTES)


NOTES = [
    "of 8 bookmarks 4 were looked up: all of their keys, since a key leads to its newest bookmark"
]


def test_the_number_of_look_ups() -> None:
    entries = [Entry(n, TYPE_BOOKMARK, key(n)) if n % 2 else Entry(n, 3, b"") for n in range(2000)]
    stub = Stub(entries)
    report = checked(stub, most=100)
    asked = [int.from_bytes(e.key, "big") for e in stub.seen if isinstance(e, BookmarkQuery)]
    assert report.ok
    assert 50 <= len(asked) <= 100
    assert asked == list(range(asked[0], 2000, asked[1] - asked[0]))
    which = f"the keys of one bookmark in {(asked[1] - asked[0]) // 2}"
    assert report.notes == [f"of 1,000 bookmarks {len(asked)} were looked up: {which}"]
