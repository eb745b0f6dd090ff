"""TLS: certificates and keys from files, and the messages for failed handshakes.

Owns the TLS version (1.3), how a server selects its certificate, and the checks of files before
they are used. Knows neither trio nor sockets nor the protocol.
"""

from __future__ import annotations

import contextlib
import os
import ssl
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from datastreamer.errors import BadCertificate, ConnectFailed, TLSFailed, UsageError
from datastreamer.transport.secret_files import read_secret

PathLike = str | os.PathLike[str]
Pair = tuple[str, str]

# OpenSSL's verification errors.
_NOT_YET_VALID = 9
_EXPIRED = 10
_WRONG_PURPOSE = 26
_NO_ISSUER = (18, 19, 20, 21)
_OTHER_NAME = (62, 64)


class ServerTLS:
    """A server's certificates, and the CA of its clients.

    ``ServerTLS(("cert.pem", "key.pem"))``: pairs of a certificate, followed by its intermediate
    certificates, all in PEM, and its key, which may be in the same file. Of several pairs a client
    gets the one for the name that it requests, by default the first. With `client_ca` clients must
    present a certificate of that CA.

    The files are read at once, and again by `reload`. Raises `BadCertificate`, also if other users
    own or can read a key.
    """

    def __init__(
        self, *pairs: tuple[PathLike, PathLike], client_ca: PathLike | None = None
    ) -> None:
        if not pairs:
            raise BadCertificate("TLS needs a certificate and its key")
        for pair in pairs:
            if not isinstance(pair, tuple | list) or len(pair) != 2:
                raise UsageError(
                    'ServerTLS needs pairs of files, as in ServerTLS(("cert.pem", "key.pem")), '
                    f"not {pair!r}"
                )
        self._pairs = [(os.path.abspath(cert), os.path.abspath(key)) for cert, key in pairs]
        self._client_ca = None if client_ca is None else os.path.abspath(client_ca)
        self._context = self._load()

    @property
    def context(self) -> ssl.SSLContext:
        """The context for new connections."""
        return self._context

    @property
    def asks_clients(self) -> bool:
        """Whether clients must present a certificate."""
        return self._client_ca is not None

    @property
    def expires_at(self) -> int:
        """When the first of the certificates expires, in seconds since 1970."""
        return self._expires_at

    def reload(self) -> None:
        """Read the files again, for new connections. From any thread.

        Raises `BadCertificate`; then the files read before stay in use.
        """
        self._context = self._load()

    def to_json(self) -> dict[str, Any]:
        """The paths of the files, for another process."""
        return {"pairs": self._pairs, "client_ca": self._client_ca}

    @classmethod
    def from_json(cls, order: Mapping[str, Any]) -> ServerTLS:
        """The inverse of `to_json`. Raises `BadCertificate`."""
        return cls(*map(tuple, order["pairs"]), client_ca=order["client_ca"])

    def _load(self) -> ssl.SSLContext:
        by_name: dict[str, ssl.SSLContext] = {}
        contexts = []
        expiries = []
        for pair in self._pairs:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.minimum_version = ssl.TLSVersion.TLSv1_3
            # Connections are rare and long: session resumption gains nothing.
            context.num_tickets = 0
            _load_pair(context, pair)
            if self._client_ca is not None:
                context.verify_mode = ssl.CERT_REQUIRED
                _load_ca(context, self._client_ca)
            certificate = _examine(pair, serving=True)
            expiries.append(ssl.cert_time_to_seconds(certificate["notAfter"]))
            for name in names_of(certificate):
                by_name.setdefault(name, context)
            contexts.append(context)
        if len(contexts) > 1:

            def choose(connection: ssl.SSLObject, name: str | None, _: ssl.SSLContext) -> None:
                wanted = (name or "").lower()
                found = by_name.get(wanted) or by_name.get("*." + wanted.partition(".")[2])
                if found is not None:
                    connection.context = found

            contexts[0].sni_callback = choose
        self._expires_at = min(expiries)
        return contexts[0]


