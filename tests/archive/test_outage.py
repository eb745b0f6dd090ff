"""A store that does not answer delays only those who ask for evicted entries.

No test measures a time: the others are served while the answers are withheld.
"""

from __future__ import annotations

import json
import socket
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path

import pytest

from datastreamer import BlockingClient, DataStream
from datastreamer.cli.main import main
from datastreamer.errors import UnknownEntry
from datastreamer.format import TYPE_BOOKMARK
from datastreamer.http.options import HttpOptions
from datastreamer.protocol.commands import (
    BatchQuery,
    BookmarkQuery,
    Command,
    CommitStart,
    EntryQuery,
    FilteredRead,
    FilteredStart,
    HashQuery,
    MarksQuery,
    RangeQuery,
    Start,
    SumsQuery,
    encode_command,
)
from datastreamer.service.blocking_relay import BlockingRelay
from datastreamer.service.embedded import StreamServer
from datastreamer.storage.bookmarks.builder import IndexBuilder
from datastreamer.storage.objects import page_runs
from datastreamer.storage.objects.store import ObstoreBackend
from datastreamer.storage.parts import ChangeBegins, ChangeEnds
from datastreamer.storage.read.evicted import PagedFile
from tests.archive.conftest import FLOOR
from tests.archive.evicting import (
    Fields,
    entries,
    everything,
    evict,
    fields,
    made,
    marked_copy,
    pushed,
)
from tests.archive.withholding import PATIENCE, Running, Withholding, served
from tests.network.fixtures import in_memory

# More than threads of any kind.
MANY = 48


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Withholding:
    """No server has asked it before a test begins."""
    monkeypatch.setattr(PagedFile, "_prepare", lambda self: None)
    return Withholding(monkeypatch)


@pytest.fixture
def wanted(twin: Path) -> list[Fields]:
    return entries(twin)


@pytest.fixture
def server(marked: Path, store: Withholding) -> Iterator[StreamServer]:
    with StreamServer(
        *(marked,), host="127.0.0.1", port=0, create=False, in_process=True, sync="os",
        http=HttpOptions(port=0),
    ) as server:  # fmt: skip
        yield server


class Others:
    """Who asks for nothing that is evicted: a writer, and clients of every kind."""

    def __init__(self, server: StreamServer, wanted: list[Fields], stack: ExitStack) -> None:
        self._server = server
        self._local = [each for each in wanted if each[0] >= server.stream.floor]
        address = "127.0.0.1", server.port
        self._client = stack.enter_context(BlockingClient(*address))
        live = stack.enter_context(BlockingClient(*address))
        self._live = stack.enter_context(live.entries(from_entry=server.stream.total_entries))

    def are_served(self) -> None:
        served(self._are_served)

    def _are_served(self) -> None:
        client, local = self._client, self._local
        number = self._server.stream.append(2, b"more")
        assert fields(next(self._live)) == (number, 2, b"more")
        assert client.header().total_entries == number + 1
        for entry in (local[0], local[-1]):
            assert fields(client.entry(entry[0])) == entry
        # The newest one with its key is not evicted.
        key = next(each[2] for each in reversed(local) if each[1] == TYPE_BOOKMARK)
        assert client.bookmark(key).number > local[0][0]
        first = local[0][0]
        assert fields(client.batch_read(first, 3)[0]) == local[0]
        assert client.batch_read(first, 3, types={2})[0].number >= first
        with client.entries(from_entry=first, stop=first + 20) as found:
            assert [fields(each) for each in found] == local[:20]
        self._web("stream")
        assert json.loads(self._web(f"entries/{first}"))["number"] == first
        many = self._web(f"entries?from={first}&format=ndjson").splitlines()
        assert len(many) >= len(local)
        assert len(self._web(f"entries?from={first}&format=raw")) > 1 << 20
        self._web("overview")
        with urllib.request.urlopen(f"{self._base}/metrics", timeout=PATIENCE) as answer:
            assert b"datastreamer_" in answer.read()

    @property
    def _base(self) -> str:
        return f"http://127.0.0.1:{self._server.http_port}"

    def _web(self, path: str) -> bytes:
        with urllib.request.urlopen(f"{self._base}/v1/{path}", timeout=PATIENCE) as answer:
            return bytes(answer.read())


