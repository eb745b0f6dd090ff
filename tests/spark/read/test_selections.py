"""The options `types` and `prefixes`: the rows are those that an oracle selects, from anywhere."""

from __future__ import annotations

import random
import re
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from datastreamer import StreamServer
from datastreamer._codec import Entry
from datastreamer.errors import DamagedEntry, HistoryChanged, StreamFileError
from datastreamer.protocol.commands import CapabilitiesQuery, FilteredStart, HeaderQuery, Start
from datastreamer.selection.clauses import Clause, Where
from tests.arrow.damage import damaged, write_pages
from tests.client.test_batch_reads import asked
from tests.network.stub import Filtering, Handler, Selecting, Stub, StubServer, handler, is_wanted
from tests.spark.conftest import Make
from tests.spark.read.reading import Query

SELECTIONS: list[tuple[dict[str, str], list[Clause]]] = [
    ({"types": "16"}, [16]),
    ({"types": "16, 176", "prefixes": "2:0x01"}, [Where(16, 2, b"\1"), Where(176, 2, b"\1")]),
    (
        {"types": "16", "prefixes": "2:0x00, 2:0x0203,0x00"},
        [Where(16, 2, b"\0"), Where(16, 2, b"\2\3"), Where(16, 0, b"\0")],
    ),
    (
        {"types": "2,16", "prefixes": "8:0x7f,8:0xaaaaaaaa,8:0xff"},
        [Where(kind, 8, data) for kind in (2, 16) for data in (b"\x7f", b"\xaa" * 4, b"\xff")],
    ),
    ({"types": "4294967295", "prefixes": "65000:0xAA"}, [Where(4294967295, 65000, b"\xaa")]),
    (
        # More than a request has.
        {"types": "16", "prefixes": ",".join(f"2:0x{n:02x}{n:02x}" for n in range(80))},
        [Where(16, 2, bytes([n, n])) for n in range(80)],
    ),
    ({"types": "77", "prefixes": "9:0x99"}, []),
]
selections = pytest.mark.parametrize("options, where", SELECTIONS)


def random_entries(seed: int, count: int, sizes: Sequence[int]) -> list[Entry]:
    """Of some types, with few different bytes at the beginning, of all sizes."""
    chance = random.Random(seed)
    found = []
    for number in range(count):
        kind = chance.choice((16, 16, 16, 2, 176, 4294967295))
        size = chance.randrange(1, 17) if kind == 176 else chance.choice(sizes)
        data = bytes(chance.randrange(4) for _ in range(min(size, 8)))
        found.append(Entry(number, kind, data.ljust(size, b"\xaa")))
    return found


def selected(entries: Sequence[Entry], where: Sequence[Clause]) -> list[tuple[int, int, bytes]]:
    return [(it.number, it.type, it.data) for it in entries if is_wanted(it, where)]


def rows_of(query: Query) -> list[tuple[int, int, bytes]]:
    return [(row["number"], row["type"], row["data"]) for row in query.rows()]


@selections
def test_files(make: Make, options: dict[str, str], where: list[Clause]) -> None:
    entries = random_entries(1, 700, (0, 1, 2, 3, 4, 60, 5_000, 65_001, 65_000))
    path = make((it.type, it.data) for it in entries)
    for part_bytes in ("1m", "1g"):
        query = Query(path=path, partitionBytes=part_bytes, **options)
        # No page but the last may hold a row if there is no such entry.
        assert (len(query.parts) > 5) == (part_bytes == "1m" and options["types"] != "77")
        assert rows_of(query) == selected(entries, where)
    some = Query(path=path, startingOffset=33, endingOffset=600, **options)
    assert rows_of(some) == selected(entries[33:600], where)


SERVERS: dict[str, Callable[[Sequence[Entry]], Stub]] = {
    "selects": lambda entries: Selecting(entries, span=40),
    "filters types alone": Filtering,
    "old": lambda entries: Stub(entries, extensions="refused"),
    "old, closes": lambda entries: Stub(entries, extensions="closed"),
}


@selections
@pytest.mark.parametrize("server", SERVERS)
def test_servers(server: str, options: dict[str, str], where: list[Clause]) -> None:
    entries = random_entries(2, 900, (0, 1, 2, 3, 4, 60, 300))
    stubs = [SERVERS[server](entries) for _ in range(20)]
    with StubServer(*map(handler, stubs)) as listening:
        query = Query(server=f"127.0.0.1:{listening.port}", partitionBytes=300, **options)
        assert len(query.parts) == 3
        assert rows_of(query) == selected(entries, where)
    # 80 clauses become one of the whole type.
    typed = "prefixes" not in options or len(where) > 64
    asks = server == "selects" or (typed and server == "filters types alone")
    assert asked(stubs, FilteredStart) == (len(query.parts) if asks else 0)


