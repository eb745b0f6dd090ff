"""`datastreamer serve`: serve a stream over TCP, with TLS or without, or a Unix socket."""

from __future__ import annotations

import logging
import os
from typing import Annotated

import typer

from datastreamer.cli.commands.config import CheckConfigOption, ConfigOption
from datastreamer.cli.shared.addresses import sources_of
from datastreamer.cli.shared.creation import CreationOptions
from datastreamer.cli.shared.exit_codes import Failure
from datastreamer.cli.shared.logs import say
from datastreamer.cli.shared.options import FileArgument, number_option, text_option
from datastreamer.cli.shared.server_options import (
    HttpPortOptions,
    MetricsOptions,
    ServerOptions,
    log_serving,
    port_option,
)
from datastreamer.cli.verbs.archive.arguments import ArchiveGroup
from datastreamer.client.upstream import Upstream
from datastreamer.errors import StreamFileError, StreamLocked
from datastreamer.format import DEFAULT_PORT
from datastreamer.server.publish.policy import Publishing
from datastreamer.service.daemon import serve_until_signal
from datastreamer.storage.stream import DataStream

_log = logging.getLogger(__name__)


PortOption = Annotated[int | None, port_option(DEFAULT_PORT)]
PublishTokenFileOption = Annotated[
    str | None,
    text_option(
        "FILE",
        "Accept a remote publisher that presents a token of this file (one per line). Without TLS, "
        "tokens are sent unencrypted.",
    ),
]
PublishClientCertOption = Annotated[
    list[str] | None,
    text_option(
        "NAME",
        "Accept a remote publisher whose client certificate is for NAME, with --publish-token-file "
        "only if it has a token, too; repeatable; requires --tls-client-ca.",
    ),
]
FollowOption = Annotated[
    bool,
    typer.Option(
        "--follow",
        help="Serve a file that another process writes. Otherwise this process writes the file.",
    ),
]
WorkersOption = Annotated[
    int, number_option("N", "Number of serving processes.", most=1024, least=1)
]
HealOption = Annotated[
    list[str] | None,
    text_option(
        "HOST:PORT",
        "Restore damaged pages from this server of the same stream (tcps://: with TLS) or from "
        "archive:URL; repeatable. --scrub finds damage in pages that no client reads.",
    ),
]


def serve(
    file: FileArgument,
    *,
    config: ConfigOption = None,
    check_config: CheckConfigOption = False,
    port: PortOption = None,
    options: ServerOptions,
    publish_token_file: PublishTokenFileOption = None,
    publish_client_cert: PublishClientCertOption = None,
    creation: CreationOptions,
    follow: FollowOption = False,
    workers: WorkersOption = 1,
    heal: HealOption = None,
    archive: ArchiveGroup,
    metrics: MetricsOptions,
    http: HttpPortOptions,
) -> None:
    """Serve a stream to clients over TCP or a Unix socket.

    It serves until SIGINT or SIGTERM. On the first signal the server stops accepting
    connections and gives clients up to --grace seconds to receive committed entries; on a
    second signal it exits at once. Sockets passed by systemd replace --host, --port and --unix.

    Examples:
      datastreamer serve stream.bin --create --host 127.0.0.1
      datastreamer serve stream.bin --tls-cert tls.pem --metrics-port 9600
    """
    limits = archive.limits(options)
    creation.check()
    if creation.create and follow:
        raise typer.BadParameter(
            "--create and --follow exclude each other: with --follow another process writes"
        )
    tls = options.tls()
    publishing = None
    if publish_token_file is not None or publish_client_cert:
        if publish_client_cert and options.tls_client_ca is None:
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
    options.check_reserve(tls, publishing=publishing is not None)
    if heal and (follow or workers != 1):
        raise typer.BadParameter(
            "--heal needs the process that writes the stream: it excludes --follow and more than "
            "one of --workers"
        )
    archived = archive.options()
    if archived is not None and follow:
        raise typer.BadParameter("--archive needs the process that writes the stream: no --follow")
    servers, archives = sources_of("--heal", heal or [])
    http_options = http.options()
    if check_config:
        metrics.address()
        creation.check_file(file)
        say("the options are right")
        return

    def open_stream() -> DataStream:
        if follow or (os.path.isfile(file) and not os.access(file, os.W_OK)):
            if heal:
                raise StreamFileError(file, "--heal: this file is read-only, and not restored")
            return DataStream.open(file, follow=True, index=options.backend, verify="never")
        try:
            return creation.open(file, sync=options.sync, index=options.backend, verify="never")
        except StreamLocked as error:
            raise Failure(f"{error}; --follow serves what another process writes") from None

    def listening(stream: DataStream, addresses: list[tuple[str, int]]) -> None:
        how = ", written by another process" if follow else ", read-only" * (not stream.writable)
        log_serving(_log, file, stream, addresses, how + ", with TLS" * (tls is not None))
        options.warn_of_everyone(addresses)

    # Signals raise no exception here: until now `early_signals` handled them.
    name = serve_until_signal(
        open_stream,
        host=options.host or None,
        port=options.port(port, DEFAULT_PORT),
        unix=options.unix,
        tls=tls,
        limits=limits,
        metrics=metrics.address(),
        http=http_options,
        workers=workers,
        publishing=publishing,
        heal_from=[*(Upstream(*each) for each in servers), *archives],
        archive=archived,
        listening=listening,
    )
    _log.info("ended by %s", name, extra={"signal": name})
