"""`datastreamer relay`: download a stream from other servers, keep it in a file, serve it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Annotated, Literal

import typer

from datastreamer.archive.beside import restored
from datastreamer.archive.options import ArchiveOptions
from datastreamer.cli.commands.config import CheckConfigOption, ConfigOption
from datastreamer.cli.shared.addresses import addresses_of
from datastreamer.cli.shared.exit_codes import Failure
from datastreamer.cli.shared.logs import say
from datastreamer.cli.shared.options import (
    StreamTypeOption,
    TLSOptions,
    number_option,
    text_option,
)
from datastreamer.cli.shared.server_options import (
    HttpPortOptions,
    MetricsOptions,
    ServerOptions,
    log_serving,
    port_option,
)
from datastreamer.cli.verbs.archive.arguments import ArchiveGroup
from datastreamer.client.upstream import Upstream
from datastreamer.errors import FileMissing
from datastreamer.relay.relay import DEFAULT_PORT, Relay
from datastreamer.relay.status import READY_LAG
from datastreamer.server.limits import Limits
from datastreamer.server.publish.policy import read_tokens
from datastreamer.service.daemon import relay_until_signal, serve_until_signal
from datastreamer.storage.stream import DataStream

_log = logging.getLogger(__name__)


ServerOption = Annotated[
    list[str] | None,
    text_option(
        "HOST:PORT",
        "Server to download from; tcps://HOST:PORT with TLS, unix:PATH. Repeatable: a later "
        "one is used while the earlier ones are not available.",
        name="--server",
    ),
]
RelayFileOption = Annotated[str | None, text_option("FILE", "Stream file of the relay.")]
RelayPortOption = Annotated[int | None, port_option(DEFAULT_PORT)]
OnRewriteOption = Annotated[
    Literal["stop", "follow"],
    typer.Option(
        help="Set what to do if a server has other entries, or truncated some: stop downloading "
        "from it, or truncate the relay to the last common entry."
    ),
]
UpstreamCaOption = Annotated[
    str | None, text_option("FILE", "For tcps:// servers: trust the CAs in this PEM file.")
]
UpstreamCertOption = Annotated[
    str | None,
    text_option("FILE", "For tcps:// servers: present the client certificate in this PEM file."),
]
UpstreamKeyOption = Annotated[
    str | None,
    text_option("FILE", "Read the key of --server-tls-cert from this PEM file [the same file]."),
]
UpstreamNameOption = Annotated[
    str | None,
    text_option("NAME", "For tcps:// servers: require this name in their certificates [HOST]."),
]
UpstreamTokenFileOption = Annotated[
    str | None,
    text_option(
        "FILE", "Present the first token in this file to each server, for a reserved slot there."
    ),
]
ReadyLagOption = Annotated[
    int,
    number_option(
        "N", "Maximum lag in entries at which /readyz on the metrics port reports ready."
    ),
]
ArchiveModeOption = Annotated[
    Literal["push", "read"],
    typer.Option(
        help="read: begin a missing FILE with the entries in the archive; push: also archive "
        "what the relay has."
    ),
]


def relay(
    *,
    upstreams: ServerOption = None,
    file: RelayFileOption = None,
    config: ConfigOption = None,
    check_config: CheckConfigOption = False,
    port: RelayPortOption = None,
    options: ServerOptions,
    on_rewrite: OnRewriteOption = "stop",
    stream_type: StreamTypeOption = None,
    server_tls_ca: UpstreamCaOption = None,
    server_tls_cert: UpstreamCertOption = None,
    server_tls_key: UpstreamKeyOption = None,
    server_tls_name: UpstreamNameOption = None,
    server_token_file: UpstreamTokenFileOption = None,
    archive: ArchiveGroup,
    archive_mode: ArchiveModeOption = "read",
    metrics: MetricsOptions,
    http: HttpPortOptions,
    ready_lag: ReadyLagOption = READY_LAG,
) -> None:
    """Download a stream, keep it in a file, and serve it.

    Runs until SIGINT or SIGTERM. Serves the file also while no server can be reached. Compares the
    last entries of the file with those of a server before it appends anything. Without --server,
    follows --archive.

    Examples:
      datastreamer relay --server sequencer --file relay.bin
      datastreamer relay --config relay.toml --check-config
    """
    followed = None if upstreams else archive.options("follow")
    servers = []
    if followed is None:
        servers = _upstreams(
            upstreams or [],
            TLSOptions(server_tls_ca, server_tls_cert, server_tls_key),
            server_tls_name,
            server_token_file,
        )
    if not file:
        raise typer.BadParameter("--file is required: it names the stream file of the relay")
    if followed is not None and not check_config:
        followed = replace(followed, takeover=on_rewrite == "follow")
        follow_archive(file, followed, options, archive.limits(options), port, metrics, http)
        return
    metrics.address()
    tls = options.tls()
    options.check_reserve(tls, publishing=False)
    if followed is not None:
        say("the options are right")
        return
    made = Relay(
        servers,
        file,
        host=options.host or None,
        port=options.port(port, DEFAULT_PORT),
        unix=options.unix,
        tls=tls,
        limits=archive.limits(options),
        sync=options.sync,
        index=options.backend,
        stream_type=stream_type,
        on_rewrite=on_rewrite,
        metrics_port=metrics.metrics_port,
        metrics_host=metrics.metrics_host or None,
        ready_lag=ready_lag,
        http=http.options(),
        archive=archive.options(archive_mode),
    )
    if check_config:
        say("the options are right")
        return
    relay_until(made, options.warn_of_everyone)


def follow_archive(
    file: str,
    archive: ArchiveOptions,
    options: ServerOptions,
    limits: Limits,
    port: int | None,
    metrics: MetricsOptions,
    http: HttpPortOptions,
) -> None:
    """Serve a file that follows an archive, until a signal."""

    def open_stream() -> DataStream:
        try:
            return DataStream.open(file, sync=options.sync, index=options.backend, verify="never")
        except FileMissing:
            raise Failure(f"{archive.url}: nothing is archived there yet") from None

    def listening(stream: DataStream, addresses: list[tuple[str, int]]) -> None:
        log_serving(_log, file, stream, addresses, f", from {archive.url}")
        options.warn_of_everyone(addresses)

    # Before signals belong to the server: one ends this, and the next start continues it.
    restored(archive, file)
    name = serve_until_signal(
        open_stream,
        host=options.host or None,
        port=options.port(port, DEFAULT_PORT),
        unix=options.unix,
        tls=options.tls(),
        limits=limits,
        metrics=metrics.address(),
        http=http.options(),
        archive=archive,
        listening=listening,
    )
    _log.info("ended by %s", name, extra={"signal": name})


def relay_until(
    made: Relay, warn: Callable[[Sequence[tuple[str, int]]], None] = lambda _: None
) -> None:
    """Run the relay until a signal, logging its start and end. `warn` is called with the addresses
    that it listens on."""

    def listening(relay: Relay, addresses: list[tuple[str, int]]) -> None:
        assert relay.stream is not None
        log_serving(_log, relay.path, relay.stream, addresses)
        warn(addresses)

    name = relay_until_signal(made, listening)
    _log.info("ended by %s", name, extra={"signal": name})


def _upstreams(
    servers: list[str], tls: TLSOptions, name: str | None, token_file: str | None
) -> list[Upstream]:
    if not servers:
        raise typer.BadParameter("--server is required: it names a server to download from")
    token = None if token_file is None else read_tokens(token_file)[0]
    upstreams = [Upstream(*each, token=token) for each in addresses_of("--server", servers)]
    secured = [upstream for upstream in upstreams if upstream.tls]
    if not secured:
        given = {"ca": tls.tls_ca, "cert": tls.tls_cert, "key": tls.tls_key, "name": name}
        for option, value in given.items():
            if value is not None:
                raise typer.BadParameter(f"--server-tls-{option} is for tcps:// servers")
        return upstreams
    if tls.tls_key is not None and tls.tls_cert is None:
        raise typer.BadParameter("--server-tls-key requires --server-tls-cert")
    context = tls.context()
    return [
        replace(each, tls=context, tls_server_name=name) if each.tls else each for each in upstreams
    ]
