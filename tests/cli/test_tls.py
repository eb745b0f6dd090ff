"""TLS and Unix sockets from the command line: `serve`, and everything that reads."""

from __future__ import annotations

import os
import re
import signal
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from datastreamer.service.embedded import StreamServer
from datastreamer.transport.tls import ServerTLS
from tests.cli.conftest import ENTRIES, Invoke
from tests.cli.process import running
from tests.network.secure import HOST, Authority


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"), "trusted")


@pytest.mark.parametrize("workers", [1, 2])
def test_serving_and_reading_with_tls(
    invoke: Invoke, copy: Path, authority: Authority, workers: int
) -> None:
    cert, key = authority.issue("server")
    other_cert, other_key = authority.issue("other", "stream.example")
    mine, my_key = authority.issue("client", "client.example")
    words = ("serve", copy, "--port", "0", "--host", HOST, "--tls-client-ca", authority.file)
    words = (*words, "--workers", workers)
    pairs = ("--tls-cert", cert, "--tls-key", key, "--tls-cert", other_cert, "--tls-key", other_key)
    with running(*words, *pairs, cwd=copy.parent) as serving:
        port = serving.port()
        place = f"tcps://{HOST}:{port}"
        assert "entries, with TLS) on" in serving.err.seen[-1]
        known = ("--tls-ca", authority.file, "--tls-cert", mine, "--tls-key", my_key)
        assert invoke("info", place, *known, "--json").objects[0]["total_entries"] == ENTRIES
        assert len(invoke("cat", place, *known).objects) == ENTRIES
        assert invoke("entry", place, "7", *known).objects[0]["number"] == 7
        found = invoke("bookmark", place, "block:2", "--entry-number", *known)
        assert (found.code, found.err) == (0, "")
        named = (*known, "--tls-server-name", "stream.example")
        assert invoke("info", place, *named).code == 0
        for more, message in (
            (("--tls-ca", authority.file), "it requires a client certificate"),
            ((), "the server's certificate is not accepted: "),
            ((*known, "--tls-server-name", "x.example"), "not valid for 'x.example'"),
        ):
            failed = invoke("info", place, *more).failed()
            assert failed.startswith(f"no TLS connection to {HOST}:{port}: ")
            assert message in failed
        assert (
            "This server requires TLS: connect to tcps://"
            in invoke("info", place.replace("tcps", "tcp")).failed()
        )
        key.write_text("nothing")
        serving.signal(signal.SIGHUP)
        assert "no private key in PEM" in serving.err.until("stay in use: (.*)")[1]
        assert invoke("info", place, *known).code == 0
        authority.issue("server")
        serving.signal(signal.SIGHUP)
        for _ in range(1 if workers == 1 else 1 + workers):  # each says so
            serving.err.until("the TLS files were read again")
        for _ in range(2 * workers):
            assert invoke("info", place, *known).code == 0
        serving.signal(signal.SIGTERM)
        assert serving.wait() == 0


@contextmanager
def piped(content: bytes) -> Iterator[str]:
    """The path of a pipe that a program has written, as <(...) of a shell."""
    reading, writing = os.pipe()
    os.write(writing, content)
    os.close(writing)
    yield f"/dev/fd/{reading}"
    os.close(reading)


def test_secrets_from_pipes(invoke: Invoke, copy: Path, authority: Authority) -> None:
    """They are read several times: for each handshake in memory, each token, each worker."""
    cert, key = (path.read_bytes() for path in authority.issue("server"))
    mine, my_key = (path.read_bytes() for path in authority.issue("client", "client.example"))
    token = b"\xef\xbb\xbfa token with a byte order mark\n"
    with ExitStack() as stack:
        give = [stack.enter_context(piped(each)) for each in (cert, key, token)]
        words = ["--tls-cert", give[0], "--tls-key", give[1], "--publish-token-file", give[2]]
        checked = invoke("serve", copy, *words, "--check-config")
        assert (checked.code, checked.err) == (0, "the options are right\n")
    server = authority.issue("served")
    with (
        StreamServer(
            copy,
            host=HOST,
            port=0,
            in_process=True,
            tls=ServerTLS(server, client_ca=authority.file),
        ) as serving,
        ExitStack() as stack,
    ):
        files = (authority.file.read_bytes(), mine, my_key)
        ca, shown, secret = [stack.enter_context(piped(each)) for each in files]
        words = ["--tls-ca", ca, "--tls-cert", shown, "--tls-key", secret]
        assert invoke("entry", f"tcps://{HOST}:{serving.port}", 7, *words).objects[0]["number"] == 7
    with piped(cert) as path:
        refused = invoke("context", "add", "x", "tcps://a", "--tls-ca", path).failed(2)
        assert refused == "Invalid value: a pipe can be read once only; a context needs a file"


