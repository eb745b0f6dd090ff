"""A streaming over TLS and over a Unix socket whose server goes and comes back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import trio

from datastreamer.client.blocking_client import BlockingClient
from datastreamer.client.trio_driver import connect
from datastreamer.errors import TLSFailed
from datastreamer.protocol.retry import Backoff
from datastreamer.service.embedded import StreamServer
from datastreamer.storage.stream import DataStream
from datastreamer.transport.tls import ServerTLS
from tests.network.secure import HOST, Authority

SOON = Backoff(0.01, 0.05)


def add(stream: DataStream, count: int) -> None:
    with stream.atomic_op() as op:
        op.add_entries(3, [b"%d" % n for n in range(count)])


@pytest.fixture(params=["tls", "unix"])
def ways(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The options of a server and of its clients."""
    if request.param == "unix":
        place = str(tmp_path / "socket")
        return {"port": None, "unix": place}, {"host": f"unix:{place}"}
    authority = Authority(tmp_path, "trusted")
    serving = {"host": HOST, "tls": ServerTLS(authority.issue("server")), "port": 0}
    return serving, {"host": HOST, "tls": authority.context()}


def test_blocking(tmp_path: Path, ways: tuple[dict[str, Any], dict[str, Any]]) -> None:
    serving, calling = ways
    path = tmp_path / "s.bin"
    with StreamServer(path, in_process=True, **serving) as server:
        add(server.stream, 50)
        if serving["port"] == 0:
            serving["port"] = calling["port"] = server.port
        client = BlockingClient(**calling, backoff=SOON, heartbeat=0.02)
        entries = client.entries(stop=100)
        seen = [next(entries).number for _ in range(50)]
    with StreamServer(path, in_process=True, **serving) as server:
        add(server.stream, 50)
        seen += [entry.number for entry in entries]
        client.close()
    assert seen == list(range(100))


async def test_trio(tmp_path: Path, ways: tuple[dict[str, Any], dict[str, Any]]) -> None:
    serving, calling = ways
    path = tmp_path / "s.bin"
    seen: list[int] = []
    with trio.fail_after(30):
        with StreamServer(path, in_process=True, **serving) as server:
            add(server.stream, 50)
            if serving["port"] == 0:
                serving["port"] = calling["port"] = server.port
            opened = connect(**calling, backoff=SOON, heartbeat=0.02)
            client = await opened.__aenter__()
            entries = client.entries(stop=100)
            while len(seen) < 50:
                seen.append((await entries.__anext__()).number)
        with StreamServer(path, in_process=True, **serving) as server:
            add(server.stream, 50)
            async for entry in entries:
                seen.append(entry.number)  # noqa: PERF401
            await opened.__aexit__(None, None, None)
    assert seen == list(range(100))


def test_a_server_that_comes_back_without_its_certificate(tmp_path: Path) -> None:
    ours, other = tmp_path / "ours", tmp_path / "other"
    ours.mkdir()
    other.mkdir()
    authority, stranger = Authority(ours, "ours"), Authority(other, "other")
    path = tmp_path / "s.bin"
    with StreamServer(
        path, host=HOST, port=0, in_process=True, tls=ServerTLS(authority.issue("server"))
    ) as server:
        add(server.stream, 50)
        port = server.port
        client = BlockingClient(HOST, port, tls=authority.context(), backoff=SOON)
        entries = client.entries()
        assert [next(entries).number for _ in range(50)] == list(range(50))
    with (
        StreamServer(
            path, host=HOST, port=port, in_process=True, tls=ServerTLS(stranger.issue("server"))
        ),
        pytest.raises(TLSFailed),
    ):
        next(entries)
    client.close()
