"""Times over HTTP: in entries, and as places to begin at."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import trio

from datastreamer.selection.times import moment_text
from datastreamer.storage.stream import DataStream
from tests.http.asking import ask
from tests.http.serving import serving
from tests.http.test_entries import read, refused
from tests.network.timed import COMMITS, PLACES, TOTAL, Clock, ms, timed

SINCE = {number: seconds for first, seconds in COMMITS for number in range(first, TOTAL)}
TIMES = [moment_text(ms(SINCE[number])) for number in range(TOTAL)]


async def entries(port: int, query: str, form: str = "ndjson") -> list[dict[str, Any]]:
    code, _, body = await ask(port, f"/v1/entries?format={form}&{query}")
    assert code == 200, body
    if form == "json":
        found: list[dict[str, Any]] = json.loads(body)
        return found
    return [json.loads(line) for line in body.splitlines()]


@pytest.mark.parametrize("form", ["ndjson", "json"])
async def test_entries_have_times(stream: DataStream, form: str) -> None:
    clock = timed(stream)
    async with serving(stream) as web:
        found = await entries(web.port, "from=0", form)
        assert [each["time"] for each in found] == TIMES
        assert [list(each) for each in found[:1]] == [["number", "type", "length", "data", "time"]]
        some = await entries(web.port, "type=1&from=2&to=10", form)
        assert [(each["number"], each["time"]) for each in some] == [
            (number, TIMES[number]) for number in (3, 6, 9)
        ]
        assert (await read(web, "/v1/entries/4"))["time"] == TIMES[4]
        decoded = await read(web, "/v1/entries/4?decode=zkevm")
        assert decoded["time"] == TIMES[4]
        durable = await read(web, "/v1/streams/default?offset=-1")
        assert [each["time"] for each in durable] == TIMES
        clock.commit(2)
        later = await entries(web.port, f"from={TOTAL - 1}", form)
        assert [each.get("time") for each in later] == [TIMES[-1], None, None]
        assert "time" not in await read(web, f"/v1/entries/{TOTAL}")


async def test_a_follower_gets_times(stream: DataStream) -> None:
    clock = timed(stream)
    async with serving(stream) as web:
        request = b"GET /v1/follow?from=3 HTTP/1.1\r\nHost: localhost\r\n\r\n"
        found: list[dict[str, Any]] = []
        async with await trio.open_tcp_stream("127.0.0.1", web.port) as follower:
            await follower.send_all(request)
            received = b""
            while len(found) < TOTAL - 3:
                received += await follower.receive_some(65536)
                lines = [line[6:] for line in received.split(b"\n") if line.startswith(b"data: ")]
                found = [each for line in lines if line.endswith(b"]") for each in json.loads(line)]
        assert [each["time"] for each in found] == TIMES[3:]
        assert clock.stream.total_entries == TOTAL


@pytest.mark.parametrize("query", ["/v1/entries?from=time:", "/v1/follow?from=time:"])
async def test_from_a_time_on(stream: DataStream, query: str) -> None:
    timed(stream)
    async with serving(stream) as web:
        if "entries" in query:
            for seconds, number in PLACES:
                for moment in (str(ms(seconds)), moment_text(ms(seconds))):
                    found = await entries(web.port, f"from=time:{moment}")
                    assert [each["number"] for each in found] == list(range(number, TOTAL))
            for moment in ("2026-11-29T08:01:00+01:00", "2026-11-29T08:01:00%2B01:00"):
                found = await entries(web.port, f"from=time:{moment}&limit=1")
                assert [each["number"] for each in found] == [5]
            # What it leads to may change, so it is not kept.
            _, headers, _ = await ask(web.port, f"{query}{ms(60)}&to=7")
            assert "Etag" not in headers
            code, headers, _ = await ask(web.port, f"{query}{ms(60)}&limit=2&to=10")
            assert (code, headers["Link"].split(";")[0]) == (
                200,
                "</v1/entries?from=7&to=10&limit=2&format=ndjson>",
            )
        for wrong in ("", "x", "7", "2026-11-29T07:00:00", "2026-13-01", "-1"):
            code, detail = await refused(web, f"{query}{wrong}")
            assert code == 400
            assert detail.startswith("from: ")
            assert "is not a time: write 2026-11-29T07:00:00Z" in detail


async def test_a_time_that_is_not_known(stream: DataStream) -> None:
    clock = Clock(stream)
    clock.commit(4)
    clock.commit(4, 60.0)
    async with serving(stream) as web:
        for path in ("/v1/entries", "/v1/follow"):
            code, detail = await refused(web, f"{path}?from=time:2026-11-29T07:00:00Z")
            assert (code, detail.startswith("it is not known which entry was committed")) == (
                404,
                True,
            )
            assert "entry 4, of 2026-11-29T07:01:00" in detail
            assert stream.path not in detail
        found = await entries(web.port, "from=time:2026-11-29T07:01:00.500Z")
        assert [each["number"] for each in found] == [4, 5, 6, 7]


async def test_a_tag_is_weak(stream: DataStream, path: Path) -> None:
    """The time of an entry may become known later; it is the same entry."""
    clock = Clock(stream)
    clock.commit(2)
    async with serving(stream) as web:
        _, before, body = await ask(web.port, "/v1/entries/1")
        assert b"time" not in body
        stream.parts.relay.put_time_marks([(0, ms(0))], 1000, 2)
        for known in (before["Etag"], before["Etag"].removeprefix("W/")):
            assert (await ask(web.port, "/v1/entries/1", f"If-None-Match: {known}"))[0] == 304
        assert before["Etag"].startswith('W/"')
        assert b'"time"' in (await ask(web.port, "/v1/entries/1"))[2]
