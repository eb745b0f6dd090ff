"""What /metrics reports of the HTTP port itself."""

from __future__ import annotations

import urllib.request
from pathlib import Path

import trio

from datastreamer.http.options import HttpOptions
from datastreamer.service.embedded import StreamServer
from datastreamer.storage.stream import DataStream
from tests.http.asking import ask
from tests.http.serving import Web, serving
from tests.http.test_follow import following, live
from tests.network.fixtures import append
from tests.server.test_metrics import Samples, parsed, value

ENTRIES = "/v1/entries"


async def scraped(web: Web) -> Samples:
    return parsed((await ask(web.port, "/metrics"))[2])


def requests(samples: Samples, path: str, status: int) -> float:
    return value(samples, "http_requests_total", path=path, status=str(status))


async def test_requests_by_path_and_status(stream: DataStream) -> None:
    append(stream, *[(1, b"one")] * 3)
    async with serving(stream) as web:
        before = await scraped(web)
        for path in ("/v1/entries/1", "/v1/entries/2", "/v1/entries/3", "/nothing", ENTRIES):
            await ask(web.port, path)
        await ask(web.port, b"no request\r\n\r\n")
        _, headers, _ = await ask(web.port, f"{ENTRIES}?to=1")
        await ask(web.port, f"{ENTRIES}?to=1", f"If-None-Match: {headers['Etag']}")
        after = await scraped(web)
    # An alert sees the first of each path.
    assert requests(before, ENTRIES, 200) == requests(before, "/v1/follow", 200) == 0
    assert requests(after, "/v1/entries/{number}", 200) == 2
    assert requests(after, "/v1/entries/{number}", 404) == 1
    assert (requests(after, ENTRIES, 200), requests(after, ENTRIES, 304)) == (2, 1)
    assert (requests(after, "", 404), requests(after, "", 400)) == (1, 1)
    assert requests(after, "/metrics", 200) == 1


async def test_connections_followers_and_bytes(stream: DataStream) -> None:
    append(stream, *[(1, b"x" * 1000)] * 5000)
    async with serving(stream) as web:
        counts = web.server.counts
        for form in ("raw", "ndjson"):
            before = await scraped(web)
            _, _, body = await ask(web.port, f"{ENTRIES}?format={form}")
            after = await scraped(web)
            name = "http_sent_bytes_total"
            assert value(after, name) - value(before, name) > len(body)
        # Those of TCP clients are counted apart.
        assert counts.bytes_sent == 0
        async with following(web) as one, following(web) as two:
            await live(web, 2)
            before = await scraped(web)
            append(stream, (1, b"y" * 1000))
            await one.entries(1)
            await two.entries(1)
            after = await scraped(web)
            assert value(after, "http_followers") == 2
            assert value(after, "http_connections") == 3
            assert value(after, name) - value(before, name) > 2 * 2000
        assert counts.http is not None
        while counts.http.followers or counts.http.connections:
            await trio.lowlevel.checkpoint()


async def test_rejected_tokens(stream: DataStream, tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text("right\n")
    tokens.chmod(0o600)
    known = "Authorization: Bearer right"
    async with serving(stream, token_file=tokens) as web:
        name = "authentication_failures_total"
        before = parsed((await ask(web.port, "/metrics", known))[2])
        assert (await ask(web.port, "/v1/stream", "Authorization: Bearer wrong"))[0] == 401
        after = parsed((await ask(web.port, "/metrics", known))[2])
    assert (value(before, name, command="http"), value(after, name, command="http")) == (0, 1)
    assert requests(after, "/v1/stream", 401) == 1


def test_all_workers_are_summed(path: Path) -> None:
    options = HttpOptions(port=0)
    with StreamServer(path, host="127.0.0.1", port=0, http=options, workers=2) as server:
        url = f"http://127.0.0.1:{server.http_port}"
        for _ in range(16):
            urllib.request.urlopen(f"{url}/v1/stream", timeout=20).close()
        with urllib.request.urlopen(f"{url}/metrics", timeout=20) as answer:
            samples = parsed(answer.read())
    assert requests(samples, "/v1/stream", 200) == 16
