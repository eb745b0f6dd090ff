"""A port that speaks another protocol than the one expected is named, on both sides."""

from __future__ import annotations

import socket
import threading
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from datastreamer.http.options import HttpOptions
from datastreamer.protocol.commands import HeaderQuery, encode_command
from datastreamer.service.embedded import StreamServer
from tests.cli.conftest import Invoke
from tests.cli.process import running
from tests.ports import free_port


def test_a_wrong_port(invoke: Invoke, copy: Path) -> None:
    with StreamServer(
        copy, host="127.0.0.1", port=0, in_process=True, metrics_port=0, http=HttpOptions(port=0)
    ) as server:
        for port in (server.http_port, server.metrics_port):
            where = f"127.0.0.1:{port}"
            assert invoke("info", where).failed() == (
                f"{where} answers HTTP: is it the HTTP or metrics port of this server?"
            )
            for sent, words in (
                (encode_command(HeaderQuery(), 1), b"a command of the stream's own protocol"),
                (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", b"it is TLS"),
            ):
                with socket.create_connection(("127.0.0.1", port or 0)) as client:
                    client.sendall(sent)
                    answer = b""
                    while part := client.recv(4096):
                        answer += part
                assert answer.startswith(b"HTTP/1.1 400 ")
                assert words in answer
        where = f"127.0.0.1:{server.port}"
        assert invoke("top", where, "--count", 1).failed() == (
            f"{where}: this is the port of the stream; the metrics have their own port"
        )
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(f"http://{where}/v1/stream")
        assert refused.value.code == 400
        assert b"--http-port has the stream for HTTP" in refused.value.read()
        # It goes on.
        assert invoke("info", where).code == 0


def test_health(invoke: Invoke, copy: Path) -> None:
    with StreamServer(copy, host="127.0.0.1", port=0, in_process=True, metrics_port=0) as server:
        ports = [f"127.0.0.1:{port}" for port in (server.port, server.metrics_port)]
        for port, state in zip(ports, ("serves 200 entries", "serving"), strict=True):
            (facts,) = invoke("health", port, "--json").objects
            assert facts["state"] == state
            (line,) = invoke("health", port, "--format", "table").lines
            assert line.startswith(f"{port}: {state} (")
    assert "cannot connect" in invoke("health", ports[0]).failed()


def test_health_of_a_relay_that_is_not_ready(invoke: Invoke, tmp_path: Path) -> None:
    upstream = f"127.0.0.1:{free_port()}"
    words = ("--server", upstream, "--file", "r.bin", "--port", "0", "--metrics-port", "0")
    with running("relay", *words, cwd=tmp_path) as relay:
        port = relay.err.until(r"metrics on http://(\S+)/metrics")[1]
        assert invoke("health", port).failed() == (
            f"{port}: no upstream has answered yet, so the stream is not known"
        )


def test_tls_where_the_protocol_is_expected(invoke: Invoke) -> None:
    """A server of other make answers with an alert."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        where = f"127.0.0.1:{listener.getsockname()[1]}"

        def serve() -> None:
            client, _ = listener.accept()
            with client:
                client.sendall(b"\x15\x03\x01\x00\x02\x02\x46")
                client.recv(1 << 16)

        thread = threading.Thread(target=serve)
        thread.start()
        assert invoke("info", where).failed() == f"{where} answers TLS: connect with tcps://"
        thread.join()
