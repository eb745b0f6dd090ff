"""`top` and `clients`: a server's state from its metrics port."""

from __future__ import annotations

import contextlib
import json
import math
import re
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from datastreamer.cli.shared.console import new_console
from datastreamer.cli.shared.metrics_client import size, table, with_rates
from datastreamer.client.blocking_client import BlockingClient
from datastreamer.errors import UsageError
from datastreamer.format import COMMAND_CLIENT_NAME
from datastreamer.service.embedded import StreamServer
from tests.cli.conftest import Invoke
from tests.cli.process import command, on_terminal, running
from tests.cli.test_terminal import Terminal
from tests.network import model
from tests.network.stub import Stub, StubServer, sample


class Served:
    """A server with metrics, and a client of it that streams."""

    def __init__(self, server: StreamServer, client: socket.socket) -> None:
        self.server = server
        self.address = f"127.0.0.1:{server.metrics_port}"
        self.client = "{}:{}".format(*client.getsockname())


@pytest.fixture
def served(copy: Path) -> Iterator[Served]:
    with (
        StreamServer(copy, host="127.0.0.1", port=0, metrics_port=0, in_process=True) as server,
        socket.create_connection(("127.0.0.1", server.port)) as client,
    ):
        client.settimeout(20)
        head = server.stream.total_entries
        client.sendall(model.start(head))
        assert client.recv(100) == model.OK
        yield Served(server, client)


def test_clients_as_lines_and_as_a_table(invoke: Invoke, served: Served) -> None:
    done = invoke("clients", served.address)
    assert done.code == 0, done.err
    [client] = [json.loads(line) for line in done.out.splitlines()]
    assert client["client"] == served.client
    assert client["entry"] == served.server.stream.total_entries
    assert (client["lag_entries"], client["lag_bytes"]) == (0, 0)
    done = invoke("clients", served.address, "--format", "table")
    assert done.code == 0
    text = done.out.decode()
    assert f"head {served.server.stream.total_entries:,} entries" in text
    assert served.client in text
    assert "1 live" in text or "1 catch-up" in text
    none = invoke("clients", served.address, "--limit", 0, "--format", "table").out.decode()
    assert served.client not in none
    assert "1 more" in none


def test_a_client_with_a_name(invoke: Invoke, served: Served) -> None:
    options = {"client_name": "indexer \u202e"}
    with BlockingClient("127.0.0.1", served.server.port, **options) as client:
        assert client.header().total_entries == 200
        shown = invoke("clients", served.address, "--format", "table").out.decode()
        [named] = [
            each for each in invoke("clients", served.address).objects if "(" in each["client"]
        ]
    assert re.fullmatch(r"127\.0\.0\.1:\d+ \(indexer \\u202e\)", named["client"])
    assert named["client"] in shown
    with pytest.raises(UsageError, match="a client's name must have 1 to 64 bytes, not 65"):
        BlockingClient("127.0.0.1", served.server.port, client_name=65 * "x")


def test_a_client_with_a_name_of_a_server_that_knows_none() -> None:
    """It connects again without; with its token, if that was accepted."""
    stub = Stub(sample(5))
    seen = []

    def handle(connection: socket.socket) -> None:
        head = connection.recv(65536)
        seen.append(int.from_bytes(head[:8], "big"))
        if seen[-1] == COMMAND_CLIENT_NAME:
            connection.sendall(model.result(9))
            return
        connection.sendall(stub.receive(head))
        while data := connection.recv(65536):
            connection.sendall(stub.receive(data))

    with (
        StubServer(handle, handle) as server,
        BlockingClient("127.0.0.1", server.port, client_name="indexer") as client,
    ):
        assert client.entry(3).number == 3
    assert seen[0] == COMMAND_CLIENT_NAME
    assert len(seen) == 2


def test_top_prints_a_line_per_update_without_a_terminal(invoke: Invoke, served: Served) -> None:
    done = invoke("top", served.address, "--interval", "0.1", "--count", 2)
    assert done.code == 0, done.err
    first, second = [json.loads(line) for line in done.out.splitlines()]
    assert first["head_entries"] == served.server.stream.total_entries
    assert first["entries_per_second"] is None
    assert second["entries_per_second"] == 0
    assert second["clients"][0]["client"] == served.client
    assert second["clients"][0]["entries_per_second"] == 0


def test_top_on_a_terminal(served: Served, tmp_path: Path) -> None:
    words = command("top", served.address, "--interval", "0.1", "--count", 3)
    code, shown = on_terminal(words, tmp_path, columns=120)
    assert code == 0, shown
    assert served.client in shown
    assert "entries/s" in shown


