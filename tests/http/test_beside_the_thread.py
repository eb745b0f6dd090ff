"""Followers beside live clients of a thread, which moves the view and wakes the followers."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import trio

from datastreamer.http.options import HttpOptions
from datastreamer.http.ports import Ports
from datastreamer.http.serving import start_ports
from datastreamer.storage.stream import DataStream
from tests.http.asking import ask
from tests.http.serving import Web
from tests.http.test_changes import updates
from tests.http.test_follow import following, live
from tests.http.test_ranges import held
from tests.network.fixtures import append, until
from tests.server.streaming.live_thread import (
    armed,
    follower,
    is_armed,
    only_the_thread,
    streaming,
    waker,
    writer,
)

__all__ = ["follower", "only_the_thread", "waker", "writer"]

pytestmark = pytest.mark.usefixtures("only_the_thread")


@asynccontextmanager
async def beside(writer: DataStream, follower: DataStream, waker: int) -> AsyncIterator[Web]:
    """An HTTP port of a server whose thread serves a live client."""
    async with streaming(writer, follower, waker, 1) as (rig, _), trio.open_nursery() as nursery:
        ports = Ports.open(list, http=HttpOptions(port=0))
        port = ports.web[0].getsockname()[1]
        await start_ports(nursery, rig.server, ports)
        await armed(rig, writer)
        web = Web(rig.server, port, rig.address)
        assert is_armed(rig)
        yield web
        nursery.cancel_scope.cancel()


def located(web: Web, writer: DataStream) -> None:
    """Have the view moved by what counts the thread's clients, and no other part."""
    while web.server.broadcast.view.head.entries < writer.total_entries:
        web.server.broadcast.locate()


async def test_followers_get_each_commit(
    writer: DataStream, follower: DataStream, waker: int
) -> None:
    async with beside(writer, follower, waker) as web, following(web, "?from=0") as client:
        total = writer.total_entries
        assert await client.entries(total) == held(writer, 0, total)
        await live(web)
        for at in range(50):
            append(writer, (1, b"%d" % at), (2, b"x" * 1000))
            if at % 2:
                located(web, writer)
            assert await client.entries(2) == held(writer, total + 2 * at, total + 2 * at + 2)
        assert web.server.broadcast._live.armed


async def test_a_wait_for_a_commit(writer: DataStream, follower: DataStream, waker: int) -> None:
    async with beside(writer, follower, waker) as web, trio.open_nursery() as nursery:
        for at in range(20):
            got: list[bytes] = []

            async def poll(got: list[bytes] = got) -> None:
                path = "/v1/streams/default?offset=now&live=long-poll"
                got.append((await ask(web.port, path))[2])

            nursery.start_soon(poll)
            await until(lambda: web.server.broadcast.watchers)
            append(writer, (1, b"%d" % at))
            if at % 2:
                located(web, writer)
            await until(lambda got=got: got)
            assert [row["number"] for row in json.loads(got[0])] == [writer.total_entries - 1]


async def test_a_change_by_another_process(
    writer: DataStream, follower: DataStream, waker: int
) -> None:
    async with beside(writer, follower, waker) as web, following(web, "?from=0") as client:
        total = writer.total_entries
        await client.entries(total)
        await live(web)
        last = writer.entry(total - 1)
        await trio.to_thread.run_sync(writer.update_entry, last.number, last.type, last.data[::-1])
        assert await updates(client) == [(last.number, last.data[::-1])]
        await trio.to_thread.run_sync(writer.truncate, total - 1)
        assert await client.event() == {
            "event": "truncated",
            "data": {"total_entries": total - 1},
        }
        append(writer, (2, b"new"))
        assert await client.entries(1) == held(writer, total - 1, total)
