"""A server in a synchronous program: as a child process or a thread, and its shutdown."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

from datastreamer.errors import (
    FileMissing,
    ListenFailed,
    ServerFailed,
    StreamClosed,
    StreamLocked,
    UsageError,
    WrongStreamType,
)
from datastreamer.server.limits import Limits
from datastreamer.server.server import Server
from datastreamer.service import control_protocol as control
from datastreamer.service import embedded as embed
from datastreamer.service import worker_main as child
from datastreamer.service import worker_process as process
from datastreamer.service.embedded import StreamServer
from datastreamer.service.worker_pool import Workers
from datastreamer.storage.stream import DataStream
from tests.network import model as wire
from tests.network.fixtures import append
from tests.network.model import BOOKMARK, OK, Model

PATIENCE = 20.0
both = pytest.mark.parametrize("in_process", [False, True], ids=["child", "thread"])
needs_pidfd = pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="waits on pidfds")


def modelled(path: Path) -> Model:
    return Model(path.read_bytes())


class Plain:
    """A raw client on a blocking socket."""

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=PATIENCE)

    def __enter__(self) -> Plain:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def read(self, size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            more = self.socket.recv(min(1 << 20, size - len(data)))
            assert more, f"the connection ended after {len(data)} of {size} bytes"
            data += more
        return bytes(data)

    def ask(self, request: bytes, answer: bytes) -> None:
        self.socket.sendall(request)
        assert self.read(len(answer)) == answer

    def rest(self) -> bytes:
        data = bytearray()
        while more := self.socket.recv(1 << 20):
            data += more
        return bytes(data)


@contextlib.contextmanager
def serving(path: Path, **options: Any) -> Iterator[StreamServer]:
    with StreamServer(path, host="127.0.0.1", port=0, sync="os", **options) as server:
        yield server


def gone(pid: int) -> bool:
    """Whether the process ends within the tests' patience."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([fd], [], [], PATIENCE)[0])
    finally:
        os.close(fd)


@both
def test_a_sequencer_and_its_clients(path: Path, in_process: bool) -> None:
    with serving(path, in_process=in_process) as server:
        assert server.addresses == [("127.0.0.1", server.port)]
        with Plain(server.port) as early, Plain(server.port) as asker:
            early.ask(wire.start(0), OK)
            for turn in range(30):
                with server.stream.atomic_op() as op:
                    op.add_bookmark(b"%d" % turn)
                    op.add_entry(turn, b"x" * turn * 1_000)
                early.ask(b"", modelled(path).packed(2 * turn))
                request = wire.bookmark(b"%d" % turn) + wire.entry(2 * turn) + wire.header()
                asker.ask(request, wire.Conversation(modelled(path)).feed(request))
            asker.ask(wire.start_bookmark(b"7"), OK + modelled(path).packed(14))
            # Half an operation is not served.
            server.stream.start_atomic_op()
            number = server.stream.add_entry(1, b"open")
            with Plain(server.port) as other:
                other.ask(wire.entry(number), wire.NOT_FOUND)
            server.stream.commit_atomic_op()
            for client in (early, asker):
                client.ask(b"", wire.pack(number, 1, b"open"))
            assert server.drain()
    assert server.stream.closed


@both
def test_truncation_and_update(path: Path, in_process: bool) -> None:
    with serving(path, in_process=in_process) as server:
        stream = server.stream
        append(stream, *[(1, b"%d" % n) for n in range(10)])
        with Plain(server.port) as live, Plain(server.port) as idle:
            live.ask(wire.start(0), OK + modelled(path).packed())
            idle.ask(wire.entry(7), OK + wire.pack(7, 1, b"7", packet=0xFE))
            stream.truncate(5)
            idle.ask(wire.entry(7), wire.NOT_FOUND)
            with pytest.raises(ConnectionResetError):
                live.rest()
            append(stream, *[(2, b"%d" % n) for n in range(5, 10)])
            idle.ask(wire.entry(7), OK + wire.pack(7, 2, b"7", packet=0xFE))
            stream.update_entry(7, 2, b"!")
            idle.ask(wire.entry(7), OK + wire.pack(7, 2, b"!", packet=0xFE))
            idle.ask(wire.start(0), OK + modelled(path).packed())


