"""`datastreamer serve`: serve a stream over TCP, with TLS or without, or a Unix socket."""

from __future__ import annotations

import logging
import os
from enum import Enum
from typing import TYPE_CHECKING, Annotated

import typer

from datastreamer.cli.shared.creation import (
    CreateOption,
    Creation,
    NewStreamTypeOption,
    StreamVersionOption,
    SystemIdOption,
)
from datastreamer.cli.shared.options import (
    FileArgument,
    number_option,
)
from datastreamer.format import DEFAULT_PORT, U32_MAX
from datastreamer.server.limits import GRACE_SECONDS, INACTIVITY_SECONDS, MAX_CLIENTS, Limits
from datastreamer.server.publish.policy import Publishing, check_client_tokens
from datastreamer.service.daemon import serve_until_signal
from datastreamer.storage.bookmarks.fallback import LMDB_OR_MEMORY
from datastreamer.storage.stream import DataStream
from datastreamer.transport.listeners import address_of

if TYPE_CHECKING:
    from datastreamer.transport.tls import ServerTLS

_log = logging.getLogger(__name__)


class Sync(str, Enum):
    """When a commit is durable."""

    commit = "commit"
    os = "os"


class Index(str, Enum):
    """Where bookmarks are indexed."""

    lmdb = "lmdb"
    memory = "memory"

    @property
    def backend(self) -> str:
        """The index of a server, which starts even if the disk has no room for one."""
        return LMDB_OR_MEMORY if self is Index.lmdb else self.value


HostOption = Annotated[
    list[str] | None,
    typer.Option(
        "--host",
        metavar="HOST",
        help="Address to listen on; repeatable [all, IPv4 and IPv6].",
    ),
]
PortOption = Annotated[
    int | None,
    number_option(
        "--port",
        "PORT",
        f"TCP port to listen on; 0: any free port, which is logged [{DEFAULT_PORT}].",
        most=65535,
    ),
]
UnixOption = Annotated[
    str | None,
    typer.Option(
        "--unix",
        metavar="PATH",
        help="Unix socket to listen on; with --host or --port, TCP as well.",
    ),
]
CertOption = Annotated[
    list[str] | None,
    typer.Option(
        "--tls-cert",
        metavar="FILE",
        help="Use TLS with the certificate chain in this PEM file. Repeatable: each client "
        "receives "
        "the one for the name that it asks for, else the first. SIGHUP reloads the files.",
    ),
]
KeyOption = Annotated[
    list[str] | None,
    typer.Option(
        "--tls-key",
        metavar="FILE",
        help="Read the key from this PEM file, one for each --tls-cert [the same file].",
    ),
]
ClientCaOption = Annotated[
    str | None,
    typer.Option(
        "--tls-client-ca",
        metavar="FILE",
        help="Accept only clients with a certificate of the CA in this PEM file.",
    ),
]
PublishTokenFileOption = Annotated[
    str | None,
    typer.Option(
        "--publish-token-file",
        metavar="FILE",
        help="Accept a remote publisher that presents a token, a line of this file. Without TLS, "
        "tokens are sent unencrypted.",
    ),
]
PublishClientCertOption = Annotated[
    list[str] | None,
    typer.Option(
        "--publish-client-cert",
        metavar="NAME",
        help="Also accept a publisher whose client certificate is for NAME; repeatable; requires "
        "--tls-client-ca.",
    ),
]
ClientTokenFileOption = Annotated[
    str | None,
    typer.Option(
        "--client-token-file",
        metavar="FILE",
        help="Give a client that presents a token, a line of this file, a reserved place when the "
        "server is full.",
    ),
]
FollowOption = Annotated[
    bool,
    typer.Option(
        "--follow", help="Serve a file that another process writes [hold the writer's lock]."
    ),
]
WorkersOption = Annotated[
    int,
    number_option("--workers", "N", "Number of serving processes [1].", most=1024, least=1),
]
MaxClientsOption = Annotated[
    int,
    number_option(
        "--max-clients",
        "N",
        "Maximum number of connections; a full server closes the client that has been idle "
        "longest, or refuses the new one.",
        most=U32_MAX,
        least=1,
    ),
]
MaxClientsPerAddressOption = Annotated[
    int | None,
    number_option(
        "--max-clients-per-address",
        "N",
        "Maximum number of connections from one address (IPv6: one /64); 0: no limit [a tenth of "
        "--max-clients, at least 64; loopback and Unix sockets: no limit].",
        most=U32_MAX,
    ),
]
ReservedClientsOption = Annotated[
    int | None,
    number_option(
        "--reserved-clients",
        "N",
        "Number of connections above --max-clients for publishers and for clients with a "
        "certificate or a token [8].",
        most=U32_MAX,
    ),
]
AcceptRateOption = Annotated[
    int,
    number_option(
        "--accept-rate",
        "N",
        "Maximum rate of accepted connections per second; others wait. 0: no limit.",
        most=U32_MAX,
    ),
]
RequestRateOption = Annotated[
    int,
    number_option(
        "--request-rate",
        "N",
        "Maximum rate of commands per second from one client; more wait. 0: no limit.",
        most=U32_MAX,
    ),
]
InactivityTimeoutOption = Annotated[
    int,
    number_option(
        "--inactivity-timeout",
        "S",
        "Disconnect a client that neither streams nor sends commands for S seconds; 0: never.",
        most=U32_MAX,
    ),
]
WriteTimeoutOption = Annotated[
    int,
    number_option(
        "--write-timeout",
        "S",
        "Disconnect a client that receives no byte for S seconds; 0: never.",
        most=U32_MAX,
    ),
]
GraceOption = Annotated[
    int,
    number_option(
        "--grace",
        "S",
        "Time after the signal for clients to receive committed entries, in seconds.",
        most=U32_MAX,
    ),
]
MetricsPortOption = Annotated[
    int | None,
    number_option(
        "--metrics-port",
        "PORT",
        "Port of the metrics for Prometheus and `top`; 0: any free port, which is logged.",
        most=65535,
    ),
]
MetricsHostOption = Annotated[
    list[str] | None,
    typer.Option(
        "--metrics-host",
        metavar="HOST",
        help="Address of the metrics port; repeatable [127.0.0.1].",
    ),
]
SyncOption = Annotated[
    Sync,
    typer.Option(
        "--sync", help="Sync to disk with each commit, or leave that to the operating system."
    ),
]
IndexOption = Annotated[
    Index,
    typer.Option(
        "--index",
        help="Keep the bookmark index in a folder beside the file, or in memory; lmdb falls "
        "back to "
        "memory if no file can be created there.",
    ),
]


