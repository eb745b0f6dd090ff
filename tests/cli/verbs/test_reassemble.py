"""`reassemble`: payloads of several streams as lines, and errors."""

from __future__ import annotations

import json
import signal
import socket
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from datastreamer.cli.reassembly_output import described, event_line, lines_of
from datastreamer.consumer.state import (
    SourceBack,
    SourceFailed,
    SourceLost,
    SourceRolledBack,
)
from datastreamer.errors import ConnectFailed
from datastreamer.position import Position
from datastreamer.protocol.resume import Rollback
from datastreamer.reassembly import Block, Dropped, Reorg, Splitter, pack_message
from datastreamer.reassembly.merge import Payload
from datastreamer.service.embedded import StreamServer
from datastreamer.storage.stream import DataStream
from tests.cli.conftest import Invoke
from tests.cli.process import command, on_terminal, piped, running

Message = tuple[bytes, bytes]


def own(number: int) -> bytes:
    return b"%016d" % number * 2


def messages_of(number: int, text: bytes = b"") -> list[Message]:
    prefixes = [bytes([first]) + own(number) for first in (1, 2)]
    parts = {prefix: [(b"0", b"value" + text), (b"1", b"")] for prefix in prefixes}
    return Splitter().split(own(number), parts)


def line_of(number: int, first: int = 0) -> dict[str, Any]:
    parts = [
        {"key": f"0x{key.hex()}", "value": f"0x{value.hex()}"}
        for key, value in sorted(messages_of(number))
        if key[0] and first in (0, key[0])
    ]
    return {"id": f"0x{own(number).hex()}", "parts": parts}


def write(path: Path, *messages: Message) -> Path:
    """Write messages to a stream, which is created if it is missing."""
    with DataStream.open_or_create(path, sync="os", index="memory") as stream:
        for message in messages:
            with stream.atomic_op() as op:
                if message[0][0] == 0:
                    op.add_bookmark(message[0][1:17])
                op.add_entry(0x10, pack_message(*message))
    return path


@pytest.fixture
def two(tmp_path: Path) -> tuple[Path, Path]:
    """Neither has all of payload 2."""
    return (
        write(tmp_path / "a.bin", *messages_of(1), *messages_of(2)[:3]),
        write(tmp_path / "b.bin", *messages_of(2)[2:], *messages_of(3)),
    )


@pytest.fixture
def server(two: tuple[Path, Path]) -> Iterator[StreamServer]:
    with StreamServer(two[0], host="127.0.0.1", port=0, in_process=True, index="memory") as server:
        yield server


def address(server: StreamServer) -> str:
    return f"tcp://127.0.0.1:{server.port}"


def numbers(out: list[dict[str, Any]]) -> list[int]:
    return sorted(int(bytes.fromhex(line["id"][2:])[:16]) for line in out)


def test_a_file_and_a_server(invoke: Invoke, server: StreamServer, two: tuple[Path, Path]) -> None:
    done = invoke("reassemble", address(server), two[1])
    assert (done.code, done.err) == (0, "")
    assert sorted(done.objects, key=lambda line: str(line["id"])) == [line_of(n) for n in (1, 2, 3)]


def test_split_accepts_its_lines(invoke: Invoke, two: tuple[Path, Path], tmp_path: Path) -> None:
    _, lines, _ = piped(command("reassemble", *two), "cat", tmp_path)
    (tmp_path / "lines").write_text(lines)
    into = f"{' '.join(command('split', 'again.bin', '--create'))} >&2"
    code, _, errors = piped(["cat", "lines"], f"cd {tmp_path}; {into}", tmp_path)
    assert (code, errors) == (0, "")
    again = invoke("reassemble", tmp_path / "again.bin")
    assert again.out.decode() == lines


def test_a_part_with_nested_headers(invoke: Invoke, tmp_path: Path) -> None:
    prefixes = [bytes([first]) + b"%032d" % at for first in (1, 2) for at in range(50)]
    made = Splitter(400).split(own(1), {prefix: [(b"", b"v")] for prefix in prefixes})
    assert any(key[0] == 0xFF for key, _ in made)
    path = write(tmp_path / "a.bin", *made)
    [line] = invoke("reassemble", path, "--subscribe", "0x01").objects
    assert [part["key"] for part in line["parts"]] == [f"0x{p.hex()}" for p in prefixes[:50]]
    [line] = invoke("reassemble", path, "--subscribe", "0x01", "--subscribe", "0x02").objects
    assert len(line["parts"]) == 100


def test_a_part(invoke: Invoke, two: tuple[Path, Path]) -> None:
    done = invoke("reassemble", *two, "--subscribe", "0x01", "--json")
    assert sorted(done.objects, key=lambda line: str(line["id"])) == [
        line_of(number, first=1) for number in (1, 2, 3)
    ]


