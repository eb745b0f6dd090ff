"""`datastreamer serve`: a stream for clients over TCP, with TLS or without, or a Unix socket."""

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
    """When a commit returns."""

    commit = "commit"
    os = "os"


class Index(str, Enum):
    """Where bookmarks are indexed."""

    lmdb = "lmdb"
    memory = "memory"

    @property
    def backend(self) -> str:
        """The index of a server, which starts without room for one on disk."""
        return LMDB_OR_MEMORY if self is Index.lmdb else self.value


HostOption = Annotated[
    list[str] | None,
    typer.Option(
        "--host",
        metavar="HOST",
        help="Listen on this address; repeatable [all, IPv4 and IPv6].",
    ),
]
PortOption = Annotated[
    int | None,
    number_option(
        "--port", "PORT", f"0 takes a free one, and says which [{DEFAULT_PORT}].", most=65535
    ),
]
UnixOption = Annotated[
    str | None,
    typer.Option(
        "--unix",
        metavar="PATH",
        help="Listen on a Unix socket; on TCP as well only with --host or --port.",
    ),
]
CertOption = Annotated[
    list[str] | None,
    typer.Option(
        "--tls-cert",
        metavar="FILE",
        help="TLS with this certificate and what stands behind it; PEM. Repeatable: each client "
        "gets the one for the name it asks for, else the first. SIGHUP reads the files again.",
    ),
]
KeyOption = Annotated[
    list[str] | None,
    typer.Option(
        "--tls-key",
        metavar="FILE",
        help="The key of the certificate, one for each [in the same file]; PEM.",
    ),
]
ClientCaOption = Annotated[
    str | None,
    typer.Option(
        "--tls-client-ca",
        metavar="FILE",
        help="Serve only clients with a certificate of this CA; PEM.",
    ),
]
PublishTokenFileOption = Annotated[
    str | None,
    typer.Option(
        "--publish-token-file",
        metavar="FILE",
        help="Take operations from a source elsewhere that shows a token, a line of this file. "
        "Without TLS tokens can be read on the way.",
    ),
]
PublishClientCertOption = Annotated[
    list[str] | None,
    typer.Option(
        "--publish-client-cert",
        metavar="NAME",
        help="And, or, whose certificate is for this name; repeatable; goes with --tls-client-ca.",
    ),
]
ClientTokenFileOption = Annotated[
    str | None,
    typer.Option(
        "--client-token-file",
        metavar="FILE",
        help="Give a client that shows a token, a line of this file, a reserved place when the "
        "server is full.",
    ),
]
FollowOption = Annotated[
    bool,
    typer.Option(
        "--follow", help="Another process writes; without this we hold the writer's lock."
    ),
]
WorkersOption = Annotated[
    int,
    number_option("--workers", "N", "Serve from so many processes [1].", most=1024, least=1),
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
        "Places beyond --max-clients for publishers and for clients with a certificate or a "
        "token [8].",
        most=U32_MAX,
    ),
]
AcceptRateOption = Annotated[
    int,
    number_option(
        "--accept-rate", "N", "Connections let in a second; the others wait. 0: all.", most=U32_MAX
    ),
]
RequestRateOption = Annotated[
    int,
    number_option(
        "--request-rate",
        "N",
        "Commands taken from one client a second; more wait. 0: all.",
        most=U32_MAX,
    ),
]
InactivityTimeoutOption = Annotated[
    int,
    number_option(
        "--inactivity-timeout",
        "S",
        "End a client that neither streams nor asks for so long. 0: never.",
        most=U32_MAX,
    ),
]
WriteTimeoutOption = Annotated[
    int,
    number_option(
        "--write-timeout",
        "S",
        "End a client that takes not one byte for so long. 0: never.",
        most=U32_MAX,
    ),
]
GraceOption = Annotated[
    int,
    number_option(
        "--grace", "S", "At the end, clients have so long to take what is committed.", most=U32_MAX
    ),
]
MetricsPortOption = Annotated[
    int | None,
    number_option(
        "--metrics-port",
        "PORT",
        "Answer with metrics on this port, for Prometheus and `top`; 0 takes a free one.",
        most=65535,
    ),
]
MetricsHostOption = Annotated[
    list[str] | None,
    typer.Option(
        "--metrics-host",
        metavar="HOST",
        help="On this address; repeatable [127.0.0.1].",
    ),
]
SyncOption = Annotated[
    Sync,
    typer.Option(
        "--sync", help="What is committed is on disk: with each commit, or when it suits."
    ),
]
IndexOption = Annotated[
    Index,
    typer.Option(
        "--index",
        help="Keep the bookmark index beside the file, or in memory. lmdb: in memory while no file "
        "can be made there.",
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

    The signal lets nobody in any more and gives clients --grace seconds to take what is
    committed; a second one ends that at once. Sockets that systemd hands down are used in
    place of --host, --port and --unix.
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
            "--create makes a stream to write to, --follow leaves that to others"
        )
    tls = server_tls(tls_cert or [], tls_key or [], tls_client_ca)
    publishing = None
    if publish_token_file is not None or publish_client_cert:
        if publish_client_cert and tls_client_ca is None:
            raise typer.BadParameter("--publish-client-cert goes with a --tls-client-ca")
        if follow or workers != 1:
            raise typer.BadParameter(
                "a source elsewhere publishes through the one process that writes: no --follow, "
                "and one of --workers"
            )
        publishing = Publishing(
            token_file=publish_token_file, client_certs=tuple(publish_client_cert or ())
        )
        publishing.tokens()  # before anything is made
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
            ", written by others" if follow else "" if stream.writable else ", read-only",
            "" if tls is None else ", with TLS",
            ", ".join(map(address_of, addresses)),
            extra={
                "file": file,
                "entries": stream.total_entries,
                "addresses": [address_of(address) for address in addresses],
            },
        )

    # No signal is raised here as an exception: before this it ends the process, see `early`.
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
    """Where metrics are to be found, by the options; None where nobody asked for them."""
    if port is None:
        if host:
            raise typer.BadParameter("--metrics-host goes with a --metrics-port")
        return None
    return host or None, port


def check_reserve(limits: Limits, publishing: bool, tls: ServerTLS | None) -> None:
    """Raises for tokens that cannot be read, and for reserved places that no client can use."""
    check_client_tokens(limits.client_token_file)
    proofs = (limits.client_token_file, publishing, tls is not None and tls.asks_clients)
    if limits.reserved_clients and not any(proofs):
        raise typer.BadParameter(
            "--reserved-clients goes with a --client-token-file, a --tls-client-ca or publishing: "
            "nobody else can have these places"
        )


def server_tls(certs: list[str], keys: list[str], client_ca: str | None) -> ServerTLS | None:
    """What --tls-cert, --tls-key and --tls-client-ca come to."""
    if not certs:
        if keys or client_ca is not None:
            option = "--tls-key" if keys else "--tls-client-ca"
            raise typer.BadParameter(f"{option} goes with a --tls-cert")
        return None
    if keys and len(keys) != len(certs):
        raise typer.BadParameter(
            f"{len(certs)} --tls-cert and {len(keys)} --tls-key: one key for each, in this order, "
            "or none where the keys stand in the same files"
        )
    from datastreamer.transport.tls import ServerTLS

    return ServerTLS(*zip(certs, keys or certs, strict=True), client_ca=client_ca)
