"""Following by Server-Sent Events: history, live, resumption, truncation, the end."""

from __future__ import annotations

import json
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio

from datastreamer.storage.stream import DataStream
from tests.http.asking import ask
from tests.http.serving import Web, serving
from tests.http.test_entries import refused
from tests.http.test_ranges import held
from tests.network.fixtures import append


class Events:
    """A client that follows: the entries of its events, as a browser would see them."""

    def __init__(self, stream: trio.abc.Stream) -> None:
        self._stream = stream
        self._got = bytearray()
        self._body = bytearray()
        self.head = b""
        self.id: str | None = None
        self.ended = False
        """Whether the body has its end."""
        self.selects = False
        """Whether it may be sent less than all entries."""

    async def more(self) -> bool:
        """Receive some bytes; False at the end of the connection."""
        try:
            data = await self._stream.receive_some(1 << 16)
        except trio.BrokenResourceError:
            return False
        self._got += data
        if not self.head:
            head, end, rest = bytes(self._got).partition(b"\r\n\r\n")
            if end:
                self.head, self._got = head, bytearray(rest)
        while self.head:
            size, end, _ = bytes(self._got[:20]).partition(b"\r\n")
            length = int(size, 16) if end else 0
            if not end or len(self._got) < len(size) + length + 4:
                break
            self._body += self._got[len(size) + 2 : len(size) + 2 + length]
            del self._got[: len(size) + length + 4]
            self.ended = self.ended or not length
        return bool(data)

    async def event(self) -> dict[str, Any] | None:
        """The next event; None at the end."""
        while True:
            text, end, rest = bytes(self._body).partition(b"\n\n")
            if not end:
                if self.ended or not await self.more():
                    return None
                continue
            self._body = bytearray(rest)
            lines = [line for line in text.decode().split("\n") if not line.startswith(":")]
            parts = (line.partition(":") for line in lines)
            fields = {name: value.removeprefix(" ") for name, _, value in parts}
            if "id" in fields:
                self.id = fields["id"]
            if "data" in fields:
                return {"event": fields.get("event", "message"), "data": json.loads(fields["data"])}

    async def entries(self, count: int) -> list[tuple[int, int, bytes]]:
        """The entries of the next events, as many as expected or more."""
        found: list[tuple[int, int, bytes]] = []
        while len(found) < count:
            event = await self.event()
            assert event is not None
            assert event["event"] == "message"
            rows = event["data"]
            found += [(row["number"], row["type"], bytes.fromhex(row["data"][2:])) for row in rows]
        at = int(str(self.id).partition("-")[0]) if found else 0
        assert not found or at == found[-1][0] + 1 or (self.selects and at > found[-1][0])
        return found


@asynccontextmanager
async def following(
    web: Web, query: str = "", *headers: str, target: str = "/v1/follow"
) -> AsyncIterator[Events]:
    """A client whose answer has begun."""
    lines = (f"GET {target}{query} HTTP/1.1", "Host: localhost", *headers, "", "")
    async with await trio.open_tcp_stream("127.0.0.1", web.port) as stream:
        await stream.send_all("\r\n".join(lines).encode())
        client = Events(stream)
        while not client.head:
            assert await client.more()
        assert client.head.startswith(b"HTTP/1.1 200 ")
        yield client


async def live(web: Web, count: int = 1) -> None:
    """Wait until `count` followers are in the pass."""
    while len(web.server.broadcast.feed) < count:
        await trio.lowlevel.checkpoint()


async def test_history_then_live(stream: DataStream) -> None:
    append(stream, *[(at % 7, b"x" * (at % 300)) for at in range(1000)])
    async with serving(stream) as web, following(web, "?from=10") as client:
        assert b"content-type: text/event-stream" in client.head.lower()
        assert b"x-accel-buffering: no" in client.head.lower()
        assert await client.entries(990) == held(stream, 10, 1000)
        await live(web)
        for _ in range(20):
            append(stream, (1, b"one"), (2, b"two"))
            assert await client.entries(2) == held(
                stream, stream.total_entries - 2, stream.total_entries
            )


async def test_the_default_is_the_head(stream: DataStream) -> None:
    append(stream, *[(1, b"old")] * 3)
    async with serving(stream) as web, following(web) as client:
        await live(web)
        append(stream, (1, b"new"))
        assert await client.entries(1) == [(3, 1, b"new")]