def client_tls(
    ca: PathLike | None = None, cert: PathLike | None = None, key: PathLike | None = None
) -> ssl.SSLContext:
    """The TLS context of a client: for `connect` and `BlockingClient`.

    `ca` is a file of CA certificates in PEM (None: the system's), or the server's self-signed
    certificate. `cert` and `key` (None: in the same file) are for servers that require a client
    certificate. Raises `BadCertificate`.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    # A certificate in `ca` is trusted even if another CA has signed it.
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    if ca is None:
        context.load_default_certs()
    else:
        _load_ca(context, os.fspath(ca))
    if cert is not None:
        pair = (os.fspath(cert), os.fspath(cert if key is None else key))
        _load_pair(context, pair)
        _examine(pair, serving=False)
    elif key is not None:
        raise BadCertificate(
            f"{os.fspath(key)}: a key without a certificate; give the certificate too"
        )
    return context


# Files.


def _check_pem(path: str, what: str, *, secret: bool = False) -> None:
    """Raises `BadCertificate` if the file cannot be read, has no `what` in PEM, or is a `secret`
    that other users own or can read."""
    try:
        if f"{what.upper()}-----".encode() not in Path(path).read_bytes():
            raise BadCertificate(f"{path}: the file has no {what} in PEM")
        if secret:
            read_secret(path, 0)
    except OSError as error:
        raise BadCertificate(f"{path}: cannot be read: {error.strerror or error}") from None
    except UsageError as error:
        raise BadCertificate(str(error)) from None


def _load_pair(context: ssl.SSLContext, pair: Pair) -> None:
    cert, key = pair
    _check_pem(cert, "certificate")
    _check_pem(key, "private key", secret=True)
    asked = False

    def password() -> str:
        nonlocal asked
        asked = True
        return ""

    try:
        context.load_cert_chain(cert, key, password)
    except (ssl.SSLError, ValueError) as error:
        if asked:
            raise BadCertificate(
                f"{key}: the key is encrypted; decrypt it with `openssl pkey -in {key} -out "
                "plain.pem`"
            ) from None
        if getattr(error, "reason", None) == "KEY_VALUES_MISMATCH":
            raise BadCertificate(
                f"{key}: this is not the key of the certificate in {cert}"
            ) from None
        raise BadCertificate(
            f"{cert}, {key}: certificate or key cannot be used: {why(error)}"
        ) from None


def _load_ca(context: ssl.SSLContext, path: str) -> None:
    _check_pem(path, "certificate")
    try:
        context.load_verify_locations(path)
    except (ssl.SSLError, ValueError) as error:
        raise BadCertificate(f"{path}: cannot be used: {why(error)}") from None


def _examine(pair: Pair, *, serving: bool) -> Mapping[str, Any]:
    """The fields of a certificate, read in a handshake in memory, which proves that it works.

    Raises `BadCertificate` if it has expired or is for another purpose.
    """
    server, client = (
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER),
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT),
    )
    client.check_hostname = False
    client.verify_mode = ssl.CERT_NONE
    judge = client if serving else server
    judge.verify_mode = ssl.CERT_REQUIRED
    judge.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    try:
        judge.load_verify_locations(pair[0])
        _load_pair(server, pair)
        if not serving:
            _load_pair(client, pair)
        to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
        sides = (
            client.wrap_bio(to_client, to_server),
            server.wrap_bio(to_server, to_client, server_side=True),
        )
        for _ in range(3):
            for side in sides:
                with contextlib.suppress(ssl.SSLWantReadError):
                    side.do_handshake()
        return sides[0 if serving else 1].getpeercert() or {}
    except ssl.SSLCertVerificationError as error:
        what = {
            _NOT_YET_VALID: "is not valid yet; is this machine's clock right?",
            _EXPIRED: "has expired; obtain a new one",
            _WRONG_PURPOSE: f"is not made for a {'server' if serving else 'client'}",
        }.get(error.verify_code, f"cannot be used: {error.verify_message}")
        raise BadCertificate(f"{pair[0]}: the certificate {what}") from None
    except (ssl.SSLError, ValueError) as error:
        raise BadCertificate(f"{pair[0]}: the certificate cannot be used: {why(error)}") from None


def names_of(certificate: Mapping[str, Any]) -> list[str]:
    """The DNS names of a certificate, in lower case; its common name if it has none."""
    found = [name for kind, name in certificate.get("subjectAltName", ()) if kind == "DNS"]
    if not found:
        subject = (part for parts in certificate.get("subject", ()) for part in parts)
        found = [name for kind, name in subject if kind == "commonName"]
    return [name.lower() for name in found]


# Messages.


def tls_failed(peer: str, error: BaseException) -> TLSFailed | ConnectFailed:
    """The exception for a client whose handshake failed.

    `ConnectFailed` if the server only closed the connection: it may be shutting down.
    """
    kind = ConnectFailed if _is_end(error) else TLSFailed
    return kind(f"no TLS connection to {peer}: {server_fault(error)}")


def _is_end(error: BaseException) -> bool:
    """Whether the other side closed the connection without a reason."""
    is_tls = isinstance(error, ssl.SSLError) and not isinstance(error, ssl.SSLEOFError)
    return not is_tls and not isinstance(error, ValueError)


def server_fault(error: BaseException) -> str:
    """Why a client's connection failed: `error` is from its handshake or from a later read."""
    reason = getattr(error, "reason", None) or ""
    if isinstance(error, ssl.SSLCertVerificationError):
        if error.verify_code in _NO_ISSUER:
            hint = "; give the CA that signed it (--tls-ca, client_tls())"
        elif error.verify_code in _OTHER_NAME:
            hint = (
                "; connect by the name in it, or give that name as the TLS server name "
                "(--tls-server-name, tls_server_name=)"
            )
        else:
            hint = ""
        return f"the server's certificate is not accepted: {_verdict(error)}{hint}"
    if reason == "WRONG_VERSION_NUMBER" or _is_end(error):
        return "it closed the connection in the TLS handshake; does the server use TLS?"
    if reason == "TLSV13_ALERT_CERTIFICATE_REQUIRED":
        return "it requires a client certificate; give one, with its key"
    if reason in _UNKNOWN_CA:
        return "it does not accept this client's certificate: it does not trust the CA"
    if "ALERT_CERTIFICATE" in reason or "BAD_CERTIFICATE" in reason:
        return f"it does not accept this client's certificate: {why(error)}"
    if "PROTOCOL" in reason:
        return "it does not support TLS 1.3"
    return f"TLS failed: {why(error)}"


