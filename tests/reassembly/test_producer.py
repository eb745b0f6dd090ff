"""Payloads in a stream, from two producers, and back."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio

from datastreamer import (
    BlockingPublisher,
    DataStream,
    Publishing,
    StreamServer,
    aio,
    connect_publisher,
)
from datastreamer.errors import BadArgument, BadEntryType, BadPayload
from datastreamer.format import MAX_DATA_SIZE
from datastreamer.reassembly import (
    AsyncProducer,
    PayloadComplete,
    Producer,
    Reassembler,
    Splitter,
)
from tests.reassembly.generated import name

IDS = [bytes([number]) * 32 for number in range(1, 31)]


def parts_of(own: bytes) -> dict[bytes, bytes]:
    return {name(1, own[:20]): own * 20, name(2, own[:20]): b""}


def test_two_producers_and_a_consumer(tmp_path: Path) -> None:
    streams = []
    for producer in "ab":
        stream = DataStream.create(tmp_path / f"{producer}.bin", sync="os", index="memory")
        streams.append(stream)
        publisher = Producer(stream, limit=200)
        for own in random.Random(producer).sample(IDS, len(IDS)):
            total = stream.total_entries
            numbers = publisher.publish(own, parts_of(own))
            assert numbers == range(total + 1, stream.total_entries)
            assert stream.bookmark(own[:16]) == total
    entries = [
        {(entry.type, entry.data) for batch in stream.batches() for entry in batch}
        for stream in streams
    ]
    assert entries[0] == entries[1]

    reassembler = Reassembler()
    found = {}
    for source, stream in zip("ab", streams, strict=True):
        for batch in stream.batches():
            for event in reassembler.receive_batch(batch, source):
                assert isinstance(event, PayloadComplete)
                assert event.id not in found
                found[event.id] = event.parts
        stream.close()
    assert set(found) == set(IDS)
    for own, parts in found.items():
        assert b"".join(value for _, value in parts) == own * 20
    assert reassembler.positions() == {"a": streams[0].total_entries, "b": streams[1].total_entries}
    assert reassembler.stats().sources["b"].duplicates == sum(
        len(Splitter(200).split(own, parts_of(own))) for own in IDS
    )


def test_a_payload_that_cannot_be_cut_leaves_nothing(tmp_path: Path) -> None:
    with DataStream.create(tmp_path / "s.bin", sync="os", index="memory") as stream:
        with pytest.raises(BadPayload):
            Producer(stream).publish(IDS[0], {b"short": b""})
        assert stream.total_entries == 0
        numbers = Producer(stream, 7).publish(IDS[0], {})
        assert (numbers, stream.entry(1).type) == (range(1, 2), 7)


def test_wrong_options(tmp_path: Path) -> None:
    with DataStream.create(tmp_path / "s.bin", sync="os", index="memory") as stream:
        for wrong in (0xB0, -1, 2**32):
            with pytest.raises(BadEntryType, match="messages need a u32 entry type"):
                Producer(stream, wrong)
        with pytest.raises(BadArgument, match="at most 1,048,557 bytes, not 1,048,558"):
            Producer(stream, limit=MAX_DATA_SIZE - 1)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[StreamServer]:
    token = tmp_path / "token"
    token.write_text("a token")
    token.chmod(0o600)
    publishing = Publishing(token_file=token)
    with StreamServer(
        tmp_path / "s.bin",
        host="127.0.0.1",
        port=0,
        in_process=True,
        index="memory",
        publishing=publishing,
    ) as server:
        yield server


def expected(tmp_path: Path) -> list[tuple[int, bytes]]:
    """The entries that a stream holds when the first two payloads were published."""
    with DataStream.create(tmp_path / "local.bin", sync="os", index="memory") as stream:
        for own in IDS[:2]:
            Producer(stream, limit=200).publish(own, parts_of(own))
        return [(entry.type, entry.data) for entry in stream.entries()]


def published(server: StreamServer) -> list[tuple[int, bytes]]:
    return [(entry.type, entry.data) for entry in server.stream.entries()]


def test_to_a_server(server: StreamServer, tmp_path: Path) -> None:
    with BlockingPublisher("127.0.0.1", server.port, token="a token") as publisher:
        producer = Producer(publisher, limit=200)
        for own in IDS[:2]:
            total = server.stream.total_entries
            numbers = producer.publish(own, parts_of(own))
            assert numbers == range(total + 1, server.stream.total_entries)
        with pytest.raises(BadPayload):
            producer.publish(IDS[2], {b"short": b""})
        with publisher.atomic_op() as op:  # no operation was left open
            op.roll_back()
    assert published(server) == expected(tmp_path)


@pytest.mark.parametrize("driver", ["trio", "asyncio"])
@pytest.mark.parametrize("wait", [True, False])
def test_to_a_server_in_tasks(
    server: StreamServer, tmp_path: Path, driver: str, wait: bool
) -> None:
    connect = connect_publisher if driver == "trio" else aio.connect_publisher

    async def main() -> None:
        async with connect("127.0.0.1", server.port, token="a token") as publisher:
            producer = AsyncProducer(publisher, limit=200)
            numbers = [await producer.publish(own, parts_of(own), wait) for own in IDS[:2]]
            assert [own.start for own in numbers] == [1, numbers[0].stop + 1]
            if wait:
                assert server.stream.total_entries == numbers[-1].stop
                assert publisher.unacknowledged == 0
            with pytest.raises(BadPayload):
                await producer.publish(IDS[2], {b"short": b""})
            publisher.atomic_op().roll_back()  # no operation was left open

    if driver == "trio":
        trio.run(main)
    else:
        asyncio.run(main())
    assert published(server) == expected(tmp_path)
