"""The publisher in Go, written from the specification, against our server."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import struct
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from datastreamer.storage.stream import DataStream
from tests.cli.process import ENVIRONMENT, running
from tests.interop.peer import GO_ENVIRONMENT
from tests.ports import free_port
from tests.programs import needs

SOURCE = Path(__file__).resolve().parents[2] / "examples" / "publisher"

pytestmark = [pytest.mark.interop, needs("go")]


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built with nothing but what comes with Go."""
    built = tmp_path_factory.mktemp("go") / "publisher"
    for words in (["vet", "./..."], ["build", "-o", str(built), "."]):
        done = subprocess.run(
            ["go", *words],
            cwd=SOURCE,
            env={**os.environ, **GO_ENVIRONMENT},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, done.stderr
    assert "require" not in (SOURCE / "go.mod").read_text()
    return built


def serve(port: int = 0) -> tuple[object, ...]:
    return ("serve", "s.bin", "--create", "--host", "127.0.0.1", "--port", port,
            "--publish-token-file", "token")  # fmt: skip


def contents(folder: Path) -> list[tuple[int, bytes]]:
    with DataStream.open(folder / "s.bin", read_only=True) as stream:
        return [(e.type, e.data) for e in stream.entries()]


def wanted(lines: list[str]) -> list[tuple[int, bytes]]:
    return [
        item
        for number, line in enumerate(lines)
        for item in ((0xB0, struct.pack(">Q", number)), (3, line.encode()))
    ]


def publish(
    program: Path, folder: Path, port: int, lines: list[str], token: str = "token"
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [program, "-server", f"127.0.0.1:{port}", "-token-file", token],
        input="".join(f"{line}\n" for line in lines),
        cwd=folder,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_it_publishes(program: Path, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("a token\n")
    (tmp_path / "token").chmod(0o600)
    (tmp_path / "wrong").write_text("wrong\n")
    lines = [f"line {number}" for number in range(1000)]
    with running(*serve(), cwd=tmp_path) as server:
        port = server.port()
        done = publish(program, tmp_path, port, lines)
        assert (done.returncode, done.stderr) == (0, "")
        said = done.stdout.splitlines()
        assert len(said) == 1000
        assert said[-1] == "entries 1998 to 1999 are on disk"
        done = publish(program, tmp_path, port, lines, token="wrong")
        assert done.returncode == 1
        assert done.stderr.startswith("error: the server refused: Not allowed: ")
        server.signal(signal.SIGTERM)
        assert server.wait() == 0
    assert contents(tmp_path) == wanted(lines)


def pass_on(source: socket.socket, to: socket.socket, left: int) -> None:
    """Forward at most this many bytes, then close both connections."""
    with contextlib.suppress(OSError):
        while left and (data := source.recv(min(left, 4096))):
            to.sendall(data)
            left -= len(data)
    for each in (source, to):
        with contextlib.suppress(OSError):
            each.shutdown(socket.SHUT_RDWR)


def cut_connections(listener: socket.socket, target: int, sizes: Iterator[int]) -> None:
    """Pass connections on until the listener ends; each is torn down when its server has said
    as many bytes as are next of `sizes`."""
    while True:
        try:
            client, _ = listener.accept()
        except OSError:
            return
        with client, contextlib.suppress(OSError):
            server = socket.create_connection(("127.0.0.1", target))
            up = threading.Thread(target=pass_on, args=(client, server, 1 << 40))
            up.start()
            pass_on(server, client, next(sizes, 1 << 40))
            up.join()
            server.close()


def test_it_publishes_once_over_lost_connections_and_a_killed_server(
    program: Path, tmp_path: Path
) -> None:
    (tmp_path / "token").write_text("a token\n")
    (tmp_path / "token").chmod(0o600)
    lines = [f"line {number}" for number in range(5000)]
    listener = socket.create_server(("127.0.0.1", 0))
    # While the server is down, a connection to an ephemeral port could come from that port.
    port = free_port()
    with listener, running(*serve(port), cwd=tmp_path) as server:
        server.port()
        sizes = iter([130, 200, 3000, 7, 77, 20_000, 144, 36])
        thread = threading.Thread(target=cut_connections, args=(listener, port, sizes))
        thread.start()
        between = listener.getsockname()[1]
        words = [str(program), "-server", f"127.0.0.1:{between}", "-token-file", "token"]
        with subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=tmp_path, text=True
        ) as source:
            assert source.stdin is not None
            assert source.stdout is not None
            reader = threading.Thread(target=source.stdout.read)
            reader.start()
            source.stdin.write("".join(f"{line}\n" for line in lines[:4000]))
            source.stdin.flush()
            server.signal(signal.SIGKILL)
            server.wait()
            with running(*serve(port), cwd=tmp_path) as second:
                second.port()
                source.stdin.write("".join(f"{line}\n" for line in lines[4000:]))
                source.stdin.close()
                assert source.wait(120) == 0
                reader.join()
                listener.shutdown(socket.SHUT_RDWR)
                thread.join()
    assert contents(tmp_path) == wanted(lines)
