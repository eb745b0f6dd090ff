"""`--create` and its options: the stream that a command writes to, created if it is missing."""

from __future__ import annotations

import logging
from typing import Annotated

import typer

from datastreamer.cli.shared.exit_codes import Failure
from datastreamer.cli.shared.options import number_option
from datastreamer.errors import FileMissing
from datastreamer.format import STREAM_TYPE_SEQUENCER
from datastreamer.storage.stream import DataStream
from datastreamer.storage.view import IndexName
from datastreamer.storage.write.durability import SyncPolicy

_log = logging.getLogger(__name__)

CreateOption = Annotated[
    bool, typer.Option("--create", help="Create an empty stream if FILE does not exist.")
]
SystemIdOption = Annotated[
    int | None,
    number_option(
        "--system-id", "N", "With --create: set the system id, for example the chain id [0]."
    ),
]
StreamVersionOption = Annotated[
    int | None,
    number_option(
        "--stream-version",
        "N",
        "With --create: set the stream version: 1 fixed layouts, 2 and later protobuf [1].",
        most=255,
        least=1,
    ),
]
NewStreamTypeOption = Annotated[
    int | None,
    number_option(
        "--stream-type",
        "T",
        "With --create: set the stream type that clients ask for [1, a sequencer's].",
    ),
]


class Creation:
    """The options, checked before any file is opened."""

    def __init__(
        self,
        create: bool,
        system_id: int | None,
        stream_version: int | None,
        stream_type: int | None,
    ) -> None:
        asked = {"system_id": system_id, "version": stream_version, "stream_type": stream_type}
        self._given = {name: value for name, value in asked.items() if value is not None}
        self._create = create
        if self._given and not create:
            raise typer.BadParameter(
                "--system-id, --stream-version and --stream-type require --create; an existing "
                "file has its own"
            )

    def open(
        self, file: str, *, sync: SyncPolicy = "commit", index: IndexName = "lmdb"
    ) -> DataStream:
        """Open the stream in `file` for writing."""
        try:
            stream = DataStream.open(file, sync=sync, index=index)
        except FileMissing:
            if not self._create:
                raise Failure(
                    f"{file}: no such file; use --create to create an empty stream"
                ) from None
            return DataStream.create(
                file,
                version=self._given.get("version", 1),
                system_id=self._given.get("system_id", 0),
                stream_type=self._given.get("stream_type", STREAM_TYPE_SEQUENCER),
                sync=sync,
                index=index,
            )
        for name, value in self._given.items():
            if (has := getattr(stream.header, name)) != value:
                _log.warning(
                    "%s: the %s of the existing file is %d, not %d", file, _WORDS[name], has, value
                )
        return stream


_WORDS = {"system_id": "system id", "version": "stream version", "stream_type": "stream type"}
