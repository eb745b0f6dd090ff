"""Commands as processes whose pipes close, which get signals, or whose servers end."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from datastreamer.cli.shared import source
from datastreamer.cli.shared.exit_codes import Failure
from datastreamer.cli.shared.source import open_source
from datastreamer.errors import HistoryChanged
from datastreamer.format import Header
from datastreamer.protocol.commands import Stop
from datastreamer.service.embedded import StreamServer
from datastreamer.storage.stream import DataStream
from tests.cli.conftest import ENTRIES, Invoke
from tests.cli.process import ENVIRONMENT, PATIENCE, command, done, piped, running
from tests.network.stub import Stub, StubServer, sample


@pytest.mark.parametrize(
    "words, into, lines",
    [
        (["cat", "FILE"], "head -n 3", 3),
        (["cat", "FILE", "--format", "table"], "head -n 2", 2),
        (["cat", "SERVER", "--follow"], "head -n 3", 3),
        (["info", "FILE", "--format", "table"], "head -n 1", 1),
        (["cat", "FILE", "--follow", "--from", "latest"], "true", 0),
        (["cat", "SERVER", "--follow", "--from", "latest"], "true", 0),
        (["-h"], "true", 0),
    ],
)
def test_a_closed_pipe_is_silent(
    made: Path, server: str, words: list[str], into: str, lines: int
) -> None:
    where = {"FILE": str(made), "SERVER": server}
    called = command(*(where.get(word, word) for word in words))
    code, output, errors = piped(called, into, made.parent)
    assert (code, errors) == (0, "")
    assert len(output.splitlines()) == lines


def test_a_signal_after_the_reader_has_closed_the_pipe(tmp_path: Path) -> None:
    """The signal may arrive while the command ends because its output is closed: no traceback."""
    stub = Stub(sample(5))
    ours, theirs = socket.socketpair()

    def handle(connection: socket.socket) -> None:
        while not any(isinstance(event, Stop) for event in stub.seen):
            connection.sendall(stub.receive(connection.recv(65536)))
        following.send_signal(signal.SIGINT)
        with contextlib.suppress(OSError):
            connection.recv(1)

    with StubServer(handle) as server, ours:
        following = subprocess.Popen(
            command("cat", f"127.0.0.1:{server.port}", "--follow"),
            stdin=subprocess.DEVNULL,
            stdout=theirs,
            stderr=subprocess.PIPE,
            # It is interrupted at a random point, and may end with an open socket.
            env={key: value for key, value in ENVIRONMENT.items() if key != "PYTHONWARNINGS"},
        )
        theirs.close()
        assert b'"number"' in ours.recv(65536)
        ours.close()
        [connection] = server.connections
        connection.sendall(stub.append(*sample(6)[5:]))
        try:
            _, errors = following.communicate(timeout=PATIENCE)
        finally:
            following.kill()
    assert (following.returncode, errors) == (0, b"")


def test_more_than_a_pipe_holds(long: Path) -> None:
    code, output, errors = piped(command("cat", long.name), "head -n 1", long.parent)
    assert (code, errors) == (0, "")
    assert output.startswith('{"number": 0, "type": 1, "length": 1000, "data": "0x000')


def test_a_full_disk(made: Path) -> None:
    if not os.path.exists("/dev/full"):
        pytest.skip("there is no /dev/full here")
    with open("/dev/full", "wb") as full:
        failed = subprocess.run(
            command("cat", made), check=False, stdout=full, stderr=subprocess.PIPE, env=ENVIRONMENT
        )
    assert failed.returncode == 1
    assert failed.stderr == b"error: standard output: No space left on device\n"


@pytest.fixture
def long(tmp_path: Path) -> Path:
    """A file of which `cat` writes some 6 MB, more than pipes and short limits hold."""
    path = tmp_path / "long.bin"
    with DataStream.create(path, sync="os") as stream, stream.atomic_op() as op:
        op.add_entries(1, [bytes(1000)] * 3000)
    return path


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_partial_write_of_output_is_an_error(long: Path, unbuffered: str) -> None:
    """With and without the interpreter's buffer, which containers often turn off."""
    environment = {**ENVIRONMENT, "PYTHONUNBUFFERED": unbuffered}
    words = " ".join(command("cat", long))
    cut = long.parent / "cut"
    limited = subprocess.run(
        f"ulimit -f 100; {words} > {cut}",
        shell=True,
        check=False,
        stderr=subprocess.PIPE,
        env=environment,
    )
    assert limited.returncode == 1
    assert limited.stderr == b"error: standard output: File too large\n"
    assert 0 < cut.stat().st_size <= 102_400


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_output_to_a_pipe_that_does_not_block(long: Path, unbuffered: str) -> None:
    """Another process that shares the pipe may have set it so."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    with subprocess.Popen(
        command("cat", long),
        stdout=writing,
        stderr=subprocess.PIPE,
        env={**ENVIRONMENT, "PYTHONUNBUFFERED": unbuffered},
    ) as reader:
        os.close(writing)
        with open(reading, "rb") as output:
            begun = output.read(1)
            # The command fills the pipe meanwhile.
            got = begun + output.read()
        assert reader.stderr is not None
        errors = reader.stderr.read()
    assert (reader.returncode, errors) == (0, b"")
    assert got.count(b"\n") == 3000


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_an_operation_whose_result_cannot_be_printed_is_in_the_stream(
    tmp_path: Path, unbuffered: str
) -> None:
    if not os.path.exists("/dev/full"):
        pytest.skip("there is no /dev/full here")
    with open("/dev/full", "wb") as full:
        failed = subprocess.run(
            command("append", tmp_path / "new.bin", "--create"),
            input=b'{"type": 3, "data": "0xaa"}\n{"commit": true}\n{"commit": true}\n',
            check=False,
            stdout=full,
            stderr=subprocess.PIPE,
            env={**ENVIRONMENT, "PYTHONUNBUFFERED": unbuffered},
        )
    assert failed.returncode == 1
    assert failed.stderr == (
        b"error: standard output: No space left on device; line 2 is done: the operation from "
        b"entry 0 on is in the stream, which holds 1 entry\n"
    )


def test_input_from_a_pipe_that_does_not_block(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    with subprocess.Popen(
        command("append", tmp_path / "new.bin", "--create"),
        stdin=reading,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=ENVIRONMENT,
    ) as appending:
        os.close(reading)
        assert appending.stdout is not None
        assert appending.stderr is not None
        result = []
        for piece in (b'{"type": 3, "data": "0xaa"}\n{"com', b'mit": true}\n', b'{"commit": true}'):
            os.write(writing, piece)
            if piece.endswith(b"\n"):
                result.append(appending.stdout.readline())
        os.close(writing)
        result += appending.stdout.readlines()
        errors = appending.stderr.read()
    assert (appending.returncode, errors) == (0, b"")
    assert result[0] == b'{"first_entry": 0, "entries": 1, "total_entries": 1}\n'
    assert len(result) == 2


def test_no_output_at_all(made: Path) -> None:
    words = " ".join(command("cat", made))
    closed = subprocess.run(f"{words} >&-", shell=True, check=False, env=ENVIRONMENT)
    assert closed.returncode == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("kind", ["file", "server"])
def test_a_signal_ends_following_with_exit_code_0(
    made: Path, server: str, kind: str, number: signal.Signals
) -> None:
    what = made if kind == "file" else server
    with running("cat", what, "--follow", "--from", "198", cwd=made.parent) as following:
        following.out.until('"number": 199')
        following.signal(number)
        assert following.wait() == 0
        assert (following.out.rest(), following.err.rest()) == ([], [])


# Sends itself a signal when a module is about to be loaded.
SIGNALLED = """
import os, sys

