"""`dsapp`: the documented options, and the output that scripts parse."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from datastreamer.cli.dsapp.client import Sanity
from datastreamer.client.blocking_client import BlockingClient
from datastreamer.service.embedded import StreamServer
from datastreamer.storage.stream import DataStream
from tests.cli.conftest import Invoke
from tests.cli.process import running
from tests.interop.plain import header, scan
from tests.ports import free_port

MODULE = "datastreamer.cli.dsapp"
ROOT = Path(__file__).resolve().parents[2]


def test_help(invoke_dsapp: Invoke) -> None:
    shown = invoke_dsapp()
    assert (shown.code, shown.err) == (0, "")
    assert b"server" in shown.out
    assert b"client" in shown.out
    assert invoke_dsapp("-h").out == invoke_dsapp("--help").out == shown.out
    assert invoke_dsapp("help").out == shown.out
    for verb, option in (("server", b"--opers"), ("client", b"--dumpbatch")):
        assert option in invoke_dsapp("help", verb).out
        assert invoke_dsapp("help", verb) == invoke_dsapp(verb, "-h")
    assert "no such command 'nonsense'" in invoke_dsapp("help", "nonsense").failed(2)


def test_help_has_a_short_name(invoke_dsapp: Invoke) -> None:
    listing = invoke_dsapp()
    assert re.search(rb"^  help, h +Show", listing.out, re.MULTILINE)
    assert invoke_dsapp("h") == listing
    assert invoke_dsapp("h", "client") == invoke_dsapp("help", "client")
    for name in ("help", "h"):
        shown = invoke_dsapp(name, "-h")
        assert shown.out.startswith(b"Usage: dsapp " + name.encode() + b" [OPTIONS]")
        assert invoke_dsapp("help", name).code == 0


def test_the_makefile_makes_an_executable(tmp_path: Path) -> None:
    make = ["make", "-f", ROOT / "Makefile", "-o", "core", f"VENV={sys.prefix}", "build-dsapp"]
    subprocess.run(make, cwd=tmp_path, check=True, capture_output=True)
    shown = subprocess.run(["./dsapp", "h"], cwd=tmp_path, check=True, capture_output=True)
    assert b"help, h" in shown.stdout


def test_header(invoke_dsapp: Invoke, made: Path, server: str) -> None:
    shown = invoke_dsapp("client", "--server", server, "--header")
    assert shown.code == 0
    (line,) = shown.lines
    assert f"totalLength {header(made)['total_length']}" in line
    assert "totalEntries 200" in line


@pytest.mark.parametrize(
    "query, number",
    [
        (["--entry", "7"], 7),
        (["--bookmark", "3"], 17),
        (["--bookmark", "3", "--bookmarktype", "1"], 17),
    ],
)
def test_entries(
    invoke_dsapp: Invoke, made: Path, server: str, query: list[str], number: int
) -> None:
    shown = invoke_dsapp("client", "--server", server, *query)
    entry = scan(made)[number]
    expected = f"number {number}, type {entry.type}, length {len(entry.data)}, data 0x"
    assert shown.code == 0
    (line,) = shown.lines
    assert expected + entry.data.hex() in line


def test_options_with_one_dash(invoke_dsapp: Invoke, server: str) -> None:
    one, two = (f"{dash}entry" for dash in ("-", "--"))
    assert invoke_dsapp("client", "-server", server, one, "7") == invoke_dsapp(
        "client", f"--server={server}", two, "7", "--log", "warn"
    )


@pytest.mark.parametrize(
    "query, message",
    [
        (["--entry", "200"], "no entry 200: the stream holds 0 to 199"),
        (["--bookmark", "40"], "no bookmark 0x000000000000000028"),
        (["--frombookmark", "40"], "no bookmark 0x000000000000000028"),
        (["--dumpbatch", "40"], "no bookmark 0x010000000000000028"),
        (["--from", "201"], "no entry 201"),
    ],
)
def test_unknown_entries_and_bookmarks(
    invoke_dsapp: Invoke, server: str, query: list[str], message: str
) -> None:
    shown = invoke_dsapp("client", "--server", server, "--log", "error", *query)
    assert message in shown.failed()


@pytest.mark.parametrize(
    "words",
    [
        ["client", "--server", ":6900"],
        ["client", "--from", "x"],
        ["client", "--bookmarktype", "256"],
        ["client", "--log", "loud"],
        ["server", "--opers", "x"],
        ["relay", "--server", ":6900"],
        ["repeat"],
    ],
)
def test_wrong_usage(invoke_dsapp: Invoke, words: list[str]) -> None:
    assert invoke_dsapp(*words).failed(2)


def test_dump_of_a_batch(invoke_dsapp: Invoke, server: str) -> None:
    shown = invoke_dsapp("client", "--server", server, "--dumpbatch", "38")
    assert shown.code == 0
    title, *entries = shown.lines
    assert title == "batch 38:"
    assert [int(re.search(r"number (\d+)", line)[1]) for line in entries] == [  # type: ignore[index]
        *range(190, 195)
    ]
    last = invoke_dsapp("client", "--server", server, "--dumpbatch", "39")
    assert len(last.lines) == 6


def test_sanity(invoke_dsapp: Invoke, server: str) -> None:
    shown = invoke_dsapp("client", "--server", server, "--sanitycheck")
    assert shown.lines == [
        "sanity check: entries 0 to 199, blocks 0 to 39, batches 0 to 39: in order"
    ]
    part = invoke_dsapp("client", "--server", server, "--sanitycheck", "--frombookmark", "30")
    assert part.lines == [
        "sanity check: entries 151 to 199, blocks 30 to 39, batches 31 to 39: in order"
    ]


def test_sanity_finds_gaps(invoke_dsapp: Invoke, copy: Path) -> None:
    with StreamServer(copy, host="127.0.0.1", port=0, in_process=True) as serving:
        with serving.stream.atomic_op() as op:
            op.add_bookmark(bytes(7) + b"\x00\x2a")
            op.add_bookmark(bytes(7) + b"\x00\x07")
        where = f"127.0.0.1:{serving.port}"
        shown = invoke_dsapp("client", "--server", where, "--sanitycheck")
    assert shown.code == 1
    assert shown.lines[0].endswith(": 2 errors")
    result = shown.err.splitlines()
    assert "at entry 200: found block 42, expected 40" in result[0]
    assert "at entry 201: found block 7, expected 43" in result[1]


def test_sanity_of_the_real_stream(real_stream: Path) -> None:
    sanity = Sanity(2)
    with DataStream.open(real_stream, read_only=True) as stream:
        for batch in stream.batches():
            sanity.check(batch)
    expected = "entries 0 to 34722, blocks 0 to 11317, batches 0 to 101: in order"
    assert str(sanity) == expected


def test_the_stream_version_determines_the_key(invoke_dsapp: Invoke, tmp_path: Path) -> None:
    with StreamServer(
        tmp_path / "two.bin", version=2, host="127.0.0.1", port=0, in_process=True
    ) as serving:
        with serving.stream.atomic_op() as op:
            op.add_bookmark(bytes.fromhex("08011007"))
            op.add_entry(1, b"found")
        where = ("client", "--server", f"127.0.0.1:{serving.port}")
        found = invoke_dsapp(*where, "--bookmark", "7", "--bookmarktype", "1")
        assert "number 1, type 1, length 5" in found.lines[0]
        assert len(invoke_dsapp(*where, "--dumpbatch", "7").lines) == 3
        assert "has no key" in invoke_dsapp(*where, "--bookmark", "0").failed()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_client_streams_until_a_signal(made: Path, server: str, number: signal.Signals) -> None:
    words = ("client", "--server", server, "--from", "0")
    with running(*words, cwd=made.parent, module=MODULE) as client:
        client.out.until("number 199, type 3, length 72$")
        assert client.out.seen[2] == "entry: number 2, type 1, length 122"
        client.signal(number)
        assert client.wait() == 0
        assert client.out.rest() == []


def test_a_server_ends_after_its_operations(tmp_path: Path) -> None:
    words = ("server", "--port", free_port(), "--opers", "30", "--sleep", "60", "--log", "info")
    more = ("--writetimeout", "3000", "--inactivitytimeout", "0", "--file", "ds.bin")
    with running(*words, *more, cwd=tmp_path, module=MODULE) as serving:
        with BlockingClient("127.0.0.1", serving.port()) as client:
            entries = client.entries(from_entry=0, stop=150)
            assert [entry.number for entry in entries] == list(range(150))
        assert serving.wait() == 0
        assert "the stream holds 150 entries" in serving.err.rest()[0]
    assert len(scan(tmp_path / "ds.bin")) == 150
    assert header(tmp_path / "ds.bin")["system_id"] == 137


def test_an_idle_client_is_disconnected(tmp_path: Path) -> None:
    words = ("server", "--port", free_port(), "--sleep", "1000000", "--inactivitytimeout", "1")
    with (
        running(*words, "--writetimeout", "60000", cwd=tmp_path, module=MODULE) as serving,
        socket.create_connection(("127.0.0.1", serving.port()), timeout=30) as client,
    ):
        assert client.recv(1) == b""
        serving.err.until("connection ended: it has sent nothing for 1 s since it connected")


def test_numbering_continues(tmp_path: Path) -> None:
    for _ in range(2):
        words = ("server", "--port", free_port(), "--opers", "2")
        with running(*words, cwd=tmp_path, module=MODULE) as serving:
            assert serving.wait() == 0
    blocks = [entry.data for entry in scan(tmp_path / "datastream.bin")][1::5]
    assert blocks == [bytes([0] * 8 + [number]) for number in range(4)]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_shuts_a_server_down_with_exit_code_0(
    tmp_path: Path, number: signal.Signals
) -> None:
    words = ("server", "--port", free_port(), "--sleep", "1000000")
    with running(*words, cwd=tmp_path, module=MODULE) as serving:
        serving.port()
        serving.signal(number)
        assert serving.wait() == 0
        assert "0 of 1,000,000 operations" in serving.err.rest()[0]
