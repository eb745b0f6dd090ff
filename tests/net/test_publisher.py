"""The publisher, against a server on loopback and through connections that are cut."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio

from datastreamer.errors import (
    OperationOpen,
)
from datastreamer.net.listen import open_listeners
from datastreamer.net.publisher import connect_publisher
from datastreamer.net.publishing import Publishing
from datastreamer.net.server import Server
from datastreamer.protocol.resume import Backoff
from datastreamer.storage.stream import DataStream
from tests.net.conftest import PATIENCE

TOKEN = b"a token"
QUICK = Backoff(0.001, 0.01)


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    path = tmp_path / "token"
    path.write_bytes(TOKEN)
    return path


@pytest.fixture
def durable(path: Path) -> Any:
    with DataStream.create(path, sync="commit", index="memory") as made:
        yield made


@asynccontextmanager
async def serving(
    stream: DataStream, token_file: Path, **terms: Any
) -> AsyncIterator[tuple[Server, int]]:
    server = Server(stream, publishing=Publishing(token_file=token_file, **terms))
    with trio.fail_after(PATIENCE):
        async with trio.open_nursery() as nursery:
            [(_, port)] = await nursery.start(server.run, open_listeners("127.0.0.1", 0))
            yield server, port
            nursery.cancel_scope.cancel()


publisher_at = partial(connect_publisher, "127.0.0.1", token=TOKEN, backoff=QUICK)


def contents(stream: DataStream) -> list[tuple[int, bytes]]:
    return [(e.type, e.data) for e in stream.entries()]


async def test_operations_are_on_disk_when_they_return(
    durable: DataStream, token_file: Path
) -> None:
    async with serving(durable, token_file) as (_, port), publisher_at(port) as publisher:
        async with publisher.atomic_op() as op:
            assert op.add_bookmark(b"key") == 0
            assert op.add_entry(3, b"one") == 1
            with pytest.raises(OperationOpen):
                publisher.atomic_op()
            assert durable.total_entries == 0
        assert durable.total_entries == publisher.total_entries == 2
        op = publisher.atomic_op()
        op.add_entry(3, b"forgotten")
        op.roll_back()
        pending = []
        for number in range(200):
            op = publisher.atomic_op()
            op.add_entry(4, b"%d" % number)
            pending.append(await op.commit(wait=False))
        receipts = [await each.wait() for each in pending]
        assert [r.first_entry for r in receipts] == list(range(2, 202))
        op = publisher.atomic_op()
        for _ in range(8):
            op.add_entry(5, bytes(900_000))
        op.add_entry(5, bytes(1_048_559))
        await op.commit()
        assert publisher.unacknowledged == 0
    assert [data for kind, data in contents(durable) if kind == 4] == [
        b"%d" % n for n in range(200)
    ]
    assert durable.total_entries == 211
