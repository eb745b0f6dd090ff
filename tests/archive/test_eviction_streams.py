"""Evictions beside clients whose sockets are full: plain and by TLS, of the writer's workers and of
a process that follows the file. Each byte is compared with that of a file that keeps its pages."""

from __future__ import annotations

import random
import shutil
import socket
import struct
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from datastreamer import DataStream
from datastreamer.archive import eviction
from datastreamer.archive.eviction import Eviction
from datastreamer.format import PAGE_SIZE
from datastreamer.service.embedded import StreamServer
from datastreamer.storage.objects.opened import OpenArchive
from tests.archive.evicting import made, pushed
from tests.cli.process import running
from tests.network import model as wire
from tests.network.model import OK
from tests.network.secure import HOST, Authority

PAGES, CLIENTS = 30, 8
_ENTRY_HEAD = 17


class Twin:
    """What a server sends of the stream."""

    def __init__(self, path: Path) -> None:
        parts, self.offsets, self.firsts, at = [], [], [], 0
        with DataStream.open(path, read_only=True) as stream:
            for each in stream.entries():
                data = bytes(each.data)
                head = struct.pack(">BIIQ", 2, _ENTRY_HEAD + len(data), each.type, each.number)
                self.offsets.append(at)
                parts.append(head + data)
                at += len(parts[-1])
            self.firsts = [stream.reader.first_number(page) for page in range(PAGES)]
        self.sent = b"".join(parts)


class Clients:
    """Threads that stream from about the floor on, with sockets that are full at first."""

    def __init__(self, twin: Twin, floor: list[int]) -> None:
        self.floor = floor
        self.wrong: list[str] = []
        self.streams = self.bytes = self.across = 0
        self._twin = twin
        self._ending = threading.Event()
        self._threads: list[threading.Thread] = []

    def start(self, port: int, authority: Authority | None, seed: int) -> None:
        thread = threading.Thread(target=self._run, args=(port, authority, random.Random(seed)))
        self._threads.append(thread)
        thread.start()

    def close(self) -> None:
        self._ending.set()
        for thread in self._threads:
            thread.join()

    def _run(self, port: int, authority: Authority | None, chance: random.Random) -> None:
        while not self._ending.is_set() and not self.wrong:
            try:
                with ExitStack() as stack:
                    self._stream(port, authority, chance, stack)
            except Exception as error:  # noqa: BLE001 - the test reports it
                self.wrong.append(f"{type(error).__name__}: {error}")

    def _stream(
        self, port: int, authority: Authority | None, chance: random.Random, stack: ExitStack
    ) -> None:
        client = stack.enter_context(socket.socket())
        client.settimeout(60)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect((HOST, port))
        if authority is not None:
            context = authority.context()
            client = stack.enter_context(context.wrap_socket(client, server_hostname=HOST))
        before = self.floor[0]
        page = min(PAGES - 2, max(0, before - chance.choice((0, 0, 0, 1, 2))))
        number = self._twin.firsts[page] + chance.randrange(5)
        client.sendall(wire.start(number))
        assert _received(client, len(OK)) == OK
        at = self._twin.offsets[number]
        stop = min(len(self._twin.sent), at + chance.randrange(PAGE_SIZE // 2, 2 * PAGE_SIZE))
        # Some of it, then nothing: what the server has sent stays in its queue.
        for pause in (chance.random() * 1.5, chance.random() * 0.7, 0):
            size = (stop - at) // 3 if pause else stop - at
            got = _received(client, size)
            if got != self._twin.sent[at : at + size]:
                wanted = self._twin.sent[at : at + size]
                first = next(k for k, (a, b) in enumerate(zip(got, wanted, strict=True)) if a != b)
                self.wrong.append(f"byte {at + first} of page {page}: {got[first : first + 20]!r}")
                return
            at += size
            if pause and at < stop:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                self._ending.wait(pause)
        self.streams += 1
        self.bytes += stop - self._twin.offsets[number]
        self.across += self.floor[0] != before


def _received(client: socket.socket, size: int) -> bytes:
    got = bytearray()
    while len(got) < size:
        more = client.recv(min(65536, size - len(got)))
        assert more, "the connection ended"
        got += more
    return bytes(got)


@pytest.fixture(params=["disk", "memory"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """A folder on the disk, and one on tmpfs."""
    if request.param == "disk":
        yield tmp_path
        return
    made_in = Path(tempfile.mkdtemp(dir="/dev/shm"))
    yield made_in
    shutil.rmtree(made_in)


@pytest.mark.parametrize("seconds", [10, pytest.param(300, marks=pytest.mark.soak)])
@pytest.mark.slow
def test_full_sockets(seconds: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eviction, "_BATCH", 1)
    monkeypatch.setattr(eviction, "_NEVER", 1)
    # Shorter than it is, so that more of them fit.
    monkeypatch.setattr(eviction, "_SETTLE_SECONDS", 0.4)
    path, url = made(folder / "s.bin", PAGES), (folder / "archive").as_uri()
    twin, authority = Twin(path), Authority(folder, "streams")
    pushed(path, url)
    cert, key = authority.issue("server")
    follower = ("serve", path, "--follow", "--host", HOST, "--port", "0")
    secure = ("--tls-cert", cert, "--tls-key", key)
    floor, evictions, restores = [0], 0, 0
    clients = Clients(twin, floor)
    with (
        StreamServer(path, host=HOST, port=0, workers=2) as server,
        running(*follower, *secure, cwd=folder) as following,
    ):
        stream, port = server.stream, following.port()
        archive = OpenArchive.open(url)
        evicting = Eviction(stream, lambda: (archive, archive.newest()[0]), 1, url)
        try:
            for number in range(CLIENTS):
                if number % 2:
                    clients.start(port, authority, number)
                else:
                    clients.start(server.port, None, number)
            until = time.monotonic() + seconds
            while time.monotonic() < until and not clients.wrong:
                if evicting.step():
                    evictions += 1
                    floor[0] = stream.parts.pages.floor_page
                else:
                    stream.parts.pages.bring_back(0)
                    floor[0], restores = 0, restores + 1
        finally:
            clients.close()
    print(
        f"{evictions} evictions, {restores} restores in place; {clients.streams} streams, "
        f"{clients.bytes / 1e9:.2f} GB compared, {clients.across} while the floor moved"
    )
    assert clients.wrong == []
    assert evictions
    assert clients.across