async def test_an_event_is_a_commit_of_bounded_size(stream: DataStream) -> None:
    async with serving(stream) as web, following(web) as client:
        await live(web)
        append(stream, *[(1, b"x" * 100)] * 2000)
        left = 2000
        while left:
            event = await client.event()
            assert event is not None
            assert len(json.dumps(event["data"])) <= 64 * 1024
            left -= len(event["data"])
        append(stream, (1, b"large" * 100_000))
        assert await client.entries(1) == held(stream, 2000, 2001)


async def test_many_followers_get_the_same(stream: DataStream) -> None:
    async with serving(stream, max_followers=50) as web, trio.open_nursery() as nursery:
        got: list[Any] = []

        async def follow() -> None:
            async with following(web, "?from=0") as client:
                got.append(await client.entries(60))

        for _ in range(50):
            nursery.start_soon(follow)
        await live(web, 50)
        code, detail = await refused(web, "/v1/follow")
        assert (code, "followers" in detail) == (503, True)
        for at in range(30):
            append(stream, (1, b"%d" % at), (2, b"x" * 1000))
            await trio.lowlevel.checkpoint()
    assert got == [held(stream, 0, 60)] * 50


async def test_resumption_without_gap_or_repeat(stream: DataStream) -> None:
    """A client that is cut after any number of bytes continues with the event after the last one
    that it has whole."""
    chance = random.Random(5)
    append(stream, *[(at % 7, b"x" * (at % 90)) for at in range(500)])
    got: list[Any] = []
    async with serving(stream) as web, trio.open_nursery() as nursery:

        async def write() -> None:
            for at in range(200):
                append(stream, (1, b"%d" % at))
                await trio.sleep(0.001)

        nursery.start_soon(write)
        seen: list[str] = []
        while len(got) < 700:
            headers = [f"Last-Event-ID: {seen[-1]}"] if seen else []
            budget = chance.randrange(60_000)
            async with following(web, "?from=0", *headers) as client:
                stream_of = client._stream

                class Cut:
                    left = budget

                    async def receive_some(self, size: int, source: Any = stream_of) -> bytes:
                        if self.left <= 0:
                            return b""
                        data = bytes(await source.receive_some(min(size, self.left)))
                        self.left -= len(data)
                        return data

                client._stream = Cut()  # type: ignore[assignment]
                while len(got) < 700 and (event := await client.event()) is not None:
                    got += [row["number"] for row in event["data"]]
                    assert client.id is not None
                    seen.append(client.id)
    assert got == list(range(700))


@pytest.mark.parametrize("whose", ["live", "behind"])
async def test_a_truncation_is_an_event(stream: DataStream, whose: str) -> None:
    append(stream, *[(1, b"x" * 1000)] * 20)
    async with serving(stream) as web, following(web, "?from=0") as client:
        first = await client.entries(20 if whose == "live" else 1)
        if whose == "live":
            await live(web)
        await trio.to_thread.run_sync(stream.truncate, len(first) - 1)
        append(stream, (2, b"other"))
        while (event := await client.event()) is not None and event["event"] == "message":
            assert event["data"][0]["type"] == 1
        assert event == {"event": "truncated", "data": {"total_entries": len(first) - 1}}
        assert client.id == f"{len(first) - 1}-1"
        assert await client.entries(1) == [(len(first) - 1, 2, b"other")]


async def test_a_client_that_was_away_for_a_truncation(stream: DataStream) -> None:
    append(stream, *[(1, b"one")] * 5)
    async with serving(stream) as web, following(web, "", "Last-Event-ID: 9") as client:
        assert await client.event() == {"event": "truncated", "data": {"total_entries": 5}}
        append(stream, (2, b"two"))
        assert await client.entries(1) == [(5, 2, b"two")]


async def test_a_client_that_does_not_read_delays_no_other(stream: DataStream) -> None:
    async with serving(stream) as web, following(web) as slow, following(web) as quick:
        await live(web, 2)
        for _ in range(40):
            append(stream, (1, b"x" * 500_000))
            await quick.entries(1)
        assert await slow.entries(40) == held(stream, 0, 40)
        await live(web, 2)


async def test_the_end_of_the_server_ends_the_body(stream: DataStream) -> None:
    append(stream, (1, b"one"))
    async with serving(stream) as web, following(web, "?from=0") as client:
        assert await client.entries(1) == held(stream, 0, 1)
        await live(web)
        assert await web.server.finish(5)
        assert await client.event() is None
        assert client.ended


