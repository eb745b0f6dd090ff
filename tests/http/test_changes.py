"""Followers and updates and truncations of what they were sent, also while they were away."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trio

from datastreamer.selection.times import moment_text
from datastreamer.storage.stream import DataStream
from tests.http.asking import ask
from tests.http.serving import serving
from tests.http.test_durable import PATH, get
from tests.http.test_entries import refused
from tests.http.test_follow import Events, following, live
from tests.http.test_ranges import held
from tests.network.fixtures import append, until

# The file records this many changes.
RECORDED = 16


def update(stream: DataStream, number: int, data: bytes) -> None:
    stream.update_entry(number, 1, data)


async def updates(client: Events) -> list[tuple[int, bytes]]:
    """The entries of the next event, which is of updates."""
    event = await client.event()
    assert event is not None
    assert event["event"] == "updated"
    return [(row["number"], bytes.fromhex(row["data"][2:])) for row in event["data"]]


@pytest.mark.parametrize("whose", ["live", "behind"])
async def test_an_update_is_an_event(stream: DataStream, whose: str) -> None:
    append(stream, *[(1, b"x" * 1000)] * 20)
    async with serving(stream) as web, following(web, "?from=0") as client:
        sent = len(await client.entries(20 if whose == "live" else 1))
        if whose == "live":
            await live(web)
        # One that the client was not sent is sent as it is then.
        await trio.to_thread.run_sync(update, stream, 0, b"y" * 1000)
        while (event := await client.event()) is not None and event["event"] == "message":
            sent += len(event["data"])
        assert event is not None
        assert event["event"] == "updated"
        [entry] = event["data"]
        assert entry.pop("time") == moment_text(stream.time_of(0) or 0)
        assert entry == {"number": 0, "type": 1, "length": 1000, "data": "0x" + "79" * 1000}
        append(stream, (2, b"new"))
        assert await client.entries(21 - sent) == held(stream, sent, 21)
        assert client.id == "21-1"


async def test_followers_in_the_pass_are_sent_updates_once(stream: DataStream) -> None:
    append(stream, *[(1, b"%03d" % at) for at in range(20)])
    async with serving(stream) as web, trio.open_nursery() as nursery:

        async def follow() -> None:
            async with following(web, "?from=0") as client:
                assert await client.entries(20) == before
                for at in range(5):
                    assert await updates(client) == [(at, b"new")]
                assert await client.entries(1) == [(20, 1, b"end")]

        before = held(stream, 0, 20)
        for _ in range(10):
            nursery.start_soon(follow)
        await live(web, 10)
        for at in range(5):
            await trio.to_thread.run_sync(update, stream, at, b"new")
            await live(web, 10)
        append(stream, (1, b"end"))


CHANGES: dict[str, tuple[Callable[[DataStream], None], list[Any], int]] = {
    "truncated, and grown beyond": (
        lambda stream: (stream.truncate(3), append(stream, *[(2, b"two")] * 5))[0],
        [("truncated", {"total_entries": 3})],
        3,
    ),
    "truncated after what the client has": (
        lambda stream: (append(stream, *[(2, b"two")] * 5), stream.truncate(7))[0],
        [],
        5,
    ),
    "updated": (
        lambda stream: (update(stream, 1, b"new"), append(stream, (2, b"two")))[0],
        [("updated", [1])],
        5,
    ),
    "updated, and then truncated": (
        lambda stream: (
            *(update(stream, 1, b"new"), update(stream, 4, b"cut"), stream.truncate(4)),
            append(stream, *[(2, b"two")] * 5),
        )[0],
        [("updated", [1]), ("truncated", {"total_entries": 4})],
        4,
    ),
}


@pytest.mark.parametrize("what", CHANGES)
async def test_a_change_while_a_client_was_away(stream: DataStream, what: str) -> None:
    change, expected, place = CHANGES[what]
    append(stream, *[(1, b"one")] * 5)
    async with serving(stream) as web:
        async with following(web, "?from=0") as client:
            await client.entries(5)
        change(stream)
        async with following(web, "", f"Last-Event-ID: {client.id}") as client:
            for name, data in expected:
                event = await client.event()
                assert event is not None
                found = event["data"]
                if name == "updated":
                    found = [row["number"] for row in found]
                assert (event["event"], found) == (name, data)
            rest = held(stream, place, stream.total_entries)
            assert await client.entries(len(rest)) == rest
            assert client.id == f"{stream.total_entries}-{stream.epoch}"


async def test_changes_are_reported_until_the_client_has_all_of_them(stream: DataStream) -> None:
    append(stream, *[(1, b"x" * 5000)] * 10)
    async with serving(stream) as web:
        async with following(web, "?from=0") as client:
            await client.entries(10)
        for at in range(5):
            update(stream, at, b"%d" % at * 5000)
        seen = client.id
        for _ in range(2):
            async with following(web, "", f"Last-Event-ID: {seen}") as client:
                assert len(await updates(client)) == 1
        async with following(web, "", f"Last-Event-ID: {seen}") as client:
            for at in range(5):
                assert client.id is None
                assert await updates(client) == [(at, b"%d" % at * 5000)]
            assert client.id == "10-5"
        async with following(web, "", f"Last-Event-ID: {client.id}") as client:
            append(stream, (1, b"new"))
            assert await client.entries(1) == [(10, 1, b"new")]


async def test_the_id_moves_past_updates_that_were_not_selected(stream: DataStream) -> None:
    append(stream, (1, b"one"), (2, b"two"))
    async with serving(stream) as web, following(web, "?from=0&type=2") as client:
        client.selects = True
        await client.entries(1)
        await live(web)
        await trio.to_thread.run_sync(update, stream, 0, b"new")
        assert (await updates(client), client.id) == ([], "2-1")


async def test_changes_that_are_not_known_any_more(stream: DataStream) -> None:
    append(stream, *[(1, b"one")] * 5)
    async with serving(stream) as web:
        async with following(web, "?from=0") as client:
            await client.entries(5)
        headers, _ = await get(web)
    path = stream.path
    for _ in range(RECORDED + 1):
        update(stream, 1, b"two")
    with DataStream.open(path, follow=True, index="memory") as opened:
        async with serving(opened) as web:
            line = f"Last-Event-ID: {client.id}"
            code, detail = await refused(web, "/v1/follow", line)
            assert (code, "begin again" in detail) == (410, True)
            offset = headers["Stream-Next-Offset"]
            assert (await refused(web, f"{PATH}?offset={offset}"))[0] == 410
            # The last ones are known.
            async with following(web, "", "Last-Event-ID: 5-1") as client:
                assert await updates(client) == [(1, b"two")]


async def test_a_change_by_another_process_that_is_not_recorded(stream: DataStream) -> None:
    """The answer ends, and the client cannot continue."""
    append(stream, *[(1, b"one")] * 5)
    with DataStream.open(stream.path, follow=True, index="memory") as opened:
        async with serving(opened) as web, following(web, "?from=0") as client:
            await client.entries(5)
            await live(web)
            for _ in range(2 * RECORDED):
                update(stream, 1, b"two")
            assert await client.event() is None
            assert client.ended
            assert (await refused(web, "/v1/follow", f"Last-Event-ID: {client.id}"))[0] == 410


async def test_a_durable_offset_of_another_stream(stream: DataStream, tmp_path: Path) -> None:
    append(stream, *[(1, b"one")] * 5)
    async with serving(stream) as web:
        headers, _ = await get(web)
    with DataStream.create(tmp_path / "other.bin", sync="os", index="memory") as other:
        append(other, *[(2, b"two")] * 9)
        async with serving(other) as web:
            for live_ in ("", "&live=long-poll", "&live=sse"):
                offset = f"?offset={headers['Stream-Next-Offset']}{live_}"
                code, detail = await refused(web, PATH + offset)
                assert (code, "another stream" in detail) == (410, True)


async def test_an_event_id_of_a_stream_that_was_changed_more_often(stream: DataStream) -> None:
    """It is of another stream."""
    append(stream, *[(1, b"one")] * 5)
    async with serving(stream) as web:
        assert (await refused(web, "/v1/follow", "Last-Event-ID: 3-1"))[0] == 410


@pytest.mark.parametrize("how", ["truncated", "updated"])
async def test_durable_offsets_before_which_entries_were_changed(
    stream: DataStream, how: str
) -> None:
    append(stream, *[(1, b"one")] * 5)

    def change() -> None:
        if how == "updated":
            update(stream, 1, b"two")
        else:
            stream.truncate(3)
            append(stream, *[(1, b"two")] * 5)

    async with serving(stream) as web, trio.open_nursery() as nursery:
        headers, _ = await get(web)
        offset = headers["Stream-Next-Offset"]
        answers: list[int] = []

        async def poll() -> None:
            answers.append((await ask(web.port, f"{PATH}?offset={offset}&live=long-poll"))[0])

        async def follow() -> None:
            code, _, body = await ask(web.port, f"{PATH}?offset={offset}&live=sse")
            assert (code, b"event: data" in body) == (200, False)
            answers.append(410)

        nursery.start_soon(poll)
        nursery.start_soon(follow)
        await live(web)
        await until(lambda: web.server.broadcast.watchers)
        await trio.to_thread.run_sync(change)
        await until(lambda: len(answers) == 2)
        assert answers == [410, 410]
        assert (await refused(web, f"{PATH}?offset={offset}"))[0] == 410