@both
def test_a_change_disconnects_only_clients_that_it_affects(path: Path, in_process: bool) -> None:
    with serving(path, in_process=in_process) as server:
        stream = server.stream
        append(stream, *[(1, bytes(500_000))] * 40)
        with Plain(server.port) as lagging, Plain(server.port) as live:
            # It receives the first entries and then stops reading; the socket buffers are full.
            lagging.ask(wire.start(0), OK + wire.pack(0, 1, bytes(500_000)))
            live.ask(wire.start(40), OK)
            append(stream, (2, b"seen"), (3, b"cut off"))
            live.ask(b"", wire.pack(40, 2, b"seen") + wire.pack(41, 3, b"cut off"))
            stream.update_entry(40, 2, b"SEEN")  # was received before the update
            append(stream, (4, b"more"))
            live.ask(b"", wire.pack(42, 4, b"more"))
            stream.truncate(41)
            with pytest.raises(ConnectionResetError):
                live.rest()
            append(stream, (5, b"new"))
            rest = [wire.pack(n, 1, bytes(500_000)) for n in range(1, 40)]
            rest += [wire.pack(40, 2, b"SEEN"), wire.pack(41, 5, b"new")]
            lagging.ask(b"", b"".join(rest))


@both
def test_closing_sends_the_last_commit(path: Path, in_process: bool) -> None:
    got: list[bytes] = []

    def read(client: Plain) -> None:
        got.append(client.rest())

    with serving(path, in_process=in_process, limits=Limits(grace=PATIENCE)) as server:
        append(server.stream, (1, b"first"))
        clients = [Plain(server.port) for _ in range(5)]
        for client in clients:
            client.ask(wire.start(0), OK)
        append(server.stream, *[(1, bytes(100_000))] * 200)
        threads = [threading.Thread(target=read, args=(client,)) for client in clients]
        for thread in threads:
            thread.start()
        append(server.stream, (1, b"the last"))
    for thread, client in zip(threads, clients, strict=True):
        thread.join()
        client.socket.close()
    whole = modelled(path).packed()
    assert [len(part) for part in got] == [len(whole)] * 5
    assert got == [whole] * 5


@both
def test_closing_does_not_wait_for_a_client_that_reads_nothing(
    path: Path, in_process: bool
) -> None:
    with serving(path, in_process=in_process, limits=Limits(grace=0.2)) as server:
        append(server.stream, *[(1, bytes(1_000_000))] * 12)
        lazy = Plain(server.port)
        lazy.socket.sendall(wire.start(0))
        assert lazy.read(11) == OK
        assert not server.drain()
        assert not server.drain(0.05)
        for seconds in (-1, math.nan, "1"):
            with pytest.raises(UsageError, match="timeout must be 0 seconds or more"):
                server.drain(seconds)  # type: ignore[arg-type]
    lazy.socket.close()
    with DataStream.open(path) as stream:
        assert stream.total_entries == 12


@both
def test_closing_twice_and_use_after_close(path: Path, in_process: bool) -> None:
    with serving(path, in_process=in_process) as server:
        port = server.port
        assert repr(server) == f"<StreamServer of {str(path)!r}: on 127.0.0.1:{port}>"
        server.close()
        server.close()
        assert repr(server) == f"<StreamServer of {str(path)!r}: closed>"
        with pytest.raises(StreamClosed):
            server.drain()
        with pytest.raises(StreamClosed):
            server.stream.start_atomic_op()
    with pytest.raises(ConnectionRefusedError):
        Plain(port)


@both
def test_a_port_in_use(path: Path, in_process: bool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ListenFailed, match=f"127.0.0.1:{port}"):
            StreamServer(path, host="127.0.0.1", port=port, in_process=in_process)
    assert not path.exists()


@both
def test_files_that_cannot_be_served_leave_nothing_open(path: Path, in_process: bool) -> None:
    [reserved] = [socket.create_server(("127.0.0.1", 0))]
    port = reserved.getsockname()[1]
    reserved.close()
    options: dict[str, Any] = {"host": "127.0.0.1", "port": port, "in_process": in_process}
    with pytest.raises(FileMissing):
        StreamServer(path, create=False, **options)
    DataStream.create(path, stream_type=7).close()
    with pytest.raises(WrongStreamType):
        StreamServer(path, **options)
    with DataStream.open(path) as stream:
        append(stream, (1, b"x"))
        with pytest.raises(StreamLocked, match=str(os.getpid())):
            StreamServer(path, stream_type=7, **options)
    with StreamServer(path, stream_type=7, **options) as server:
        assert server.port == port
        with Plain(port) as client:
            client.ask(wire.header(7), OK + modelled(path).header())


