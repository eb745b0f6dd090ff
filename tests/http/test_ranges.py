"""Ranges of entries in all formats."""

from __future__ import annotations

import gzip
import json
from typing import Any

import pyarrow as pa
import pytest
import trio
import trio.testing

from datastreamer._codec import scan
from datastreamer.format import MAX_DATA_SIZE, PAGE_SIZE
from datastreamer.http.answers import ranges
from datastreamer.http.answers.formats import NAMES, EntryForm, form_of
from datastreamer.http.answers.ranges import FormedRange, RawRange, WantedRange
from datastreamer.http.port.messages import AnswerCut
from datastreamer.http.serving import source_of
from datastreamer.metrics.counters import HttpCounts
from datastreamer.selection.times import AskTimes
from datastreamer.server.streaming.catch_up import Sender
from datastreamer.storage.stream import DataStream
from tests.http.asking import ask, joined
from tests.http.serving import Web, serving
from tests.http.test_entries import refused
from tests.network import model
from tests.network.fixtures import append
from tests.network.stream_transport import StreamTransport

FORMATS = ("ndjson", "json", "arrow", "raw")


def parsed(format: str, body: bytes) -> list[tuple[int, int, bytes]]:
    """Number, type and data of each entry of an answer."""
    if format == "raw":
        return [(entry.number, entry.type, entry.data) for entry in scan(body)]
    if format == "arrow":
        rows = pa.ipc.open_stream(body).read_all().to_pylist()
        return [(row["number"], row["type"], row["data"]) for row in rows]
    rows = json.loads(body) if format == "json" else map(json.loads, body.splitlines())
    return [(row["number"], row["type"], bytes.fromhex(row["data"][2:])) for row in rows]


def held(stream: DataStream, first: int, stop: int) -> list[tuple[int, int, bytes]]:
    return [(entry.number, entry.type, entry.data) for entry in stream.entries(first, stop)]


async def read(web: Web, format: str, query: str = "") -> list[tuple[int, int, bytes]]:
    code, _, body = await ask(web.port, f"/v1/entries?format={format}{query}")
    assert code == 200, body
    return parsed(format, body)


@pytest.fixture
def filled(stream: DataStream) -> DataStream:
    """Some pages of entries of all sizes, the largest and empty ones among them."""
    append(stream, (model.BOOKMARK, b"key"), (1, b""), (2, b"x"))
    append(stream, *[(at % 5, bytes([at % 251]) * (at * 7 % 3000)) for at in range(3000)])
    append(stream, (3, b"m" * MAX_DATA_SIZE), (1, b"after"), (2, b"n" * (PAGE_SIZE - 100)))
    append(stream, *[(at % 5, bytes([at % 251]) * 200) for at in range(3000)])
    return stream


@pytest.mark.parametrize("format", FORMATS)
async def test_every_format_has_the_entries(filled: DataStream, format: str) -> None:
    total = filled.total_entries
    most = min(total, 10_000)
    async with serving(filled) as web:
        assert await read(web, format) == held(filled, 0, most)
        assert await read(web, format, "&from=2990&to=3010") == held(filled, 2990, 3011)
        assert await read(web, format, f"&from={total}") == []
        assert await read(web, format, "&from=1&to=1") == held(filled, 1, 2)
        assert await read(web, format, "&from=5&limit=2") == held(filled, 5, 7)
        assert await read(web, format, f"&from={total - 1}&to=99999999") == held(
            filled, total - 1, total
        )


@pytest.mark.parametrize("format", FORMATS[:3])
async def test_types(filled: DataStream, format: str) -> None:
    async with serving(filled) as web:
        found = await read(web, format, "&type=3&type=176&limit=4000")
        assert found == [it for it in held(filled, 0, 4000) if it[1] in (3, 0xB0)]
        assert await read(web, format, "&type=77") == []
        assert (await refused(web, "/v1/entries?format=raw&type=1"))[0] == 400


@pytest.mark.parametrize("format", FORMATS[:3])
async def test_prefixes(filled: DataStream, format: str) -> None:
    everything = held(filled, 0, 4000)
    sample = next(it for it in everything if it[1] == 3 and len(it[2]) > 3)
    at, prefix = 1, sample[2][1:3]
    async with serving(filled) as web:
        query = f"&type=3&type=176&prefix={at}:0x{prefix.hex()}&limit=4000"
        found = await read(web, format, query)
        assert found == [
            it for it in everything if it[1] in (3, 0xB0) and it[2][at:].startswith(prefix)
        ]
        assert sample in found
        assert await read(web, format, "&type=3&prefix=0xffffffffff&limit=4000") == []
        for bad in ("prefix=0x01", "type=3&prefix=01", "type=3&prefix=0x", "format=raw&type=3"):
            assert (await refused(web, f"/v1/entries?{bad}"))[0] == 400
        tags = set[str]()
        for one in ("", "&type=3", "&type=3&prefix=0x01", "&type=3&prefix=1:0x01"):
            _, headers, _ = await ask(web.port, f"/v1/entries?from=0&to=9&format={format}{one}")
            tags.add(headers["Etag"])
        assert len(tags) == 4
        _, headers, _ = await ask(web.port, "/v1/entries?limit=10&type=3&prefix=2:0x0a")
        assert "&type=3&prefix=2:0x0a>" in headers["Link"]


