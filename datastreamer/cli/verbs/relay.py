"""`datastreamer relay`: a stream downloaded from other servers, kept in a file, served on."""

from __future__ import annotations

import logging
from dataclasses import replace
from enum import Enum
from typing import Annotated

import typer

from datastreamer.cli.shared.config import ConfigOption
from datastreamer.cli.shared.options import (
    StreamTypeOption,
    TLSOptions,
    number_option,
)
from datastreamer.cli.shared.source import parse_address
from datastreamer.cli.verbs.serve import (
    AcceptRateOption,
    CertOption,
    ClientCaOption,
    ClientTokenFileOption,
    GraceOption,
    HostOption,
    InactivityTimeoutOption,
    Index,
    IndexOption,
    KeyOption,
    MaxClientsOption,
    MaxClientsPerAddressOption,
    MetricsHostOption,
    MetricsPortOption,
    RequestRateOption,
    ReservedClientsOption,
    Sync,
    SyncOption,
    UnixOption,
    WriteTimeoutOption,
    check_reserve,
    metrics_at,
    server_tls,
)
from datastreamer.client.upstream import Upstream
from datastreamer.relay.relay import DEFAULT_PORT, Relay
from datastreamer.relay.status import READY_LAG
from datastreamer.server.limits import GRACE_SECONDS, INACTIVITY_SECONDS, MAX_CLIENTS, Limits
from datastreamer.server.publish.policy import read_tokens
from datastreamer.service.relay_daemon import relay_until_signal
from datastreamer.transport.listeners import address_of

_log = logging.getLogger(__name__)


class OnRewrite(str, Enum):
    """What becomes of an upstream that has other entries than ours."""

    stop = "stop"
    follow = "follow"


ServerOption = Annotated[
    list[str] | None,
    typer.Option(
        "--server",
        metavar="HOST:PORT",
        help="Download from there; tcps://HOST:PORT with TLS, unix:PATH. Repeatable: the next "
        "is used while those before cannot be had.",
    ),
]
RelayFileOption = Annotated[
    str | None, typer.Option("--file", metavar="FILE", help="Keep the stream in this file.")
]
RelayPortOption = Annotated[
    int | None,
    number_option(
        "--port", "PORT", f"0 takes a free one, and says which [{DEFAULT_PORT}].", most=65535
    ),
]
OnRewriteOption = Annotated[
    OnRewrite,
    typer.Option(
        "--on-rewrite",
        help="Where a server has other entries than we do, or took some back: take nothing "
        "more from it, or go back to the last in common, as it did.",
    ),
]
UpstreamCaOption = Annotated[
    str | None,
    typer.Option(
        "--server-tls-ca", metavar="FILE", help="Of tcps:// servers, trust these CAs; PEM."
    ),
]
UpstreamCertOption = Annotated[
    str | None,
    typer.Option("--server-tls-cert", metavar="FILE", help="Who we are to them; PEM."),
]
UpstreamKeyOption = Annotated[
    str | None,
    typer.Option(
        "--server-tls-key", metavar="FILE", help="The key of that [in the same file]; PEM."
    ),
]
UpstreamNameOption = Annotated[
    str | None,
    typer.Option("--server-tls-name", metavar="NAME", help="Whom their certificates name [HOST]."),
]
UpstreamTokenFileOption = Annotated[
    str | None,
    typer.Option(
        "--server-token-file",
        metavar="FILE",
        help="Show each server the first token in this file, for a reserved place there.",
    ),
]

ReadyLagOption = Annotated[
    int,
    number_option(
        "--ready-lag",
        "N",
        "On the metrics port, /readyz says no while a server holds over N entries more.",
    ),
]


def relay(
    server: ServerOption = None,
    file: RelayFileOption = None,
    config: ConfigOption = None,
    host: HostOption = None,
    port: RelayPortOption = None,
    unix: UnixOption = None,
    on_rewrite: OnRewriteOption = OnRewrite.stop,
    stream_type: StreamTypeOption = None,
    sync: SyncOption = Sync.commit,
    index: IndexOption = Index.lmdb,
    server_tls_ca: UpstreamCaOption = None,
    server_tls_cert: UpstreamCertOption = None,
    server_tls_key: UpstreamKeyOption = None,
    server_tls_name: UpstreamNameOption = None,
    server_token_file: UpstreamTokenFileOption = None,
    tls_cert: CertOption = None,
    tls_key: KeyOption = None,
    tls_client_ca: ClientCaOption = None,
    client_token_file: ClientTokenFileOption = None,
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
    ready_lag: ReadyLagOption = READY_LAG,
) -> None:
    """Download a stream, keep it in a file, and serve it, until SIGINT or SIGTERM.

    What is in the file is served all the time, also while no server can be had. The entries
    before the end of the file are compared with each server's before anything is appended.
    """
    upstreams = _upstreams(
        server or [],
        TLSOptions(server_tls_ca, server_tls_cert, server_tls_key),
        server_tls_name,
        server_token_file,
    )
    if not file:
        raise typer.BadParameter("--file says where the stream is kept")
    if port is None and (unix is None or host):
        port = DEFAULT_PORT
    metrics_at(metrics_host, metrics_port)
    tls = server_tls(tls_cert or [], tls_key or [], tls_client_ca)
    limits = Limits(
        max_clients=max_clients,
        max_clients_per_address=max_clients_per_address,
        reserved_clients=reserved_clients,
        client_token_file=client_token_file,
        accept_rate=accept_rate or None,
        request_rate=request_rate or None,
        inactivity_timeout=inactivity_timeout or None,
        write_timeout=write_timeout or None,
        grace=grace,
    )
    check_reserve(limits, False, tls)
    made = Relay(
        upstreams,
        file,
        host=host or None,
        port=port,
        unix=unix,
        tls=tls,
        limits=limits,
        sync=sync.value,
        index=index.backend,
        stream_type=stream_type,
        on_rewrite=on_rewrite.value,
        metrics_port=metrics_port,
        metrics_host=metrics_host or None,
        ready_lag=ready_lag,
    )
    relay_until(made)


def relay_until(made: Relay) -> None:
    """Run it until a signal, with the log lines of a program."""

    def listening(relay: Relay, addresses: list[tuple[str, int]]) -> None:
        assert relay.stream is not None
        _log.info(
            "serving %s (%d entries) on %s",
            relay.path,
            relay.stream.total_entries,
            ", ".join(map(address_of, addresses)),
        )

    name = relay_until_signal(made, listening)
    _log.info("ended by %s", name)


def upstream_of(text: str) -> Upstream:
    """The server that an option names, without TLS's particulars."""
    address = parse_address(text)
    if address is None:
        raise typer.BadParameter(f"{text!r}: a server is named as HOST:PORT")
    return Upstream(address.host, address.port, address.tls)


def _upstreams(
    servers: list[str], tls: TLSOptions, name: str | None, token_file: str | None
) -> list[Upstream]:
    if not servers:
        raise typer.BadParameter("--server says where to download from; there may be several")
    token = None if token_file is None else read_tokens(token_file)[0]
    upstreams = [replace(upstream_of(text), token=token) for text in servers]
    secured = [upstream for upstream in upstreams if upstream.tls]
    if not secured:
        for option, value in {**tls._asdict(), "name": name}.items():
            if value is not None:
                raise typer.BadParameter(f"--server-tls-{option} is for tcps:// servers")
        return upstreams
    if tls.key is not None and tls.cert is None:
        raise typer.BadParameter("--server-tls-key is the key of a --server-tls-cert")
    context = tls.context()
    return [
        replace(each, tls=context, tls_server_name=name) if each.tls else each for each in upstreams
    ]
