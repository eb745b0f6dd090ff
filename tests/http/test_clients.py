"""Other people's clients and proxies, and the examples."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from datastreamer.format import PAGE_SIZE
from datastreamer.http.options import HttpOptions
from datastreamer.service.embedded import StreamServer
from tests.cli.process import ENVIRONMENT, Running
from tests.network.fixtures import append
from tests.ports import free_port
from tests.programs import needs

ROOT = Path(__file__).resolve().parent.parent.parent
EXAMPLES = ROOT / "examples" / "http"


@pytest.fixture
def server(path: Path) -> Iterator[StreamServer]:
    with StreamServer(
        path, host="127.0.0.1", port=0, in_process=True, http=HttpOptions(port=0)
    ) as made:
        append(made.stream, *[(at % 3, b"x" * at) for at in range(500)])
        yield made


def url_of(server: StreamServer) -> str:
    return f"http://127.0.0.1:{server.http_port}"


@contextmanager
def running(*words: object) -> Iterator[Running]:
    started = Running([*map(str, words)], ROOT)
    try:
        yield started
    finally:
        started.process.terminate()
        started.process.wait()
        for stream in (started.process.stdout, started.process.stderr):
            assert stream is not None
            stream.close()


@needs("curl")
def test_curl(server: StreamServer) -> None:
    url = url_of(server)

    def curl(*words: str) -> bytes:
        done = subprocess.run(["curl", "-sSf", *words], capture_output=True, check=True, timeout=20)
        return done.stdout

    lines = curl("--compressed", f"{url}/v1/entries").splitlines()
    assert [json.loads(line)["number"] for line in lines] == list(range(500))
    assert json.loads(curl(f"{url}/v1/entries/7"))["length"] == 7
    with running("curl", "-sN", f"{url}/v1/follow?from=499") as followed:
        assert followed.out.until(r"^id: 500$")
        append(server.stream, (1, b"new"))
        assert followed.out.until(r"^id: 501$")


def test_following_with_httpx(path: Path) -> None:
    pytest.importorskip("httpx", reason="httpx is not installed")
    port = free_port()
    options = HttpOptions(port=port)
    with StreamServer(path, host="127.0.0.1", port=0, http=options) as server:
        append(server.stream, *[(1, b"one")] * 3)
        words = (sys.executable, "-W", "error", EXAMPLES / "follow.py", f"http://127.0.0.1:{port}")
        follower = running(*words, "0")
        example = follower.__enter__()
        try:
            assert example.out.until("^2 1$")
            server.close()
            assert example.err.until("^lost ")
            with StreamServer(path, host="127.0.0.1", port=0, http=options) as again:
                append(again.stream, (2, b"two"))
                assert example.out.until("^3 2$")
                again.stream.truncate(1)
                assert example.out.until("^truncated to 1 entries$")
        finally:
            follower.__exit__(None, None, None)
        assert example.out.seen == ["0 1", "1 1", "2 1", "3 2", "truncated to 1 entries"]


def test_a_pandas_table(server: StreamServer) -> None:
    words = [sys.executable, str(EXAMPLES / "table.py"), url_of(server), "3", "8"]
    done = subprocess.run(
        words, capture_output=True, text=True, check=True, timeout=60, env=ENVIRONMENT
    )
    rows = [line.split() for line in done.stdout.splitlines()[2:]]
    assert rows == [["0", "2", "9"], ["1", "2", "11"], ["2", "2", "13"]]


@needs("nginx")
@needs("curl")
def test_behind_nginx(server: StreamServer, tmp_path: Path) -> None:
    """The configuration of contrib: ranges, events, and a request to another host's name."""
    port = free_port()
    text = (ROOT / "contrib" / "nginx" / "datastreamer.conf").read_text()
    text = text.replace("127.0.0.1:8080", f"127.0.0.1:{server.http_port}")
    config = tmp_path / "nginx.conf"
    folders = "".join(
        f"{name}_temp_path {tmp_path};"
        for name in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    config.write_text(
        f"daemon off; pid {tmp_path}/pid; error_log stderr; events {{}}\n"
        f"http {{ access_log off; {folders} {text.replace('8443', f'127.0.0.1:{port}')} }}\n"
    )
    with running("nginx", "-c", config, "-p", tmp_path, "-e", "stderr"):
        check_proxy(server, port)


@needs("caddy")
@needs("curl")
def test_behind_caddy(server: StreamServer, tmp_path: Path) -> None:
    """The same, without a certificate."""
    port = free_port()
    text = (ROOT / "contrib" / "caddy" / "Caddyfile").read_text()
    text = text.replace("127.0.0.1:8080", f"127.0.0.1:{server.http_port}")
    text = text.replace("stream.example.org", f"http://127.0.0.1:{port}")
    config = tmp_path / "Caddyfile"
    config.write_text("{\n\tadmin off\n}\n" + text)
    homes = (f"XDG_{name}_HOME={tmp_path}" for name in ("CONFIG", "DATA"))
    with running("env", *homes, "caddy", "run", "--config", config, "--adapter", "caddyfile"):
        check_proxy(server, port)


def check_proxy(server: StreamServer, port: int) -> None:
    """A range and events, through a proxy on `port`."""
    append(server.stream, *[(1, b"x" * (PAGE_SIZE // 2))] * 8)
    words = ["curl", "-sSf", "--retry", "20", "--retry-connrefused", "--retry-delay", "1"]
    url = f"http://127.0.0.1:{port}/v1/entries?format=raw&from=500"
    done = subprocess.run([*words, url], capture_output=True, check=True, timeout=60)
    assert len(done.stdout) == 8 * (PAGE_SIZE // 2 + 17)
    with running("curl", "-sN", f"http://127.0.0.1:{port}/v1/follow") as followed:
        assert followed.out.until("^retry: ")
        append(server.stream, (1, b"new"))
        assert followed.out.until(r"^id: 509$")