@pytest.fixture
def others(server: StreamServer, wanted: list[Fields]) -> Iterator[Others]:
    with ExitStack() as stack:
        yield Others(server, wanted, stack)


def test_a_server_opens_the_archive_before_a_client_asks(
    marked: Path, wanted: list[Fields], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Withholding(monkeypatch)
    with (
        store.closed(),
        StreamServer(
            *(marked,), host="127.0.0.1", port=0, create=False, in_process=True, sync="os",
            http=HttpOptions(port=0),
        ) as server,
        ExitStack() as stack,
    ):  # fmt: skip
        others = Others(server, wanted, stack)
        # What it is, the list of manifests, the newest one, the footer of the first page.
        for _ in range(4):
            assert store.asked()
            others.are_served()
            store.answer()
        client = stack.enter_context(BlockingClient("127.0.0.1", server.port))
        running = Running(lambda: client.entry(0))
        while store.asked(unless=lambda: not running.runs):
            store.answer()
        running.ended()


def test_an_opening_that_hangs_delays_no_client(
    marked: Path, wanted: list[Fields], monkeypatch: pytest.MonkeyPatch
) -> None:
    get, asked, answered = ObstoreBackend.get, threading.Event(), threading.Event()

    def hanging(self: ObstoreBackend, name: str) -> bytes:
        if not asked.is_set():
            asked.set()
            answered.wait()
        return get(self, name)

    monkeypatch.setattr(ObstoreBackend, "get", hanging)
    with (
        StreamServer(*(marked,), host="127.0.0.1", port=0, create=False, in_process=True) as server,
        BlockingClient("127.0.0.1", server.port) as client,
    ):
        assert asked.wait(PATIENCE)
        assert fields(served(lambda: client.entry(3))) == wanted[3]
        answered.set()


def updatable(found: list[Fields], after: int) -> int:
    return next(n for n, kind, data in found if n >= after and kind == 2 and len(data) > 100)


def update(stream: DataStream, wanted: list[Fields]) -> None:
    number = updatable(wanted, 100)
    stream.update_entry(number, 2, b"x" * len(wanted[number][2]))


CHANGES: list[Callable[[DataStream, list[Fields]], None]] = [
    update,
    lambda stream, _: stream.truncate(101),
    lambda stream, _: stream.truncate(7),
]


@pytest.mark.parametrize("change", CHANGES, ids=["update", "truncate", "truncate more"])
def test_a_change_of_evicted_entries(
    change: Callable[[DataStream, list[Fields]], None],
    server: StreamServer,
    others: Others,
    store: Withholding,
    wanted: list[Fields],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """At each request that it makes of the store."""
    monkeypatch.setattr(page_runs, "_AHEAD", 0)
    # (The index is made again afterwards.)
    monkeypatch.setattr(IndexBuilder, "work", lambda self: None)
    with store.closed():
        running = Running(lambda: change(server.stream, wanted))
        requests = 0
        while store.asked(unless=lambda: not running.runs):
            requests += 1
            others.are_served()
            store.answer()
        running.ended()
    assert requests > 2
    found = everything(server.stream)
    change_at = next((n for n, (a, b) in enumerate(zip(found, wanted, strict=False)) if a != b), -1)
    assert change_at == (updatable(wanted, 100) if change is update else -1)


def keys_of(wanted: list[Fields], stop: int) -> list[bytes]:
    """Bookmarks whose newest entry is before `stop`."""
    newest = {data: number for number, kind, data in wanted if kind == TYPE_BOOKMARK}
    return [key for key, number in newest.items() if number < stop]


QUESTIONS: dict[str, Callable[[list[bytes]], Command]] = {
    "entry": lambda keys: EntryQuery(3),
    "bookmark": lambda keys: BookmarkQuery(keys[0]),
    "range": lambda keys: RangeQuery(keys[0], keys[1]),
    "batch": lambda keys: BatchQuery(0),
    "filter": lambda keys: FilteredRead(0, (2,)),
    "hash": lambda keys: HashQuery(3, 50),
    "sums": lambda keys: SumsQuery(3),
    "times": lambda keys: MarksQuery(3),
    "stream": lambda keys: Start(0),
    "stream with commits": lambda keys: CommitStart(0),
    "stream with a filter": lambda keys: FilteredStart(0, (2,)),
}


@pytest.mark.parametrize("question", [*QUESTIONS, "web", "web json", "web raw"])
def test_reads_of_evicted_entries(
    question: str,
    server: StreamServer,
    others: Others,
    store: Withholding,
    wanted: list[Fields],
) -> None:
    """By more clients than there are threads."""
    if question in QUESTIONS:
        asked = encode_command(QUESTIONS[question](keys_of(wanted, 200)), 1)
        port = server.port
    else:
        names = {"web": "entries/3", "web json": "entries?from=3", "web raw": "entries?format=raw"}
        asked = f"GET /v1/{names[question]} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()
        port = server.http_port or 0
    with ExitStack() as stack:
        stack.enter_context(store.closed())
        clients = []
        for _ in range(MANY):
            client = socket.create_connection(("127.0.0.1", port), timeout=PATIENCE)
            stack.callback(client.close)
            client.sendall(asked)
            clients.append(client)
        waits = question not in ("sums", "times")
        if waits:
            store.asked()
        others.are_served()
        others.are_served()
        if not waits:
            return
    with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE) as client:
        client.sendall(asked)
        assert client.recv(100)


def test_pages_that_are_at_hand_wait_for_no_store(
    server: StreamServer, store: Withholding, wanted: list[Fields]
) -> None:
    """Also if they are to be compared, and others wait for theirs."""
    stop = server.stream.reader.first_number(2)
    with BlockingClient("127.0.0.1", server.port) as client:
        assert fields(client.entry(3)) == wanted[3]
        far = encode_command(Start(server.stream.reader.first_number(4)), 1)
        with ExitStack() as stack:
            stack.enter_context(store.closed())
            for _ in range(12):
                other = socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE)
                stack.callback(other.close)
                other.sendall(far)
            store.asked()
            found = served(lambda: list(client.entries(from_entry=0, stop=stop)))
            assert [fields(each) for each in found] == wanted[:stop]


