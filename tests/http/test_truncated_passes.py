"""Truncations between two turns of a pass over many followers: no follower is sent what was
truncated without an event that says so."""

from __future__ import annotations

import random
from typing import Any

import pytest
import trio

from datastreamer.server.streaming import feed as pass_module
from datastreamer.storage.stream import DataStream
from tests.http.serving import PATIENCE, Web, serving
from tests.http.test_durable import PATH
from tests.http.test_follow import Events, following, live
from tests.network.fixtures import append


class Copy:
    """What a follower has, as its events say."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, bytes]] = []
        self.ended = False

    async def follow(self, client: Events) -> None:
        """Until the end of the answer. A durable stream has no event for a truncation: it ends."""
        while (event := await client.event()) is not None:
            self.apply(event)
        self.ended = True

    def apply(self, event: dict[str, Any]) -> None:
        if event["event"] == "truncated":
            assert event["data"]["total_entries"] < len(self.rows)
            del self.rows[event["data"]["total_entries"] :]
        elif event["event"] in ("message", "data"):
            for row in event["data"]:
                assert row["number"] == len(self.rows), "an entry is repeated or missing"
                self.rows.append((row["type"], bytes.fromhex(row["data"][2:])))


async def all_have(stream: DataStream, copies: list[Copy]) -> int:
    """Each has the stream as it is now, or its answer has ended; returns how many go on."""
    rows = [(entry.type, entry.data) for entry in stream.entries()]
    with trio.move_on_after(PATIENCE / 3):
        for copy in copies:
            while copy.rows != rows and not copy.ended:
                await trio.sleep(0.001)
    following = [copy for copy in copies if not copy.ended]
    assert sum(copy.rows != rows for copy in following) == 0
    return len(following)


def half_way(web: Web, total: int) -> bool:
    """Whether some followers are past `total` entries and others are not."""
    places = {reader.cursor.number for reader in web.server.other_readers}  # type: ignore[attr-defined]
    return len(places) > 1 and max(places) > total


@pytest.fixture(
    params=["/v1/follow?from=0", f"{PATH}?offset=-1&live=sse"], ids=["follow", "durable"]
)
def target(request: pytest.FixtureRequest) -> str:
    return str(request.param)


async def test_a_truncation_in_the_middle_of_a_pass(
    stream: DataStream, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The followers that the pass has not reached join it again before it continues."""
    monkeypatch.setattr(pass_module, "_PASS_NS", 0)  # eight followers a call
    append(stream, (1, b"kept"))
    async with serving(stream) as web:
        for turn in range(6):
            async with trio.open_nursery() as nursery:
                copies = [Copy() for _ in range(40)]
                await begin(web, target, copies, nursery)
                total = stream.total_entries
                append(stream, (1, b"truncated %d" % turn))
                while not half_way(web, total):
                    await trio.lowlevel.checkpoint()
                stream.truncate(total)
                for _ in range(turn):
                    await trio.lowlevel.checkpoint()
                append(stream, (2, b"in its place %d" % turn))
                assert await all_have(stream, copies)
                nursery.cancel_scope.cancel()


async def test_many_followers_beside_a_writer_that_truncates(
    stream: DataStream, target: str
) -> None:
    choose = random.Random(7)
    append(stream, (1, b"kept"))

    def write() -> None:
        for at in range(10):
            if stream.total_entries > 1 and choose.random() < 0.4:
                stream.truncate(stream.total_entries - 1)
            append(stream, *[(at, choose.randbytes(30))] * choose.randrange(1, 4))

    async with serving(stream, max_followers=100) as web, trio.open_nursery() as nursery:
        copies = [Copy() for _ in range(100)]
        await begin(web, target, copies, nursery)
        for _ in range(10):
            await trio.to_thread.run_sync(write)
        append(stream, (3, b"end"))
        await all_have(stream, copies)
        nursery.cancel_scope.cancel()


async def begin(web: Web, target: str, copies: list[Copy], nursery: trio.Nursery) -> None:
    """Have each of `copies` follow; return when all are live."""

    async def follow(copy: Copy) -> None:
        async with following(web, target=target) as client:
            await copy.follow(client)

    for copy in copies:
        nursery.start_soon(follow, copy)
    await live(web, len(copies))
