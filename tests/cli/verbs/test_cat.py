"""`cat`: the same from a file and from a server."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

import pytest

from datastreamer.protocol.commands import (
    BatchQuery,
    CapabilitiesQuery,
    FilteredRead,
    FilteredStart,
    FilteredStartBookmark,
    HeaderQuery,
    Start,
    StartBookmark,
    Stop,
)
from datastreamer.protocol.server import End, Event
from datastreamer.selection.clauses import Where
from datastreamer.service.embedded import StreamServer
from datastreamer.storage.stream import DataStream
from tests.cli.conftest import ENTRIES, Invoke
from tests.interop.plain import digest, scan
from tests.network.stub import Filtering, Selecting, Stub, StubServer, handler, key, sample


def numbers(outcome: object) -> list[int]:
    return [entry["number"] for entry in outcome.objects]  # type: ignore[attr-defined]


def test_everything(invoke: Invoke, made: Path, source: str) -> None:
    cat = invoke("cat", source)
    assert (cat.code, cat.err) == (0, "")
    found = [
        {name: value for name, value in each.items() if name != "time"} for each in cat.objects
    ]
    assert found == [
        {"number": e.number, "type": e.type, "length": len(e.data), "data": f"0x{e.data.hex()}"}
        for e in scan(made)
    ]
    first = '{"number": 0, "type": 176, "length": 9, "data": "0x010000000000000000"'
    assert cat.lines[0].startswith(first)


@pytest.mark.parametrize(
    "options, expected",
    [
        (["--from", "190"], range(190, 200)),
        (["--from", "199"], [199]),
        (["--from", "200"], []),
        (["--from", "latest"], []),
        (["--from", "0", "--to", "0"], [0]),
        (["--from", "10", "--to", "12"], [10, 11, 12]),
        (["--to", "1000000", "--from", "198"], [198, 199]),
        (["--last", "3"], [197, 198, 199]),
        (["--last", "0"], []),
        (["--last", "1000", "--count", "2"], [0, 1]),
        (["--last", "5", "--type", "3"], [199]),
        (["--from", "194", "--to-bookmark", "block:39"], [194, 195, 196]),
        (["--from-bookmark", "batch:38", "--to-bookmark", "batch:38"], [190]),
        (["--from", "7", "--to-bookmark", "batch:0"], []),
        (["--count", "3"], [0, 1, 2]),
        (["--count", "0"], []),
        (["--from-bookmark", "block:39"], range(196, 200)),
        (["--from-bookmark", "batch:39", "--to", "197"], [195, 196, 197]),
        (["--from-bookmark", "0x01000000000000001e", "--count", "1"], [150]),
        (["--from-bookmark", "batch:39", "--to", "3"], []),
        (["--type", "3"], range(4, 200, 5)),
        (["--type", "0x3", "--type", "1", "--count", "3"], [2, 4, 7]),
        (["--type", "0xb0", "--from", "10", "--to", "14"], [10, 11]),
        (["--type", "99"], []),
    ],
)
def test_parts(invoke: Invoke, source: str, options: list[str], expected: list[int]) -> None:
    cat = invoke("cat", source, *options)
    assert cat.code == 0, cat
    assert numbers(cat) == list(expected)


def test_raw_and_hex_are_the_bytes_of_the_entries(invoke: Invoke, made: Path, source: str) -> None:
    packed = b"".join(entry.packed for entry in scan(made))
    assert invoke("cat", source, "--format", "raw").out == packed
    as_hex = invoke("cat", source, "--format", "hex")
    assert b"".join(map(bytes.fromhex, as_hex.lines)) == packed
    assert len(as_hex.lines) == ENTRIES
    some = invoke("cat", source, "--format", "raw", "--type", "2", "--count", "2").out
    assert some == b"".join([entry.packed for entry in scan(made) if entry.type == 2][:2])


def test_a_table(invoke: Invoke, source: str) -> None:
    cat = invoke("cat", source, "--format", "table", "--count", "4")
    head, *rows = cat.lines
    assert head.split() == ["NUMBER", "TYPE", "LENGTH", "DATA"]
    assert rows[1].split() == ["1", "bookmark", "9", "0x000000000000000000", "(block:0)"]
    assert rows[2].split()[:3] == ["2", "1", "122"]
    assert rows[2].endswith("...")
    assert len({len(row) for row in rows[2:]}) == 1


@pytest.mark.parametrize(
    "options, message",
    [
        (["--from", "201"], ": no entry 201: the stream holds 0 to 199"),
        (["--from-bookmark", "block:40"], "no bookmark block:40 in the stream"),
    ],
)
def test_unknown_entries_and_bookmarks(
    invoke: Invoke, source: str, options: list[str], message: str
) -> None:
    assert message in invoke("cat", source, *options).failed()


def test_a_file_that_grows_is_read_to_its_end_at_the_start(invoke: Invoke, copy: Path) -> None:
    with DataStream.open(copy, sync="os") as stream:
        assert len(invoke("cat", copy).lines) == ENTRIES
        with stream.atomic_op() as op:
            op.add_entry(7, b"more")
        assert len(invoke("cat", copy).lines) == ENTRIES + 1


@pytest.mark.parametrize(
    "options, asked",
    [
        ([], [BatchQuery(0, 50, 1 << 20)]),
        (["--count", "3"], [BatchQuery(0, 3, 1 << 20)]),
        (["--from", "9", "--to", "20"], [BatchQuery(9, 12, 1 << 20)]),
        (["--no-batch-reads"], [Start(0), Stop()]),
        (["--from-bookmark", f"0x{key(20).hex()}"], [StartBookmark(key(20)), Stop()]),
    ],
)
def test_batch_reads_are_used_if_the_server_supports_them(
    invoke: Invoke, options: list[str], asked: list[Event]
) -> None:
    stub = Stub(sample(50))
    with StubServer(handler(stub)) as server:
        cat = invoke("cat", f"127.0.0.1:{server.port}", *options)
        assert cat.code == 0, cat
    questions = [event for event in stub.seen if not isinstance(event, HeaderQuery | End)]
    if isinstance(asked[0], BatchQuery):
        asked = [CapabilitiesQuery(), *asked]
    assert questions == asked


@pytest.mark.parametrize(
    "options, asked",
    [
        (["--type", "3"], [FilteredRead(0, (3,), 50, 0, 1 << 20)]),
        (["--type", "3", "--from", "20", "--to", "24"], [FilteredRead(20, (3,), 25, 0, 1 << 20)]),
        (
            ["--type", "3", "--type", "0xb0", "--from-bookmark", f"0x{key(20).hex()}"],
            [FilteredStartBookmark(key(20), (3, 0xB0)), Stop()],
        ),
        (["--type", "3", "--no-batch-reads"], [Start(0), Stop()]),
    ],
)
def test_filtered_reads_are_used_if_the_server_supports_them(
    invoke: Invoke, options: list[str], asked: list[Event]
) -> None:
    stub = Filtering(sample(50), span=100)
    old = Stub(sample(50), extensions="refused")
    with StubServer(handler(stub)) as server, StubServer(handler(old)) as before:
        cat = invoke("cat", f"127.0.0.1:{server.port}", *options)
        assert cat.code == 0, cat
        assert invoke("cat", f"127.0.0.1:{before.port}", *options) == cat
    questions = [event for event in stub.seen if not isinstance(event, HeaderQuery | End)]
    if "--no-batch-reads" not in options:
        asked = [CapabilitiesQuery(), *asked]
    assert questions == asked


@pytest.mark.parametrize(
    "options, asked",
    [
        (
            ["--type", "3", "--prefix", "0x1f", "--prefix", "2:0x2D"],
            [FilteredRead(0, (Where(3, 0, b"\x1f"), Where(3, 2, b"\x2d")), 50, 0, 1 << 20)],
        ),
        (["--type", "3", "--prefix", "0x1f", "--no-batch-reads"], [Start(0), Stop()]),
    ],
)
def test_selected_reads_are_used_if_the_server_supports_them(
    invoke: Invoke, options: list[str], asked: list[Event]
) -> None:
    stub = Selecting(sample(50), span=100)
    old = Filtering(sample(50))
    with StubServer(handler(stub)) as server, StubServer(handler(old)) as before:
        cat = invoke("cat", f"127.0.0.1:{server.port}", *options)
        assert cat.code == 0, cat
        assert 31 in numbers(cat)
        assert invoke("cat", f"127.0.0.1:{before.port}", *options) == cat
    questions = [event for event in stub.seen if not isinstance(event, HeaderQuery | End)]
    if "--no-batch-reads" not in options:
        asked = [CapabilitiesQuery(), *asked]
    assert questions == asked


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--prefix", "0x01"], "name the type, too"),
        (["--type", "3", "--prefix", "01"], "[OFFSET:]0xHEX"),
        (["--type", "3", "--prefix", "0x"], "[OFFSET:]0xHEX"),
        (["--type", "3", "--prefix", "70000:0x01"], "[OFFSET:]0xHEX"),
        (["--type", "3", "--prefix", "-1:0x01"], "[OFFSET:]0xHEX"),
    ],
)
def test_prefixes_that_are_none(invoke: Invoke, options: list[str], says: str) -> None:
    cat = invoke("cat", "stream.bin", *options)
    assert cat.code == 2
    assert says in cat.err
    assert "--prefix" in cat.err


def test_following_some_types(invoke: Invoke) -> None:
    stub = Filtering(sample(50))
    with StubServer(handler(stub)) as server:
        source = f"127.0.0.1:{server.port}"
        cat = invoke("cat", source, "--follow", "--type", "3", "--count", "4")
    assert numbers(cat) == [3, 17, 24, 31]
    assert FilteredStart(0, (3,)) in stub.seen


def test_a_server_without_batches_streams(invoke: Invoke) -> None:
    """It closes the first connection, on which the client asks for its features."""
    stubs = [Stub(sample(50), extensions=how) for how in ("closed", "known")]
    with StubServer(*map(handler, stubs)) as server:
        cat = invoke("cat", f"127.0.0.1:{server.port}", "--from", "3")
    assert numbers(cat) == list(range(3, 50))
    assert cat.err == ""
    asked = [event for stub in stubs for event in stub.seen if not isinstance(event, End)]
    seen = [type(event).__name__ for event in asked]
    assert seen == ["HeaderQuery", "CapabilitiesQuery", "HeaderQuery", "Start", "Stop"]


def test_an_empty_stream(invoke: Invoke, tmp_path: Path) -> None:
    DataStream.create(tmp_path / "empty.bin", sync="os").close()
    assert invoke("cat", tmp_path / "empty.bin") == (0, b"", "")
    failed = invoke("cat", tmp_path / "empty.bin", "--from", "1").failed()
    assert failed == f"{tmp_path}/empty.bin: no entry 1: the stream holds none"


def test_the_real_stream(invoke: Invoke, real_stream: Path) -> None:
    entries = scan(real_stream)
    raw = invoke("cat", real_stream, "--format", "raw").out
    assert hashlib.sha256(raw).hexdigest() == digest(entries)
    found = invoke("cat", real_stream).objects
    assert len(found) == 34_723
    assert [(e["number"], e["type"], e["data"]) for e in found] == [
        (e.number, e.type, f"0x{e.data.hex()}") for e in entries
    ]
    batch = invoke("cat", real_stream, "--from-bookmark", "batch:1", "--count", "1").objects[0]
    assert batch["number"] == 5


def test_the_real_stream_over_tcp(invoke: Invoke, real_stream: Path, tmp_path: Path) -> None:
    copy = shutil.copyfile(real_stream, tmp_path / "real.bin")
    with StreamServer(copy, host="127.0.0.1", port=0) as serving:
        raw = invoke("cat", f"127.0.0.1:{serving.port}", "--format", "raw").out
    assert hashlib.sha256(raw).hexdigest() == digest(scan(real_stream))
