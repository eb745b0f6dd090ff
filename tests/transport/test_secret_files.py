"""Tokens and private keys that other users own or can read are refused, unless that is allowed."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from datastreamer.errors import BadCertificate, UsageError
from datastreamer.server.publish.policy import Publishing, read_tokens
from datastreamer.transport.secret_files import ALLOW, read_secret
from datastreamer.transport.tls import ServerTLS, client_tls
from tests.network.secure import Authority

READABLE = [0o644, 0o444, 0o640, 0o660, 0o604, 0o606, 0o620]
AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="gives files to other users: needs root")


@pytest.fixture(autouse=True)
def nothing_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ALLOW, raising=False)


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    path = tmp_path / "token"
    path.write_bytes(b"a token")
    return path


@pytest.fixture
def not_root(token_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The token file, and this process, are another user's than root."""
    if os.geteuid() == 0:
        os.chown(token_file, 4000, 4000)
        monkeypatch.setattr(os, "geteuid", lambda: 4000)


@pytest.mark.usefixtures("not_root")
@pytest.mark.parametrize("mode", READABLE)
def test_a_token_file_that_others_can_read(
    token_file: Path, mode: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    token_file.chmod(mode)
    terms = Publishing(token_file=token_file)
    with pytest.raises(UsageError, match=rf"token: holds a secret, and its mode {mode:04o}") as why:
        terms.tokens()
    assert "\n" not in str(why.value)
    assert "--allow-readable-secrets" in str(why.value)
    monkeypatch.setenv(ALLOW, "1")
    assert terms.tokens() == [b"a token"]


@pytest.mark.usefixtures("not_root")
@pytest.mark.parametrize("mode", [0o600, 0o400, 0o700])
def test_a_token_file_of_its_owner_alone(token_file: Path, mode: int) -> None:
    token_file.chmod(mode)
    assert read_tokens(token_file) == [b"a token"]


@AS_ROOT
@pytest.mark.parametrize("user", [0, 4001])
def test_a_token_file_of_another_user(
    token_file: Path, user: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That user has chosen the token, and can read it."""
    os.chown(token_file, 4000, 4000)
    token_file.chmod(0o600)
    monkeypatch.setattr(os, "geteuid", lambda: user)
    with pytest.raises(UsageError, match="token: holds a secret, and belongs to user 4000") as why:
        read_tokens(token_file)
    assert "\n" not in str(why.value)
    assert f"chown {user} " in str(why.value)
    monkeypatch.setenv(ALLOW, "1")
    assert read_tokens(token_file) == [b"a token"]


@AS_ROOT
def test_a_private_key_of_another_user(tmp_path: Path) -> None:
    cert, key = Authority(tmp_path, "ca").issue("server")
    os.chown(key, 4000, 4000)
    with pytest.raises(BadCertificate, match="belongs to user 4000"):
        ServerTLS((cert, key))


@AS_ROOT
def test_the_group_may_read_a_file_of_root(token_file: Path) -> None:
    os.chown(token_file, 0, 4000)
    for mode in (0o640, 0o440, 0o600):
        token_file.chmod(mode)
        assert read_tokens(token_file) == [b"a token"]
    for mode in (0o660, 0o644, 0o604):
        token_file.chmod(mode)
        with pytest.raises(UsageError):
            read_tokens(token_file)


def test_a_pipe_is_read_as_it_is(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe, 0o644)
    writer = threading.Thread(target=pipe.write_bytes, args=(b"a token",))
    writer.start()
    assert read_secret(pipe) == b"a token"
    writer.join()


def test_keys_of_servers_and_clients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    authority = Authority(tmp_path, "ca")
    cert, key = authority.issue("server")
    key.chmod(0o644)
    with pytest.raises(BadCertificate, match=r"server\.key: holds a secret"):
        ServerTLS((cert, key))
    with pytest.raises(BadCertificate, match=r"server\.key: holds a secret"):
        client_tls(authority.file, cert, key)
    monkeypatch.setenv(ALLOW, "1")
    ServerTLS((cert, key))
    monkeypatch.delenv(ALLOW)
    key.chmod(0o600)
    server = ServerTLS((cert, key))
    key.chmod(0o644)
    with pytest.raises(BadCertificate):
        server.reload()
