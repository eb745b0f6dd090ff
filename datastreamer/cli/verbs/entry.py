"""`datastreamer entry`: print one entry."""

from __future__ import annotations

from typing import Annotated

import typer

from datastreamer.cli.shared.exit_codes import write_out, write_raw
from datastreamer.cli.shared.options import (
    ENTRY_OUTPUT,
    NO_TLS,
    EntryOutput,
    Format,
    SourceArgument,
    StreamTypeOption,
    TLSOptions,
    number_parser,
)
from datastreamer.cli.shared.output import one_entry
from datastreamer.cli.shared.source import named_not_found, open_source
from datastreamer.format import U64_MAX

NumberArgument = Annotated[
    int, typer.Argument(metavar="N", parser=number_parser(U64_MAX), help="Number of the entry.")
]


def entry(
    source: SourceArgument,
    number: NumberArgument,
    output: EntryOutput = ENTRY_OUTPUT,
    stream_type: StreamTypeOption = None,
    tls: TLSOptions = NO_TLS,
) -> None:
    """Print one entry by its number."""
    shape = output.chosen()
    with open_source(source, stream_type, tls=tls) as stream, named_not_found(source):
        found = stream.entry(number)
        version = stream.header().version
    write = write_raw if shape is Format.raw else write_out
    write(one_entry(found, shape, version))