def test_where_it_begins(invoke: Invoke, two: tuple[Path, Path]) -> None:
    # Payload 2 has three entries there.
    assert numbers(invoke("reassemble", two[1], "--from", "3").objects) == [3]
    result = invoke("reassemble", two[0], "--from-bookmark", f"0x{own(1)[:16].hex()}")
    assert numbers(result.objects) == [1]
    assert invoke("reassemble", *two, "--from", "latest").out == b""
    done = invoke("reassemble", two[0], "--from", "99")
    assert done.code == 1
    assert done.err.endswith("error: no entry 99: the stream holds 0 to 9\n")


def test_other_events_are_printed(invoke: Invoke, tmp_path: Path) -> None:
    honest = write(tmp_path / "a.bin", *messages_of(1), *messages_of(2)[:2])
    liar = write(tmp_path / "b.bin", *messages_of(1, b"!"), (b"short", b""))
    done = invoke("reassemble", honest, liar)
    assert done.code == 0
    assert numbers(done.objects) == [1]
    result = [json.loads(line) for line in done.err.splitlines()]
    result.sort(key=lambda event: str(event["event"]))
    assert [event["event"] for event in result] == [
        "conflict",
        "conflict",
        "malformed",
        "unfinished",
    ]
    conflict, _, malformed, unfinished = result
    assert conflict.keys() == {
        *("event", "what", "key", "prefix", "payload", "source", "position"),
    }
    assert conflict["what"] == "value"
    assert conflict["payload"] == line_of(1)["id"]
    assert malformed["key"] == f"0x{b'short'.hex()}"
    assert malformed["source"] == str(liar)
    assert unfinished == {"event": "unfinished", "in_flight": 1, "messages": 1}
    # The same in a log of JSON.
    again = invoke("reassemble", honest, liar, "--log-format", "json").err
    assert {json.loads(line)["event"] for line in again.splitlines()} == {
        event["event"] for event in result
    }


def test_lines_of_other_events() -> None:
    dropped = Dropped("age", b"i" * 32, None, 3, 99, 4, 0.0, {"a": 5})
    assert json.loads(event_line(dropped)) == {
        "event": "dropped",
        "why": "age",
        "payload": f"0x{b'i'.hex() * 32}",
        "prefix": None,
        "messages": 3,
        "bytes": 99,
        "missing": 4,
        "positions": {"a": 5},
    }
    back = SourceRolledBack("a", Rollback(3, 7, Position(3)))
    assert json.loads(event_line(back)) == {
        "event": "source_rolled_back",
        "source": "a",
        "to_entry": 3,
        "from_entry": 7,
    }
    assert json.loads(event_line(SourceLost("a", ConnectFailed("no")))) == {
        "event": "source_lost",
        "source": "a",
        "error": "no",
    }
    assert json.loads(event_line(SourceBack("a", 7))) == {
        "event": "source_back",
        "source": "a",
        "next_entry": 7,
    }
    assert json.loads(event_line(SourceFailed("a", ConnectFailed("no"), again=True))) == {
        "event": "source_failed",
        "source": "a",
        "error": "no",
        "again": True,
    }


def test_a_source_that_fails(invoke: Invoke, two: tuple[Path, Path]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        dead = "{}:{}".format(*listener.getsockname())
    done = invoke("reassemble", *two, dead)
    assert done.code == 1
    assert numbers(done.objects) == [1, 2, 3]
    event, error = done.err.splitlines()
    assert json.loads(event)["event"] == "source_failed"
    assert error.startswith(f"error: {dead} was not read to its end: cannot connect to {dead}")
    assert invoke("reassemble", dead).code == 1


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--subscribe", "01"], "is not hex"),
        (["--from", "x"], "--from is a number"),
        (["--from", "1", "--from-bookmark", "x"], "exclude each other"),
        (["--from-bookmark", "block:1"], "in hex"),
        (["--type", str(0xB0)], "is the entry type of bookmarks"),
        (["--metrics-host", "::1"], "requires --metrics-port"),
        (["--tls-ca", "x"], "tcps://"),
        (["--budget", "0"], "from 1 to"),
        (["--json", "--format", "table"], "exclude each other"),
    ],
)
def test_wrong_usage(invoke: Invoke, two: tuple[Path, Path], words: list[str], why: str) -> None:
    assert why in invoke("reassemble", two[0], *words).failed(2)


def test_invalid_sources(invoke: Invoke, two: tuple[Path, Path]) -> None:
    assert "named twice" in invoke("reassemble", two[0], two[0]).failed(2)
    assert "::1: no such file, and not HOST:PORT" in invoke("reassemble", "::1").failed()
    unreached = invoke("reassemble", "no-such-host").err.splitlines()[-1]
    assert "no-such-host: no such file, and no server: cannot connect" in unreached
    assert "no such file" in invoke("reassemble", "nix/nix.bin").failed()
    assert invoke("reassemble").failed(2)


