"""What a client sends is received while its session does something else, too."""

from __future__ import annotations

import pytest
import trio
import trio.testing

from datastreamer.server.read_ahead import ReadAhead
from tests.network.stream_transport import StreamTransport


async def test_what_was_heard_meanwhile_is_received_next() -> None:
    ours, client = trio.testing.memory_stream_pair()
    receiving, heard = ReadAhead(StreamTransport(ours)), trio.Event()
    async with trio.open_nursery() as nursery:
        receiving.listen(nursery, heard.set)
        assert not receiving.heard
        await client.send_all(b"first")
        await heard.wait()
        assert receiving.heard
        await client.send_all(b"second")
        assert await receiving.receive() == b"first"
        assert not receiving.heard
        assert await receiving.receive() == b"second"


async def test_a_connection_that_is_lost_meanwhile() -> None:
    ours, _ = trio.testing.memory_stream_pair()
    receiving, heard = ReadAhead(StreamTransport(ours)), trio.Event()
    async with trio.open_nursery() as nursery:
        receiving.listen(nursery, heard.set)
        await trio.testing.wait_all_tasks_blocked()
        await ours.aclose()
        await heard.wait()
        with pytest.raises(trio.ClosedResourceError):
            await receiving.receive()