async def test_links_lead_through_the_stream(filled: DataStream) -> None:
    got, path = [], "/v1/entries?limit=2500&format=json&type=1"
    async with serving(filled) as web:
        while path:
            code, headers, body = await ask(web.port, path)
            assert code == 200
            got += parsed("json", body)
            link = headers.get("Link", "")
            path = link.partition("<")[2].partition(">")[0]
    assert got == [it for it in held(filled, 0, filled.total_entries) if it[1] == 1]


@pytest.mark.parametrize(
    "accept, kind",
    [
        (None, "application/x-ndjson"),
        ("*/*", "application/x-ndjson"),
        ("", "application/x-ndjson"),
        ("application/json", "application/json"),
        ("text/html, application/json;q=0.5, */*;q=0.1", "application/json"),
        ("application/octet-stream, application/x-ndjson;q=0.9", "application/octet-stream"),
        ("application/vnd.apache.arrow.stream", "application/vnd.apache.arrow.stream"),
        ("text/html", 406),
        ("application/json;q=0", 406),
    ],
)
async def test_accept(stream: DataStream, accept: str | None, kind: Any) -> None:
    append(stream, (1, b"one"))
    headers = [] if accept is None else [f"Accept: {accept}"]
    async with serving(stream) as web:
        code, found, _ = await ask(web.port, "/v1/entries", *headers)
        if isinstance(kind, int):
            assert code == kind
        else:
            assert (code, found["Content-Type"]) == (200, kind)
            assert "Accept" in found["Vary"]


@pytest.mark.parametrize(
    "query, code, named",
    [
        ("from=-1", 400, "from"),
        ("from=x", 400, "from"),
        ("from=block:", 400, "block:"),
        ("from=block:7", 404, "block:7"),
        ("from=0xzz", 400, "0xzz"),
        ("from=99999999", 416, "99999999"),
        ("from=2&to=1", 400, "to"),
        ("to=18446744073709551616", 400, "to"),
        ("limit=0", 400, "limit"),
        ("limit=10001&format=json", 400, "limit"),
        ("format=xml", 400, "format"),
        ("type=x", 400, "type"),
        ("from=1&from=2", 400, "from"),
    ],
)
async def test_bad_parameters(stream: DataStream, query: str, code: int, named: str) -> None:
    append(stream, *[(1, b"one")] * 3)
    async with serving(stream) as web:
        got, detail = await refused(web, f"/v1/entries?{query}")
    assert (got, named in detail) == (code, True)


async def test_parameters_that_mean_nothing_here_are_named(stream: DataStream) -> None:
    append(stream, *[(1, b"one")] * 3)
    async with serving(stream) as web:
        for path in ("/v1/entries?to=1", "/v1/stream?", "/v1/entries/1?", "/v1/clients?", "/?"):
            code, headers, body = await ask(web.port, f"{path}&form=json&_=17&1795935600&a%0Db=")
            assert (code, headers["Ignored-Parameters"]) == (200, "form, _, 1795935600, a%0Db")
            assert body == (await ask(web.port, path))[2] or "clients" in path
        many = "&".join(f"{at:050}=" for at in range(60))
        _, headers, _ = await ask(web.port, f"/v1/stream?{many}")
        assert headers["Ignored-Parameters"].split(", ") == ["0" * 40] * 8
        assert "Ignored-Parameters" not in (await ask(web.port, "/v1/entries?to=1"))[1]
        assert (await refused(web, "/v1/entries?type=%ff"))[0] == 400


async def test_from_a_bookmark(stream: DataStream) -> None:
    append(stream, (1, b"one"), (model.BOOKMARK, b"key"), (2, b"two"))
    async with serving(stream) as web:
        assert await read(web, "json", "&from=0x6b6579") == held(stream, 1, 3)


