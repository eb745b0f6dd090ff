"""Answers to different clients that are sent together."""

from __future__ import annotations

import contextlib

import pytest
import trio
import trio.testing

from datastreamer.server.answers import burst as burst_module
from datastreamer.server.answers.burst import AnswerBurst
from datastreamer.server.streaming.output import ClientOutput
from datastreamer.storage.stream import DataStream
from tests.network import model as wire
from tests.network.fixtures import append, over_loopback
from tests.network.model import OK
from tests.network.stream_transport import StreamTransport


class Counts:
    bytes_sent = 0


class Client(StreamTransport):
    """Takes `room` bytes at once, or fails."""

    def __init__(self, log: list[str], name: str, room: int = 1000, broken: bool = False) -> None:
        ours, self.its = trio.testing.memory_stream_pair()
        super().__init__(ours)
        self.log, self.name, self.room, self.broken = log, name, room, broken
        self.got = b""
        self.output = ClientOutput(self, Counts())

    def send_now(self, data: bytes | bytearray | memoryview) -> int:
        self.log.append(f"sent {self.name}")
        if self.broken:
            raise trio.BrokenResourceError("gone")
        self.got += bytes(data[: self.room])
        return min(len(data), self.room)

    async def send(self, data: bytes | bytearray | memoryview) -> None:
        self.log.append(f"rest {self.name}")
        self.got += bytes(data)


async def answer(client: Client, burst: AnswerBurst) -> None:
    client.log.append(f"answers {client.name}")
    await burst.send(client.output, b"0123456789")
    client.log.append(f"done {client.name}")


async def test_answers_of_one_turn_are_sent_together() -> None:
    log: list[str] = []
    burst = AnswerBurst()
    clients = [Client(log, "a"), Client(log, "b", room=4), Client(log, "c")]
    for _ in range(2):
        log.clear()
        async with trio.open_nursery() as nursery:
            for client in clients:
                nursery.start_soon(answer, client, burst)
        assert [line.split()[0] for line in log[:6]] == ["answers"] * 3 + ["sent"] * 3
        assert sorted(log[6:]) == ["done a", "done b", "done c", "rest b", "sent b"]
    assert [client.got for client in clients] == [b"01234567890123456789"] * 3
    burst.close()
    burst.close()


async def test_one_client_s_failure_is_its_own() -> None:
    log: list[str] = []
    burst = AnswerBurst()
    clients = [Client(log, "a"), Client(log, "b", broken=True), Client(log, "c")]
    failed = []

    async def attempt(client: Client) -> None:
        try:
            await answer(client, burst)
        except trio.BrokenResourceError:
            failed.append(client.name)

    async with trio.open_nursery() as nursery:
        for client in clients:
            nursery.start_soon(attempt, client)
    assert failed == ["b"]
    assert [client.got for client in clients] == [b"0123456789", b"", b"0123456789"]
    burst.close()


async def test_the_first_of_many_does_not_wait_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(burst_module, "_MOST", 4)
    log: list[str] = []
    burst = AnswerBurst()
    async with trio.open_nursery() as nursery:
        for at in range(10):
            nursery.start_soon(answer, Client(log, str(at)), burst)
    kinds = [line.split()[0] for line in log[:20]]
    assert kinds == [*(["answers"] * 4 + ["sent"] * 4) * 2, *["answers"] * 2, *["sent"] * 2]
    burst.close()


async def test_a_cancelled_one() -> None:
    """Its connection is lost; the others are answered."""
    log: list[str] = []
    burst = AnswerBurst()
    lost, other = Client(log, "lost"), Client(log, "other")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(answer, other, burst)
        with trio.CancelScope() as scope:
            scope.cancel()
            await answer(lost, burst)
    assert scope.cancelled_caught
    assert other.got == b"0123456789"
    burst.close()


async def test_who_is_answered_with_others(
    stream: DataStream, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clients that ask in turn; one that asks alone is answered at once."""
    sizes: list[int] = []
    send_all = AnswerBurst._send_all

    def counted(burst: AnswerBurst) -> None:
        sizes.append(len(burst._due))
        send_all(burst)

    monkeypatch.setattr(AnswerBurst, "_send_all", counted)
    append(stream, (1, b"event"))
    answered = OK + wire.pack(0, 1, b"event", packet=0xFE)
    async with over_loopback(stream) as rig, contextlib.AsyncExitStack() as stack:
        peers = [await stack.enter_async_context(rig.client()) for _ in range(5)]
        for _ in range(10):
            for peer in peers:
                # At once, so that the event loop finds them in one turn.
                peer.stream.socket._sock.sendall(wire.entry(0))
            for peer in peers:
                await peer.expect(answered)
        assert max(sizes) == 5
        assert sum(sizes) == 50
        sizes.clear()
        for _ in range(10):
            await peers[0].ask(wire.entry(0), answered)
        assert sum(sizes) <= 2
