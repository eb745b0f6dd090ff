"""`datastreamer truncate`: remove the last entries of a stream."""

from __future__ import annotations

from typing import Annotated

import typer

from datastreamer.cli.shared import logs
from datastreamer.cli.shared.exit_codes import Failure
from datastreamer.cli.shared.options import FileArgument, number_parser
from datastreamer.cli.shared.signals import StopRequest
from datastreamer.storage.stream import DataStream

CountArgument = Annotated[
    int,
    typer.Argument(
        metavar="N",
        parser=number_parser(),
        help="Number of entries to keep: those before entry N.",
    ),
]


def truncate(file: FileArgument, number: CountArgument) -> None:
    """Truncate a stream to its first N entries, permanently.

    The bookmarks among the removed entries are removed; an older one of the same key is found
    again.

    Examples:
      datastreamer truncate stream.bin 1000
      datastreamer truncate stream.bin 0
    """
    with logs.hold_index_errors(), DataStream.open(file) as stream:
        before = stream.total_entries
        if number > before:
            raise Failure(f"{file}: cannot truncate to {number} entries: the stream holds {before}")
        if number == before:
            logs.say(f"{file} already holds {before:,} entries; nothing was changed")
            return
        # A signal does not interrupt the truncation.
        with StopRequest():
            stream.truncate(number)
        logs.say(
            f"{file} was truncated from {before:,} to {number:,} entries, "
            f"{stream.header.total_length:,} bytes"
        )
