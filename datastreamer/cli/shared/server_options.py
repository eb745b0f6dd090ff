"""Groups of options of commands that serve: `serve`, `relay`, `reassemble`, `dsapp server`."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass, fields
from ipaddress import ip_address
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from datastreamer.cli.shared.options import (
    SyncOption,
    number_option,
    rate_option,
    size_option,
    text_option,
)
from datastreamer.format import U32_MAX
from datastreamer.http.options import LOOPBACK, HttpOptions
from datastreamer.http.options import MAX_CLIENTS as HTTP_CLIENTS
from datastreamer.printable import counted
from datastreamer.server.limits import GRACE_SECONDS, INACTIVITY_SECONDS, MAX_CLIENTS, Limits
from datastreamer.server.publish.policy import check_client_tokens
from datastreamer.storage.bookmarks.fallback import LMDB_OR_MEMORY
from datastreamer.transport.address import UNIX
from datastreamer.transport.listeners import address_of

_log = logging.getLogger(__name__)

if TYPE_CHECKING:
    from datastreamer.storage.stream import DataStream
    from datastreamer.storage.view import IndexName
    from datastreamer.transport.tls import ServerTLS


def port_option(default: int) -> Any:
    text = f"TCP port to listen on; 0: any free port, which is logged [{default}]."
    return number_option("PORT", text, most=65535)


def log_serving(
    log: logging.Logger,
    path: str,
    stream: DataStream,
    addresses: Iterable[tuple[str, int]],
    about: str = "",
) -> None:
    """Log which stream is served, and where."""
    shown = [address_of(each) for each in addresses]
    fields = {"file": path, "entries": stream.total_entries, "addresses": shown}
    what = "serving %s (%s%s) on %s"
    log.info(what, path, counted(stream.total_entries), about, ", ".join(shown), extra=fields)


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return False


@dataclass(frozen=True)
class MetricsOptions:
    """The metrics port."""

    metrics_port: Annotated[
        int | None,
        number_option(
            "PORT",
            "Port of the metrics for Prometheus and `top`; 0: any free port, which is logged.",
            most=65535,
        ),
    ] = None
    metrics_host: Annotated[
        list[str] | None,
        text_option("HOST", "Address of the metrics port; repeatable [127.0.0.1]."),
    ] = None

    def address(self) -> tuple[list[str] | None, int] | None:
        """Hosts and port; None without --metrics-port."""
        if self.metrics_port is None:
            if self.metrics_host:
                raise typer.BadParameter("--metrics-host requires --metrics-port")
            return None
        return self.metrics_host or None, self.metrics_port


@dataclass(frozen=True)
class HttpPortOptions:
    """The HTTP port."""

    http_port: Annotated[
        int | None,
        number_option(
            "PORT",
            "Port for HTTP: the stream for browsers and other programs, and a console; with TLS if "
            "--tls-cert is given. 0: any free port, which is logged.",
            most=65535,
        ),
    ] = None
    http_host: Annotated[
        list[str] | None, text_option("HOST", "Address of the HTTP port; repeatable [127.0.0.1].")
    ] = None
    http_token_file: Annotated[
        str | None,
        text_option(
            "FILE", "Answer only requests with Authorization: Bearer and a token of this file."
        ),
    ] = None
    http_cors: Annotated[
        list[str] | None,
        text_option(
            "ORIGIN", "Let web pages of this origin read over HTTP; *: of every origin; repeatable."
        ),
    ] = None
    http_max_clients: Annotated[
        int, number_option("N", "Maximum number of HTTP connections.", most=U32_MAX, least=1)
    ] = HTTP_CLIENTS
    http_max_followers: Annotated[
        int,
        number_option(
            "N", "Maximum number of HTTP connections that wait for commits.", most=U32_MAX, least=1
        ),
    ] = HTTP_CLIENTS

    explorer: Annotated[
        bool,
        typer.Option(
            "--explorer",
            help="Index the hashes and addresses of a zkEVM stream from the start on, for the "
            "search over HTTP, in FILE.explorer [from the first search on].",
        ),
    ] = False

    def options(self) -> HttpOptions | None:
        """None without --http-port. Raises `UsageError` for a token file without tokens."""
        if self.http_port is None:
            for option in ("host", "token_file", "cors", "max_clients", "max_followers"):
                if getattr(self, f"http_{option}") not in (None, HTTP_CLIENTS):
                    name = option.replace("_", "-")
                    raise typer.BadParameter(f"--http-{name} requires --http-port")
            if self.explorer:
                raise typer.BadParameter("--explorer requires --http-port")
            return None
        made = HttpOptions(
            port=self.http_port,
            host=self.http_host or LOOPBACK,
            token_file=self.http_token_file,
            cors=self.http_cors or (),
            max_clients=self.http_max_clients,
            max_followers=self.http_max_followers,
            explorer=self.explorer,
        )
        made.check()
        return made


@dataclass(frozen=True)
class ServerOptions:
    """The addresses, TLS, limits and storage of a server."""

    host: Annotated[
        list[str] | None,
        text_option("HOST", "Address to listen on; repeatable [all, IPv4 and IPv6]."),
    ] = None
    unix: Annotated[
        str | None,
        text_option("PATH", "Unix socket to listen on; with --host or --port, TCP as well."),
    ] = None
    tls_cert: Annotated[
        list[str] | None,
        text_option(
            "FILE",
            "Use TLS with the certificate chain in this PEM file. Repeatable: each client receives "
            "the one for the name that it asks for, else the first. SIGHUP reloads the files.",
        ),
    ] = None
    tls_key: Annotated[
        list[str] | None,
        text_option(
            "FILE", "Read the key from this PEM file, one for each --tls-cert [the same file]."
        ),
    ] = None
    tls_client_ca: Annotated[
        str | None,
        text_option("FILE", "Accept only clients with a certificate of the CA in this PEM file."),
    ] = None
    client_token_file: Annotated[
        str | None,
        text_option(
            "FILE",
            "Give a client that presents a token of this file (one per line) a reserved slot when "
            "the server is full.",
        ),
    ] = None
    max_clients: Annotated[
        int,
        number_option(
            "N",
            "Maximum number of connections; a full server closes the client that has been idle "
            "longest, or refuses the new one.",
            most=U32_MAX,
            least=1,
        ),
    ] = MAX_CLIENTS
    max_clients_per_address: Annotated[
        int | None,
        number_option(
            "N",
            "Maximum number of connections from one address (IPv6: one /64); 0: no limit [a tenth "
            "of --max-clients, at least 64; loopback and Unix sockets: no limit].",
            most=U32_MAX,
        ),
    ] = None
    reserved_clients: Annotated[
        int | None,
        number_option(
            "N",
            "Number of connections above --max-clients for publishers and for clients with a "
            "certificate or a token [8].",
            most=U32_MAX,
        ),
    ] = None
    accept_rate: Annotated[
        int,
        number_option(
            "N",
            "Maximum rate of accepted connections per second; others wait. 0: no limit.",
            most=U32_MAX,
        ),
    ] = 0
    request_rate: Annotated[
        int,
        number_option(
            "N",
            "Maximum rate of commands per second from one client; more wait. 0: no limit.",
            most=U32_MAX,
        ),
    ] = 0
    inactivity_timeout: Annotated[
        int,
        number_option(
            "SECONDS",
            "Disconnect a client that neither streams nor sends commands for this time; 0: never.",
            most=U32_MAX,
        ),
    ] = int(INACTIVITY_SECONDS)
    write_timeout: Annotated[
        int,
        number_option(
            "SECONDS",
            "Disconnect a client that receives no byte for this time; 0: never.",
            most=U32_MAX,
        ),
    ] = 0
    grace: Annotated[
        int,
        number_option(
            "SECONDS",
            "Time after the signal for clients to receive committed entries.",
            most=U32_MAX,
        ),
    ] = int(GRACE_SECONDS)
    scrub_rate: Annotated[
        float | None,
        rate_option(
            "While idle, read the file again and again at up to this rate (50MB/s), and compare "
            "its pages with their checksums.",
            name="--scrub",
        ),
    ] = None
    archive_cache: Annotated[
        int | None,
        size_option("Keep that much of the pages that were fetched from the archive [1GiB]."),
    ] = None
    archive_cache_dir: Annotated[
        str | None, text_option("DIR", "Keep these pages in this folder [the stream file's].")
    ] = None
    sync: SyncOption = "commit"
    index: Annotated[
        Literal["lmdb", "memory"],
        typer.Option(
            help="Keep the bookmark index in a folder beside the file, or in memory; lmdb falls "
            "back to memory if no file can be created there."
        ),
    ] = "lmdb"

    @property
    def backend(self) -> IndexName:
        """The index of a server, which starts even if the disk has no room for one."""
        return LMDB_OR_MEMORY if self.index == "lmdb" else self.index

    def port(self, given: int | None, default: int) -> int | None:
        """The TCP port; None if the server listens on a Unix socket only."""
        if given is None and (self.unix is None or self.host):
            return default
        return given

    def limits(self) -> Limits:
        given = {each.name: getattr(self, each.name, None) for each in fields(Limits)}
        return Limits(**{name: value for name, value in given.items() if value is not None})

    def tls(self) -> ServerTLS | None:
        certs, keys = self.tls_cert or [], self.tls_key or []
        if not certs:
            if keys or self.tls_client_ca is not None:
                option = "--tls-key" if keys else "--tls-client-ca"
                raise typer.BadParameter(f"{option} requires --tls-cert")
            return None
        if keys and len(keys) != len(certs):
            raise typer.BadParameter(
                f"{len(certs)} --tls-cert and {len(keys)} --tls-key: one key for each, in this "
                "order, or none if the keys are in the same files"
            )
        from datastreamer.transport.tls import ServerTLS

        pairs = zip(certs, keys or certs, strict=True)
        return ServerTLS(*pairs, client_ca=self.tls_client_ca)

    def warn_of_everyone(self, addresses: Iterable[tuple[str, int]]) -> None:
        """Log a warning if clients need nothing but the network to be served."""
        open_to = [
            address_of(each)
            for each in addresses
            if not each[0].startswith(UNIX) and not _is_loopback(each[0])
        ]
        if open_to and self.tls_client_ca is None:
            _log.warning(
                "every client that reaches %s is served, without authentication; --host 127.0.0.1 "
                "accepts clients of this machine only, --tls-client-ca those with a certificate",
                ", ".join(open_to),
                extra={"addresses": open_to},
            )

    def check_reserve(self, tls: ServerTLS | None, *, publishing: bool) -> None:
        """Raises for unreadable tokens, and for reserved slots that no client can use."""
        check_client_tokens(self.client_token_file)
        proofs = (self.client_token_file, publishing, tls is not None and tls.asks_clients)
        if self.reserved_clients and not any(proofs):
            raise typer.BadParameter(
                "--reserved-clients requires --client-token-file, --tls-client-ca or publishing: "
                "no other client can use these slots"
            )
