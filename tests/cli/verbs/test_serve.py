"""`serve` as a process: its log, its errors, its end."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import struct
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from datastreamer.cli.verbs.serve import serve as serve_verb
from datastreamer.client.blocking_client import BlockingClient
from datastreamer.server.limits import Limits
from datastreamer.service.daemon import serve_until_signal
from datastreamer.storage.maintain.check import verify
from datastreamer.storage.stream import DataStream
from datastreamer.zkevm.bookmark_keys import BookmarkName, key_of
from tests.cli.conftest import Invoke
from tests.cli.process import done, running
from tests.network.damage import flip, written


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_serves_until_a_signal(copy: Path, number: signal.Signals) -> None:
    with running("serve", copy, "--host", "127.0.0.1", "--port", "0", cwd=copy.parent) as serving:
        port = serving.port()
        assert "(200 entries) on 127.0.0.1:" in serving.err.seen[-1]
        with BlockingClient("127.0.0.1", port) as client:
            assert client.header().total_entries == 200
            refused = done("serve", copy, "--port", "0", cwd=copy.parent)
            assert refused.returncode == 1
            assert f"locked by another writer, process {serving.process.pid}" in refused.stderr
            assert "--follow serves what another process writes" in refused.stderr
            with client.batches() as batches:
                assert next(batches).first_number == 0
                serving.signal(number)
                assert serving.wait() == 0
        assert serving.out.rest() == []
        (line,) = serving.err.rest()
        assert line.endswith(f"ended by {number.name}")


def test_creates_a_stream(tmp_path: Path) -> None:
    words = ("serve", "new.bin", "--host", "127.0.0.1", "--port", "0")
    refused = done(*words, cwd=tmp_path)
    assert refused.returncode == 1
    expected = "error: new.bin: no such file; use --create to create an empty stream\n"
    assert refused.stderr == expected
    assert list(tmp_path.iterdir()) == []
    what = ("--create", "--system-id", "7", "--stream-version", "3", "--stream-type", "2")
    with running(*words, *what, cwd=tmp_path) as serving:
        with BlockingClient("127.0.0.1", serving.port(), stream_type=2) as client:
            assert client.header()[:3] == (3, 7, 2)
        serving.signal(signal.SIGINT)
        assert serving.wait() == 0


def test_on_a_full_disk(copy: Path, tmp_path: Path) -> None:
    """Without room for a bookmark index, it serves with one in memory and logs one line."""
    folder = tmp_path / "small"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(folder)]
    if os.geteuid() or subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("mounting a small disk needs more rights than there are here")
    try:
        path = Path(shutil.copyfile(copy, folder / "stream.bin"))
        file = os.open(folder / "ballast", os.O_CREAT | os.O_WRONLY)
        with suppress(OSError):
            while os.write(file, bytes(4096)):
                pass
        os.close(file)
        words = ("serve", path, "--host", "127.0.0.1", "--port", "0")
        with running(*words, cwd=tmp_path) as serving:
            port = serving.port()
            (warning,) = [line for line in serving.err.seen if " warn " in line]
            assert "stream.bin: the bookmark index is kept in memory until it fits" in warning
            assert "No space left on device" in warning
            with BlockingClient("127.0.0.1", port) as client:
                key = key_of(client.header().version, BookmarkName("block", 7))
                assert client.bookmark(key).number > 0
            serving.signal(signal.SIGINT)
            assert serving.wait() == 0
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def test_an_existing_file_has_its_own_properties(copy: Path) -> None:
    words = ("serve", copy, "--create", "--system-id", "7", "--port", "0", "--host", "127.0.0.1")
    with running(*words, cwd=copy.parent) as serving:
        warning = serving.err.next()
        assert warning is not None
        assert "warn " in warning
        assert warning.endswith("the system id of the existing file is 137, not 7")
        with BlockingClient("127.0.0.1", serving.port()) as client:
            assert client.header().system_id == 137


def test_a_port_in_use(copy: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        words = ("serve", "new.bin", "--create", "--host", "127.0.0.1", "--port", port)
        refused = done(*words, cwd=copy.parent)
    assert refused.returncode == 1
    assert refused.stderr.startswith(f"error: cannot listen on 127.0.0.1:{port}: Address already")
    assert refused.stderr.count("\n") == 1
    assert not (copy.parent / "new.bin").exists()


def test_an_address_of_another_machine(invoke: Invoke, copy: Path) -> None:
    failed = invoke("serve", copy, "--host", "192.0.2.1", "--port", "0").failed()
    assert failed.startswith("cannot listen on 192.0.2.1:0")


@pytest.mark.parametrize(
    "name, message",
    [
        ("folder", "folder: is a folder, not a stream file"),
        ("text", "text: not a stream file"),
        ("cut", "cut: at byte 6000: the file ends here, but its data ends at byte"),
    ],
)
def test_nothing_to_serve(
    invoke: Invoke,
    made: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("folder").mkdir()
    Path("text").write_text("no stream\n" * 1000)
    Path("cut").write_bytes(made.read_bytes()[:6000])
    for more in ([], ["--follow"], ["--create"]):
        failed = invoke("serve", name, "--host", "127.0.0.1", "--port", "0", *more)
        assert message in failed.failed()


def test_serves_what_another_process_writes(copy: Path) -> None:
    words = ("serve", copy, "--follow", "--host", "127.0.0.1", "--port", "0")
    with (
        DataStream.open(copy, sync="os") as stream,
        running(*words, cwd=copy.parent) as serving,
        BlockingClient("127.0.0.1", serving.port()) as client,
    ):
        assert "written by another process" in serving.err.seen[-1]
        batches = client.batches(from_entry=200)
        with batches, stream.atomic_op() as op:
            op.add_entry(7, b"later")
            stream.commit_atomic_op()
            assert next(batches)[0].data == b"later"
        serving.signal(signal.SIGTERM)
        assert serving.wait() == 0


def test_a_file_that_cannot_be_written_is_followed(
    invoke: Invoke, copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    def until_signal(open_stream: object, **_: object) -> str:
        assert callable(open_stream)
        with open_stream() as stream:
            seen.append(stream.writable)
        return "SIGINT"

    monkeypatch.setitem(serve_verb.__globals__, "serve_until_signal", until_signal)
    assert invoke("serve", copy).code == 0
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK)
    assert invoke("serve", copy).code == 0
    assert seen == [True, False]


def test_the_limit_of_clients(copy: Path) -> None:
    words = ("serve", copy, "--max-clients", "1", "--host", "127.0.0.1", "--port", "0")
    with running(*words, cwd=copy.parent) as serving:
        port = serving.port()
        with BlockingClient("127.0.0.1", port) as client:
            assert client.header().total_entries == 200
            with socket.create_connection(("127.0.0.1", port)) as second:
                assert second.recv(1) == b""
            assert serving.err.until("refused: 1 client is connected")


@contextmanager
def stalled(port: int) -> Iterator[socket.socket]:
    """A client that streams, and reads only the Result."""
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.settimeout(30)
        client.connect(("127.0.0.1", port))
        client.sendall(struct.pack(">QQQ", 1, 1, 0))
        assert client.recv(11)[0] == 0xFF
        yield client


@pytest.fixture
def large(tmp_path: Path) -> Path:
    path = tmp_path / "large.bin"
    with DataStream.create(path, sync="os", index="memory") as stream, stream.atomic_op() as op:
        op.add_entries(1, [bytes(500_000)] * 20)
    return path


def test_clients_have_the_grace_period_to_receive_all_entries(large: Path) -> None:
    words = ("serve", large, "--host", "127.0.0.1", "--port", "0", "--grace", "30")
    with running(*words, cwd=large.parent) as serving, stalled(serving.port()) as client:
        serving.signal(signal.SIGTERM)
        got = 0
        while more := client.recv(1 << 20):
            got += len(more)
        assert got == 20 * 500_017
        client.close()
        assert serving.wait() == 0
        assert [line.partition("ended by ")[2] for line in serving.err.rest()] == ["SIGTERM"]


def test_a_second_signal_ends_the_grace(large: Path) -> None:
    words = ("serve", large, "--host", "127.0.0.1", "--port", "0", "--grace", "1000")
    with running(*words, cwd=large.parent) as serving:
        port = serving.port()
        with stalled(port):
            serving.signal(signal.SIGTERM)
            with suppress(OSError):
                while True:  # until it stops listening
                    socket.create_connection(("127.0.0.1", port)).close()
            assert serving.process.poll() is None
            serving.signal(signal.SIGINT)
            assert serving.wait() == 0


def test_without_grace_no_client_delays_the_end(large: Path) -> None:
    words = ("serve", large, "--host", "127.0.0.1", "--port", "0", "--grace", "0")
    with running(*words, cwd=large.parent) as serving, stalled(serving.port()):
        serving.signal(signal.SIGTERM)
        assert serving.wait() == 0
        assert "1 clients did not receive all committed entries within 0 s" in serving.err.rest()[0]


def test_times_and_rates(large: Path) -> None:
    limits = ("--inactivity-timeout", "1", "--write-timeout", "2", "--request-rate", "100")
    more = ("--max-clients-per-address", "3", "--accept-rate", "50", "--log-level", "info")
    words = ("serve", large, "--host", "127.0.0.1", "--port", "0", *limits, *more)
    with running(*words, cwd=large.parent) as serving:
        port = serving.port()
        with stalled(port), BlockingClient("127.0.0.1", port) as client:
            client.header()
            # In either order: a busy machine may connect the second client late.
            ends = "neither streamed nor sent a command for 1 s|received nothing for 2 s"
            found = [serving.err.until(f"connection ended: it has ({ends})")[1] for _ in "12"]
            assert len({*found}) == 2


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_do_not_interrupt_the_close(
    copy: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    stream = DataStream.open(copy)
    close = stream.close

    def close_under_signals() -> None:
        os.kill(os.getpid(), number)
        os.kill(os.getpid(), number)
        close()

    monkeypatch.setattr(stream, "close", close_under_signals)
    name = serve_until_signal(
        lambda: stream,
        host="127.0.0.1",
        port=0,
        limits=Limits(),
        listening=lambda *_: os.kill(os.getpid(), number),
    )
    assert name == number.name
    DataStream.open(copy).close()  # no process holds the lock


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_repeated_signals(copy: Path, number: signal.Signals) -> None:
    with running("serve", copy, "--host", "127.0.0.1", "--port", "0", cwd=copy.parent) as serving:
        serving.port()
        while serving.process.poll() is None:
            serving.signal(number)
            with suppress(subprocess.TimeoutExpired):
                serving.process.wait(0.001)
        assert (serving.wait(), [line for line in serving.err.rest() if "ended" not in line]) == (
            0,
            [],
        )


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_the_program_is_loaded(copy: Path, number: signal.Signals) -> None:
    """A module that the program imports sends it."""
    (copy.parent / "typer.py").write_text(
        f"import os, time\nos.kill(os.getpid(), {int(number)})\ntime.sleep(30)\n"
    )
    words = ("serve", "copy.bin", "--host", "127.0.0.1", "--port", "0")
    # The current folder is first in the module search path.
    ended = done(*words, cwd=copy.parent)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")


def test_heals_what_the_scrub_finds(tmp_path: Path) -> None:
    """From a server that runs, with the words of the documentation."""
    for name in ("whole", "damaged"):
        (tmp_path / name).mkdir()
    path = tmp_path / "damaged" / "stream.bin"
    written(path)
    shutil.copyfile(path, tmp_path / "whole" / "stream.bin")
    flip(path, 3)
    listen = ("--host", "127.0.0.1", "--port", "0")
    with running("serve", "stream.bin", *listen, cwd=tmp_path / "whole") as other:
        peer = f"127.0.0.1:{other.port()}"
        words = ("serve", "stream.bin", *listen, "--scrub", "1GB/s", "--heal", peer)
        with running(*words, cwd=tmp_path / "damaged") as serving:
            serving.err.until("restored from")
            line = serving.err.seen[-1]
            assert "page 3 (entries " in line
            assert f"restored from {peer}; the damaged bytes are kept in " in line
            serving.signal(signal.SIGTERM)
            assert serving.wait() == 0
    assert verify(path).ok


def test_heal_needs_the_writer(invoke: Invoke, copy: Path) -> None:
    heal = ("--heal", "127.0.0.1:1")
    for words in (("--follow",), ("--workers", "2")):
        refused = invoke("serve", copy, *heal, *words)
        assert refused.code == 2
        assert "--heal needs the process that writes the stream" in refused.err
    refused = invoke("serve", copy, "--heal", "no:where")
    assert refused.code == 2
    assert "--heal: 'no:where' is not HOST:PORT" in refused.err


def test_a_file_of_options(invoke: Invoke, copy: Path) -> None:
    path = copy.with_name("serve.toml")
    words = ("serve", "--config", path, "--check-config")
    path.write_text(f'file = "{copy}"\nport = 0\nmax-clients = 3\nhost = ["127.0.0.1"]\n')
    assert invoke(*words) == (0, b"", "the options are right\n")
    with running("serve", "--config", path, cwd=copy.parent) as serving:
        assert invoke("info", f"127.0.0.1:{serving.port()}").code == 0
        serving.signal(signal.SIGTERM)
        assert serving.wait() == 0
    path.write_text("max-client = 3\n")
    assert "did you mean 'max-clients'?" in invoke(*words).failed(2)
    path.write_text('file = "missing.bin"\n')
    assert "missing.bin: no such file; use --create" in invoke(*words).failed()
    assert invoke(*words, "--create").code == 0
    path.write_text("max-clients = 3\n")
    assert "Missing argument" in invoke(*words).failed(2)


@pytest.mark.parametrize("option", ["host", "token-file", "cors", "max-clients", "max-followers"])
def test_options_of_a_port_that_there_is_not(invoke: Invoke, copy: Path, option: str) -> None:
    words = ("serve", copy, f"--http-{option}", "7")
    assert f"--http-{option} requires --http-port" in invoke(*words).failed(2)