def test_web_conversions_of_evicted_entries(
    server: StreamServer, others: Others, store: Withholding, wanted: list[Fields]
) -> None:
    """After a first piece that is at hand."""
    first = server.stream.reader.first_number(4) - 10
    with BlockingClient("127.0.0.1", server.port) as client:
        assert fields(client.entry(first)) == wanted[first]
    asked = b"GET /v1/entries?from=%d HTTP/1.1\r\nHost: localhost\r\n\r\n" % first
    with ExitStack() as stack:
        stack.enter_context(store.closed())
        for _ in range(8):
            client = socket.create_connection(("127.0.0.1", server.http_port), timeout=PATIENCE)
            stack.callback(client.close)
            client.sendall(asked)
        store.asked()
        others.are_served()


def test_an_index_that_is_built(
    twin: Path, tmp_path: Path, url: str, store: Withholding, wanted: list[Fields]
) -> None:
    """From pages in the archive alone: changes of local entries do not wait for it, nor does the
    end."""
    marked_copy(twin, tmp_path / "first" / "s.bin", url)
    path = tmp_path / "made.bin"
    assert main(["archive", "restore", url, str(path), "--from-page", str(FLOOR)]) == 0
    with store.closed():
        server = StreamServer(
            *(path,), host="127.0.0.1", port=0, create=False, in_process=True, sync="os",
            http=HttpOptions(port=0),
        )  # fmt: skip
        try:
            store.asked()
            with ExitStack() as stack:
                others = Others(server, wanted, stack)
                others.are_served()
                number = updatable(wanted, server.stream.floor)
                data = b"y" * len(wanted[number][2])
                served(lambda: server.stream.update_entry(number, 2, data))
                wanted[number] = number, 2, data
                others = Others(server, wanted, stack)
                others.are_served()
                served(lambda: server.stream.truncate(server.stream.total_entries - 1))
                others = Others(server, wanted, stack)
                others.are_served()
        finally:
            served(server.close)
    with DataStream.open(path) as stream:
        stream.bookmarks.wait()
        assert everything(stream)[: len(wanted)] == wanted


