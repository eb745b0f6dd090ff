"""The stream, entries, bookmarks, blocks and batches as JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import trio

from datastreamer.cli.demo import DemoSequencer
from datastreamer.http.answers import blocks
from datastreamer.selection.times import moment_text
from datastreamer.storage.stream import DataStream
from datastreamer.zkevm.block_json import DescribedEvent, FoundEvent
from tests.http.asking import ask
from tests.http.serving import Web, serving
from tests.network import model
from tests.network.fixtures import append, until


async def read(web: Web, path: str, *headers: str) -> Any:
    code, _, body = await ask(web.port, path, *headers)
    assert code == 200, body
    return json.loads(body)


async def refused(web: Web, path: str, *headers: str) -> tuple[int, str]:
    """The status and the detail of an error."""
    code, found, body = await ask(web.port, path, *headers)
    assert found["Content-Type"] == "application/problem+json"
    return code, json.loads(body)["detail"]


async def test_stream_and_entry(stream: DataStream) -> None:
    append(stream, (model.BOOKMARK, b"key"), (7, b"one"), (8, b""))
    async with serving(stream) as web:
        assert await read(web, "/v1/stream") == {
            "version": stream.header.version,
            "system_id": stream.header.system_id,
            "stream_type": 1,
            "total_entries": 3,
            "total_length": stream.header.total_length,
            "epoch": stream.epoch,
            "first_entry": 0,
            "floor": 0,
            "sync": "os",
        }
        since = stream.time_of(1)
        assert since is not None
        entry = {
            "number": 1,
            "type": 7,
            "length": 3,
            "data": "0x6f6e65",
            "time": moment_text(since),
        }
        assert await read(web, "/v1/entries/1") == entry
        unknown = {"kind": None, "fields": None}
        assert await read(web, "/v1/entries/1?decode=zkevm") == entry | unknown
        assert await refused(web, "/v1/entries/3") == (
            404,
            "there is no entry 3; the stream has 3 entries",
        )
        code, detail = await refused(web, "/v1/entries/x")
        assert (code, "'x'" in detail) == (400, True)
        assert (await refused(web, "/v1/entries/1?decode=json"))[0] == 400
        assert (await refused(web, "/v1/nothing"))[0] == 404


@pytest.mark.parametrize(
    "key, answer",
    [
        ("key", {"key": "0x6b6579", "entry": 0, "first_event": 1}),
        ("0x6b6579", {"key": "0x6b6579", "entry": 0, "first_event": 1}),
        ("0x00ff", {"key": "0x00ff", "entry": 2, "first_event": None}),
        ("%00%ff", {"key": "0x00ff", "entry": 2, "first_event": None}),
        ("nothing", 404),
        ("block:1", 404),
        ("block:x", 400),
        ("0xx", 400),
        ("a" * 17, 400),
        ("", 400),
    ],
)
async def test_bookmarks(stream: DataStream, key: str, answer: Any) -> None:
    append(stream, (model.BOOKMARK, b"key"), (7, b"one"), (model.BOOKMARK, b"\0\xff"))
    async with serving(stream) as web:
        if isinstance(answer, int):
            assert (await refused(web, f"/v1/bookmarks/{key}"))[0] == answer
        else:
            assert await read(web, f"/v1/bookmarks/{key}") == answer


@pytest.fixture
def batches(path: Path) -> Iterator[DataStream]:
    """Batches of a few blocks with transactions."""
    with DataStream.create(path, version=3, sync="os", index="memory") as stream:
        sequencer = DemoSequencer(stream)
        for _ in range(3):
            sequencer.write()
        yield stream


async def test_blocks_and_batches(batches: DataStream) -> None:
    total = batches.total_entries
    async with serving(batches) as web:
        batch = await read(web, "/v1/batches/2")
        [block, *_] = batch["blocks"]
        number = block["block"]["fields"]["number"]
        found = await read(web, f"/v1/blocks/{number}")
        assert (found["number"], found["block"]) == (number, block["block"])
        assert found["transactions"] == block["transactions"]
        assert found["transactions"][0]["opened"]["hash"].startswith("0x")
        assert (await refused(web, "/v1/blocks/99"))[0] == 404
        assert (await refused(web, "/v1/batches/-1"))[0] == 400
        entry = await read(web, f"/v1/entries/{total - 1}?decode=zkevm")
        assert entry["kind"] == "BatchEnd"


class Decoding:
    """Records which entries are decoded, each in a slice of its own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: list[int] = []
        self.begun: Callable[[], None] = lambda: None
        described = blocks.described

        def recorded(found: FoundEvent, opening: bool) -> DescribedEvent:
            self.seen.append(found[0].number)
            self.begun()
            return described(found, opening)

        monkeypatch.setattr(blocks, "described", recorded)
        monkeypatch.setattr(blocks, "_SLICE_SECONDS", 0)


