"""Several processes on one listener: what they share, and what each has of its own."""

from __future__ import annotations

import contextlib
import os
import select
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from datastreamer.errors import ServerFailed, UsageError
from datastreamer.server.admission.accept_balance import AcceptBalance, shared_block
from datastreamer.server.limits import Limits
from datastreamer.service import worker_pool as pool
from datastreamer.service import worker_process as process
from datastreamer.service.daemon import serve_until_signal
from datastreamer.service.embedded import StreamServer
from datastreamer.service.worker_pool import Workers
from datastreamer.storage.parts import ChangeBegins
from datastreamer.storage.stream import DataStream
from tests.cli.process import done, running
from tests.network import model as wire
from tests.network.fixtures import append
from tests.network.model import OK
from tests.service.test_embedded import Plain, gone, modelled, read_until, serving

needs_pidfd = pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="waits on pidfds")


def workers_of(server: StreamServer) -> Workers:
    assert isinstance(server._serving, Workers)
    return server._serving


def by_worker(server: StreamServer, name: str, label: str | None = None) -> list[int]:
    """The value of a metric in each process that answers, of all labels or of one."""
    return [
        sum(
            value
            for labels, value in process["samples"].get(name, ())
            if isinstance(value, int) and label in (None, *labels)
        )
        for process in workers_of(server).snapshots(0)
    ]


def clients_by_worker(server: StreamServer) -> list[int]:
    return by_worker(server, "datastreamer_clients")


@contextlib.contextmanager
def clients(port: int, count: int, start: int = 0) -> Iterator[list[Plain]]:
    """`count` clients that stream from `start` and have received the Result."""
    with contextlib.ExitStack() as stack:
        made = [stack.enter_context(Plain(port)) for _ in range(count)]
        for client in made:
            client.ask(wire.start(start), OK)
        yield made


def test_each_client_is_served_by_one_process(path: Path) -> None:
    with serving(path, workers=3) as server:
        assert len({process.pid for process in workers_of(server).processes}) == 3
        append(server.stream, *[(1, b"%d" % n) for n in range(10)])
        with clients(server.port, 30) as many:
            for turn in range(20):
                append(server.stream, (2, b"live %d" % turn))
            whole = modelled(path).packed()
            for client in many:
                client.ask(b"", whole)
            assert server.drain()
            assert sum(clients_by_worker(server)) == 30
            assert min(clients_by_worker(server)) > 5
            assert sum(by_worker(server, "datastreamer_connections_accepted_total")) == 30
            assert sum(by_worker(server, "datastreamer_commands_total", "start")) == 30
            sent = by_worker(server, "datastreamer_sent_bytes_total")
            assert sum(sent) == 30 * len(OK + whole)


def test_all_processes_learn_of_changes_before_a_byte_is_written(path: Path) -> None:
    with serving(path, workers=2) as server:
        stream = server.stream
        append(stream, *[(1, b"%d" % n) for n in range(10)])
        with clients(server.port, 6) as many, clients(server.port, 2, 10) as idle:
            for client in many:
                client.ask(b"", modelled(path).packed())
            stream.truncate(5)
            append(stream, *[(2, b"%d" % n) for n in range(5, 10)])
            for client in (*many, *idle):
                with pytest.raises(ConnectionResetError):
                    client.rest()
        with clients(server.port, 6) as many:
            for client in many:
                client.ask(b"", modelled(path).packed())
            stream.update_entry(7, 2, b"!")  # these clients have the entry
            append(stream, (3, b"on"))
            for client in many:
                client.ask(b"", modelled(path).packed(10))


def contents(stream: DataStream) -> tuple[int, list[bytes]]:
    return stream.epoch, [entry.data for entry in stream.entries()]


def served(port: int, path: Path) -> bool:
    """Whether clients are sent the stream, and remain connected for a while."""
    with clients(port, 6) as some:
        try:
            for client in some:
                client.ask(b"", modelled(path).packed())
            time.sleep(0.2)
            for client in some:
                client.ask(wire.stop(), OK)
        except ConnectionResetError:
            return False
    return True