async def test_closed_ranges_may_be_kept(stream: DataStream) -> None:
    append(stream, *[(1, b"one")] * 3)
    async with serving(stream) as web:
        for query, closed in (
            ("from=0&to=1", True),
            ("from=0&to=2", True),
            ("from=0&limit=2", True),
            ("from=0", False),
            ("from=0&to=3", False),
        ):
            code, headers, _ = await ask(web.port, f"/v1/entries?{query}")
            assert (code, "Etag" in headers) == (200, closed), query
        tags = set()
        for each in FORMATS:
            _, headers, _ = await ask(web.port, f"/v1/entries?to=1&format={each}")
            tags.add(headers["Etag"])
        assert len(tags) == 4
        _, before, _ = await ask(web.port, "/v1/entries?to=1")
        stream.truncate(2)
        _, after, _ = await ask(web.port, "/v1/entries?to=1", f"If-None-Match: {before['Etag']}")
        assert after["Etag"] != before["Etag"]


@pytest.mark.parametrize("format", ["ndjson", "json"])
async def test_compression(filled: DataStream, format: str) -> None:
    async with serving(filled) as web:
        path = f"/v1/entries?format={format}"
        code, headers, body = await ask(web.port, path, "Accept-Encoding: br, gzip;q=0.5")
        assert (code, headers["Content-Encoding"]) == (200, "gzip")
        assert parsed(format, gzip.decompress(body)) == held(filled, 0, filled.total_entries)
        _, headers, _ = await ask(web.port, path, "Accept-Encoding: gzip;q=0, br")
        assert "Content-Encoding" not in headers


async def test_head_has_the_headers_and_no_body(filled: DataStream) -> None:
    async with serving(filled) as web:
        request = b"HEAD /v1/entries?to=3 HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
        code, headers, body = await ask(web.port, request)
        assert (code, body, "Etag" in headers) == (200, b"", True)


class SlowClient:
    """Asks for a range and reads only what it is told to."""

    def __init__(self, stream: trio.SocketStream) -> None:
        self.stream = stream
        self.got = bytearray()

    async def rest(self) -> bytes:
        try:
            while more := await self.stream.receive_some(1 << 16):
                self.got += more
        except trio.BrokenResourceError:
            pass
        return bytes(self.got)


