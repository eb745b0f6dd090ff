"""How the next query of a client is received: polled for, if the client is prompt and alone."""

from __future__ import annotations

import pytest
import trio
import trio.testing

from datastreamer.server import read_ahead
from datastreamer.server.read_ahead import BusyPoll, ReadAhead
from tests.network.fixtures import PATIENCE
from tests.network.stream_transport import StreamTransport


class Counted(StreamTransport):
    """A client's bytes, given out one `receive` at a time; counts how they were received."""

    def __init__(self) -> None:
        ours, self.client = trio.testing.memory_stream_pair()
        super().__init__(ours)
        self.polls = self.waits = 0
        self.bytes_soon: list[bytes] = []

    async def receive(self) -> bytes:
        self.waits += 1
        return await super().receive()

    def receive_now(self) -> bytes | None:
        self.polls += 1
        return self.bytes_soon.pop() if self.bytes_soon else None


async def prompt(transport: Counted, receiving: ReadAhead, times: int) -> None:
    """The client has sent its next query before the server waits for it."""
    for _ in range(times):
        await transport.client.send_all(b"query")
        assert await receiving.receive_query() == b"query"


async def test_a_prompt_client_is_polled_for() -> None:
    transport, poll = Counted(), BusyPoll()
    receiving = ReadAhead(transport, poll)
    await prompt(transport, receiving, 16)
    assert (transport.polls, transport.waits) == (0, 16)
    transport.bytes_soon = [b"second", b"first"]
    assert await receiving.receive_query() == b"first"
    assert await receiving.receive_query() == b"second"
    assert (transport.polls, transport.waits) == (2, 16)
    # An end of the stream is received, too.
    transport.bytes_soon = [b""]
    assert await receiving.receive_query() == b""


async def test_a_slow_client_is_not_polled_for() -> None:
    transport = Counted()
    receiving = ReadAhead(transport, BusyPoll())
    await prompt(transport, receiving, 16)
    polls = []
    for _ in range(3):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(receiving.receive_query)
            await trio.sleep(0.01)
            await transport.client.send_all(b"query")
        polls.append(transport.polls)
    assert polls == [polls[0]] * 3
    # It is prompt again.
    await prompt(transport, receiving, 1)
    transport.bytes_soon = [b"soon"]
    assert await receiving.receive_query() == b"soon"


async def test_clients_that_take_turns_are_not_polled_for() -> None:
    poll = BusyPoll()
    transports = [Counted(), Counted()]
    both = [ReadAhead(transport, poll) for transport in transports]
    for _ in range(40):
        for transport, receiving in zip(transports, both, strict=True):
            await prompt(transport, receiving, 1)
    assert [transport.polls for transport in transports] == [0, 0]


async def test_other_tasks_run_while_a_client_is_polled_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(read_ahead, "_POLLS", 1 << 30)
    monkeypatch.setattr(read_ahead, "_PROMPT_SECONDS", PATIENCE)
    transport = Counted()
    receiving = ReadAhead(transport, BusyPoll())
    await prompt(transport, receiving, 16)
    got: list[bytes] = []

    async def receive() -> None:
        got.append(await receiving.receive_query())

    with trio.fail_after(PATIENCE):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(receive)
            while transport.polls < 3:
                await trio.lowlevel.checkpoint()
            transport.bytes_soon = [b"query"]
        assert got == [b"query"]
        # It ends when it is cancelled.
        async with trio.open_nursery() as nursery:
            nursery.start_soon(receive)
            polls = transport.polls
            while transport.polls < polls + 3:
                await trio.lowlevel.checkpoint()
            nursery.cancel_scope.cancel()
    assert got == [b"query"]


async def test_a_client_that_is_heard_already_is_not_polled_for() -> None:
    transport = Counted()
    receiving = ReadAhead(transport, BusyPoll())
    await prompt(transport, receiving, 16)
    heard = trio.Event()
    async with trio.open_nursery() as nursery:
        receiving.listen(nursery, heard.set)
        await transport.client.send_all(b"query")
        await heard.wait()
        assert await receiving.receive_query() == b"query"
    assert transport.polls == 0


async def test_a_client_that_was_answered_with_others_gets_one_more_turn() -> None:
    transport, poll = Counted(), BusyPoll()
    receiving, other = ReadAhead(transport, poll), ReadAhead(Counted(), poll)
    transport.bytes_soon = [b"at once"]
    assert await receiving.receive_query(paused=True) == b"at once"
    assert (transport.polls, transport.waits) == (1, 0)
    ran: list[str] = []

    async def meanwhile() -> None:
        ran.append("another task")
        await transport.client.send_all(b"query")

    async with trio.open_nursery() as nursery:
        nursery.start_soon(meanwhile)
        assert await receiving.receive_query(paused=True) == b"query"
    assert ran
    assert (transport.polls, transport.waits) == (2, 1)
    # Alone until another one asks.
    assert receiving.alone
    assert not other.alone
    poll.last, poll.row = other, 1
    assert not receiving.alone
    assert not other.alone
