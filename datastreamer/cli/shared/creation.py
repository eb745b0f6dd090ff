"""`--create` and what goes with it: the stream that a command writes to, made if it is missing.

Owns these options and what they mean beside an existing file.
"""

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
    bool, typer.Option("--create", help="Make an empty stream where there is no file.")
]
SystemIdOption = Annotated[
    int | None,
    number_option("--system-id", "N", "With --create: the chain id, say [0]."),
]
StreamVersionOption = Annotated[
    int | None,
    number_option(
        "--stream-version",
        "N",
        "With --create: 1 fixed layouts, from 2 on protobuf [1].",
        most=255,
        least=1,
    ),
]
NewStreamTypeOption = Annotated[
    int | None,
    number_option(
        "--stream-type", "T", "With --create: what clients must ask for [1, a sequencer's]."
    ),
]


class Creation:
    """What the options say. Made before anything is opened: wrong usage shows first."""

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
                "--system-id, --stream-version and --stream-type go with --create; an existing "
                "file brings its own"
            )

    def open(
        self, file: str, *, sync: SyncPolicy = "commit", index: IndexName = "lmdb"
    ) -> DataStream:
        """The stream in `file`, for writing."""
        try:
            stream = DataStream.open(file, sync=sync, index=index)
        except FileMissing:
            if not self._create:
                raise Failure(
                    f"{file}: no such file; --create makes an empty stream there"
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
                    "%s: the existing file's %s is %d, not %d", file, _WORDS[name], has, value
                )
        return stream


_WORDS = {"system_id": "system id", "version": "stream version", "stream_type": "stream type"}