async def begun(web: Web, path: str) -> SlowClient:
    """A client whose answer has begun, and that reads nothing more."""
    made = trio.socket.socket()
    made.setsockopt(trio.socket.SOL_SOCKET, trio.socket.SO_RCVBUF, 4096)
    await made.connect(("127.0.0.1", web.port))
    client = SlowClient(trio.SocketStream(made))
    await client.stream.send_all(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
    while b"\r\n\r\n" not in client.got:
        client.got += await client.stream.receive_some(1024)
    while not web.server.other_readers:
        await trio.lowlevel.checkpoint()
    return client


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("change", ["truncate", "update"])
async def test_a_change_within_the_range_ends_the_answer(
    stream: DataStream, format: str, change: str
) -> None:
    append(stream, *[(1, b"x" * 1000)] * 20_000)
    last = 9_500
    async with serving(stream) as web:
        client = await begun(web, f"/v1/entries?format={format}")
        async with client.stream:
            if change == "truncate":
                await trio.to_thread.run_sync(stream.truncate, last)
            else:
                await trio.to_thread.run_sync(stream.update_entry, last - 1, 1, b"y" * 1000)
            answer = await client.rest()
        assert answer.startswith(b"HTTP/1.1 200 ")
        with pytest.raises((AssertionError, ValueError)):
            joined(answer.partition(b"\r\n\r\n")[2])


class Recorded:
    """An output that keeps what is sent."""

    def __init__(self) -> None:
        self.got = b""
        self.counts = HttpCounts()
        self.transport = StreamTransport(trio.testing.memory_stream_pair()[0])

    async def send(self, data: bytes) -> None:
        self.got += data


@pytest.mark.parametrize("format", FORMATS)
async def test_a_change_that_is_under_way_when_an_answer_begins(
    stream: DataStream, format: str
) -> None:
    append(stream, *[(1, b"x" * 1000)] * 100)
    async with serving(stream) as web:
        reading = source_of(web.server).reading()
        output, wanted = Recorded(), WantedRange(range(100), (), False, None)
        answer: Any = RawRange(reading, wanted.entries)
        if format != "raw":
            form = form_of(NAMES[format], stream.time_marks)
            answer = FormedRange(reading, wanted, form)
            await answer.begin()
        web.server.broadcast.hold(None)

        async def send() -> None:
            with pytest.raises(AnswerCut):
                await answer.send(output)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(send)
            await trio.testing.wait_all_tasks_blocked()
            stream.update_entry(90, 1, b"y" * 1000)
            web.server.broadcast.release()
        assert b"7878" not in output.got
        assert b"xx" not in output.got


async def test_a_tag_is_of_the_entries_that_are_sent(
    stream: DataStream, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if they are updated between the request and its answer."""
    append(stream, *[(1, b"old")] * 10)

    def updated(kind: str, time_marks: AskTimes) -> EntryForm:
        stream.update_entry(3, 1, b"new")
        return form_of(kind, time_marks)

    async with serving(stream) as web:
        before = await ask(web.port, "/v1/entries?to=5")
        monkeypatch.setattr(ranges, "form_of", updated)
        during = await ask(web.port, "/v1/entries?to=5")
        monkeypatch.undo()
        after = await ask(web.port, "/v1/entries?to=5")
    assert [answer[2].count(b"6e6577") for answer in (before, during, after)] == [0, 1, 1]
    assert before[1]["Etag"] != during[1]["Etag"] == after[1]["Etag"]


@pytest.mark.parametrize("format", FORMATS)
async def test_a_change_after_the_range_does_not_matter(stream: DataStream, format: str) -> None:
    append(stream, *[(1, b"x" * 1000)] * 20_000)
    async with serving(stream) as web:
        client = await begun(web, f"/v1/entries?format={format}&to=9000")
        async with client.stream:
            await trio.to_thread.run_sync(stream.truncate, 9001)
            append(stream, (2, b"new"))
            while not client.got.endswith(b"0\r\n\r\n"):
                client.got += await client.stream.receive_some(1 << 16)
        body = joined(bytes(client.got).partition(b"\r\n\r\n")[2])
        assert parsed(format, body) == held(stream, 0, 9001)


async def test_a_client_that_asked_for_the_end_gets_it_at_once(
    filled: DataStream, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Although the server waits to hear that the client has all: a system that is told of the end
    says so at once, and may take 40 ms otherwise."""
    unacknowledged = True
    monkeypatch.setattr(Sender, "refers", property(lambda _: unacknowledged))
    async with serving(filled) as web:
        with trio.fail_after(5):
            code, _, body = await ask(web.port, "/v1/entries?format=raw")
        assert (code, parsed("raw", body)) == (200, held(filled, 0, filled.total_entries))
        assert web.server.other_readers, "the server waits"
        unacknowledged = False


@pytest.mark.parametrize("format", FORMATS)
async def test_an_answer_is_not_cut_for_another_connection(stream: DataStream, format: str) -> None:
    """When the port is full of answers, the next client is told to come back; a connection that
    waits for a request is closed for it."""
    append(stream, *[(1, b"x" * 1000)] * 10_000)
    async with serving(stream, max_clients=1) as web:
        client = await begun(web, f"/v1/entries?format={format}")
        async with client.stream:
            code, headers, _ = await ask(web.port, "/v1/stream")
            assert (code, headers["Retry-After"]) == (503, "5")
            while not client.got.endswith(b"0\r\n\r\n"):
                client.got += await client.stream.receive_some(1 << 16)
            body = joined(bytes(client.got).partition(b"\r\n\r\n")[2])
            assert parsed(format, body) == held(stream, 0, 10_000)
            while (await ask(web.port, "/v1/stream"))[0] != 200:
                # The end of a raw answer is waited for.
                assert format == "raw"
            assert await client.rest() == bytes(client.got)


async def test_keep_alive_serves_one_request_after_another(filled: DataStream) -> None:
    """Also pipelined ones, whose answers are in order."""
    paths = ["/v1/entries?to=4", "/v1/stream", "/v1/entries/1", "/nothing", "/v1/entries?to=2"]
    requests = b"".join(
        f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode() for path in paths
    )
    async with serving(filled) as web:
        alone = [(await ask(web.port, path))[2] for path in paths]
        async with await trio.open_tcp_stream("127.0.0.1", web.port) as client:
            await client.send_all(requests)
            got = b""
            for body in alone:
                while body not in got:
                    got += await client.receive_some(1 << 16)
                got = got.partition(body)[2]
            await client.send_eof()
            assert await client.receive_some(1) == b""


async def test_a_long_selection(stream: DataStream) -> None:
    """It does not make the answer's head long, and has its own tag; a request has 64 clauses."""
    append(stream, *[(16, b"\0\5%d" % at) for at in range(100)])
    prefixes = "".join(f"&prefix=2:0x{n:02x}{'00' * 32}" for n in range(60))
    async with serving(stream) as web:
        code, headers, _ = await ask(web.port, f"/v1/entries?from=0&to=9&type=16{prefixes}")
        assert code == 200
        assert sum(len(name) + len(value) for name, value in headers.items()) < 1000
        for types in ("&type=1&type=2", "".join(f"&type={n}" for n in range(30))):
            assert (await refused(web, f"/v1/entries?{types[1:]}{prefixes}"))[0] == 400
