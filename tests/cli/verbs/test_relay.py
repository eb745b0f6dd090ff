"""`relay` and `dsapp relay` as processes: their files, logs and errors."""

from __future__ import annotations

import contextlib
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from datastreamer.cli.main import main
from datastreamer.client.blocking_client import BlockingClient
from datastreamer.format import page_of, page_start
from datastreamer.protocol.retry import Backoff
from datastreamer.service.embedded import StreamServer
from datastreamer.storage.stream import DataStream
from tests.cli.conftest import ENTRIES, Invoke
from tests.cli.process import running


def at(server: StreamServer) -> str:
    return f"127.0.0.1:{server.port}"


@pytest.fixture
def upstream(copy: Path) -> Iterator[StreamServer]:
    with StreamServer(copy, host="127.0.0.1", port=0, sync="os", in_process=True) as serving:
        yield serving


def add(server: StreamServer, count: int, size: int = 100) -> int:
    with server.stream.atomic_op() as op:
        for number in range(count):
            op.add_entry(1, number.to_bytes(8, "big").ljust(size))
    return server.stream.total_entries


def numbers(port: int, total: int) -> list[int]:
    with BlockingClient("127.0.0.1", port, backoff=Backoff(0.01, 0.1)) as client:
        return [entry.number for entry in client.entries(stop=total)]


def same(one: Path, other: Path) -> bool:
    def read(path: Path) -> list[tuple[int, int, bytes]]:
        with DataStream.open(path, read_only=True, index="memory") as stream:
            return [(e.number, e.type, e.data) for batch in stream.batches(0) for e in batch]

    return read(one) == read(other)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_relays_until_a_signal(
    upstream: StreamServer, tmp_path: Path, number: signal.Signals
) -> None:
    words = ("relay", "--server", at(upstream), "--file", "r.bin", "--host", "127.0.0.1")
    with running(*words, "--port", "0", cwd=tmp_path) as relaying:
        port = relaying.port()
        assert numbers(port, ENTRIES) == list(range(ENTRIES))
        total = add(upstream, 50)
        assert numbers(port, total) == list(range(total))
        relaying.signal(number)
        assert relaying.wait() == 0
        assert relaying.err.rest()[-1].endswith(f"ended by {number.name}")
        assert relaying.out.rest() == []
    assert same(tmp_path / "r.bin", Path(upstream.stream.path))


@pytest.mark.parametrize(
    ("commit", "written", "sync"),
    [
        # Each two of them are together in one test; all three are, in the soak tests.
        pytest.param(commit, written, sync, marks=() if (i + j + k) % 2 == 0 else pytest.mark.soak)
        for i, commit in enumerate([1, 2, 7])
        for j, written in enumerate(["half", "entries"])
        for k, sync in enumerate(["os", "commit"])
    ],
)
def test_continues_after_a_kill_within_a_commit(
    upstream: StreamServer, tmp_path: Path, commit: int, written: str, sync: str
) -> None:
    """It keeps the earlier commits, and continues after them."""
    total = add(upstream, 30_000, size=500)
    file = tmp_path / "r.bin"
    words = ("relay", "--server", at(upstream), "--file", file, "--host", "127.0.0.1")
    with running(
        *(commit, written, *words, "--port", "0", "--sync", sync),
        module="tests.cli.killed_relay",
        cwd=tmp_path,
    ) as killed:
        # The existing entries are one commit, and each later operation another.
        while killed.process.poll() is None:
            total = add(upstream, 20, size=500)
            with contextlib.suppress(subprocess.TimeoutExpired):
                killed.process.wait(0.05)
        assert killed.wait() == -signal.SIGKILL
    with DataStream.open(file, read_only=True, index="memory") as kept:
        have, end = kept.total_entries, kept.header.total_length
    if sync == "os":
        assert (have > 0) == (commit > 1)
    assert have < total
    # After the end are the first bytes of the interrupted commit.
    with open(file, "rb") as behind:
        heads = []
        for offset in (end, page_start(page_of(end) + 1)):
            behind.seek(offset)
            heads.append((behind.read(1), int.from_bytes(behind.read(16)[-8:], "big")))
    assert (b"\x02", have) in heads
    total = add(upstream, 10)
    with running(*words, "--port", "0", cwd=tmp_path) as relaying:
        port = relaying.port()
        due = int(relaying.err.until(r"relaying from .*: next entry (\d+)")[1])
        # Entries that were not synced were not visible; without a power cut they are not lost.
        assert have <= due < total
        assert due == have or sync == "commit"
        assert numbers(port, total) == list(range(total))
        relaying.signal(signal.SIGTERM)
        assert relaying.wait() == 0
    assert same(file, Path(upstream.stream.path))


