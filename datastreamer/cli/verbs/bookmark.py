"""`datastreamer bookmark`: look a bookmark up."""

from __future__ import annotations

from typing import Annotated

import typer

from datastreamer.cli.shared.exit_codes import write_out, write_raw
from datastreamer.cli.shared.options import (
    ENTRY_OUTPUT,
    NO_TLS,
    EntryOutput,
    Format,
    Key,
    KeyArgument,
    SourceArgument,
    StreamTypeOption,
    TLSOptions,
)
from datastreamer.cli.shared.output import one_entry
from datastreamer.cli.shared.source import named_not_found, open_source

EntryNumberOption = Annotated[
    bool,
    typer.Option("--entry-number", help="Print only the entry number of the bookmark itself."),
]


def bookmark(
    source: SourceArgument,
    key: KeyArgument,
    entry_number: EntryNumberOption = False,
    output: EntryOutput = ENTRY_OUTPUT,
    stream_type: StreamTypeOption = None,
    tls: TLSOptions = NO_TLS,
) -> None:
    """Print the first event at or after a bookmark."""
    wanted = Key(key)
    shape = output.chosen()
    with open_source(source, stream_type, tls=tls) as stream, named_not_found(source, key):
        version = stream.header().version
        if entry_number:
            shown = b"%d\n" % stream.bookmark(wanted.of(version))
        else:
            shown = one_entry(stream.first_event(wanted.of(version)), shape, version)
    write = write_raw if shape is Format.raw else write_out
    write(shown)
