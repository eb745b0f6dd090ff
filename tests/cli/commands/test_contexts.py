"""Named contexts, the SOURCE of the environment, and servers seen before."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest

from datastreamer.cli.commands.contexts import remember_server, seen_servers
from datastreamer.server.publish.policy import Publishing
from datastreamer.service.embedded import StreamServer
from tests.cli.conftest import Invoke


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path


def test_a_context_names_the_server(invoke: Invoke, server: str) -> None:
    assert invoke("context", "add", "prod", server, "--stream-type", 1).code == 0
    assert invoke("info", "--context", "prod").objects[0]["total_entries"] == 200
    # An argument after SOURCE, and an option that wins over the context's.
    assert invoke("entry", "7", "--context", "prod").objects[0]["number"] == 7
    assert "another stream type" in invoke("info", "--context=prod", "--stream-type", 7).failed()
    assert invoke("context", "show").objects == [
        {"name": "prod", "server": server, "stream-type": 1}
    ]
    assert invoke("context", "remove", "prod").code == 0
    assert invoke("context", "show").out == b""


def test_the_current_context(
    invoke: Invoke, server: str, made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    invoke("context", "add", "prod", server)
    invoke("context", "add", "other", "127.0.0.1:1")
    assert invoke("context", "use", "prod").code == 0
    assert invoke("info").objects[0]["total_entries"] == 200
    assert invoke("entry", 7).objects[0]["number"] == 7
    shown = invoke("context", "ls", "--format", "table").out.decode().splitlines()
    assert [line[:7] for line in shown] == ["  other", "* prod "]
    # What is given wins, and so do the option and the environment.
    assert invoke("info", made).objects[0]["file_size"]
    assert "connect to 127.0.0.1:1" in invoke("info", "--context", "other").failed()
    monkeypatch.setenv("DATASTREAMER_SERVER", "127.0.0.1:1")
    assert "connect to 127.0.0.1:1" in invoke("info").failed()
    monkeypatch.delenv("DATASTREAMER_SERVER")
    # Nothing is written to a server that is not named.
    assert "Missing argument" in invoke("append").failed(2)
    assert invoke("context", "remove", "prod").code == 0
    assert "Missing argument" in invoke("info").failed(2)
    assert "no context 'x'" in invoke("context", "use", "x").failed(2)


def test_a_context_to_write_to(
    invoke: Invoke, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (token := tmp_path / "token").write_text("a token of enough length\n")
    token.chmod(0o600)
    with StreamServer(
        tmp_path / "s.bin",
        create=True,
        host="127.0.0.1",
        port=0,
        in_process=True,
        publishing=Publishing(token_file=token),
    ) as server:
        invoke("context", "add", "prod", f"127.0.0.1:{server.port}")
        lines = b'{"type": 3, "text": "a"}\n{"commit": true}\n'
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(lines)))
        done = invoke("append", "--context", "prod", "--token-file", token)
        assert done.objects == [{"first_entry": 0, "entries": 1, "total_entries": 1}], done
        assert server.stream.total_entries == 1


def test_a_context_for_a_relay(invoke: Invoke, server: str, home: Path) -> None:
    """Its options are those for the upstream, not those for the relay's own clients."""
    tls = ("--tls-ca", "ca.pem", "--tls-server-name", "n")
    invoke("context", "add", "secure", "tcps://h:1", *tls)
    relay = ("relay", "--file", home / "r.bin", "--check-config", "--context")
    assert "ca.pem: cannot be read" in invoke(*relay, "secure").failed()
    invoke("context", "add", "plain", server)
    done = invoke(*relay, "plain")
    assert (done.code, done.err) == (0, "the options are right\n")
    assert "leave --server out" in invoke(*relay, "plain", "--server", "h").failed(2)


def test_the_second_stream_of_a_comparison(
    invoke: Invoke, server: str, made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    invoke("context", "add", "prod", server)
    diff = ("zkevm", "diff", made, "--json")
    assert invoke(*diff, "--context", "prod").objects[0]["equal"]
    assert "leave B out" in invoke(*diff, server, "--context", "prod").failed(2)
    monkeypatch.setenv("DATASTREAMER_SERVER", server)
    assert invoke(*diff).objects[0]["equal"]


def test_wrong_contexts(invoke: Invoke, server: str, home: Path) -> None:
    invoke("context", "add", "prod", server)
    assert "did you mean 'prod'?" in invoke("info", "--context", "prd").failed(2)
    assert "the context of this name, write --context prod" in invoke("info", "prod").failed()
    assert "leave SOURCE out" in invoke("info", server, "--context", "prod").failed(2)
    assert "no context 'x'" in invoke("context", "remove", "x").failed(2)
    assert "--tls-ca is for tcps" in invoke("context", "add", "a", "h", "--tls-ca", "f").failed(2)
    assert "is not HOST:PORT" in invoke("context", "add", "a", "h:x").failed(2)
    path = home / "config" / "datastreamer" / "contexts.toml"
    for text, message in (("[", "not TOML"), ("[a]\n", "[a] has no server")):
        path.write_text(text)
        assert message in invoke("context", "show").failed()


def test_the_tls_files_of_a_context(
    invoke: Invoke, monkeypatch: pytest.MonkeyPatch, home: Path
) -> None:
    monkeypatch.chdir(home)
    assert invoke("context", "add", "t", "tcps://localhost:1", "--tls-ca", "ca.pem").code == 0
    shown = invoke("info", "--context", "t").failed()
    assert shown == f"{home}/ca.pem: cannot be read: No such file or directory"


def test_the_source_of_the_environment(
    invoke: Invoke, server: str, made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DATASTREAMER_SERVER", server)
    assert invoke("info").objects[0]["total_entries"] == 200
    assert invoke("entry", "7").objects[0]["number"] == 7
    assert invoke("bookmark", "block:3", "--entry-number").lines == ["16"]
    # What is given wins.
    assert "pages" in invoke("info", made).objects[0]


def test_servers_seen_before(invoke: Invoke, server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert invoke("info", server).code == 0
    assert seen_servers() == []
    with monkeypatch.context() as patch:
        patch.setattr(sys.stdin, "isatty", lambda: True)
        assert invoke("info", server).code == 0
    assert seen_servers() == [server]
    for number in range(60):
        remember_server(f"h:{number + 1}")
    remember_server(server)
    assert seen_servers()[:2] == [server, "h:60"]
    assert len(seen_servers()) == 50


def test_a_home_that_cannot_be_written(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (home / "file").write_text("")
    monkeypatch.setenv("XDG_STATE_HOME", str(home / "file"))
    remember_server("h:1")
    assert seen_servers() == []


def test_names_of_any_characters(invoke: Invoke, server: str) -> None:
    for name in ('tab\t"quoted"', "DEL\x7f", "größe", "a.b # c"):
        invoke("context", "add", name, server)
        assert invoke("info", "--context", name, "--json").code == 0


def test_a_name_that_is_not_text(invoke: Invoke, home: Path) -> None:
    assert "not UTF-8" in invoke("context", "add", "a\udcff", "127.0.0.1").failed()
    assert list(home.rglob("tmp*")) == []