async def test_one_batch_is_decoded_at_a_time_beside_other_tasks(
    batches: DataStream, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoding, turns = Decoding(monkeypatch), 0

    async def other() -> None:
        nonlocal turns
        while True:
            turns += 1
            await trio.lowlevel.checkpoint()

    async with serving(batches) as web, trio.open_nursery() as beside:
        beside.start_soon(other)
        async with trio.open_nursery() as nursery:
            for _ in range(3):
                nursery.start_soon(read, web, "/v1/batches/2")
        beside.cancel_scope.cancel()
    seen = decoding.seen
    once = seen[: len(seen) // 3]
    assert seen == once * 3
    assert turns > len(seen) > 20


@pytest.mark.parametrize("limit", ["_MOST_ENTRIES", "_MOST_BYTES"])
async def test_a_batch_that_is_too_large(
    batches: DataStream, monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    monkeypatch.setattr(blocks, limit, 5)
    async with serving(batches) as web:
        code, detail = await refused(web, "/v1/batches/2")
        assert (code, "/v1/entries?from=" in detail) == (413, True)


async def test_decoding_ends_when_the_client_leaves(
    batches: DataStream, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoding = Decoding(monkeypatch)
    async with serving(batches) as web:
        await read(web, "/v1/batches/2")
        whole, decoding.seen = len(decoding.seen), []
        async with await trio.open_tcp_stream("127.0.0.1", web.port) as client:
            decoding.begun = client.socket.close
            await client.send_all(b"GET /v1/batches/2 HTTP/1.1\r\nHost: localhost\r\n\r\n")
            await until(lambda: decoding.seen)
        counts = web.server.counts.http
        assert counts is not None
        await until(lambda: not counts.connections)
    assert 0 < len(decoding.seen) < whole


async def test_conditional_requests(stream: DataStream) -> None:
    append(stream, (7, b"one"), (7, b"two"))
    async with serving(stream) as web:
        code, headers, _ = await ask(web.port, "/v1/entries/0")
        tag = headers["Etag"]
        assert (code, "max-age" in headers["Cache-Control"]) == (200, True)
        assert tag.startswith('W/"')
        for known in (tag, f'"x", {tag}', tag.removeprefix("W/"), "*"):
            code, headers, body = await ask(web.port, "/v1/entries/0", f"If-None-Match: {known}")
            assert (code, body, headers["Etag"]) == (304, b"", tag)
        stream.update_entry(0, 7, b"ONE")
        code, headers, body = await ask(web.port, "/v1/entries/0", f"If-None-Match: {tag}")
        assert (code, headers["Etag"] != tag) == (200, True)
        assert json.loads(body)["data"] == "0x4f4e45"


async def test_tokens(stream: DataStream, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text("first-secret\nsecond-secret\n")
    tokens.chmod(0o600)
    async with serving(stream, token_file=tokens) as web:
        assert (await refused(web, "/v1/stream"))[0] == 401
        code, headers, _ = await ask(web.port, "/v1/stream", "Authorization: Bearer wrong-secret")
        assert (code, headers["Www-Authenticate"][:6]) == (401, "Bearer")
        assert (await refused(web, "/v1/stream", "Authorization: Basic first-secret"))[0] == 401
        bearer = "Authorization: Bearer second-secret"
        code, headers, _ = await ask(web.port, "/v1/entries?from=0", bearer)
        assert code == 200
        assert (await ask(web.port, "/healthz"))[0] == 200
        tokens.write_text("third\n")
        assert (await refused(web, "/v1/stream", bearer))[0] == 401
    assert "secret" not in caplog.text


async def test_origins(stream: DataStream) -> None:
    page = "Origin: https://page.example"
    async with serving(stream) as web:
        _, headers, _ = await ask(web.port, "/v1/stream", page)
        assert "Access-Control-Allow-Origin" not in headers
        assert headers["Cross-Origin-Resource-Policy"] == "same-origin"
    async with serving(stream, cors=["https://page.example"]) as web:
        _, headers, _ = await ask(web.port, "/v1/stream", page)
        assert headers["Access-Control-Allow-Origin"] == "https://page.example"
        # It is for pages that may not read what they embed.
        assert headers["Cross-Origin-Resource-Policy"] == "same-origin"
        assert "Origin" in headers["Vary"]
        _, headers, _ = await ask(web.port, "/v1/stream", "Origin: https://other.example")
        assert "Access-Control-Allow-Origin" not in headers
    async with serving(stream, cors=["*"]) as web:
        _, headers, _ = await ask(web.port, "/v1/stream")
        assert headers["Access-Control-Allow-Origin"] == "*"
