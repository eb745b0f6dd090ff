"""`--create` and its options: the stream that a command writes to, created if it is missing."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from datastreamer.cli.shared.exit_codes import Failure
from datastreamer.cli.shared.options import number_option
from datastreamer.errors import FileMissing
from datastreamer.storage.bookmarks.fallback import LMDB_OR_MEMORY
from datastreamer.storage.pages.page_states import Verify
from datastreamer.storage.stream import DataStream
from datastreamer.storage.view import IndexName
from datastreamer.storage.write.sync_policy import SyncPolicy

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class CreationOptions:
    """--create and the properties of a new stream, a group."""

    create: Annotated[
        bool, typer.Option("--create", help="Create an empty stream if FILE does not exist.")
    ] = False
    system_id: Annotated[
        int | None,
        number_option("N", "With --create: set the system id, for example the chain id [0]."),
    ] = None
    stream_version: Annotated[
        int | None,
        number_option(
            "N",
            "With --create: set the stream version: 1 fixed layouts, 2 and later protobuf [1].",
            most=255,
            least=1,
        ),
    ] = None
    stream_type: Annotated[
        int | None,
        number_option(
            "T", "With --create: set the stream type that clients ask for [1, a sequencer's]."
        ),
    ] = None

    def check(self) -> None:
        """Raises `typer.BadParameter` for properties without --create."""
        if self._given() and not self.create:
            raise typer.BadParameter(
                "--system-id, --stream-version and --stream-type require --create; an existing "
                "file has its own"
            )

    def _given(self) -> dict[str, Any]:
        values = {
            "system_id": self.system_id,
            "version": self.stream_version,
            "stream_type": self.stream_type,
        }
        return {name: value for name, value in values.items() if value is not None}

    def check_file(self, file: str) -> None:
        """Raises `Failure` if `open` would find no file."""
        if not self.create and not os.path.exists(file):
            raise _missing(file)

    def open(
        self,
        file: str,
        *,
        sync: SyncPolicy = "commit",
        index: IndexName = LMDB_OR_MEMORY,
        verify: Verify = "cold",
    ) -> DataStream:
        """Open the stream in `file` for writing."""
        given = self._given()
        try:
            stream = DataStream.open(file, sync=sync, index=index, verify=verify)
        except FileMissing:
            if self.create:
                return DataStream.create(file, sync=sync, index=index, **given)
            raise _missing(file) from None
        for name, value in given.items():
            if (has := getattr(stream.header, name)) != value:
                what = name.replace("_", " ")
                _log.warning(
                    "%s: the %s of the existing file is %d, not %d", file, what, has, value
                )
        return stream


def _missing(file: str) -> Failure:
    return Failure(f"{file}: no such file; use --create to create an empty stream")