def serve(
    file: FileArgument,
    host: HostOption = None,
    port: PortOption = None,
    unix: UnixOption = None,
    tls_cert: CertOption = None,
    tls_key: KeyOption = None,
    tls_client_ca: ClientCaOption = None,
    publish_token_file: PublishTokenFileOption = None,
    publish_client_cert: PublishClientCertOption = None,
    client_token_file: ClientTokenFileOption = None,
    create: CreateOption = False,
    system_id: SystemIdOption = None,
    stream_version: StreamVersionOption = None,
    stream_type: NewStreamTypeOption = None,
    follow: FollowOption = False,
    workers: WorkersOption = 1,
    max_clients: MaxClientsOption = MAX_CLIENTS,
    max_clients_per_address: MaxClientsPerAddressOption = None,
    reserved_clients: ReservedClientsOption = None,
    accept_rate: AcceptRateOption = 0,
    request_rate: RequestRateOption = 0,
    inactivity_timeout: InactivityTimeoutOption = int(INACTIVITY_SECONDS),
    write_timeout: WriteTimeoutOption = 0,
    grace: GraceOption = int(GRACE_SECONDS),
    metrics_port: MetricsPortOption = None,
    metrics_host: MetricsHostOption = None,
    sync: SyncOption = Sync.commit,
    index: IndexOption = Index.lmdb,
) -> None:
    """Serve a stream to clients over TCP or a Unix socket, until SIGINT or SIGTERM.

    On the first signal the server stops accepting connections and gives clients up to --grace
    seconds to receive committed entries; on a second signal it exits at once. Sockets passed by
    systemd replace --host, --port and --unix.
    """
    limits = Limits(
        max_clients=max_clients,
        max_clients_per_address=max_clients_per_address,
        reserved_clients=reserved_clients,
        client_token_file=client_token_file,
        accept_rate=accept_rate,
        request_rate=request_rate,
        inactivity_timeout=inactivity_timeout,
        write_timeout=write_timeout,
        grace=grace,
    )
    creation = Creation(create, system_id, stream_version, stream_type)
    if create and follow:
        raise typer.BadParameter(
            "--create and --follow exclude each other: with --follow another process writes"
        )
    tls = server_tls(tls_cert or [], tls_key or [], tls_client_ca)
    publishing = None
    if publish_token_file is not None or publish_client_cert:
        if publish_client_cert and tls_client_ca is None:
            raise typer.BadParameter("--publish-client-cert requires --tls-client-ca")
        if follow or workers != 1:
            raise typer.BadParameter(
                "publishing needs the process that writes the stream: it excludes --follow and "
                "more than one of --workers"
            )
        publishing = Publishing(
            token_file=publish_token_file, client_certs=tuple(publish_client_cert or ())
        )
        publishing.tokens()  # read before a file is created
    check_reserve(limits, publishing is not None, tls)
    if port is None and (unix is None or host):
        port = DEFAULT_PORT

    def open_stream() -> DataStream:
        if follow or (os.path.isfile(file) and not os.access(file, os.W_OK)):
            return DataStream.open(file, follow=True, index=index.backend)
        return creation.open(file, sync=sync.value, index=index.backend)

    def listening(stream: DataStream, addresses: list[tuple[str, int]]) -> None:
        _log.info(
            "serving %s (%d entries%s%s) on %s",
            file,
            stream.total_entries,
            ", written by another process" if follow else "" if stream.writable else ", read-only",
            "" if tls is None else ", with TLS",
            ", ".join(map(address_of, addresses)),
            extra={
                "file": file,
                "entries": stream.total_entries,
                "addresses": [address_of(address) for address in addresses],
            },
        )

    # Signals raise no exception here: until now `early_signals` handled them.
    name = serve_until_signal(
        open_stream,
        host=host or None,
        port=port,
        unix=unix,
        tls=tls,
        limits=limits,
        metrics=metrics_at(metrics_host, metrics_port),
        workers=workers,
        publishing=publishing,
        listening=listening,
    )
    _log.info("ended by %s", name, extra={"signal": name})