def test_a_child_that_cannot_start(
    path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(sys, "executable", "/bin/false")
        with pytest.raises(ServerFailed, match=r"did not start \(exit code 1\)"):
            StreamServer(path, host="127.0.0.1", port=0)
    with DataStream.open(path):
        pass  # the lock is free again


def test_a_stray_module_in_the_working_directory(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "trio.py").write_text("raise SystemExit('not the real one')")
    monkeypatch.chdir(tmp_path)
    with serving(path) as server, Plain(server.port) as client:
        client.ask(wire.header(), OK + modelled(path).header())


def read_until(port: int, start: int, size: int) -> bytes:
    """The bytes that a client receives that reconnects when the connection is lost."""
    with contextlib.suppress(ConnectionError, AssertionError), Plain(port) as client:
        client.ask(wire.start(start), OK)
        return client.read(size)
    return read_until(port, start, size)


def test_a_child_that_dies_is_restarted(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(process, "_FIRST_PAUSE", 0.01)
    with serving(path) as server:
        serving_processes = server._serving
        assert isinstance(serving_processes, Workers)
        [child] = serving_processes.processes
        for turn in range(3):
            append(server.stream, (1, b"before %d" % turn))
            pid = child.pid
            with Plain(server.port) as client:
                client.ask(wire.start(2 * turn), OK + modelled(path).packed(2 * turn))
                os.kill(pid, signal.SIGKILL)
                append(server.stream, (1, b"while it restarts"))
                with contextlib.suppress(ConnectionResetError):
                    client.rest()
            whole = modelled(path).packed()
            assert read_until(server.port, 0, len(whole)) == whole
            assert server.drain()  # it waits until the new process is known here too
            assert child.pid != pid
        messages = [r.getMessage() for r in caplog.records if r.levelno == logging.ERROR]
        assert len(messages) == 3
        assert "the serving process ended (exit code -9)" in messages[0]


def test_a_child_that_dies_repeatedly_is_not_restarted(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The next commit raises it and writes nothing; the stream can be closed and read."""
    monkeypatch.setattr(process, "_FIRST_PAUSE", 0.001)
    monkeypatch.setattr(process, "_ATTEMPTS", 2)
    with serving(path) as server:
        append(server.stream, (1, b"kept"))
        serving_processes = server._serving
        assert isinstance(serving_processes, Workers)
        [child] = serving_processes.processes
        before = path.read_bytes()
        last = 0
        assert child._watcher is not None
        while child._watcher.is_alive():
            if child.pid != last:
                last = child.pid
                os.kill(last, signal.SIGKILL)
            child._watcher.join(0.01)
        for _ in range(2):
            with (
                pytest.raises(
                    ServerFailed, match=r"died 3 times in a row .* clients are not served"
                ),
                server.stream.atomic_op() as op,
            ):
                op.add_entry(1, b"lost")
        assert path.read_bytes()[:8192] == before[:8192]
        assert server.stream.total_entries == 1
        assert not server.drain()
    assert "it is not restarted" in caplog.text
    with DataStream.open(path) as stream:
        append(stream, (1, b"on"))


def run_script(script: str, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        # A fork beside threads is deprecated; some of these programs test it.
        [sys.executable, "-Werror", "-Wignore::DeprecationWarning", "-c", script, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )


SERVE_UNTIL_ASKED = """
import sys
from datastreamer.service.embedded import StreamServer
from datastreamer.server.limits import Limits
with StreamServer(sys.argv[1], host="127.0.0.1", port=0) as server:
    with server.stream.atomic_op() as op:
        op.add_entry(1, b"from the parent")
    print(server._serving.processes[0].pid, server.port, flush=True)
    sys.stdin.read()
"""


@needs_pidfd
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_the_child_ends_with_its_parent(path: Path, how: signal.Signals) -> None:
    parent = run_script(SERVE_UNTIL_ASKED, str(path))
    assert parent.stdout is not None
    try:
        pid, port = map(int, parent.stdout.readline().split())
        with Plain(port) as client:
            client.ask(wire.start(0), OK + wire.pack(0, 1, b"from the parent"))
            parent.send_signal(how)
            assert gone(pid)
            assert client.rest() == b""
    finally:
        parent.kill()
        parent.communicate(timeout=PATIENCE)
    with pytest.raises(ConnectionRefusedError):
        Plain(port)
    with DataStream.open(path) as stream:
        assert stream.total_entries == 1


@needs_pidfd
def test_signals_to_all_processes_leave_the_shutdown_to_the_parent(path: Path) -> None:
    """Service managers send them so; committed entries are sent nevertheless."""
    with serving(path) as server:
        append(server.stream, *[(1, bytes(100_000))] * 100)
        assert isinstance(server._serving, Workers)
        pid = server._serving.processes[0].pid
        whole = modelled(path).packed()
        with Plain(server.port) as client:
            client.ask(wire.start(0), OK)
            os.kill(pid, signal.SIGTERM)
            os.kill(pid, signal.SIGINT)
            closing = threading.Thread(target=server.close)
            closing.start()
            assert client.rest() == whole
            closing.join()


def test_a_signal_to_a_child_that_has_just_begun(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is blocked until the child ignores it."""
    popen = subprocess.Popen

    def signalled(*words: Any, **named: Any) -> subprocess.Popen[bytes]:
        begun = popen(*words, **named)
        begun.send_signal(signal.SIGTERM)
        return begun

    monkeypatch.setattr(subprocess, "Popen", signalled)
    with serving(path) as server, Plain(server.port) as client:
        client.ask(wire.start(0), OK)
    assert signal.SIGTERM not in signal.pthread_sigmask(signal.SIG_BLOCK, [])


@needs_pidfd
def test_an_interrupt_to_the_process_group_shuts_both_down(path: Path) -> None:
    parent = run_script(SERVE_UNTIL_ASKED, str(path))
    assert parent.stdout is not None
    try:
        pid, port = map(int, parent.stdout.readline().split())
        os.kill(pid, signal.SIGINT)  # as a terminal does to a process group
        with Plain(port) as client:
            client.ask(wire.start(0), OK + wire.pack(0, 1, b"from the parent"))
            parent.send_signal(signal.SIGINT)
            assert gone(pid)
            assert client.rest() == b""
    finally:
        _, said = parent.communicate(timeout=PATIENCE)
    assert said.strip().splitlines()[-1] == "KeyboardInterrupt"


@pytest.mark.parametrize("how", [signal.SIGKILL, None])
def test_without_eventfd_and_pidfd(path: Path, how: signal.Signals | None) -> None:
    """On such systems a pipe wakes the child, and the control socket ends it."""
    script = "import os\nfor n in 'eventfd', 'pidfd_open': delattr(os, n)\n" + SERVE_UNTIL_ASKED
    parent = run_script(script, str(path))
    assert parent.stdout is not None
    try:
        pid, port = map(int, parent.stdout.readline().split())
        with Plain(port) as client:
            client.ask(wire.start(0), OK + wire.pack(0, 1, b"from the parent"))
            if how is not None:
                parent.send_signal(how)
            else:
                assert parent.stdin is not None
                parent.stdin.close()
            assert client.rest() == b""
        assert gone(pid)
    finally:
        parent.kill()
        parent.wait(PATIENCE)
        for pipe in (parent.stdin, parent.stdout, parent.stderr):
            assert pipe is not None
            pipe.close()


FORK = """
import os, signal, sys
from datastreamer.service.embedded import StreamServer
from datastreamer.server.limits import Limits

class Raised(Exception): pass

with StreamServer(sys.argv[1], host="127.0.0.1", port=0) as server:
    port = server.port
    if (pid := os.fork()) == 0:
        try:
            if sys.argv[2] == "close":
                server.close()
            elif sys.argv[2] == "collect":
                del server
                import gc
                gc.collect()
            elif sys.argv[2] == "wait":
                signal.pause()
        finally:
            os._exit(0)
    if sys.argv[2] != "wait":
        os.waitpid(pid, 0)
    with server.stream.atomic_op() as op:
        op.add_entry(1, b"after the fork")
    print(port, server.drain(), server._serving.processes[0].pid, flush=True)
    sys.stdin.readline()
print("closed", flush=True)
if sys.argv[2] == "wait":
    sys.stdin.readline()
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
"""


@needs_pidfd
@pytest.mark.parametrize("how", ["close", "collect", "wait"])
def test_a_fork_of_the_parent_owns_nothing(path: Path, how: str) -> None:
    """Closing the copy closes nothing; a copy that continues to run holds neither port nor lock."""
    parent = run_script(FORK, str(path), how)
    assert parent.stdout is not None
    assert parent.stdin is not None
    try:
        port, drained, pid = parent.stdout.readline().split()
        assert drained == "True"
        with Plain(int(port)) as client:
            client.ask(wire.start(0), OK + wire.pack(0, 1, b"after the fork"))
            parent.stdin.write("\n")
            parent.stdin.flush()
            assert parent.stdout.readline() == "closed\n"
            assert gone(int(pid))
            assert client.rest() == b""
        with pytest.raises(ConnectionRefusedError):
            Plain(int(port))
        with DataStream.open(path) as stream:
            assert stream.total_entries == 1
    finally:
        _, said = parent.communicate("\n", timeout=PATIENCE)
    assert parent.returncode == 0, said


def test_a_writer_that_burns_cpu(path: Path) -> None:
    over = threading.Event()

    def burn() -> None:
        while not over.is_set():
            sum(range(1_000))

    thread = threading.Thread(target=burn)
    with serving(path) as server, Plain(server.port) as client:
        client.ask(wire.start(0), OK)
        thread.start()
        try:
            for turn in range(20):
                append(server.stream, (BOOKMARK, b"%d" % turn), (1, b"x" * 2_000))
                client.ask(b"", modelled(path).packed(2 * turn))
        finally:
            over.set()
            thread.join()


@both
async def test_inside_of_another_event_loop(path: Path, in_process: bool) -> None:
    """Blocking calls return there too."""
    with trio.fail_after(PATIENCE), serving(path, in_process=in_process) as server:
        append(server.stream, *[(1, b"%d" % n) for n in range(10)])
        stream = await trio.open_tcp_stream("127.0.0.1", server.port)
        await stream.send_all(wire.start(0))
        got = b""
        while len(got) < len(OK + modelled(path).packed()):
            got += await stream.receive_some()
        assert server.drain(5)
        server.stream.truncate(5)
        with pytest.raises(trio.BrokenResourceError):
            await stream.receive_some()
        await stream.aclose()
    assert server.stream.closed


@both
def test_many_clients_and_a_limit(path: Path, in_process: bool) -> None:
    with (
        serving(path, in_process=in_process, limits=Limits(max_clients=2)) as server,
        Plain(server.port) as one,
        Plain(server.port) as two,
    ):
        for client in (one, two):
            client.ask(wire.header(), OK + modelled(path).header())
        with Plain(server.port) as outside, contextlib.suppress(ConnectionResetError):
            assert outside.rest() == b""


def test_the_failure_of_a_thread_is_raised_at_the_next_commit(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with serving(path, in_process=True) as server:
        append(server.stream, (1, b"kept"))
        thread = server._serving
        assert isinstance(thread, embed._ServerThread)

        def fail(*_: object) -> None:
            raise RuntimeError("from the callback")

        with Plain(server.port) as client:
            client.ask(wire.start(0), OK + modelled(path).packed())
            monkeypatch.setattr(
                "datastreamer.server.streaming.broadcast.Broadcast._catch_up_live", fail
            )
            with contextlib.suppress(ConnectionResetError):
                client.rest()
        thread._thread._thread.join(PATIENCE)
        with (
            pytest.raises(ServerFailed, match="the server has failed: from the callback"),
            server.stream.atomic_op() as op,
        ):
            op.add_entry(1, b"lost")
        assert server.stream.total_entries == 1
        assert not server.drain()
    assert "the server has failed" in caplog.text


async def test_a_request_before_readiness_is_reported(stream: DataStream) -> None:
    """One task reports readiness and then answers the request."""
    ours, theirs = trio.testing.memory_stream_pair()
    number = control.NUMBER.pack(7)
    with trio.fail_after(PATIENCE):
        await ours.send_all(control.DRAIN + number + control.NUMBER.pack(0))
        async with trio.open_nursery() as nursery:
            server = Server(stream)
            nursery.start_soon(child._serve_parent, theirs, server, None, nursery.cancel_scope)
            got = b""
            while len(got) < 10:
                got += await ours.receive_some()
            assert got == control.READY + control.YES + number + bytes(4)
            await ours.aclose()


@pytest.mark.parametrize("asked", [False, True])
async def test_a_parent_that_is_killed_before_an_answer_arrives(
    stream: DataStream, asked: bool
) -> None:
    """The child ends without an error."""
    ours, theirs = trio.testing.memory_stream_pair()
    with trio.fail_after(PATIENCE):
        async with trio.open_nursery() as nursery:
            if not asked:
                await ours.aclose()
            nursery.start_soon(
                child._serve_parent, theirs, Server(stream), None, nursery.cancel_scope
            )
            if asked:
                assert await ours.receive_some() == control.READY
                assert isinstance(ours.receive_stream, trio.testing.MemoryReceiveStream)
                ours.receive_stream.close()
                await ours.send_all(control.RELOAD + control.NUMBER.pack(7))
            await trio.sleep_forever()
    assert nursery.cancel_scope.cancelled_caught