def test_a_process_that_hangs_ends_a_change(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may still send what would change: nothing is changed, and the error names the process."""
    with serving(path, workers=2) as server:
        stream = server.stream
        append(stream, *[(1, b"%d" % n) for n in range(10)])
        with clients(server.port, 6) as many:
            for client in many:
                client.ask(b"", modelled(path).packed())
            hanging = workers_of(server).processes[0].pid
            os.kill(hanging, signal.SIGSTOP)
            monkeypatch.setattr(pool, "_CHANGE_SECONDS", 0.3)
            before = contents(stream)
            try:
                with pytest.raises(ServerFailed, match=f"CONT {hanging}.*nothing was changed"):
                    stream.update_entry(7, 1, b"!")
                with pytest.raises(ServerFailed, match=f"process {hanging} has not answered"):
                    stream.truncate(9)
                assert contents(stream) == before
                append(stream, (2, b"on"))
            finally:
                os.kill(hanging, signal.SIGCONT)
            monkeypatch.setattr(pool, "_CHANGE_SECONDS", 60)
            # Also clients that the process has disconnected meanwhile are served again.
            while not served(server.port, path):
                pass  # it ends some of them for the changes that it has not answered
            with clients(server.port, 6) as again:
                for client in again:
                    client.ask(b"", modelled(path).packed())
                stream.truncate(9)
                append(stream, (2, b"after"))
                for client in again:
                    with pytest.raises(ConnectionResetError):
                        client.rest()
        assert hanging == workers_of(server).processes[0].pid


@pytest.mark.parametrize("when", ["before", "meanwhile", "between"])
def test_a_process_that_dies_does_not_hinder_a_change(
    path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    with serving(path, workers=2) as server:
        stream = server.stream
        append(stream, *[(1, b"%d" % n) for n in range(10)])
        dying = workers_of(server).processes[0]
        pid = dying.pid
        os.kill(pid, signal.SIGKILL if when == "before" else signal.SIGSTOP)
        if when == "between":
            os.kill(pid, signal.SIGCONT)
            stream.parts.feed.subscribe(
                lambda event: (
                    os.kill(pid, signal.SIGKILL) if isinstance(event, ChangeBegins) else None
                )
            )
        if when == "meanwhile":
            threading.Timer(0.3, os.kill, (pid, signal.SIGKILL)).start()
        stream.truncate(5)
        append(stream, (2, b"on"))
        while workers_of(server).processes[0].pid == pid:
            pass
        with clients(server.port, 6) as many:
            for client in many:
                client.ask(b"", modelled(path).packed())


def test_a_change_does_not_wait_for_a_drain(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A drain, a restart and other requests hold a process: that wait has the same limit."""
    with serving(path) as server:
        stream = server.stream
        append(stream, *[(1, b"%d" % n) for n in range(10)])
        (process,) = workers_of(server).processes
        os.kill(process.pid, signal.SIGSTOP)
        drain = threading.Thread(target=server.drain, args=(60,))
        drain.start()
        while not process.guard.locked():
            pass
        monkeypatch.setattr(pool, "_CHANGE_SECONDS", 0.3)
        with pytest.raises(ServerFailed, match=f"process {process.pid} has not answered"):
            stream.truncate(5)
        assert drain.is_alive()
        assert stream.total_entries == 10
        os.kill(process.pid, signal.SIGKILL)
        drain.join()


def test_the_processes_share_the_limit_of_clients(path: Path) -> None:
    """A client is refused only when no process has a free slot."""
    with serving(path, workers=3, limits=Limits(max_clients=10)) as server:
        append(server.stream, (1, b"x"))
        with clients(server.port, 10) as many:
            assert clients_by_worker(server) == [4, 3, 3]
            with Plain(server.port) as refused, contextlib.suppress(ConnectionResetError):
                assert refused.rest() == b""
            # A client that disconnects frees a slot, in any process.
            for client in many[:5]:
                client.socket.close()
            while sum(clients_by_worker(server)) > 5:
                pass
            with clients(server.port, 5):
                assert sum(clients_by_worker(server)) == 10
        assert sum(by_worker(server, "datastreamer_connections_refused_total")) == 1


def test_the_processes_share_the_limit_by_address(path: Path) -> None:
    with serving(path, workers=3, limits=Limits(max_clients_per_address=4)) as server:
        with clients(server.port, 4) as many:
            assert sum(clients_by_worker(server)) == 4
            for _ in range(5):
                with Plain(server.port) as refused, contextlib.suppress(ConnectionResetError):
                    assert refused.rest() == b""
            many[0].socket.close()
            while sum(clients_by_worker(server)) > 3:
                pass
            with clients(server.port, 1):
                pass
        refused_by_address = by_worker(
            server, "datastreamer_connections_refused_total", "max_clients_per_address"
        )
        assert sum(refused_by_address) == 5


def test_more_workers_than_clients(path: Path) -> None:
    with pytest.raises(UsageError, match="3 workers for at most 2 clients"):
        StreamServer(path, host="127.0.0.1", port=0, workers=3, limits=Limits(max_clients=2))
    with pytest.raises(UsageError, match="whole number from 1"):
        StreamServer(path, host="127.0.0.1", port=0, workers=0)
    with pytest.raises(UsageError, match="one thread"):
        StreamServer(path, host="127.0.0.1", port=0, workers=2, in_process=True)
    with DataStream.open(path):
        pass  # the lock is free


def test_the_shares_of_limits_add_up() -> None:
    limits = Limits(max_clients=11, accept_rate=30, max_clients_per_address=2)
    parts = [limits.share(at, 3) for at in range(3)]
    assert [part.max_clients for part in parts] == [4, 4, 3]
    assert [part.accept_rate for part in parts] == [10, 10, 10]
    assert {part.max_clients_per_address for part in parts} == {2}
    assert limits.share(0, 1) == limits


def test_a_process_that_dies_disconnects_only_its_own_clients(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "_FIRST_PAUSE", 0.01)
    with serving(path, workers=2) as server:
        append(server.stream, (1, b"first"))
        before = [process.pid for process in workers_of(server).processes]
        with clients(server.port, 8) as many:
            for client in many:
                client.ask(b"", modelled(path).packed())
            concerned = clients_by_worker(server)[0]
            assert 0 < concerned < 8
            os.kill(before[0], signal.SIGKILL)
            with selectors.DefaultSelector() as ready:
                for client in many:
                    ready.register(client.socket, selectors.EVENT_READ, client)
                lost: set[Plain] = set()
                while len(lost) < concerned:
                    lost.update(key.data for key, _ in ready.select(20))
            append(server.stream, (2, b"second"))
            for client in set(many) - lost:
                client.ask(b"", modelled(path).packed(1))
            for client in lost:
                with contextlib.suppress(ConnectionResetError):
                    assert client.rest() == b""
            # Its clients reconnect without waiting for the restart.
            whole = modelled(path).packed()
            for _ in lost:
                assert read_until(server.port, 0, len(whole)) == whole
            assert server.drain()
            # The restarted process accepts clients until it has as many as the other.
            while (
                len(clients_by_worker(server)) < 2 or sum(clients_by_worker(server)) > 8 - concerned
            ):
                pass
            with clients(server.port, concerned):
                assert min(clients_by_worker(server)) > 1


def test_commits_continue_while_one_process_is_left(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "_FIRST_PAUSE", 0.001)
    monkeypatch.setattr(process, "_ATTEMPTS", 0)
    with serving(path, workers=2) as server:
        first = workers_of(server).processes[0]
        assert first._watcher is not None
        os.kill(first.pid, signal.SIGKILL)
        first._watcher.join()
        assert first.failure
        append(server.stream, (1, b"on"))
        for _ in range(3):
            with Plain(server.port) as client:
                client.ask(wire.start(0), OK + modelled(path).packed())
        assert len(clients_by_worker(server)) == 1


def test_if_one_process_cannot_start_none_is_left(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pids: list[int] = []
    ready = process.ServingProcess.wait_until_ready

    def fail_at_the_second(self: process.ServingProcess, *rest: object) -> None:
        pids.append(self.pid)
        if len(pids) == 2:
            raise OSError("from the callback")
        ready(self)

    monkeypatch.setattr(process.ServingProcess, "wait_until_ready", fail_at_the_second)
    with pytest.raises(OSError, match="from the callback"):
        StreamServer(path, host="127.0.0.1", port=0, workers=2)
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    with DataStream.open(path):
        pass


async def test_which_process_accepts_next(autojump_clock: MockClock) -> None:
    fd = shared_block(3)
    block = [AcceptBalance(fd, at) for at in range(3)]
    os.close(fd)

    async def waits(at: int) -> float:
        begin = trio.current_time()
        await block[at].wait()
        return trio.current_time() - begin

    try:
        block[0].note(0, 10)
        assert await waits(0) == 0, "alone"
        block[1].note(0, 10)
        assert await waits(0) == await waits(1) == 0, "even"
        block[0].note(1, 9)
        assert await waits(0) > 0, "one ahead of another"
        assert await waits(1) == 0
        block[0].note(109, 9)
        block[1].note(100, 9)
        assert await waits(0) == 0, "even enough"
        block[2].note(3, 0)
        assert await waits(0) == 0, "of who has no room nothing is expected"
        block[0].note(5, 0)
        assert await waits(0) > 0.9, "another may let it in"
        block[1].leave()
        assert await waits(0) == 0, "no process has room: it is refused at once"
        block[0].note(150, 5)
        block[1].note(100, 5)
        async with trio.open_nursery() as nursery:
            begin = trio.current_time()
            nursery.start_soon(block[0].wait)
            await trio.sleep(0.005)
            block[1].note(150, 5)
        assert trio.current_time() - begin < 0.007, "as soon as the other has caught up"
    finally:
        for each in block:
            each.close()


def test_addresses_are_counted_over_all_processes() -> None:
    fd = shared_block(3, 100)
    one, other, third = block = [AcceptBalance(fd, at) for at in range(3)]
    os.close(fd)
    try:
        hosts = [f"10.0.0.{n}" for n in range(100)]
        for count, host in enumerate(hosts, 1):
            one.note_address(host, count)
            other.note_address(host, 1)
        assert [third.elsewhere(host) for host in hosts] == list(range(2, 102))
        assert [one.elsewhere(host) for host in hosts] == [1] * 100
        assert third.elsewhere("10.0.1.0") == 0
        for host in hosts[:50]:
            one.note_address(host, 0)
        assert [third.elsewhere(host) for host in hosts[:50]] == [1] * 50
        other.leave()
        assert [third.elsewhere(host) for host in hosts] == [*[0] * 50, *range(51, 101)]
        # More addresses than the shared memory has room for: some are not counted.
        crowd = [f"10.1.{n // 256}.{n % 256}" for n in range(2_000)]
        for host in crowd:
            other.note_address(host, 1)
        assert 0 < sum(third.elsewhere(host) for host in crowd) <= 416
        for host in crowd:
            other.note_address(host, 0)
        assert not any(third.elsewhere(host) for host in crowd)
    finally:
        for each in block:
            each.close()


def test_addresses_are_not_counted_without_a_limit() -> None:
    fd = shared_block(2)
    one, other = AcceptBalance(fd, 0), AcceptBalance(fd, 1)
    os.close(fd)
    one.note_address("10.0.0.1", 1)
    assert other.elsewhere("10.0.0.1") == 0
    one.leave()
    one.close()
    other.close()


# The command.


def test_serve_with_workers(path: Path) -> None:
    """The writer's lock is held meanwhile; after SIGTERM clients receive committed entries."""
    with DataStream.create(path) as stream:
        append(stream, *[(1, bytes(100_000))] * 100)
    whole = modelled(path).packed()
    words = ("serve", path, "--workers", "2", "--host", "127.0.0.1", "--port", "0")
    with running(*words, cwd=path.parent) as server:
        port = server.port()
        refused = done("append", path, cwd=path.parent)
        assert refused.returncode == 1
        assert "locked" in refused.stderr or str(server.process.pid) in refused.stderr
        with clients(port, 6) as many:
            server.signal(signal.SIGTERM)
            for client in many:
                assert len(client.rest()) == len(whole)
            assert server.wait() == 0
        with pytest.raises(ConnectionRefusedError):
            Plain(port)
    assert "ended by SIGTERM" in server.err.seen[-1]


def test_serve_with_workers_follows_another_writer(path: Path) -> None:
    with DataStream.create(path, sync="os") as stream:
        append(stream, (1, b"first"))
        words = ("serve", path, "--follow", "--workers", "2", "--host", "127.0.0.1")
        with running(*words, "--port", "0", cwd=path.parent) as server:
            with clients(server.port(), 4) as many:
                append(stream, (2, b"second"))
                for client in many:
                    client.ask(b"", modelled(path).packed())
            server.signal(signal.SIGINT)
            assert server.wait() == 0


@needs_pidfd
def test_a_second_signal_ends_all_processes(path: Path) -> None:
    with DataStream.create(path) as stream:
        append(stream, *[(1, bytes(1_000_000))] * 20)
    words = ("serve", path, "--workers", "2", "--grace", "300", "--host", "127.0.0.1")
    with (
        running(*words, "--port", "0", cwd=path.parent) as server,
        clients(port := server.port(), 2),
    ):
        server.signal(signal.SIGTERM)
        with contextlib.suppress(ConnectionError):
            while True:  # until no client is accepted any more
                Plain(port).socket.close()
        server.signal(signal.SIGTERM)
        assert server.wait() == 0


@needs_pidfd
def test_workers_end_with_a_killed_parent(path: Path) -> None:
    words = ("serve", path, "--create", "--workers", "2", "--host", "127.0.0.1", "--port", "0")
    with running(*words, cwd=path.parent) as server:
        port = server.port()
        children = Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children")
        pids = [int(pid) for pid in children.read_text().split()]
        assert len(pids) == 2
        server.signal(signal.SIGKILL)
        assert all(gone(pid) for pid in pids)
        with pytest.raises(ConnectionRefusedError):
            Plain(port)


def test_serve_with_too_many_workers(path: Path) -> None:
    result = done(
        "serve", path, "--create", "--workers", "3", "--max-clients", "2", cwd=path.parent
    )
    assert result.returncode != 0
    assert result.stderr.splitlines() == [
        "error: 3 workers for at most 2 clients: each needs at least one"
    ]
    assert not path.exists()


class Begun(list["subprocess.Popen[bytes]"]):
    """The started processes; `any` is set with the first."""

    def __init__(self) -> None:
        self.any = threading.Event()


@pytest.fixture
def begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Begun:
    """Serving processes that start and never become ready."""
    stuck = tmp_path / "stuck"
    stuck.write_text("#!/bin/sh\nexec sleep 1000\n")
    stuck.chmod(0o755)
    started = Begun()
    popen = subprocess.Popen

    def noted(*words: Any, **named: Any) -> subprocess.Popen[bytes]:
        started.append(popen(*words, **named))
        started.any.set()
        return started[-1]

    monkeypatch.setattr(sys, "executable", str(stuck))
    monkeypatch.setattr(subprocess, "Popen", noted)
    return started


def test_no_more_start_together_than_there_are_processors(
    path: Path, begun: Begun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "_processors", lambda: 3)
    monkeypatch.setattr(process, "_READY_SECONDS", 0.2)
    with pytest.raises(ServerFailed, match=r"did not start within 0\.2 s; the machine"):
        StreamServer(path, host="127.0.0.1", port=0, workers=64)
    assert len(begun) == 3
    assert all(each.returncode == -signal.SIGKILL for each in begun)
    with DataStream.open(path):
        pass  # the lock is free again


@pytest.mark.skipif(sys.platform != "linux", reason="needs an eventfd of Linux")
@pytest.mark.parametrize(
    "workers, processors, woken", [(1, 1, 0), (1, 2, 1), (2, 2, 0), (2, 3, 2), (3, 4, 0)]
)
def test_a_commit_wakes_a_process_early(
    path: Path, monkeypatch: pytest.MonkeyPatch, workers: int, processors: int, woken: int
) -> None:
    """A few that have a processor each; what is announced reaches the thread in each of them."""
    monkeypatch.setattr(pool, "_processors", lambda: processors)
    before = set(os.listdir("/proc/self/fd"))
    with serving(path, workers=workers) as server:
        owned = server.stream._writer.owned  # type: ignore[union-attr]
        assert len(owned.early_wakers) == woken
        with contextlib.ExitStack() as stack:
            # Each process has clients then.
            for _ in range(4 * workers):
                stack.enter_context(Plain(server.port)).ask(wire.start(0), OK)
            for early in owned.early_wakers:
                # The thread has its clients soon after a commit; on a busy machine it may rest.
                until, awaited = time.monotonic() + 50, False
                while not awaited:
                    assert time.monotonic() < until, "the thread does not wait for it"
                    server.stream.append(1, b"more")
                    time.sleep(0.02)
                    os.eventfd_write(early, 1)
                    time.sleep(0.02)
                    awaited = not select.select([early], [], [], 0)[0]
    assert owned.early_wakers == owned.wakers == []
    assert set(os.listdir("/proc/self/fd")) <= before


def test_a_signal_while_workers_start(path: Path, begun: Begun) -> None:
    """It ends them without waiting until all are ready."""

    def opened() -> DataStream:
        # When the first process has started.
        threading.Thread(target=interrupt).start()
        return DataStream.create(path)

    def interrupt() -> None:
        begun.any.wait()
        signal.raise_signal(signal.SIGTERM)

    name = serve_until_signal(
        opened, host="127.0.0.1", port=0, limits=Limits(), workers=64, listening=never_listens
    )
    assert name == "SIGTERM"
    assert begun
    assert all(each.returncode == -signal.SIGKILL for each in begun)


def never_listens(stream: DataStream, addresses: list[tuple[str, int]]) -> None:
    raise AssertionError("clients are not served")