def metrics_at(host: list[str] | None, port: int | None) -> tuple[list[str] | None, int] | None:
    """The address of the metrics port by the options; None without --metrics-port."""
    if port is None:
        if host:
            raise typer.BadParameter("--metrics-host requires --metrics-port")
        return None
    return host or None, port


def check_reserve(limits: Limits, publishing: bool, tls: ServerTLS | None) -> None:
    """Raises for unreadable tokens, and for reserved places that no client can use."""
    check_client_tokens(limits.client_token_file)
    proofs = (limits.client_token_file, publishing, tls is not None and tls.asks_clients)
    if limits.reserved_clients and not any(proofs):
        raise typer.BadParameter(
            "--reserved-clients requires --client-token-file, --tls-client-ca or publishing: no "
            "other client can use these places"
        )


def server_tls(certs: list[str], keys: list[str], client_ca: str | None) -> ServerTLS | None:
    """The TLS of the server by --tls-cert, --tls-key and --tls-client-ca."""
    if not certs:
        if keys or client_ca is not None:
            option = "--tls-key" if keys else "--tls-client-ca"
            raise typer.BadParameter(f"{option} requires --tls-cert")
        return None
    if keys and len(keys) != len(certs):
        raise typer.BadParameter(
            f"{len(certs)} --tls-cert and {len(keys)} --tls-key: one key for each, in this order, "
            "or none if the keys are in the same files"
        )
    from datastreamer.transport.tls import ServerTLS

    return ServerTLS(*zip(certs, keys or certs, strict=True), client_ca=client_ca)
