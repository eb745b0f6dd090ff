"""`datastreamer serve`: a stream for clients over TCP."""

from __future__ import annotations

import logging
import os
from enum import Enum
from typing import Annotated

import typer

from datastreamer.cli.creation import (
    CreateOption,
    Creation,
    NewStreamTypeOption,
    StreamVersionOption,
    SystemIdOption,
)
from datastreamer.cli.options import FileArgument, LogFormatOption, LogLevelOption, number_parser
from datastreamer.format import DEFAULT_PORT, U32_MAX
from datastreamer.net.listen import address_of
from datastreamer.net.run import serve_until_signal
from datastreamer.storage.stream import DataStream

_log = logging.getLogger(__name__)


class Sync(str, Enum):
    """When a commit returns."""

    commit = "commit"
    os = "os"


class Index(str, Enum):
    """Where bookmarks are indexed."""

    lmdb = "lmdb"
    memory = "memory"


HostOption = Annotated[
    str | None,
    typer.Option("--host", metavar="HOST", help="Listen on this address [all, IPv4 and IPv6]."),
]
PortOption = Annotated[
    int,
    typer.Option(
        "--port",
        parser=number_parser(65535),
        metavar="PORT",
        help="0 takes a free one, and says which.",
    ),
]
FollowOption = Annotated[
    bool,
    typer.Option(
        "--follow", help="Another process writes; without this we hold the writer's lock."
    ),
]
MaxClientsOption = Annotated[
    int,
    typer.Option(
        "--max-clients",
        parser=number_parser(U32_MAX, least=1),
        metavar="N",
        help="Refuse connections above this.",
    ),
]
SyncOption = Annotated[
    Sync,
    typer.Option(
        "--sync", help="What is committed is on disk: with each commit, or when it suits."
    ),
]
IndexOption = Annotated[
    Index, typer.Option("--index", help="Bookmarks are indexed beside the file, or in memory.")
]


def serve(
    file: FileArgument,
    host: HostOption = None,
    port: PortOption = DEFAULT_PORT,
    create: CreateOption = False,
    system_id: SystemIdOption = None,
    stream_version: StreamVersionOption = None,
    stream_type: NewStreamTypeOption = None,
    follow: FollowOption = False,
    max_clients: MaxClientsOption = 10_000,
    sync: SyncOption = Sync.commit,
    index: IndexOption = Index.lmdb,
    log_level: LogLevelOption = None,
    log_format: LogFormatOption = None,
) -> None:
    """Serve a stream to clients over TCP, until SIGINT or SIGTERM."""
    creation = Creation(create, system_id, stream_version, stream_type)
    if create and follow:
        raise typer.BadParameter(
            "--create makes a stream to write to, --follow leaves that to others"
        )

    def open_stream() -> DataStream:
        if follow or (os.path.isfile(file) and not os.access(file, os.W_OK)):
            return DataStream.open(file, follow=True, index=index.value)
        return creation.open(file, sync=sync.value, index=index.value)

    def listening(stream: DataStream, addresses: list[tuple[str, int]]) -> None:
        _log.info(
            "serving %s (%d entries%s) on %s",
            file,
            stream.total_entries,
            ", written by others" if follow else "" if stream.writable else ", read-only",
            ", ".join(map(address_of, addresses)),
        )

    # No signal is raised here as an exception: before this it ends the process, see `early`.
    name = serve_until_signal(
        open_stream, host=host, port=port, max_clients=max_clients, listening=listening
    )
    _log.info("ended by %s", name)
