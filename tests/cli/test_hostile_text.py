"""Every command, with hostile text from outside: no escape sequence reaches a terminal.

A command that has no case here fails the first test.
"""

from __future__ import annotations

import fcntl
import io
import json
import os
import pty
import re
import socket
import struct
import subprocess
import sys
import termios
import threading
from collections.abc import Iterator
from contextlib import closing, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import typer

from datastreamer import DataStream
from datastreamer.cli import dsapp, main
from datastreamer.cli.dsapp.program import program as dsapp_program
from datastreamer.cli.program import program
from datastreamer.format import PACKET_RESULT, RESULT_HEAD_SIZE, RESULT_HEAD_STRUCT
from datastreamer.printable import printable
from datastreamer.zkevm import encode, events
from tests.cli.conftest import Invoke
from tests.cli.process import ENVIRONMENT, PATIENCE, command, running

# A title, a cleared screen, a question that the terminal answers (C1), text that runs backwards,
# text that is not seen, a character that is erased, a line of its own, markup of rich.
TEXT = "a\x1b]0;owned\x07\x1b[2J\x9b6n\u202e\u2066\u200b\ufe0f\x7f\r\nFORGED[red]markup[/red]"
# What rich itself writes to a terminal: styles, the cursor's moves, cleared lines.
OWN = re.compile(r"\x1b\[[0-9;]*m|\x1b\[\?25[hl]|\x1b\[[0-9]*[AK]|\x1b\[2K|\r")

# For every command, what it is given: N a file that is not there, S a stream whose name and
# contents are hostile and T another, P a server that answers so, M a metrics port that does.
CASES: dict[str, list[list[str]]] = {
    "serve": [["N"], ["S", "--tls-cert", "N"], ["S", "--host", "N"], ["S", "--unix", "N/N"]],
    "relay": [["--config", "C"], ["--server", "N", "--file", "S"], ["--config", "N"]],
    "info": [["S"], ["S", "--format", "table"], ["N"], ["P"], ["N:1"]],
    "cat": [
        ["S", "--format", "table"],
        ["S", "--decode", "zkevm", "--format", "table"],
        ["S", "--decode", "zkevm", "--json"],
        ["S", "--from-bookmark", "N"],
        ["N"],
        ["P"],
    ],
    "tail": [["N"], ["S", "--last", "N"], ["P"]],
    "entry": [["S", "1", "--format", "table"], ["S", "N"], ["P", "1"], ["N", "1"]],
    "bookmark": [["S", "N"], ["S", "key", "--format", "table"], ["P", "key"]],
    "append": [["P"], ["S"], ["N"], ["S", "--token-file", "N"]],
    "truncate": [["N", "1"], ["S", "N"]],
    "snapshot": [["S", "S"], ["N", "N"], ["S", "N/N"]],
    "reindex": [["N"], ["S"]],
    "sums": [["N"], ["S"]],
    "import-leveldb": [["S", "--db", "N"]],
    "verify": [["S", "--format", "table"], ["D", "--format", "table"], ["N"], ["P"]],
    "repair": [["D", "--dry-run", "--format", "table"], ["N"]],
    "reassemble": [["P"], ["N"], ["S", "--subscribe", "N"]],
    "split": [["--part-size", "N"], []],
    "archive push": [["S", "N"], ["N", "file:///N"], ["S", "A"]],
    "archive list": [["N"], ["file:///N"], ["A", "--format", "table"]],
    "archive verify": [["N"], ["A", "--against", "N"], ["A", "--sample", "N"]],
    "archive restore": [["A", "N/N"], ["A", "S"], ["A", "x.bin", "--manifest", "N"]],
    "archive prune": [["N"], ["A", "--keep", "N"]],
    "export": [["S", "N/N.jsonl"], ["S", "N.N"], ["P", "out.jsonl"]],
    "top": [["M", "--count", "1", "--format", "table"], ["M", "--count", "1", "--json"], ["N"]],
    "health": [["M"], ["M", "--json"], ["P"], ["N:1"]],
    "clients": [["M", "--format", "table"], ["M", "--json"], ["N:1"]],
    "demo": [["N/N"], ["N", "--ops", "N"]],
    "bench": [["--seed", "N"]],
    "zkevm check": [["S", "--format", "table"], ["S", "--json"], ["N"], ["P"]],
    "zkevm batch": [["S", "1", "--format", "table"], ["S", "1", "--json"], ["S", "N"]],
    "zkevm block": [["S", "1", "--format", "table"], ["S", "1", "--json"], ["P", "1"]],
    "zkevm diff": [["S", "T", "--format", "table"], ["S", "T", "--json"], ["S", "N"], ["S", "P"]],
    "context add": [["N", "host"], ["name", "N"], ["N", "host", "--tls-ca", "N"]],
    "context remove": [["N"]],
    "context use": [["N"]],
    "context ls": [["--format", "table"]],
    "context show": [["--format", "table"], ["--json"]],
    "completion": [["N"]],
    "spark ingest": [["N", "N", "--format", "N"]],
    "spark report": [["N", "--format", "N"]],
    "dsapp server": [["--file", "N/N"], ["--port", "N"]],
    "dsapp client": [["--server", "P", "--header"], ["--server", "N"], ["--from", "N"]],
    "dsapp relay": [["--server", "N"], ["--file", "N/N", "--port", "N"]],
    "dsapp help": [["N"]],
}


