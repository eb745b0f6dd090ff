"""`datastreamer bookmark`: look a bookmark up."""

from __future__ import annotations

from typing import Annotated

import typer

from datastreamer.cli.shared.exit_codes import write_out
from datastreamer.cli.shared.options import EntryOutput, Key, SourceOptions, StreamArgument
from datastreamer.cli.shared.output import write_entry
from datastreamer.cli.shared.source import named_not_found, open_source

KeyArgument = Annotated[
    str,
    typer.Argument(
        metavar="KEY", help="Key of the bookmark: 0x... in hex, block:N, batch:N, or text."
    ),
]
EntryNumberOption = Annotated[
    bool,
    typer.Option("--entry-number", help="Print only the entry number of the bookmark itself."),
]


def bookmark(
    source: StreamArgument,
    key: KeyArgument,
    *,
    entry_number: EntryNumberOption = False,
    output: EntryOutput,
    options: SourceOptions,
) -> None:
    """Print the first event at or after a bookmark.

    Examples:
      datastreamer bookmark stream.bin block:7
      datastreamer bookmark 127.0.0.1:6900 0x0107 --entry-number
    """
    wanted = Key(key)
    shape = output.chosen()
    with open_source(source, options, batch_reads=True) as stream, named_not_found(source, key):
        version = stream.header().version
        if entry_number:
            write_out(b"%d\n" % stream.bookmark(wanted.of(version)))
        else:
            write_entry(stream.first_event(wanted.of(version)), shape, version, stream.time_marks)