@pytest.mark.parametrize("tcp", [False, True])
def test_serving_and_reading_a_unix_socket(invoke: Invoke, copy: Path, tcp: bool) -> None:
    path = copy.parent / "socket"
    more = ("--host", HOST, "--port", "0") if tcp else ()
    with running("serve", copy, "--unix", "socket", *more, cwd=copy.parent) as serving:
        line = serving.err.until(r"serving .* on (.*)")[1]
        assert line.split(", ")[0] == f"unix:{path}"
        assert line.count(HOST) == tcp
        assert len(invoke("cat", f"unix:{path}").objects) == ENTRIES
        refused = invoke("serve", copy, "--follow", "--unix", path).failed()
        assert "another server listens there" in refused
        serving.signal(signal.SIGTERM)
        assert serving.wait() == 0
    assert not path.exists()
    assert "cannot connect to unix:" in invoke("info", f"unix:{path}").failed()


@pytest.mark.parametrize(
    "words, message",
    [
        (["--tls-key", "k"], "--tls-key requires --tls-cert"),
        (["--tls-client-ca", "c"], "--tls-client-ca requires --tls-cert"),
        (["--tls-cert", "a", "--tls-cert", "b", "--tls-key", "k"], "2 --tls-cert and 1 --tls-key"),
    ],
)
def test_wrong_usage_of_serve(invoke: Invoke, copy: Path, words: list[str], message: str) -> None:
    assert message in invoke("serve", copy, *words).failed(2)


def test_certificates_that_cannot_be_used(
    invoke: Invoke, copy: Path, authority: Authority, tmp_path: Path
) -> None:
    cert, key = authority.issue("past", first_day=-9, last_day=-1)
    failed = invoke("serve", copy, "--tls-cert", cert, "--tls-key", key, "--port", "0").failed()
    assert failed == f"{cert}: the certificate has expired; obtain a new one"
    failed = invoke("info", "tcps://127.0.0.1:1", "--tls-ca", tmp_path / "nothing").failed()
    assert failed == f"{tmp_path}/nothing: cannot be read: No such file or directory"


@pytest.mark.parametrize("verb", [["info"], ["cat"], ["entry", "1"], ["bookmark", "block:1"]])
def test_tls_options_for_a_source_without_tls(invoke: Invoke, copy: Path, verb: list[str]) -> None:
    name, *more = verb
    for place in (copy, "127.0.0.1:1", "tcp://127.0.0.1:1", "unix:/run/socket"):
        failed = invoke(name, place, *more, "--tls-server-name", "x").failed(2)
        assert "--tls-server-name is for tcps://HOST:PORT, not for" in failed
    failed = invoke(name, "tcps://127.0.0.1:1", *more, "--tls-key", "x").failed(2)
    assert "--tls-key requires --tls-cert" in failed


def test_invalid_addresses(invoke: Invoke) -> None:
    assert "is not tcps://HOST:PORT" in invoke("info", "tcps://x:y").failed(2)
    assert "names no socket" in invoke("info", "unix:").failed(2)


def test_when_the_first_certificate_expires(copy: Path, authority: Authority) -> None:
    days = (300, 10)
    pairs = [authority.issue(f"server{number}", last_day=number) for number in days]
    files = [word for pair in pairs for word in ("--tls-cert", pair[0], "--tls-key", pair[1])]
    words = ("serve", copy, "--port", "0", "--host", HOST, "--metrics-port", "0", *files)
    with running(*words, cwd=copy.parent) as serving:
        url = serving.err.until(r"metrics on (http\S+)")[1]
        with urllib.request.urlopen(url) as answer:
            shown = answer.read().decode()
    found = re.search(r"^datastreamer_tls_certificate_expiry_seconds (\S+)$", shown, re.MULTILINE)
    assert found
    assert abs(float(found[1]) - time.time() - 10 * 86400) < 86400