def commands(of: Any, path: tuple[str, ...] = ()) -> Iterator[str]:
    below = getattr(of, "commands", None)
    if below is None:
        yield " ".join(path)
    else:
        for name, each in below.items():
            yield from commands(each, (*path, name.partition(",")[0]))


def test_every_command_has_a_case() -> None:
    known = set(commands(typer.main.get_command(program)))
    known |= set(commands(typer.main.get_command(dsapp_program), ("dsapp",)))
    assert known == set(CASES)


# What is hostile.


class HostileServer:
    """Rejects every command with a hostile text."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        text = TEXT.encode()
        answer = RESULT_HEAD_STRUCT.pack(PACKET_RESULT, RESULT_HEAD_SIZE + len(text), 16) + text
        with suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                with suppress(OSError), closing(connection):
                    connection.settimeout(PATIENCE)
                    if connection.recv(4096):
                        connection.sendall(answer)
                        connection.shutdown(socket.SHUT_WR)
                        while connection.recv(4096):
                            pass

    def close(self) -> None:
        self._listener.close()


class HostileMetrics(BaseHTTPRequestHandler):
    def handle(self) -> None:
        if self.connection.recv(1, socket.MSG_PEEK).isalpha():
            super().handle()
        elif self.connection.recv(4096):
            # As a metrics port answers a client of a stream.
            self.connection.sendall(b"HTTP/1.0 400 Bad Request\r\n\r\n")

    def do_GET(self) -> None:
        client = dict.fromkeys(("entry", "offset", "lag_entries", "lag_bytes"), 1)
        result = {
            "time": 1,
            "head_entries": 5,
            "head_bytes": 6,
            "sent_bytes": 7,
            "connected": {"live": 1, TEXT: 2},
            "clients": [{"id": TEXT, "client": TEXT, "state": TEXT, "seconds": 1, **client}],
            "upstreams": [{"upstream": TEXT, "state": TEXT, "lag_entries": 3}],
            TEXT: TEXT,
        }
        body = json.dumps(result).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


def write_stream(path: Path, debug: str) -> None:
    """A batch with a block; every text in it is hostile."""
    with (
        DataStream.create(path, version=3, sync="os", index="memory") as stream,
        stream.atomic_op() as op,
    ):
        op.add_bookmark(b"key\x1b[2J\x7f")
        for event in (
            events.BookMark(events.BookmarkType.BATCH, 1),
            events.BatchStart(1, debug=debug),
            events.BookMark(events.BookmarkType.L2_BLOCK, 1),
            events.L2Block(1, batch_number=1, timestamp=5, debug=debug),
            events.Transaction(1, index=0, encoded=debug.encode(), debug=debug),
            events.L2BlockEnd(1),
            events.BatchEnd(1, debug=debug),
        ):
            kind, data = encode(event, version=3)
            if isinstance(event, events.BookMark):
                op.add_bookmark(data)
            else:
                op.add_entry(kind, data)


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The values of the letters in the cases."""
    folder = tmp_path_factory.mktemp("hostile")
    named = folder / f"{TEXT.replace('/', '')}.bin"
    other, damaged = folder / f"other{named.name}", folder / f"damaged{named.name}"
    write_stream(named, TEXT)
    write_stream(other, TEXT + "other")
    write_stream(damaged, TEXT)
    with damaged.open("r+b") as file:
        file.seek(4096)
        file.write(b"\x1b[2J")
    config = folder / f"{named.name}.toml"
    config.write_text(f"{json.dumps(TEXT)} = {json.dumps(TEXT)}\n")
    server, metrics = HostileServer(), ThreadingHTTPServer(("127.0.0.1", 0), HostileMetrics)
    threading.Thread(target=metrics.serve_forever, daemon=True).start()
    try:
        yield {
            "N": TEXT.replace("/", ""),
            "S": str(named),
            "T": str(other),
            "D": str(damaged),
            "C": str(config),
            "A": f"file://{folder}/archive{TEXT.replace('/', '')}",
            "P": server.address,
            "M": f"127.0.0.1:{metrics.server_port}",
        }
    finally:
        metrics.shutdown()
        metrics.server_close()
        server.close()


