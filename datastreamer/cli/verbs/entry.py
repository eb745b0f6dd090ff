"""`datastreamer entry`: print one entry."""

from __future__ import annotations

from typing import Annotated

import typer

from datastreamer.cli.shared.options import (
    EntryOutput,
    SourceOptions,
    StreamArgument,
    number_parser,
)
from datastreamer.cli.shared.output import write_entry
from datastreamer.cli.shared.source import named_not_found, open_source

NumberArgument = Annotated[
    int, typer.Argument(metavar="N", parser=number_parser(), help="Number of the entry.")
]


def entry(
    source: StreamArgument,
    number: NumberArgument,
    *,
    output: EntryOutput,
    options: SourceOptions,
) -> None:
    """Print one entry by its number.

    Examples:
      datastreamer entry stream.bin 7
      datastreamer entry 127.0.0.1:6900 7 --format hex
    """
    shape = output.chosen()
    with open_source(source, options, batch_reads=True) as stream, named_not_found(source):
        write_entry(stream.entry(number), shape, stream.header().version, stream.time_marks)
