"""Certificates and keys: what is read, what is refused, and which is shown to whom."""

from __future__ import annotations

import contextlib
import json
import shutil
import ssl
import subprocess
from pathlib import Path

import pytest

from datastreamer.errors import BadCertificate, UsageError
from datastreamer.transport.tls import ServerTLS, client_tls, server_fault
from tests.network.secure import Authority

Pair = tuple[Path, Path]


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path, "first")


def talk(server: ssl.SSLContext, client: ssl.SSLContext, name: str | None) -> ssl.SSLObject:
    """The client's side of a handshake in memory."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ours = client.wrap_bio(to_client, to_server, server_hostname=name)
    theirs = server.wrap_bio(to_server, to_client, server_side=True)
    for _ in range(3):
        for side in (ours, theirs):
            with contextlib.suppress(ssl.SSLWantReadError):
                side.do_handshake()
    return ours


def names_of(side: ssl.SSLObject) -> list[str]:
    return [name for _, name in (side.getpeercert() or {})["subjectAltName"]]


def test_when_the_first_certificate_expires(authority: Authority) -> None:
    pairs = [authority.issue(name) for name in ("a", "b")]
    server = ServerTLS(*pairs)
    ends = [
        ssl.cert_time_to_seconds(ssl._ssl._test_decode_cert(str(cert))["notAfter"])  # type: ignore[attr-defined]
        for cert, _ in pairs
    ]
    assert server.expires_at == min(ends)


def test_the_name_of_another_host_is_said_as_openssl_says_it(authority: Authority) -> None:
    server = ServerTLS(authority.issue("server", "stream.example"))
    with pytest.raises(ssl.SSLCertVerificationError) as refused:
        talk(server.context, authority.context(), "127.0.0.2")
    assert "not accepted: IP address mismatch, certificate" in server_fault(refused.value)


def test_only_the_newest_version_is_spoken(authority: Authority) -> None:
    server = ServerTLS(authority.issue("server"))
    assert talk(server.context, authority.context(), "127.0.0.1").version() == "TLSv1.3"
    old = authority.context()
    old.minimum_version = ssl.TLSVersion.TLSv1_2
    old.maximum_version = ssl.TLSVersion.TLSv1_2
    with pytest.raises(ssl.SSLError):
        talk(server.context, old, "127.0.0.1")
    older_server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    older_server.load_cert_chain(*authority.issue("old"))
    older_server.maximum_version = ssl.TLSVersion.TLSv1_2
    with pytest.raises(ssl.SSLError):
        talk(older_server, authority.context(), "127.0.0.1")


@pytest.mark.parametrize(
    "asked, shown",
    [
        ("b.example", "b.example"),
        ("B.Example", "b.example"),
        ("x.wild.example", "*.wild.example"),
        ("a.example", "a.example"),
        ("both.example", "a.example"),
    ],
)
def test_the_certificate_for_the_name_that_is_asked_for(
    authority: Authority, asked: str, shown: str
) -> None:
    server = ServerTLS(
        authority.issue("a", "a.example", "both.example"),
        authority.issue("b", "b.example", "both.example"),
        authority.issue("wild", "*.wild.example"),
    )
    assert shown in names_of(talk(server.context, authority.context(), asked))


@pytest.mark.parametrize("asked", ["c.example", "a.wild.b.example", None])
def test_the_first_certificate_where_none_is_for_the_name(
    authority: Authority, asked: str | None
) -> None:
    server = ServerTLS(authority.issue("a", "a.example"), authority.issue("b", "b.example"))
    client = authority.context()
    client.check_hostname = False
    assert names_of(talk(server.context, client, asked)) == ["a.example"]


def test_reloading(authority: Authority, tmp_path: Path) -> None:
    cert, key = authority.issue("server", "old.example")
    server = ServerTLS((cert, key))
    before = server.context
    new_cert, new_key = authority.issue("new", "new.example")
    shutil.copy(new_cert, cert)
    with pytest.raises(BadCertificate, match="not the key of the certificate in"):
        server.reload()
    assert server.context is before
    shutil.copy(new_key, key)
    server.reload()
    assert names_of(talk(server.context, authority.context(), "new.example")) == ["new.example"]


def test_the_key_may_be_in_the_certificates_file(authority: Authority) -> None:
    cert, key = authority.issue("server")
    cert.write_bytes(cert.read_bytes() + key.read_bytes())
    with pytest.raises(BadCertificate, match=r"server\.pem: holds a secret, and its mode 0644"):
        ServerTLS((cert, cert))
    cert.chmod(0o600)
    server = ServerTLS((cert, cert), client_ca=authority.file)
    assert talk(server.context, client_tls(authority.file, cert), "127.0.0.1").version()


def test_as_json(authority: Authority, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    cert, key = authority.issue("server")
    monkeypatch.chdir(tmp_path)
    server = ServerTLS((cert.name, key.name), client_ca=authority.file.name)
    order = json.loads(json.dumps(server.to_json()))
    assert order == {"pairs": [[str(cert), str(key)]], "client_ca": str(authority.file)}
    monkeypatch.chdir("/")
    assert ServerTLS.from_json(order).to_json() == server.to_json()


def refused(message: str, pair: Pair, ca: Path | None = None) -> None:
    """Both sides refuse it, in one line."""
    for make in (lambda: ServerTLS(pair, client_ca=ca), lambda: client_tls(ca, *pair)):
        with pytest.raises(BadCertificate, match=message) as caught:
            make()
        assert "\n" not in str(caught.value)


def test_files_that_are_no_pair() -> None:
    with pytest.raises(UsageError, match=r"^ServerTLS needs pairs of files, .* not 'c.pem'$"):
        ServerTLS("c.pem", "k.pem")  # type: ignore[arg-type]


def test_files_that_are_not_there_or_cannot_be_read(authority: Authority, tmp_path: Path) -> None:
    cert, key = authority.issue("server")
    nothing = tmp_path / "nothing.pem"
    refused(r"^\S+nothing\.pem: cannot be read: No such file or directory$", (nothing, key))
    refused(r"^\S+nothing\.pem: cannot be read: No such file or directory$", (cert, nothing))
    refused(r"^\S+nothing\.pem: cannot be read: No such", (cert, key), nothing)
    refused(r": cannot be read: Is a directory$", (tmp_path, key))


def test_files_with_something_else(authority: Authority, tmp_path: Path) -> None:
    cert, key = authority.issue("server")
    refused(r"^\S+server\.key: the file has no certificate in PEM$", (key, key))
    refused(r"^\S+server\.pem: the file has no private key in PEM$", (cert, cert))
    refused(r"^\S+server\.key: the file has no certificate in PEM$", (cert, key), key)
    text = tmp_path / "text"
    text.write_bytes(bytes(range(256)))
    refused(r"^\S+text: the file has no certificate in PEM$", (cert, key), text)
    text.write_text(cert.read_text().replace("MII", "AAA"))
    refused(r"^\S+text: cannot be used: ", (cert, key), text)
    refused(r"text, \S+server\.key: certificate or key cannot be used: ", (text, key))
    text.chmod(0o600)
    text.write_text(key.read_text().replace("MHc", "AAA"))
    refused(r"server\.pem, \S+text: certificate or key cannot be used: ", (cert, text))


def test_a_key_of_another_certificate(authority: Authority) -> None:
    (cert, _), (_, other) = authority.issue("server"), authority.issue("other")
    refused(r"^\S+other\.key: this is not the key of the certificate in \S+\.pem$", (cert, other))


def test_an_encrypted_key(authority: Authority, tmp_path: Path) -> None:
    cert, key = authority.issue("server")
    locked = tmp_path / "locked.key"
    words = ["-aes256", "-passout", "pass:secret"]
    subprocess.run(["openssl", "pkey", "-in", key, "-out", locked, *words], check=True)
    refused(
        r"^\S+locked\.key: the key is encrypted; decrypt it with `openssl pkey -in \S+ -out",
        (cert, locked),
    )


def test_certificates_out_of_their_time(authority: Authority) -> None:
    past = authority.issue("past", first_day=-9, last_day=-1)
    refused(r"^\S+past\.pem: the certificate has expired; obtain a new one$", past)
    future = authority.issue("future", first_day=3, last_day=9)
    refused(r"^\S+future\.pem: the certificate is not valid yet; is this machine's clock", future)


def test_a_certificate_for_something_else(authority: Authority, tmp_path: Path) -> None:
    for usage, wrong in (("clientAuth", "server"), ("serverAuth", "client")):
        cert, key = tmp_path / "cert.pem", tmp_path / "cert.key"
        words = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=x"]
        extension = ["-addext", f"extendedKeyUsage={usage}"]
        subprocess.run(
            [*words, *extension, "-keyout", key, "-out", cert], check=True, capture_output=True
        )
        message = rf"cert\.pem: the certificate is not made for a {wrong}$"
        with pytest.raises(BadCertificate, match=message):
            ServerTLS((cert, key)) if wrong == "server" else client_tls(cert, cert, key)
        ServerTLS((cert, key)) if wrong == "client" else client_tls(cert, cert, key)


def test_what_goes_together(authority: Authority) -> None:
    cert, key = authority.issue("server")
    with pytest.raises(BadCertificate, match="TLS needs a certificate and its key"):
        ServerTLS()
    with pytest.raises(BadCertificate, match=r"server\.key: a key without a certificate"):
        client_tls(authority.file, key=key)
    # A certificate of the server's own is enough for a client.
    assert talk(ServerTLS((cert, key)).context, client_tls(cert), "127.0.0.1").version()