@pytest.mark.parametrize(("words", "code"), [((), 0), (("--count", 3), 143)])
def test_a_signal_ends_the_wait_for_an_answer(
    tmp_path: Path, words: tuple[object, ...], code: int
) -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as silent,
        running("top", "{}:{}".format(*silent.getsockname()), *words, cwd=tmp_path) as top,
    ):
        silent.settimeout(60)
        with silent.accept()[0]:
            top.signal(signal.SIGTERM)
            assert top.wait() == code
            assert "no answer" not in "".join(top.err.rest())


def test_nothing_is_cut_at_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    long = {"entry": 123_456_789_012, "offset": 10**12, "lag_entries": 123_456_789}
    client = {"client": "[2001:db8:aaaa:bbbb:cccc:dddd:eeee:ffff]:65535", "state": "catch-up"}
    rates = {"entries_per_second": 1_234_567.0, "bytes_per_second": 123.4 * 2**20}
    state = {
        "head_entries": 10**11,
        "head_bytes": 10**13,
        "sent_bytes_per_second": 1e8,
        "connected": {"live": 1},
        "clients": [{**client, **long, **rates, "seconds": 1e6, "lag_bytes": 10**10}],
        "entries_per_second": 1.0,
    }
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr("sys.stdout", terminal := Terminal())
    console = new_console(terminal, width=80)
    console.print(table(state))
    shown = re.sub(r"\x1b\[[0-9;]*m", "", terminal.getvalue())
    assert "\u2026" not in shown
    for cell in ("123,456,789,012", "123,456,789", "1,234,567", "123.4 MiB", "catch-up"):
        assert cell in shown
    assert max(map(len, shown.splitlines())) <= 80


def test_a_signal_ends_it_with_exit_code_0(served: Served, tmp_path: Path) -> None:
    with running("top", served.address, "--interval", "0.1", cwd=tmp_path) as process:
        process.out.until("head_entries")
        process.signal(signal.SIGINT)
        assert process.wait() == 0


def test_a_server_that_restarts(copy: Path) -> None:
    def serve(metrics_port: int) -> StreamServer:
        return StreamServer(
            copy, host="127.0.0.1", port=0, metrics_port=metrics_port, in_process=True
        )

    with contextlib.ExitStack() as stack:
        with serve(0) as server:
            port = server.metrics_port
            assert port is not None
            words = ("top", f"127.0.0.1:{port}", "--interval", "0.1")
            top = stack.enter_context(running(*words, cwd=copy.parent))
            before = json.loads(top.out.next() or "")
        top.err.until(f"lost 127.0.0.1:{port}, trying again: no answer: Connection re")
        with serve(port) as server:
            with server.stream.atomic_op() as op:
                op.add_entry(1, b"more")
            top.out.until(f'"head_entries": {before["head_entries"] + 1},')
            top.signal(signal.SIGINT)
            assert top.wait() == 0
            assert top.err.rest() == []


def test_rates_use_the_clock_of_the_server() -> None:
    def state(time: float, head: int, entry: int, id: int = 1) -> dict[str, object]:
        client = {"id": id, "client": "x", "state": "live", "entry": entry, "offset": entry * 10}
        return {
            "time": time,
            "head_entries": head,
            "head_bytes": 0,
            "sent_bytes": head * 5,
            "connected": {},
            "clients": [client],
        }

    rated = with_rates(state(12.0, 200, 60), state(10.0, 100, 20))
    assert rated["entries_per_second"] == 50
    assert rated["sent_bytes_per_second"] == 250
    assert rated["clients"][0]["entries_per_second"] == 20
    assert rated["clients"][0]["bytes_per_second"] == 200
    again = with_rates(state(12.0, 50, 60, id=2), state(10.0, 100, 20))  # truncated; another client
    assert again["entries_per_second"] == 0
    assert again["clients"][0]["entries_per_second"] is None
    same = with_rates(state(10.0, 100, 20), state(10.0, 100, 20))
    assert same["entries_per_second"] is None


def test_sizes() -> None:
    assert [size(n) for n in (None, 0, 1023, 1024, 5 << 20, 1 << 45)] == [
        *("", "0 B", "1,023 B", "1.0 KiB", "5.0 MiB", "32.0 TiB")
    ]


def answered_with(answer: bytes) -> tuple[str, threading.Thread]:
    """The address of a server that answers one request with these bytes."""
    listener = socket.create_server(("127.0.0.1", 0))

    def answer_once() -> None:
        with listener, listener.accept()[0] as connection:
            connection.recv(10_000)
            connection.sendall(answer)

    thread = threading.Thread(target=answer_once)
    thread.start()
    return f"127.0.0.1:{listener.getsockname()[1]}", thread


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"\xff\x00\x00\x00\x18\x00\x00\x00\x09Invalid command",
        b"HTTP/1.1 404 Not Found\r\nContent-Length: 2\r\n\r\n{}",
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}",
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{]",
        b"HTTP/1.1 200 OK\r\nContent-Length: 200\r\n\r\n{}",
    ],
)
def test_another_program_at_the_port(invoke: Invoke, answer: bytes) -> None:
    address, thread = answered_with(answer)
    done = invoke("clients", address)
    thread.join()
    assert done.code == 1
    assert done.out == b""
    assert done.err.startswith(f"error: {address}: ")
    assert done.err.count("\n") == 1


