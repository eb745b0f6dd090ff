"""`datastreamer truncate`: cut a stream back."""

from __future__ import annotations

from typing import Annotated

import typer

from datastreamer.cli.shared import logs
from datastreamer.cli.shared.exit_codes import Failure
from datastreamer.cli.shared.options import FileArgument, number_parser
from datastreamer.cli.shared.signals import stop_on_signal
from datastreamer.format import U64_MAX
from datastreamer.storage import bookmarks
from datastreamer.storage.stream import DataStream

CountArgument = Annotated[
    int,
    typer.Argument(
        metavar="N", parser=number_parser(U64_MAX), help="How many entries stay: those before N."
    ),
]


def truncate(
    file: FileArgument,
    number: CountArgument,
) -> None:
    """Cut a stream back to its first N entries, for good.

    Bookmarks go with their entries; an older one of the same key counts again. A stream
    that holds N entries is left as it is.
    """
    with logs.damage_told_once(bookmarks.__name__), DataStream.open(file) as stream:
        before = stream.total_entries
        if number > before:
            raise Failure(f"{file}: cannot be cut back to {number} entries, it holds {before}")
        if number == before:
            logs.say(f"{file} holds {before:,} entries as it is; nothing was cut")
            return
        # A signal comes before it or after it: what is begun here is finished.
        with stop_on_signal():
            stream.truncate(number)
        logs.say(
            f"{file} was cut back from {before:,} to {number:,} entries, "
            f"{stream.header.total_length:,} bytes"
        )