def test_it_resumes_from_the_store(invoke: Invoke, two: tuple[Path, Path], tmp_path: Path) -> None:
    words = ("reassemble", *two, "--store", tmp_path / "place.db")
    assert numbers(invoke(*words).objects) == [1, 2, 3]
    assert invoke(*words).out == b""
    write(two[1], *messages_of(4))
    assert numbers(invoke(*words).objects) == [4]
    (tmp_path / "place.db").write_bytes(b"no database" * 100)
    assert "place.db: the progress of a reassembly cannot be" in invoke(*words).failed()


def test_the_table(invoke: Invoke, two: tuple[Path, Path], tmp_path: Path) -> None:
    done = invoke("reassemble", two[0], "--format", "table")
    [line] = done.lines
    assert line.split() == [f"0x{own(1).hex()}", "4", "parts", "146", "B", str(two[0])]
    code, shown = on_terminal(command("reassemble", *two, "--stats"), tmp_path, columns=120)
    assert code == 0
    assert "3 complete   0 in flight (0 messages, 0 B)   0 dropped" in shown
    assert "oldest incomplete: none" in shown
    assert "0x" not in shown


def test_stats_as_lines(invoke: Invoke, two: tuple[Path, Path]) -> None:
    done = invoke("reassemble", *two, "--stats")
    assert numbers(done.objects) == [1, 2, 3]
    last = json.loads(done.err.splitlines()[-1])
    assert (last["event"], last["complete"], last["in_flight"]) == ("stats", 3, 0)
    assert last["sources"][str(two[0])] == {
        "state": "ended",
        "received": 8,
        "duplicates": last["sources"][str(two[0])]["duplicates"],
        "conflicts": 0,
        "malformed": 0,
        "outside": 0,
    }
    assert sum(counts["duplicates"] for counts in last["sources"].values()) == 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_following_until_a_signal(
    server: StreamServer, two: tuple[Path, Path], tmp_path: Path, number: signal.Signals
) -> None:
    words = ("reassemble", address(server), two[1], "--follow", "--metrics-port", 0)
    with running(*words, cwd=tmp_path) as follower:
        port = follower.err.until(r"metrics on http://127.0.0.1:(\d+)/metrics")[1]
        for _ in range(3):
            follower.out.until("parts")
        with server.stream.atomic_op() as op:
            op.add_entries(0x10, [pack_message(*message) for message in messages_of(4)])
        follower.out.until(own(4).hex())
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=20) as answer:
            text = answer.read().decode()
        assert "datastreamer_reassembly_payloads_total 4.0\n" in text
        name = address(server).removeprefix("tcp://")
        assert f'datastreamer_reassembly_received_total{{source="{name}"}} 13.0\n' in text
        follower.signal(number)
        assert follower.wait() == 0
        assert follower.err.rest() == []


CHAIN = """
from datastreamer.reassembly import Block

NUMBER = 3

def block_of(payload):
    [value] = [value for key, value in payload.parts if key[0] == 1]
    number, branch, parent = value.decode().split()
    if branch == "none":
        return None
    if branch == "wrong":
        return number
    if branch == "exits":
        raise SystemExit(0)
    return Block(int(number), (number + branch).encode(), parent.encode())
"""


def chained(*blocks: str) -> list[Message]:
    """The messages of payloads, each with a block: "NUMBER BRANCH PARENT"."""
    found: list[Message] = []
    for block in blocks:
        name = block.encode().ljust(32, b".")
        found += Splitter().split(name, {b"\1" + name: block.encode()})
    return found


@pytest.fixture
def chain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a module that says which block a payload is, and the stream of a reorg."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "a_chain", raising=False)
    (tmp_path / "a_chain.py").write_text(CHAIN)
    write(tmp_path / "a.bin", *chained("2 a 1a", "1 a 0", "7 none -", "2 b 1a", "3 b 2b"))
    return tmp_path


def block_of(number: int, branch: str, parent: str) -> dict[str, Any]:
    own = f"{number}{branch}".encode()
    return {"number": number, "hash": f"0x{own.hex()}", "parent": f"0x{parent.encode().hex()}"}


