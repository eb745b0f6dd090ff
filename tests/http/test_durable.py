"""The read side of Durable Streams: as the protocol says, and with its published client."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import trio

from datastreamer.storage.stream import DataStream
from tests.http.asking import ask
from tests.http.serving import Web, serving
from tests.http.test_entries import refused
from tests.http.test_follow import following, live
from tests.network.fixtures import append
from tests.programs import needs, npm_package

PATH = "/v1/streams/default"


async def get(web: Web, query: str = "", *headers: str) -> tuple[dict[str, str], Any]:
    code, found, body = await ask(web.port, PATH + query, *headers)
    assert code == 200, body
    return found, json.loads(body)


async def test_catching_up_in_chunks(stream: DataStream) -> None:
    append(stream, *[(at % 7, b"x" * 300) for at in range(5000)])
    got: list[int] = []
    offsets = ["-1"]
    async with serving(stream) as web:
        while True:
            headers, rows = await get(web, f"?offset={offsets[-1]}")
            got += [row["number"] for row in rows]
            offsets.append(headers["Stream-Next-Offset"])
            if headers.get("Stream-Up-To-Date") == "true":
                break
            assert "max-age" in headers["Cache-Control"]
        assert got == list(range(5000))
        assert len(offsets) > 3
        assert offsets[1:] == sorted(offsets[1:])
        tag = headers["Etag"]
        code, _, body = await ask(web.port, f"{PATH}?offset={offsets[-2]}", f"If-None-Match: {tag}")
        assert (code, body) == (304, b"")
        headers, rows = await get(web, f"?offset={offsets[-1]}")
        assert (rows, headers["Stream-Next-Offset"]) == ([], offsets[-1])
        headers, rows = await get(web, "?offset=now")
        assert (rows, headers["Stream-Up-To-Date"]) == ([], "true")
        assert (headers["Cache-Control"], "Etag" in headers) == ("no-store", False)


async def test_head_and_writing(stream: DataStream) -> None:
    append(stream, (1, b"one"))
    async with serving(stream) as web:
        line = "HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
        code, headers, body = await ask(web.port, f"HEAD {PATH} {line}".encode())
        assert (code, body, headers["Content-Type"]) == (200, b"", "application/json")
        assert headers["Stream-Next-Offset"].endswith("_00000000000000000001")
        for method in ("PUT", "POST", "DELETE"):
            code, headers, _ = await ask(web.port, f"{method} {PATH} {line}".encode())
            assert (code, headers["Allow"]) == (405, "GET, HEAD")
        assert (await refused(web, "/v1/streams/other"))[0] == 404
        for query in ("offset=1", "offset=", "live=sse", "live=long-poll", "offset=now&live=on"):
            assert (await refused(web, f"{PATH}?{query}"))[0] == 400


async def test_long_poll(stream: DataStream, monkeypatch: pytest.MonkeyPatch) -> None:
    append(stream, (1, b"one"))
    async with serving(stream) as web, trio.open_nursery() as nursery:
        headers, rows = await get(web, "?offset=-1&live=long-poll")
        assert [row["number"] for row in rows] == [0]
        offset, cursor = headers["Stream-Next-Offset"], headers["Stream-Cursor"]
        query = f"?offset={offset}&live=long-poll&cursor={cursor}"

        async def poll() -> None:
            headers, rows = await get(web, query)
            assert [row["number"] for row in rows] == [1]
            assert int(headers["Stream-Cursor"]) > int(cursor)

        nursery.start_soon(poll)
        while not web.server.broadcast.watchers:
            await trio.lowlevel.checkpoint()
        append(stream, (1, b"two"))
    monkeypatch.setattr("datastreamer.http.answers.durable._POLL_SECONDS", 0.01)
    async with serving(stream) as web:
        code, headers, body = await ask(web.port, f"{PATH}?offset=now&live=long-poll")
        assert (code, body, headers["Stream-Up-To-Date"]) == (204, b"", "true")
        assert "Stream-Cursor" in headers


async def test_the_cursor_of_events_is_beyond_that_of_the_client(stream: DataStream) -> None:
    append(stream, (1, b"one"))
    async with serving(stream) as web:
        _, headers, _ = await ask(web.port, f"{PATH}?offset=-1&live=long-poll")
        seen = int(headers["Stream-Cursor"])
        for cursor in (seen - 5, seen, seen + 1000):
            target = f"{PATH}?offset=-1&live=sse&cursor={cursor}"
            async with following(web, target=target) as client:
                for _ in range(2):
                    while (event := await client.event()) and event["event"] != "control":
                        pass
                    assert event is not None
                    assert int(event["data"]["streamCursor"]) > cursor
                    append(stream, (1, b"new"))


async def test_an_offset_of_truncated_entries_is_no_good(stream: DataStream) -> None:
    append(stream, *[(1, b"one")] * 5)
    async with serving(stream) as web:
        headers, _ = await get(web)
        stream.truncate(3)
        append(stream, *[(2, b"two")] * 5)
        assert (await refused(web, f"{PATH}?offset={headers['Stream-Next-Offset']}"))[0] == 410
        headers, _ = await get(web)
        before = headers["Stream-Next-Offset"]
        append(stream, (3, b"three"))
        stream.truncate(8)
        # Nothing that this client has was truncated.
        headers, rows = await get(web, f"?offset={before}")
        assert rows == []


async def test_who_polls_is_a_follower_until_it_leaves(stream: DataStream) -> None:
    async with serving(stream, max_followers=1) as web:
        counts = web.server.counts.http
        assert counts is not None
        async with await trio.open_tcp_stream("127.0.0.1", web.port) as client:
            target = f"{PATH}?offset=now&live=long-poll"
            await client.send_all(f"GET {target} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
            while not web.server.broadcast.watchers:
                await trio.lowlevel.checkpoint()
            assert counts.followers == 1
            for other in (target, "/v1/follow"):
                code, detail = await refused(web, other)
                assert (code, "followers" in detail) == (503, True)
        while counts.connections:
            await trio.lowlevel.checkpoint()
        assert (counts.followers, len(web.server.broadcast.watchers)) == (0, 0)
        assert (await ask(web.port, PATH))[0] == 200


@pytest.fixture
def node() -> dict[str, str]:
    """The environment in which node finds the client, or a skipped test."""
    return {**os.environ, "DURABLE": str(npm_package("@durable-streams/client"))}


PROGRAM = """
import { pathToFileURL } from "node:url"
const { stream } = await import(pathToFileURL(process.env.DURABLE + "/dist/index.js"))
const [url, live, expected] = process.argv.slice(2)
const numbers = []
if (live === "false") {
  // Without live, this client reads one answer.
  for (let offset = "-1", upToDate = false; !upToDate; ) {
    const response = await stream({ url, offset, live: false })
    for (const item of await response.json()) numbers.push(item.number)
    ;({ offset, upToDate } = response)
  }
  console.log(JSON.stringify(numbers))
} else {
  const response = await stream({ url, offset: "-1", live })
  response.subscribeJson(async (batch) => {
    for (const item of batch.items) numbers.push(item.number)
    console.log("at", numbers.length)
    if (numbers.length >= Number(expected)) {
      console.log(JSON.stringify(numbers))
      process.exit(0)
    }
  })
}
"""


@needs("node")
@pytest.mark.parametrize("mode", ["false", "long-poll", "sse"])
async def test_the_published_client(
    stream: DataStream, tmp_path: Path, mode: str, node: dict[str, str]
) -> None:
    program = tmp_path / "read.mjs"
    program.write_text(PROGRAM)
    append(stream, *[(1, b"x" * 500)] * 3000)
    expected = 3000 if mode == "false" else 3020
    async with serving(stream) as web, trio.open_nursery() as nursery:
        words = ["node", str(program), web.url + PATH, mode, str(expected)]
        process = await nursery.start(
            lambda task_status: trio.run_process(
                words,
                env=node,
                stdout=subprocess.PIPE,
                task_status=task_status,
            )
        )
        got = b""
        if mode != "false":
            while b"at 3000\n" not in got:
                got += await process.stdout.receive_some()
            if mode == "sse":
                await live(web)
            for at in range(20):
                append(stream, (2, b"%d" % at))
        async for part in process.stdout:
            got += part
    assert json.loads(got.splitlines()[-1]) == list(range(expected))