def client_fault(error: BaseException) -> str:
    """Why a server refuses a client: `error` is from its handshake."""
    reason = getattr(error, "reason", None) or ""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not accepted: {_verdict(error)}"
    if reason == "PEER_DID_NOT_RETURN_A_CERTIFICATE":
        return "it presents no certificate"
    if reason in _UNKNOWN_CA or "ALERT_CERTIFICATE" in reason or "BAD_CERTIFICATE" in reason:
        return f"it does not accept our certificate ({why(error)})"
    if "PROTOCOL" in reason or reason in ("WRONG_VERSION_NUMBER", "NO_SHARED_CIPHER"):
        return "it does not support TLS 1.3"
    if _is_end(error):
        return "it closed the connection in the handshake; does it trust this server's certificate?"
    return f"TLS failed: {why(error)}"


def _verdict(error: ssl.SSLCertVerificationError) -> str:
    message = error.verify_message.rstrip(".")
    return message if message[1:2].isupper() else message[:1].lower() + message[1:]


_UNKNOWN_CA = ("TLSV1_ALERT_UNKNOWN_CA", "SSLV3_ALERT_CERTIFICATE_UNKNOWN")


def why(error: BaseException) -> str:
    """OpenSSL's reason in lower case, without its source location."""
    reason = getattr(error, "reason", None)
    return reason.lower().replace("_", " ") if reason else str(error)