async def test_who_leaves_is_forgotten(stream: DataStream) -> None:
    async with serving(stream) as web:
        async with following(web):
            await live(web)
        while web.server.other_readers:
            await trio.lowlevel.checkpoint()
        assert not web.server.broadcast.watchers


async def test_heartbeats(stream: DataStream, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datastreamer.http.answers.follow._HEARTBEAT_SECONDS", 0.01)
    async with serving(stream) as web, following(web) as client:
        while client._body.count(b"\n:\n") < 3:
            assert await client.more()
        # An empty line after it would be an event without data to some clients.
        assert b"\n\n" not in client._body
        append(stream, (1, b"one"))
        assert await client.entries(1) == held(stream, 0, 1)


async def test_forms_of_the_last_id(stream: DataStream) -> None:
    append(stream, *[(1, b"one")] * 5)
    async with serving(stream) as web:
        for query, *headers in (
            ("?from=0&lastEventId=3",),
            ("?Last-Event-ID=3",),
            ("?last-event-id=3", "Last-Event-ID: "),
            ("?lastEventId=1", "Last-Event-ID: 3"),
            ("?from=3&lastEventId=", "Last-Event-ID: "),
        ):
            async with following(web, query, *headers) as client:
                assert await client.entries(2) == held(stream, 3, 5), query


@pytest.mark.parametrize(
    "query, code",
    [("?from=1", 416), ("?from=x", 400), ("?from=block:1", 404), ("?lastEventId=x", 400)],
)
async def test_bad_requests(stream: DataStream, query: str, code: int) -> None:
    async with serving(stream) as web:
        assert (await refused(web, f"/v1/follow{query}"))[0] == code
        assert (await ask(web.port, "/v1/follow", "Last-Event-ID: x"))[0] == 400


SELECTED = "&type=16&type=5&prefix=2:0x01"


def made(number: int) -> tuple[int, bytes]:
    return (16, 5, 7)[number % 3], b"\0\5" + bytes([number % 4]) + bytes(number % 40)


def wanted(entry: tuple[int, int, bytes]) -> bool:
    return entry[1] in (16, 5) and entry[2][2:3] == b"\1"


async def test_selected_entries(stream: DataStream) -> None:
    """From history and live, by the pass and without it; the id counts all entries."""
    append(stream, *map(made, range(3000)))
    async with serving(stream) as web, following(web, f"?from=10{SELECTED}") as client:
        client.selects = True
        due = [it for it in held(stream, 10, 3000) if wanted(it)]
        assert await client.entries(len(due)) == due
        for first in range(3000, 3200, 10):
            append(stream, *map(made, range(first, first + 10)))
            due = [it for it in held(stream, first, first + 10) if wanted(it)]
            found: list[tuple[int, int, bytes]] = []
            while len(found) < len(due):
                found += await client.entries(1)
            assert found == due
        assert client.id is not None
        number = int(client.id)
        await trio.to_thread.run_sync(stream.truncate, 3100)
        event = await client.event()
        assert event == {"event": "truncated", "data": {"total_entries": 3100}}
        updated = next(it for it in reversed(held(stream, 0, 3100)) if wanted(it))
        await trio.to_thread.run_sync(stream.update_entry, updated[0], updated[1], updated[2])
        event = await client.event()
        assert event is not None
        assert event["event"] == "updated"
        assert number <= 3200


async def test_a_follower_of_nothing_knows_where_it_is(
    stream: DataStream, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An id without data comes instead of a comment, also if there are commits all the time."""
    monkeypatch.setattr("datastreamer.http.answers.follow._HEARTBEAT_SECONDS", 0.05)
    append(stream, (7, b"history"))
    async with serving(stream) as web, following(web, f"?from=0{SELECTED}") as client:
        with trio.fail_after(20):
            while client.id != "40":
                total = stream.total_entries
                if total < 40:
                    append(stream, (7, b"%d" % total))
                with trio.move_on_after(0.005):
                    assert await client.event() is None
        append(stream, (16, b"\0\5\1"))
        assert await client.entries(1) == [(40, 16, b"\0\5\1")]
        assert client.id == "41"


@pytest.mark.parametrize(
    "query", ["prefix=0x01", "type=16&prefix=01", "type=x", "type=16&prefix=0x01%0D%0A01"]
)
async def test_bad_selections(stream: DataStream, query: str) -> None:
    async with serving(stream) as web:
        for path in ("follow", "entries"):
            assert (await refused(web, f"/v1/{path}?{query}"))[0] == 400