number, name = int(sys.argv[1]), sys.argv[2]

class Signals:
    def find_spec(self, wanted, *_):
        if wanted == name:
            os.kill(os.getpid(), number)

sys.meta_path.insert(0, Signals())
sys.argv[1:] = sys.argv[3:]
from datastreamer.cli.main import main
sys.exit(main())
"""


@pytest.mark.parametrize("verb", ["info", "serve"])
@pytest.mark.parametrize(
    "name", ["datastreamer.cli.shared.exit_codes", "datastreamer.cli.program", "typer.main"]
)
@pytest.mark.parametrize(
    ("number", "result"), [(signal.SIGINT, "interrupted"), (signal.SIGTERM, "ended by SIGTERM")]
)
def test_a_signal_while_it_is_loaded(
    made: Path, number: signal.Signals, result: str, name: str, verb: str
) -> None:
    words = ["-c", SIGNALLED, str(int(number)), name, verb, str(made)]
    ended = subprocess.run(
        [sys.executable, *words], env=ENVIRONMENT, capture_output=True, text=True, check=False
    )
    expected = (0, "", "") if verb == "serve" else (128 + number, "", f"error: {result}\n")
    assert (ended.returncode, ended.stdout, ended.stderr) == expected


def test_a_file_is_followed(copy: Path) -> None:
    words = ("cat", copy, "--follow", "--type", "7", "--count", "2")
    with (
        running(*words, cwd=copy.parent) as following,
        DataStream.open(copy, sync="os") as stream,
    ):
        for data in (b"\x01", b"\x02"):
            with stream.atomic_op() as op:
                op.add_entry(7, data)
            following.out.until(f'"data": "0x{data.hex()}"')
        assert following.wait() == 0


def test_a_followed_file_that_is_truncated(copy: Path) -> None:
    with (
        DataStream.open(copy, sync="os") as stream,
        running("cat", copy, "--follow", "--from", "199", cwd=copy.parent) as following,
    ):
        following.out.until('"number": 199')
        stream.truncate(100)
        assert following.wait() == 1
        (line,) = following.err.rest()
        assert "the stream was truncated or updated during the read" in line


def test_a_file_that_is_truncated_while_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "s.bin"
    with DataStream.create(path, sync="os") as stream:
        with stream.atomic_op() as op:
            for _ in range(4):
                op.add_entry(7, bytes(600_000))
        with open_source(str(path)) as source:
            batches = source.batches(0, 4)
            next(batches)
            stream.truncate(2)
            with pytest.raises(Failure, match=r"truncated or updated .* \(up to entry 1\)"):
                list(batches)


def test_a_followed_server_that_restarts(copy: Path) -> None:
    serve = ("serve", copy, "--host", "127.0.0.1", "--port")
    with running(*serve, 0, cwd=copy.parent) as serving:
        port = serving.port()
        what = f"127.0.0.1:{port}"
        with running("cat", what, "--follow", cwd=copy.parent) as following:
            following.out.until(f'"number": {ENTRIES - 1}')
            serving.signal(signal.SIGKILL)
            following.err.until(
                rf"warn +lost the connection to {what}, trying again: {what} closed the connection$"
            )
            serving.wait()
            with DataStream.open(copy) as stream, stream.atomic_op() as op:
                op.add_entry(7, b"more")
            with running(*serve, port, cwd=copy.parent):
                following.err.until(
                    rf"warn +connected to {what} again, continuing at entry {ENTRIES}$"
                )
                following.out.until(f'"number": {ENTRIES}, "type": 7')
                following.signal(signal.SIGINT)
                assert following.wait() == 0
            assert following.err.rest() == []
            numbers = [int(line.split()[1][:-1]) for line in following.out.seen]
            assert numbers == list(range(ENTRIES + 1))


def test_a_followed_server_that_restarts_with_fewer_entries(copy: Path) -> None:
    serve = ("serve", copy, "--host", "127.0.0.1", "--port")
    with running(*serve, 0, cwd=copy.parent) as serving:
        port = serving.port()
        with running("cat", f"127.0.0.1:{port}", "--follow", cwd=copy.parent) as following:
            following.out.until(f'"number": {ENTRIES - 1}')
            serving.signal(signal.SIGKILL)
            serving.wait()
            with DataStream.open(copy) as stream:
                stream.truncate(ENTRIES - 3)
            with running(*serve, port, cwd=copy.parent):
                assert following.wait() == 1
                *_, line = following.err.rest()
                assert line.startswith(f"error: 127.0.0.1:{port} changed its history")
                assert f"entries {ENTRIES - 3} to {ENTRIES - 1}, which were received, are m" in line
                assert line.endswith(f"and continue with --from {ENTRIES - 3}")


def test_a_followed_server_that_restarts_with_another_stream(copy: Path) -> None:
    """None of the last entries that the client remembers is in the new stream."""
    serve = ("--host", "127.0.0.1", "--port")
    with running("serve", copy, *serve, 0, cwd=copy.parent) as serving:
        port = serving.port()
        with running("cat", f"127.0.0.1:{port}", "--follow", cwd=copy.parent) as following:
            following.out.until(f'"number": {ENTRIES - 1}')
            serving.signal(signal.SIGKILL)
            serving.wait()
            other = copy.parent / "other.bin"
            with DataStream.create(other, system_id=99) as stream, stream.atomic_op() as op:
                op.add_entries(1, [b"other"] * ENTRIES)
            with running("serve", other, *serve, port, cwd=copy.parent):
                assert following.wait() == 1
                *_, line = following.err.rest()
                assert line.endswith("start again with --from 0")


@contextlib.contextmanager
def falling_silent() -> Iterator[str]:
    """A server that answers one request, and then only accepts connections."""
    ok = b"\xff" + struct.pack(">II", 11, 0) + b"OK"

    def serve(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        with connection:
            connection.recv(16, socket.MSG_WAITALL)
            connection.sendall(ok + Header(total_entries=5, total_length=8000).pack())
            connection.recv(24, socket.MSG_WAITALL)
            connection.sendall(ok)
            second, _ = listener.accept()
            with second:
                second.recv(16, socket.MSG_WAITALL)
            connection.recv(1)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve, args=(listener,))
        thread.start()
        yield f"127.0.0.1:{listener.getsockname()[1]}"
        thread.join()


def test_a_server_that_stops_answering(tmp_path: Path) -> None:
    with falling_silent() as what:
        cat = done("cat", what, "--no-batch-reads", "--timeout", "0.05", cwd=tmp_path)
    assert cat.returncode == 1
    assert cat.stderr.startswith(
        f"error: nothing received from {what} for 0.05 s, and {what} closed"
    )


@pytest.mark.parametrize(
    "verb", [["cat", "--no-batch-reads"], ["bookmark", "block:1", "--entry-number"]]
)
def test_without_follow_a_silent_server_is_probed(
    invoke: Invoke, monkeypatch: pytest.MonkeyPatch, verb: list[str]
) -> None:
    """Also without --timeout."""
    monkeypatch.setattr(source, "_PROBE_SECONDS", 0.05)
    with falling_silent() as what:
        result = invoke(verb[0], what, *verb[1:])
    assert result.code == 1
    assert result.err.startswith(
        f"error: nothing received from {what} for 0.05 s, and {what} closed"
    )


def test_a_server_that_closes_the_connection_within_an_entry(tmp_path: Path) -> None:
    ok = b"\xff" + struct.pack(">II", 11, 0) + b"OK"
    entry = struct.pack(">BIIQ", 2, 18, 7, 0) + b"x"

    def serve(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        with connection:
            connection.recv(16, socket.MSG_WAITALL)
            connection.sendall(ok + Header(total_entries=5, total_length=8000).pack())
            connection.recv(24, socket.MSG_WAITALL)
            connection.sendall(ok + entry + entry[:12])
            connection.shutdown(socket.SHUT_WR)
            connection.recv(1)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        what = f"127.0.0.1:{listener.getsockname()[1]}"
        thread = threading.Thread(target=serve, args=(listener,))
        thread.start()
        cat = done("cat", what, "--no-batch-reads", cwd=tmp_path)
        thread.join()
    assert cat.returncode == 1
    assert cat.stdout == '{"number": 0, "type": 7, "length": 1, "data": "0x78"}\n'
    assert cat.stderr.startswith(f"error: {what} closed the connection in the middle of")
    assert cat.stderr.count("\n") == 1


@pytest.mark.parametrize("batch_reads", [True, False])
def test_a_server_that_truncates_before_it_is_read(copy: Path, batch_reads: bool) -> None:
    """A reader does not wait for entries that were truncated after it requested the header."""
    with (
        StreamServer(copy, host="127.0.0.1", port=0, in_process=True) as server,
        open_source(f"127.0.0.1:{server.port}", heartbeat=1.0, batch_reads=batch_reads) as stream,
    ):
        assert stream.header().total_entries == ENTRIES
        server.stream.truncate(ENTRIES - 3)
        batches = stream.batches(ENTRIES - 5, ENTRIES)
        assert next(batches).next_number == ENTRIES - 3
        with pytest.raises(HistoryChanged, match=f"it holds {ENTRIES - 3} entries") as result:
            next(batches)
        assert result.value.first_differing == ENTRIES - 3
