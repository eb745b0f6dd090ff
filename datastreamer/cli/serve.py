"""`datastreamer serve`: a stream for clients over TCP."""

from __future__ import annotations

import logging
import os
from enum import Enum
from typing import Annotated

import typer

from datastreamer.cli.options import FileArgument, LogFormatOption, LogLevelOption, number_parser
from datastreamer.cli.outcome import Failure, end_well_on_signal
from datastreamer.errors import FileMissing
from datastreamer.format import DEFAULT_PORT, STREAM_TYPE_SEQUENCER, U32_MAX, U64_MAX
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
CreateOption = Annotated[
    bool, typer.Option("--create", help="Make an empty stream where there is no file.")
]
SystemIdOption = Annotated[
    int | None,
    typer.Option(
        "--system-id",
        parser=number_parser(U64_MAX),
        metavar="N",
        help="With --create: the chain id, say [0].",
    ),
]
StreamVersionOption = Annotated[
    int | None,
    typer.Option(
        "--stream-version",
        parser=number_parser(255, least=1),
        metavar="N",
        help="With --create: 1 fixed layouts, from 2 on protobuf [1].",
    ),
]
StreamTypeOption = Annotated[
    int | None,
    typer.Option(
        "--stream-type",
        parser=number_parser(U64_MAX),
        metavar="T",
        help="With --create: what clients must ask for [1, a sequencer's].",
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
    stream_type: StreamTypeOption = None,
    follow: FollowOption = False,
    max_clients: MaxClientsOption = 10_000,
    sync: SyncOption = Sync.commit,
    index: IndexOption = Index.lmdb,
    log_level: LogLevelOption = None,
    log_format: LogFormatOption = None,
) -> None:
    """Serve a stream to clients over TCP, until SIGINT or SIGTERM."""
    asked = {"system_id": system_id, "version": stream_version, "stream_type": stream_type}
    given = {name: value for name, value in asked.items() if value is not None}
    if given and not create:
        raise typer.BadParameter(
            "--system-id, --stream-version and --stream-type go with --create; an existing file "
            "brings its own"
        )
    if create and follow:
        raise typer.BadParameter(
            "--create makes a stream to write to, --follow leaves that to others"
        )

    def open_stream() -> DataStream:
        if follow or (os.path.isfile(file) and not os.access(file, os.W_OK)):
            return DataStream.open(file, follow=True, index=index.value)
        try:
            stream = DataStream.open(file, sync=sync.value, index=index.value)
        except FileMissing:
            if not create:
                raise Failure(
                    f"{file}: no such file; --create makes an empty stream there"
                ) from None
            return DataStream.create(
                file,
                version=stream_version or 1,
                system_id=system_id or 0,
                stream_type=STREAM_TYPE_SEQUENCER if stream_type is None else stream_type,
                sync=sync.value,
                index=index.value,
            )
        for name, value in given.items():
            if (has := getattr(stream.header, name)) != value:
                _log.warning(
                    "%s: the existing file's %s is %d, not %d", file, _WORDS[name], has, value
                )
        return stream

    def listening(stream: DataStream, addresses: list[tuple[str, int]]) -> None:
        _log.info(
            "serving %s (%d entries%s) on %s",
            file,
            stream.total_entries,
            "" if stream.writable else ", written by others",
            ", ".join(map(address_of, addresses)),
        )

    end_well_on_signal()
    name = serve_until_signal(
        open_stream, host=host, port=port, max_clients=max_clients, listening=listening
    )
    _log.info("ended by %s", name)


_WORDS = {"system_id": "system id", "version": "stream version", "stream_type": "stream type"}