WHOLE: dict[str, Any] = {
    "time": 1.0,
    "head_entries": 5,
    "head_bytes": 100,
    "sent_bytes": 7,
    "upstreams": [{"upstream": "a:1", "state": "live", "lag_entries": None}],
    "connected": {"live": 1},
    "clients": [
        {
            "id": "1.1",
            "client": "a:2",
            "state": "live",
            "seconds": 3.5,
            "entry": None,
            "offset": 10,
            "lag_entries": 2,
            "lag_bytes": 3,
        }
    ],
}


def with_json(body: str) -> bytes:
    return f"HTTP/1.1 200 OK\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode()


@pytest.mark.parametrize(
    "other",
    [
        "[" * 100_000,
        "[]",
        '"' + "x" * 30 + '"',
        *(
            json.dumps({**WHOLE, name: value})
            for name, value in WHOLE.items()
            for value in ("1", [5], {"x": "1"}, -1, math.nan, 10**400)
        ),
        *(
            json.dumps({**WHOLE, "clients": [{**WHOLE["clients"][0], name: value}]})
            for name in WHOLE["clients"][0]
            for value in ([], {}, -1)
        ),
        *(json.dumps({**WHOLE, name: None}) for name in ("time", "connected", "clients")),
        json.dumps({**WHOLE, "clients": [{**WHOLE["clients"][0], "seconds": None}]}),
        json.dumps({**WHOLE, "clients": [{"id": "1.1", "client": "x", "state": "live"}]}),
    ],
)
@pytest.mark.parametrize("verb", ["clients", "top"])
def test_another_program_s_json_at_the_port(invoke: Invoke, verb: str, other: str) -> None:
    address, thread = answered_with(with_json(other))
    done = invoke(verb, address, "--format", "table")
    thread.join()
    assert done.code == 1
    assert done.err == (
        f"error: {address}: not the metrics port of a datastreamer; `serve` logs the address "
        "of its own\n"
    )


def test_the_same_of_a_datastreamer(invoke: Invoke) -> None:
    address, thread = answered_with(with_json(json.dumps(WHOLE)))
    done = invoke("clients", address, "--format", "table")
    thread.join()
    assert (done.code, done.err) == (0, "")
    assert b"head 5 entries, 100 B" in done.out


def test_no_server_at_the_port(invoke: Invoke) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    for address in (f"127.0.0.1:{port}", "a..b:77"):
        for verb in ("top", "clients"):
            done = invoke(verb, address)
            assert done.code == 1
            assert f"error: {address}: no answer: " in done.err
            assert done.err.count("\n") == 1


@pytest.mark.parametrize(
    "words",
    [
        ("top", "nowhere"),
        ("clients", "tcps://127.0.0.1:9100"),
        ("clients", "unix:/somewhere"),
        ("top", "127.0.0.1:9100", "--interval", "0"),
        ("top", "127.0.0.1:9100", "--limit", "10001"),
        ("serve", "FILE", "--metrics-host", "127.0.0.1"),
        ("serve", "FILE", "--metrics-port", "65536"),
    ],
)
def test_wrong_usage(invoke: Invoke, words: tuple[str, ...]) -> None:
    done = invoke(*words)
    assert done.code == 2
    assert done.err.startswith("error: ")


def test_a_metrics_port_in_use(invoke: Invoke, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        words = ("serve", tmp_path / "new.bin", "--create", "--port", 0, "--metrics-port", port)
        done = invoke(*words)
    assert done.code == 1
    assert done.err.startswith(f"error: cannot listen on 127.0.0.1:{port}: ")
    assert done.err.count("\n") == 1
    assert not (tmp_path / "new.bin").exists()


def test_serve_logs_the_address_of_its_metrics(copy: Path) -> None:
    with running(
        *("--log-format", "json", "serve", copy, "--host", "127.0.0.1", "--port", 0),
        *("--metrics-port", 0),
        cwd=copy.parent,
    ) as process:
        state = json.loads(process.err.until("metrics on").string)
        assert state["level"] == "info"
        assert state["address"] == state["message"].rpartition(" ")[2]
        served = json.loads(process.err.until('"addresses"').string)
        assert served["file"] == str(copy)