def test_in_the_order_of_a_chain(invoke: Invoke, chain: Path) -> None:
    words = ("reassemble", "a.bin", "--order", "a_chain:block_of", "--after", "0x30")
    done = invoke(*words)
    assert done.code == 0
    lines = done.objects
    one, two, other, back, two_b, three_b = lines
    assert [line.get("block") for line in lines] == [
        block_of(1, "a", "0"),
        block_of(2, "a", "1a"),
        *[None, None],
        block_of(2, "b", "1a"),
        block_of(3, "b", "2b"),
    ]
    assert back == {"rolled_back": [{"number": 2, "hash": "0x3261", "id": two["id"]}]}
    assert all(line["parts"] for line in (one, two, other, two_b, three_b))
    [gap] = [json.loads(line) for line in done.err.splitlines()]
    assert gap == {
        "event": "gap",
        "missing": "0x3161",
        "number": 1,
        "block": block_of(2, "a", "1a"),
        "source": "a.bin",
    }
    table = invoke(*words, "--format", "table").lines
    assert [line.split()[0] for line in table] == ["1", "2", other["id"], "rolled", "2", "3"]
    assert table[3] == "rolled back: block 2"


def test_a_block_that_cannot_follow(invoke: Invoke, chain: Path) -> None:
    write(chain / "a.bin", *chained("9 a 3b"))
    done = invoke("reassemble", "a.bin", "--order", "a_chain:block_of", "--after", "0x30")
    assert json.loads(done.err.splitlines()[-1]) == {
        "event": "rejected",
        "why": "weight",
        "block": block_of(9, "a", "3b"),
        "payload": f"0x{b'9 a 3b'.ljust(32, b'.').hex()}",
    }


def test_a_chain_continues_with_a_store(invoke: Invoke, chain: Path) -> None:
    words = ("reassemble", "b.bin", "--order", "a_chain:block_of", "--store", "place.db")
    write(chain / "b.bin", *chained("1 a 0", "2 a 1a"))
    assert [line["block"]["number"] for line in invoke(*words).objects] == [1, 2]
    assert invoke(*words).out == b""
    write(chain / "b.bin", *chained("2 b 1a", "3 b 2b"))
    back, *applied = invoke(*words).objects
    assert [block["hash"] for block in back["rolled_back"]] == ["0x3261"]
    assert [line["block"]["hash"] for line in applied] == ["0x3262", "0x3362"]


def test_a_payload_of_an_earlier_run_has_no_parts() -> None:
    payload = Payload(b"i" * 32, None)
    reorg = Reorg([(Block(2, b"b", b"a"), payload)], [(Block(2, b"c", b"a"), payload)])
    _, line = (json.loads(line) for line in lines_of(reorg).splitlines())
    assert line == {
        "id": f"0x{b'i'.hex() * 32}",
        "block": {"number": 2, "hash": "0x63", "parent": "0x61"},
    }
    assert b"printed by an earlier run" in described(reorg)


@pytest.mark.parametrize(
    ("order", "why"),
    [
        ("a_chain", "--order a_chain: write MODULE:FUNCTION"),
        ("a_chain.block_of", "write MODULE:FUNCTION"),
        ("no_chain:block_of", "cannot be imported: ModuleNotFoundError: No module named"),
        ("a_chain:nothing", "cannot be imported: AttributeError"),
        ("a_chain:", "--order a_chain:"),
        (":block_of", "cannot be imported: ValueError"),
        ("a_chain:NUMBER", "--order a_chain:NUMBER is not a function"),
        ("exits:block_of", "cannot be imported: SystemExit: 5"),
        ("broken:block_of", "cannot be imported: SyntaxError"),
    ],
)
def test_an_order_that_cannot_be_imported(
    invoke: Invoke, chain: Path, order: str, why: str
) -> None:
    (chain / "exits.py").write_text("raise SystemExit(5)")
    (chain / "broken.py").write_text("def")
    assert why in invoke("reassemble", "a.bin", "--order", order).failed(2)


def test_wrong_usage_of_an_order(invoke: Invoke, chain: Path) -> None:
    after = invoke("reassemble", "a.bin", "--after", "0x30")
    assert "--after requires --order" in after.failed(2)
    words = ("reassemble", "a.bin", "--order", "a_chain:block_of")
    assert "--after: " in invoke(*words, "--after", "30").failed(2)


@pytest.mark.parametrize(
    ("block", "why"),
    [
        ("x a 0", "ValueError: invalid literal for int()"),
        ("1 wrong 0", "it returned '1', which is neither a Block nor None"),
        ("1 a 1a", "a_chain:block_of, payload 0x31"),
        ("1 exits 0", "SystemExit: 0"),
    ],
)
def test_an_order_that_fails(invoke: Invoke, chain: Path, block: str, why: str) -> None:
    write(chain / "c.bin", *chained(block))
    message = invoke("reassemble", "c.bin", "--order", "a_chain:block_of").failed()
    assert why in message


def test_a_reader_that_closes_the_pipe(two: tuple[Path, Path], tmp_path: Path) -> None:
    code, output, errors = piped(command("reassemble", *two, "--follow"), "head -1", tmp_path)
    assert (code, errors) == (0, "")
    assert json.loads(output) in (line_of(1), line_of(3))
    code, _, errors = piped(command("reassemble", *two), "true", tmp_path)
    assert (code, errors) == (0, "")
