"""`--create` and its options: the stream that a command writes to, created if it is missing."""

from __future__ import annotations

import logging
from dataclasses import dataclass
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


@dataclass(frozen=True)
class CreationOptions:
    """--create and the properties of a new stream, a group."""

    create: Annotated[
        bool, typer.Option("--create", help="Create an empty stream if FILE does not exist.")
    ] = False
    system_id: Annotated[
        int | None,
        number_option(
            "--system-id", "N", "With --create: set the system id, for example the chain id [0]."
        ),
    ] = None
    stream_version: Annotated[
        int | None,
        number_option(
            "--stream-version",
            "N",
            "With --create: set the stream version: 1 fixed layouts, 2 and later protobuf [1].",
            most=255,
            least=1,
        ),
    ] = None
    stream_type: Annotated[
        int | None,
        number_option(
            "--stream-type",
            "T",
            "With --create: set the stream type that clients ask for [1, a sequencer's].",
        ),
    ] = None

    def check(self) -> None:
        """Raises `typer.BadParameter` for properties without --create."""
        if self._given() and not self.create:
            raise typer.BadParameter(
                "--system-id, --stream-version and --stream-type require --create; an existing "
                "file has its own"
            )

    def _given(self) -> dict[str, int]:
        values = {
            "system_id": self.system_id,
            "version": self.stream_version,
            "stream_type": self.stream_type,
        }
        return {name: value for name, value in values.items() if value is not None}

    def open(
        self, file: str, *, sync: SyncPolicy = "commit", index: IndexName = "lmdb"
    ) -> DataStream:
        """Open the stream in `file` for writing."""
        try:
            stream = DataStream.open(file, sync=sync, index=index)
        except FileMissing:
            if not self.create:
                raise Failure(
                    f"{file}: no such file; use --create to create an empty stream"
                ) from None
            return DataStream.create(
                file,
                version=self.stream_version or 1,
                system_id=self.system_id or 0,
                stream_type=STREAM_TYPE_SEQUENCER if self.stream_type is None else self.stream_type,
                sync=sync,
                index=index,
            )
        for name, value in self._given().items():
            if (has := getattr(stream.header, name)) != value:
                _log.warning(
                    "%s: the %s of the existing file is %d, not %d", file, _WORDS[name], has, value
                )
        return stream


_WORDS = {"system_id": "system id", "version": "stream version", "stream_type": "stream type"}
