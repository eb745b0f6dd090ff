"""The HTTP port of servers in processes of their own: workers, followers of a file, relays, TLS."""

from __future__ import annotations

import json
import ssl
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from datastreamer.cli.demo import DemoSequencer
from datastreamer.errors import ListenFailed, UsageError
from datastreamer.http.options import HttpOptions
from datastreamer.service.blocking_relay import BlockingRelay
from datastreamer.service.embedded import StreamServer
from datastreamer.storage.stream import DataStream
from datastreamer.transport.tls import ServerTLS
from datastreamer.zkevm.block_json import is_transaction
from datastreamer.zkevm.decoding import decode
from tests.cli.process import running
from tests.network.fixtures import append
from tests.network.secure import Authority


def read(url: str, context: ssl.SSLContext | None = None) -> Any:
    with urllib.request.urlopen(url, timeout=20, context=context) as answer:
        return json.loads(answer.read())


@pytest.mark.parametrize("serving", [{"in_process": True}, {}, {"workers": 2}], ids=str)
def test_an_embedded_server(path: Path, serving: Any) -> None:
    options = HttpOptions(port=0)
    with StreamServer(path, host="127.0.0.1", port=0, http=options, **serving) as server:
        append(server.stream, (1, b"one"), (2, b"two"))
        url = f"http://127.0.0.1:{server.http_port}"
        for _ in range(8):
            assert read(f"{url}/v1/entries/1")["data"] == "0x74776f"
            assert read(f"{url}/v1/clients")["head_entries"] == 2
        with urllib.request.urlopen(f"{url}/metrics", timeout=20) as answer:
            text = answer.read().decode()
    assert "datastreamer_committed_entries_total 2.0" in text
    # The limit of all processes, of which one answered.
    assert "datastreamer_clients_limit 10000.0" in text


def test_a_file_that_another_process_writes(path: Path) -> None:
    with StreamServer(path, host="127.0.0.1", port=0) as writer:
        append(writer.stream, (1, b"one"))
        words = ("serve", path, "--follow", "--host", "127.0.0.1", "--port", 0, "--http-port", 0)
        with running(*words, cwd=path.parent) as server:
            url = server.err.until(r"HTTP on (http://127\.0\.0\.1:\d+)/")[1]
            assert read(f"{url}/v1/stream")["total_entries"] == 1
            append(writer.stream, (2, b"two"))
            assert read(f"{url}/v1/entries?format=json&from=1")[0]["data"] == "0x74776f"
            writer.stream.truncate(1)
            assert read(f"{url}/v1/stream")["total_entries"] == 1


def test_a_relay(tmp_path: Path) -> None:
    with StreamServer(tmp_path / "s.bin", host="127.0.0.1", port=0) as source:
        append(source.stream, (1, b"one"), (2, b"two"))
        upstream = [("127.0.0.1", source.port)]
        options = HttpOptions(port=0)
        with BlockingRelay(
            upstream, tmp_path / "r.bin", host="127.0.0.1", port=0, http=options
        ) as relay:
            url = f"http://127.0.0.1:{relay.http_port}"
            while read(f"{url}/v1/stream")["total_entries"] < 2:
                pass
            assert read(f"{url}/v1/clients")["upstreams"][0]["state"] == "in-use"


def test_tls(path: Path, authority: Authority) -> None:
    tls = ServerTLS(authority.issue("web"))
    with StreamServer(
        path, host="127.0.0.1", port=0, tls=tls, in_process=True, http=HttpOptions(port=0)
    ) as server:
        append(server.stream, *[(1, b"x" * 1000)] * 5000)
        url = f"https://127.0.0.1:{server.http_port}"
        context = authority.context()
        assert read(f"{url}/v1/entries?from=4999&format=json", context)[0]["length"] == 1000
        with urllib.request.urlopen(
            f"{url}/v1/entries?format=raw", timeout=20, context=context
        ) as answer:
            assert len(answer.read()) == 5000 * 1017
        with pytest.raises(urllib.error.HTTPError, match="400"):
            urllib.request.urlopen(f"http://127.0.0.1:{server.http_port}/", timeout=20)


def test_a_unix_socket_for_the_protocol_and_http(path: Path) -> None:
    with StreamServer(
        path, port=None, unix=path.parent / "socket", in_process=True, http=HttpOptions(port=0)
    ) as server:
        assert read(f"http://127.0.0.1:{server.http_port}/v1/stream")["total_entries"] == 0


def test_options_that_are_no_good(path: Path, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.write_text("")
    empty.chmod(0o600)
    no_good: list[dict[str, Any]] = [
        *({"token_file": empty}, {"max_clients": 0}, {"cors": "https://a.example"}),
        *({"cors": [origin]} for origin in ("https://a.example/", "a.example", "HTTPS://a", "**")),
    ]
    for options in no_good:
        with pytest.raises(UsageError):
            StreamServer(path, port=0, http=HttpOptions(port=0, **options))
    with StreamServer(path, host="127.0.0.1", port=0, http=HttpOptions(port=0)) as server:
        taken = HttpOptions(port=server.http_port or 0)
        with pytest.raises(ListenFailed):
            StreamServer(tmp_path / "other.bin", host="127.0.0.1", port=0, http=taken)
    assert not (tmp_path / "other.bin").exists()
    cors = ["*", "http://localhost:80", "https://[::1]:1"]
    options = HttpOptions(port=1, host=["::1"], cors=cors, token_file=empty)
    assert HttpOptions(**json.loads(json.dumps(options.as_json()))) == options


def test_a_search_in_several_processes(path: Path) -> None:
    """One of them makes the index; all answer from it."""
    http = HttpOptions(port=0, explorer=True)
    with DataStream.create(path, version=3, sync="os"):
        pass
    with StreamServer(path, host="127.0.0.1", port=0, workers=2, http=http) as server:
        sequencer = DemoSequencer(server.stream)
        for round_ in range(2):
            for _ in range(20):
                sequencer.write()
            newest = server.stream.total_entries - 1
            number = next(
                entry.number
                for entry in reversed(list(server.stream.entries(newest - 10)))
                if is_transaction(decode(entry, version=3))
            )
            event = decode(server.stream.entry(number), version=3)
            assert is_transaction(event)
            url = f"http://127.0.0.1:{server.http_port}/v1/search/0x{event.open().hash.hex()}"
            # Each connection may be another process's.
            answers = 0
            while answers < 16:
                found = read(url)
                assert found["trouble"] == "", round_
                if found["searched_entries"] == newest + 1:
                    assert [row["entry"] for row in found["found"]] == [number]
                    answers += 1
                else:
                    time.sleep(0.02)
