"""Notifications to systemd and its sockets, with a datagram socket and in a process."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from datastreamer.errors import ListenFailed
from datastreamer.service import systemd
from tests.network import model as wire

linux = pytest.mark.skipif(sys.platform != "linux", reason="abstract sockets are Linux's")


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as link:
        link.bind(str(tmp_path / "notify"))
        link.settimeout(20)
        yield link


def test_without_systemd_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NOTIFY_SOCKET", "WATCHDOG_USEC", "LISTEN_PID", "LISTEN_FDS"):
        monkeypatch.delenv(name, raising=False)
    systemd.notify(systemd.READY)
    assert systemd.watchdog_seconds() is None
    assert systemd.take_listeners() == []


def test_states(manager: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", manager.getsockname())
    systemd.notify(systemd.READY)
    assert manager.recv(100) == b"READY=1"


@linux
def test_an_abstract_address(monkeypatch: pytest.MonkeyPatch) -> None:
    name = f"datastreamer test {os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as link:
        link.bind("\0" + name)
        monkeypatch.setenv("NOTIFY_SOCKET", "@" + name)
        systemd.notify(systemd.STOPPING)
        assert link.recv(100) == b"STOPPING=1"


@pytest.mark.parametrize("name", ["/no/such/socket", "relative", "", "vsock:2:1234"])
def test_a_manager_that_does_not_exist(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", name)
    systemd.notify(systemd.READY)


@pytest.mark.parametrize(
    ("micros", "process", "seconds"),
    [
        pytest.param("30000000", str(os.getpid()), 15.0, id="this process"),
        ("500000", "", 0.25),
        ("30000000", "1", None),
        ("0", "", None),
        ("soon", "", None),
    ],
)
def test_the_interval_of_the_watchdog(
    monkeypatch: pytest.MonkeyPatch, micros: str, process: str, seconds: float | None
) -> None:
    monkeypatch.setenv("WATCHDOG_USEC", micros)
    monkeypatch.setenv("WATCHDOG_PID", process)
    assert systemd.watchdog_seconds() == seconds


def test_sockets_for_another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LISTEN_PID", "1")
    monkeypatch.setenv("LISTEN_FDS", "3")
    assert systemd.take_listeners() == []
    assert "LISTEN_FDS" not in os.environ, "nor for a child of this one"


# Does with a socket what systemd does: as descriptor 3, named, for the process itself.
ACTIVATE = """
import os, sys
os.dup2(int(sys.argv[1]), 3)
os.environ.update(LISTEN_PID=str(os.getpid()), LISTEN_FDS="1", LISTEN_FDNAMES="stream")
os.execv(sys.executable, [sys.executable, "-m", "datastreamer", *sys.argv[2:]])
"""


def activated(handed: socket.socket, *words: str | Path, **variables: str) -> subprocess.Popen[str]:
    fd = handed.fileno()
    return subprocess.Popen(
        [sys.executable, "-c", ACTIVATE, str(fd), *map(str, words)],
        pass_fds=[fd],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **variables},
    )


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_UNIX])
def test_a_service_with_its_socket(
    manager: socket.socket, tmp_path: Path, family: socket.AddressFamily
) -> None:
    """Clients that connect before it runs wait; it notifies systemd when it serves and ends."""
    path = tmp_path / "stream.bin"
    with socket.socket(family) as listener, socket.socket(family) as client:
        listener.bind(("127.0.0.1", 0) if family == socket.AF_INET else str(tmp_path / "s"))
        listener.listen()
        client.settimeout(20)
        client.connect(listener.getsockname())
        client.sendall(wire.header())
        words = ("serve", path, "--create", "--port", "1", "--log-level", "info")
        outcome = {"NOTIFY_SOCKET": manager.getsockname(), "WATCHDOG_USEC": "100000"}
        with activated(listener, *words, **outcome) as process:
            assert client.recv(11) == wire.result(0)
            states = [manager.recv(100) for _ in range(4)]
            assert states.count(b"READY=1") == 1
            assert states.count(b"WATCHDOG=1") == 3
            process.send_signal(signal.SIGHUP)  # a reload, which has nothing to read again
            process.send_signal(signal.SIGTERM)
            while (state := manager.recv(100)) == b"WATCHDOG=1":
                pass
            assert state == b"STOPPING=1"
            client.close()
            _, said = process.communicate(timeout=20)
            assert process.returncode == 0, said
            assert "on 127.0.0.1:" in said or str(tmp_path / "s") in said
        # systemd owns the socket: the next client waits for the next start.
        with socket.socket(family) as later:
            later.connect(listener.getsockname())


def test_a_descriptor_that_does_not_listen(tmp_path: Path) -> None:
    one, two = socket.socketpair()
    words = ("serve", tmp_path / "stream.bin", "--create")
    with one, two, activated(one, *words) as process:
        _, said = process.communicate(timeout=20)
        assert process.returncode == 1
    assert said.startswith("error: descriptor 3 (stream), passed by systemd, is not a listening")
    assert len(said.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


def test_a_descriptor_that_is_not_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LISTEN_PID", str(os.getpid()))
    monkeypatch.setenv("LISTEN_FDS", "1")
    monkeypatch.setattr(systemd, "_FIRST_DESCRIPTOR", 1_000_000)
    with pytest.raises(ListenFailed, match=r"descriptor 1000000 \(unknown\)"):
        systemd.take_listeners()