def test_ends_while_it_waits_for_a_first_upstream(tmp_path: Path) -> None:
    words = ("relay", "--server", "127.0.0.1:1", "--file", "r.bin", "--host", "127.0.0.1")
    with running(*words, "--port", "0", cwd=tmp_path) as relaying:
        relaying.err.until("127.0.0.1:1: cannot connect")
        relaying.signal(signal.SIGTERM)
        assert relaying.wait() == 0
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_that_gets_room_again(upstream: StreamServer, tmp_path: Path) -> None:
    folder = tmp_path / "small"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(folder)]
    if subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("this user may not mount a file system")
    try:
        words = ("relay", "--server", at(upstream), "--file", folder / "r.bin")
        more = ("--host", "127.0.0.1", "--port", "0", "--index", "memory")
        with running(*words, *more, cwd=tmp_path) as relaying:
            port = relaying.port()
            assert numbers(port, ENTRIES) == list(range(ENTRIES))
            total = add(upstream, 12_000, size=500)
            relaying.err.until("No space left|disk is full")
            with BlockingClient("127.0.0.1", port) as client:
                there = client.header().total_entries
                assert ENTRIES <= there < total
                client.entry(there - 1)
            subprocess.run(
                ["mount", "-o", "remount,size=64m", str(folder)], check=True, capture_output=True
            )
            assert numbers(port, total) == list(range(total))
            relaying.signal(signal.SIGTERM)
            assert relaying.wait() == 0
        assert same(folder / "r.bin", Path(upstream.stream.path))
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True, capture_output=True)


def test_dsapp_relay(upstream: StreamServer, tmp_path: Path) -> None:
    words = ("relay", "--server", at(upstream), "--port", "0")
    with running(*words, module="datastreamer.cli.dsapp", cwd=tmp_path) as relaying:
        port = relaying.port()
        assert numbers(port, ENTRIES) == list(range(ENTRIES))
        relaying.signal(signal.SIGINT)
        assert relaying.wait() == 0
    assert same(tmp_path / "datarelay.bin", Path(upstream.stream.path))


def test_options_from_a_file(upstream: StreamServer, tmp_path: Path) -> None:
    (tmp_path / "relay.toml").write_text(
        f"""
        server = ["127.0.0.1:1", "{at(upstream)}"]
        file = "kept.bin"
        host = "127.0.0.1"
        port = 1
        on-rewrite = "follow"
        sync = "os"
        max-clients = 3
        """
    )
    with running("relay", "--config", "relay.toml", "--port", "0", cwd=tmp_path) as relaying:
        assert numbers(relaying.port(), ENTRIES) == list(range(ENTRIES))
        upstream.stream.truncate(7)
        relaying.err.until("truncated entries 7 to .* to follow")
        relaying.signal(signal.SIGTERM)
        assert relaying.wait() == 0
    assert same(tmp_path / "kept.bin", Path(upstream.stream.path))


@pytest.mark.parametrize(
    ("text", "result"),
    [
        ("sever = 1", "relay.toml: unknown option 'sever'; did you mean 'server'?"),
        ("tls-ca = 1", "relay.toml: unknown option 'tls-ca'; did you mean 'server-tls-ca'?"),
        ("xyz = 1", "relay.toml: unknown option 'xyz'; the options are server, file, port"),
        ("server = [", "relay.toml: not TOML: "),
        ("port = 1.5", "relay.toml: port cannot be 1.5"),
        ("port = true", "relay.toml: port cannot be True"),
        ("server = [1.5]", "relay.toml: server cannot be 1.5"),
    ],
)
def test_an_invalid_file_of_options(
    invoke: Invoke, tmp_path: Path, text: str, result: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "relay.toml").write_text(text)
    failed = invoke("relay", "--config", "relay.toml").failed(2)
    assert failed.startswith(f"Invalid value for '--config': {result}")


def test_a_file_of_options_is_checked(
    invoke: Invoke, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ("relay", "--config", "relay.toml", "--check-config")
    path = tmp_path / "relay.toml"
    path.write_text('server = ["here"]\nfile = "r.bin"\n')
    assert invoke(*words) == (0, b"", "the options are right\n")
    path.write_text('server = ["here"]\nfile = "r.bin"\ntls-cert = ["none.pem"]\n')
    assert "none.pem: cannot be read" in invoke(*words).failed(1)
    path.write_text('server = ["here:x"]\nfile = "r.bin"\n')
    assert "--server: 'here:x' is not HOST:PORT" in invoke(*words).failed(2)
    assert not (tmp_path / "r.bin").exists()


def test_a_missing_file_of_options(invoke: Invoke, tmp_path: Path) -> None:
    result = invoke("relay", "--config", tmp_path / "none.toml").failed()
    assert result == f"{tmp_path}/none.toml: cannot be read: No such file or directory"


@pytest.mark.parametrize(
    ("words", "result"),
    [
        ((), "--server is required"),
        (("--server", "a:1"), "--file is required"),
        (("--server", "a:x", "--file", "f"), "--server: 'a:x' is not HOST:PORT"),
        (("--server", "a:1", "--server-tls-ca", "x", "--file", "f"), "--server-tls-ca is for"),
        (("--server", "a:1", "--file", "f", "--port", "70000"), "65535"),
        (("--server", "a:1", "--file", "f", "--on-rewrite", "go"), "--on-rewrite"),
        (("--server", "a:1", "--file", "f", "--tls-key", "k"), "--tls-key requires --tls-cert"),
    ],
)
def test_wrong_usage(invoke: Invoke, words: tuple[str, ...], result: str) -> None:
    assert result in invoke("relay", *words, program=main).failed(2)


def test_a_port_in_use(upstream: StreamServer, invoke: Invoke, tmp_path: Path) -> None:
    words = ("--server", at(upstream), "--file", tmp_path / "r.bin", "--host", "127.0.0.1")
    result = invoke("relay", *words, "--port", upstream.port).failed()
    assert str(upstream.port) in result
    assert not (tmp_path / "r.bin").exists()