def test_the_end_of_a_server(marked: Path, store: Withholding) -> None:
    """While a client and the program wait."""
    with store.closed():
        server = StreamServer(
            *(marked,), host="127.0.0.1", port=0, create=False, in_process=True, sync="os"
        )
        reading = Running(lambda: server.stream.entry(3))
        store.asked()
        changing = Running(lambda: server.stream.truncate(101))
        with socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE) as client:
            client.sendall(encode_command(EntryQuery(3), 1))
            served(server.close)
        for each in (reading, changing):
            with pytest.raises(Exception, match=r"closed|alone"):
                each.ended()


@pytest.mark.parametrize("change", CHANGES[:2], ids=["update", "truncate"])
def test_a_relay_that_applies_a_change(
    change: Callable[[DataStream, list[Fields]], None],
    tmp_path: Path,
    url: str,
    store: Withholding,
) -> None:
    """Of entries that it has in the archive alone: its clients are sent what it has."""
    # More than what is compared when it joins.
    twin = made(tmp_path / "twin" / "s.bin", 16)
    wanted = entries(twin)
    path, here = tmp_path / "relay" / "s.bin", {"host": "127.0.0.1", "port": 0}
    path.parent.mkdir()
    with StreamServer(twin, **here, create=False, in_process=True, sync="os") as upstream:

        def relay() -> BlockingRelay:
            servers = [("127.0.0.1", upstream.port)]
            return BlockingRelay(servers, path, **here, sync="os", on_rewrite="follow")

        with relay() as running:
            until(lambda: running.total_entries == len(wanted))
        pushed(path, url)
        with DataStream.open(path, sync="os") as stream:
            stream.bookmarks.wait()
            evict(stream, url, 12)
            floor = stream.floor
        with relay() as running, BlockingClient("127.0.0.1", running.port) as client:
            until(lambda: running.caught_up)
            with store.closed():
                change(upstream.stream, wanted)
                store.asked()
                for number in (floor, len(wanted) - 1):
                    # (If a comparison has brought the page at hand, the change is made.)
                    with suppress(UnknownEntry):
                        assert fields(served(partial(client.entry, number))) == wanted[number]
            expected = everything(upstream.stream)
            until(lambda: running.total_entries == len(expected))
            with BlockingClient("127.0.0.1", running.port) as reader:
                until(lambda: fields(reader.entry(100)) == expected[100])
    assert entries(path) == expected


def until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.01)


async def test_a_truncation_by_another_process(marked: Path, store: Withholding) -> None:
    """A serving process need not find where an evicted entry is."""
    with DataStream.open(marked, read_only=True) as stream:
        offset = stream.reader.cursor(101).offset
    with DataStream.open(marked, follow=True) as stream:
        async with in_memory(stream) as rig:
            with store.closed():
                rig.server.change(ChangeBegins(101, None, offset))
                assert rig.server.broadcast.view.head == (offset, 101)
                rig.server.change(ChangeEnds(101, None))


def test_the_first_local_page(
    marked: Path, store: Withholding, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(IndexBuilder, "start", lambda self, **_: None)
    with DataStream.open(marked) as stream, store.closed():
        floor = stream.floor
        for number in range(floor, floor + 45):
            assert served(lambda number=number: stream.entry(number)).number == number
        assert served(lambda: next(stream.batches(floor))).first_number == floor
        assert store.waiting == 0


def test_an_update_of_a_local_entry(
    server: StreamServer, store: Withholding, wanted: list[Fields]
) -> None:
    """A client that already waits for an evicted entry gets it."""
    with BlockingClient("127.0.0.1", server.port) as client:
        found: list[Fields] = []
        with store.closed():
            reading = Running(lambda: found.append(fields(client.entry(3))))
            store.asked()
            number = updatable(wanted, server.stream.floor)
            served(lambda: server.stream.update_entry(number, 2, b"z" * len(wanted[number][2])))
        reading.ended()
        assert found == [wanted[3]]
