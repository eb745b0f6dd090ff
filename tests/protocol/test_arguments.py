"""Numbers and keys that clients and publishers are given."""

from __future__ import annotations

from typing import Any

import pytest
import trio

from datastreamer.client.blocking_client import BlockingClient
from datastreamer.client.trio_driver import connect
from datastreamer.errors import BadBookmark, BadEntryType, UsageError
from datastreamer.protocol.batches import BatchLimits
from datastreamer.publisher.blocking_publisher import BlockingPublisher
from datastreamer.publisher.trio_publisher import connect_publisher
from datastreamer.relay.relay import Relay
from tests.network.stub import Stub, sample
from tests.network.wired import client_of, commands, listed


async def refuses(what: str, connect: Any, blocking: Any, **options: Any) -> None:
    """Before anything is connected."""
    for place in ("localhost", 1), ("no such host", 1):
        with pytest.raises(UsageError, match=f"^{what} must be "):
            async with connect(*place, **options):
                pass
        with pytest.raises(UsageError, match=f"^{what} must be "):
            await trio.to_thread.run_sync(lambda: blocking(*place, **options))  # noqa: B023


@pytest.mark.parametrize("most", [0, -1, 1.5, "16"])
async def test_publishers_that_could_let_nothing_out(most: Any) -> None:
    await refuses(
        "max_unacknowledged", connect_publisher, BlockingPublisher, max_unacknowledged=most
    )


NO_U64: list[Any] = [-1, 2**64, 1.5, "5"]
no_u64 = pytest.mark.parametrize("number", NO_U64)


@no_u64
async def test_stream_types_that_are_none(number: Any) -> None:
    await refuses("stream_type", connect, BlockingClient, stream_type=number)
    await refuses("stream_type", connect_publisher, BlockingPublisher, stream_type=number)
    with pytest.raises(UsageError, match="stream_type must be "):
        Relay([("localhost", 1)], "nowhere.bin", stream_type=number)


@no_u64
@pytest.mark.parametrize("what", ["epoch", "next_entry"])
async def test_what_sources_may_not_ask_for(what: str, number: Any) -> None:
    await refuses(what, connect_publisher, BlockingPublisher, **{what: number})


async def test_a_lease_that_no_request_can_hold() -> None:
    await refuses("lease", connect_publisher, BlockingPublisher, lease=2**32 / 1000)


@no_u64
async def test_entries_that_cannot_be(number: Any) -> None:
    stub = Stub(sample(10))
    async with client_of(stub) as (client, _):
        with pytest.raises(UsageError, match="entry numbers must be 0 "):
            await client.entry(number)
        with pytest.raises(UsageError, match="an entry's number must be "):
            await listed(client.entries_by_number([1, number]))
        for iterate in client.entries, client.batches, client.read_batches:
            with pytest.raises(UsageError, match="from_entry must be "):
                iterate(from_entry=number)
            with pytest.raises(UsageError, match="stop must be "):
                iterate(stop=number)
        with pytest.raises(UsageError, match="from_entry must be "):
            # A small negative number counts from the end.
            await client.batch_read(-(2**64) if number == -1 else number)
        assert not commands(stub)
        assert await client.entry(6) == sample(10)[6]


@pytest.mark.parametrize("number", [-1, 2**32, 1.5, "5"])
async def test_limits_that_cannot_be(number: Any) -> None:
    stub = Stub(sample(10))
    async with client_of(stub) as (client, _):
        for what in "max_count", "max_bytes":
            with pytest.raises(UsageError, match=f"^{what} must be "):
                await client.batch_read(0, **{what: number})
            with pytest.raises(UsageError, match="the limits of a batch must be "):
                BatchLimits(**{what: number})
        with pytest.raises(BadEntryType):
            await client.batch_read(0, types=[number])
        if number != 1.5:
            with pytest.raises(UsageError, match="wait must be 0 to "):
                await client.batch_read(0, wait=number)
        assert not commands(stub)


async def test_keys_that_are_no_bytes() -> None:
    stub = Stub(sample(10))
    async with client_of(stub) as (client, _):
        asked: list[Any] = ["k", 5, None]
        for key in asked:
            with pytest.raises(BadBookmark, match="a bookmark key must be 1 to 16 bytes, not "):
                await client.bookmark(key)
            if key is not None:
                with pytest.raises(BadBookmark):
                    client.entries(from_bookmark=key)
        assert not commands(stub)


async def test_another_integer_is_no_bookmark() -> None:
    class Number:
        def __index__(self) -> int:
            return 6

    number: Any = Number()
    async with client_of(Stub(sample(10))) as (client, _):
        assert await listed(client.entries(from_entry=number, stop=10)) == sample(10)[6:]