def given(case: list[str], words: dict[str, str]) -> list[str]:
    return [re.sub(r"(?<![a-zA-Z0-9-])[NSTDCPM](?![a-zA-Z])", lambda it: words[it[0]], word)
            for word in case]  # fmt: skip


# The output.

LINE = ("\n" + TEXT + "\n" + json.dumps({TEXT: TEXT}) + "\n").encode()


def on_terminal(line: list[str], cwd: Path, term: str) -> str:
    """Everything that a process wrote to its terminal."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 90, 0, 0))
    process = subprocess.Popen(
        line,
        stdin=subprocess.PIPE,
        stdout=theirs,
        stderr=theirs,
        cwd=cwd,
        env={**environment(), "TERM": term},
        start_new_session=True,
    )
    os.close(theirs)
    assert process.stdin is not None
    with suppress(OSError):
        process.stdin.write(LINE)
        process.stdin.close()
    shown = b""
    try:
        with suppress(OSError):
            while part := os.read(ours, 65536):
                shown += part
        process.wait(PATIENCE)
    finally:
        process.kill()
        process.wait()
        os.close(ours)
    return shown.decode("utf-8", "surrogateescape").replace("\r\n", "\n")


HOSTILE_VARIABLES = ("LANGUAGE", "NOTIFY_SOCKET", "LISTEN_FDNAMES", "USER", "JAVA_HOME")


def environment() -> dict[str, str]:
    """The environment, with hostile values."""
    return ENVIRONMENT | dict.fromkeys(HOSTILE_VARIABLES, TEXT) | {"XDG_CONFIG_HOME": "."}


def ensure_harmless(shown: str) -> None:
    assert printable(shown) == shown, ascii(shown)
    assert not any(line.startswith("FORGED") for line in shown.splitlines()), shown
    # As it was written, not as rich reads it.
    assert shown.count("markup") == len(re.findall(r"\[red\]\s*markup", shown)), shown


def parts_of(name: str, case: list[str], words: dict[str, str]) -> list[str]:
    return [*name.removeprefix("dsapp ").split(), *given(case, words)]


@pytest.mark.parametrize("name", CASES)
def test_in_a_pipe(
    name: str,
    words: dict[str, str],
    tmp_path: Path,
    invoke: Invoke,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    for variable in HOSTILE_VARIABLES:
        monkeypatch.setenv(variable, TEXT)
    run = dsapp.main if name.startswith("dsapp ") else main.main
    for case in [*CASES[name], [f"--{TEXT}"]]:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(LINE)))
        done = invoke(*parts_of(name, case, words), program=run)
        assert "Traceback" not in done.err
        for shown in (done.out.decode(), done.err):
            ensure_harmless(shown)


@pytest.mark.parametrize("name", CASES)
def test_on_a_terminal(name: str, words: dict[str, str], tmp_path: Path) -> None:
    module = "datastreamer.cli.dsapp" if name.startswith("dsapp ") else "datastreamer"
    line = command(*parts_of(name, CASES[name][0], words), module=module)
    shown = on_terminal(line, tmp_path, "xterm-256color")
    assert "Traceback" not in shown
    ensure_harmless(OWN.sub("", shown))


@pytest.mark.parametrize("style", ["text", "json"])
def test_the_log_of_a_server(words: dict[str, str], tmp_path: Path, style: str) -> None:
    """Its file's name, a client that speaks no protocol, and a source whose token is refused."""
    tokens = tmp_path / "tokens"
    tokens.write_text("a-token-of-some-length\n")
    tokens.chmod(0o600)
    options = ("--port", "0", "--host", "127.0.0.1", "--log-level", "debug", "--log-format", style)
    more = ("--publish-token-file", tokens)
    with running("serve", words["S"], *options, *more, cwd=tmp_path) as serving:
        port = serving.err.until(r"serving .*127\.0\.0\.1:(\d+)")[1]
        for said in (TEXT.encode() * 50, b"GET /" + TEXT.encode() + b" HTTP/1.0\r\n\r\n"):
            with socket.create_connection(("127.0.0.1", int(port)), PATIENCE) as client:
                client.sendall(said)
                with suppress(OSError):
                    while client.recv(4096):
                        pass
        serving.process.terminate()
        assert serving.wait() == 0
        serving.err.rest()
        seen = serving.err.seen
    assert len(seen) > 2
    for line in seen:
        ensure_harmless(line)
        if style == "json":
            assert json.loads(line)["message"]
        else:
            assert re.match(r"\d{4}-\d\d-\d\dT|    ", line)