def test_a_server_of_ours_sends_only_these(make: Make) -> None:
    path = make([(16, b"\0\1" + bytes([n % 3]) + bytes(n % 700)) for n in range(20_000)])
    options = {"types": "16", "prefixes": "2:0x01"}
    options_of_server = {"index": "memory", "metrics_port": 0}
    with StreamServer(path, host="127.0.0.1", port=0, **options_of_server) as server:
        rows = Query(server=f"127.0.0.1:{server.port}", **options).rows()
        with urllib.request.urlopen(f"http://127.0.0.1:{server.metrics_port}/metrics") as reported:
            text = reported.read().decode()
    assert rows == Query(path=path, **options).rows()
    (sent,) = re.findall(r"^datastreamer_filter_sent_bytes_total (\S+)$", text, re.MULTILINE)
    assert float(sent) == pytest.approx(sum(17 + len(row["data"]) for row in rows), rel=1e-4)


def cut(stub: Stub, size: int) -> Handler:
    """Serves one connection with `stub`, up to this many bytes of its answers."""

    def handle(connection: Any) -> None:
        left = size
        while left > 0 and not stub.closed:
            sent = stub.receive(connection.recv(65536))[:left]
            connection.sendall(sent)
            left -= len(sent)

    return handle


@pytest.mark.parametrize("then", ["selects", "old"])
@pytest.mark.parametrize("size", [3_000, 9_000, 15_000])
def test_a_server_that_is_lost(then: str, size: int) -> None:
    """The next one continues after what came, of which most is not selected."""
    entries = [Entry(n, 16, bytes([n % 1000 == 7]) * 5) for n in range(3000)]
    lost = [Selecting(entries) for _ in range(2)]
    kept = [SERVERS[then](entries) for _ in range(3)]
    with (
        # The first connection is that of the plan.
        StubServer(handler(lost[0]), cut(lost[1], size)) as first,
        StubServer(*map(handler, kept)) as second,
    ):
        servers = f"127.0.0.1:{first.port},127.0.0.1:{second.port}"
        query = Query(server=servers, types="16", prefixes="0x01", retryFor=5)
        assert rows_of(query) == selected(entries, [Where(16, 0, b"\1")])
    if then == "old":
        begun = [it.from_entry for it in kept[0].seen if isinstance(it, Start)]
        assert begun[-1] > {3_000: -1, 9_000: 200, 15_000: 1_200}[size]


@pytest.mark.parametrize("mode", ["PERMISSIVE", "DROPMALFORMED", "FAILFAST"])
def test_damage_is_reported_whatever_is_selected(tmp_path: Path, mode: str) -> None:
    path = tmp_path / "pages.bin"
    write_pages(path)
    options = {"path": path, "mode": mode, "partitionBytes": "5m"}
    only = {"types": "2", "prefixes": "0x0864"}
    assert [row["number"] for row in Query(**options, **only).rows()] == [100]
    with damaged(path, 50, "noise") as lost:
        if mode == "FAILFAST":
            with pytest.raises(DamagedEntry):
                Query(**options, **only).rows()
            return
        due = [row for row in Query(**options).rows() if row["number"] in (100, lost.start)]
        found = Query(**options, **only).rows()
        assert found == due
        assert len(found) == (2 if mode == "PERMISSIVE" else 1)


def test_a_stream_that_was_truncated(make: Make) -> None:
    path = make([(16, b"\1" * 100)] * 300 + [(2, b"")] * 300)
    options = {"types": "16", "prefixes": "0x01"}
    with StreamServer(path, host="127.0.0.1", port=0, index="memory") as server:
        at = f"127.0.0.1:{server.port}"
        queries = [Query(path=path, **options), Query(server=at, **options)]
        queries.append(Query(server=at, batchReads="false", **options))
        # No entry that is selected: all the same it is another history.
        server.stream.truncate(500)
        server.stream.append_many(2, [b"other"] * 100)
        for query, error in zip(queries, [StreamFileError, *[HistoryChanged] * 2], strict=True):
            with pytest.raises(error, match="since this query was planned"):
                query.rows()


# Without extensions.


def test_no_extension_is_asked_for(make: Make) -> None:
    entries = random_entries(3, 600, (0, 3, 60))
    stubs = [Selecting(entries) for _ in range(30)]
    with StubServer(*map(handler, stubs)) as listening:
        at = f"127.0.0.1:{listening.port}"
        for options, where in SELECTIONS:
            query = Query(server=at, batchReads="false", **options)
            assert rows_of(query) == selected(entries, where)
    asked_for = {type(event) for stub in stubs for event in stub.seen}
    assert {HeaderQuery, Start} <= asked_for
    assert CapabilitiesQuery not in asked_for
    assert FilteredStart not in asked_for


def test_without_extensions_the_last_256_entries_are_compared(tmp_path: Path) -> None:
    with StreamServer(
        tmp_path / "s.bin", host="127.0.0.1", port=0, index="memory", sync="os"
    ) as server:
        server.stream.append_many(1, [bytes([n % 256]) * 40 for n in range(1000)])
        at = f"127.0.0.1:{server.port}"
        asking, without = Query(server=at), Query(server=at, batchReads="false")
        rows = asking.rows()
        assert without.rows() == rows
        server.stream.update_entry(5, 1, b"u" * 40)
        with pytest.raises(HistoryChanged, match="entries were truncated or changed since"):
            asking.rows()
        changed = without.rows()
        assert [row["number"] for row in changed if row not in rows] == [5]
        server.stream.update_entry(800, 1, b"u" * 40)
        with pytest.raises(HistoryChanged, match="the entries before 1000 changed since"):
            without.rows()
