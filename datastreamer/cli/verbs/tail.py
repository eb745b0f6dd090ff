"""`datastreamer tail`: print the last entries, and later ones."""

from __future__ import annotations

from typing import Annotated

from datastreamer.cli.shared.options import (
    EntryOutput,
    SourceArgument,
    SourceOptions,
    StreamVersionOption,
    number_option,
)
from datastreamer.cli.verbs.cat import DecodeOption, PrefixOption, TypeOption, cat

LastOption = Annotated[int, number_option("N", "Begin N entries before the head.")]


def tail(
    source: SourceArgument,
    *,
    last: LastOption = 10,
    types: TypeOption = None,
    prefixes: PrefixOption = None,
    decode: DecodeOption = None,
    stream_version: StreamVersionOption = None,
    output: EntryOutput,
    options: SourceOptions,
) -> None:
    """Print the last entries, and later ones as they are committed, until Ctrl-C.

    Examples:
      datastreamer tail stream.bin
      datastreamer tail tcps://stream.example.org --last 100 --json
    """
    cat(
        source,
        last=last,
        follow=True,
        types=types,
        prefixes=prefixes,
        decode=decode,
        stream_version=stream_version,
        output=output,
        options=options,
    )
