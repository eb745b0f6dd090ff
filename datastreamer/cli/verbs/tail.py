"""`datastreamer tail`: print the last entries, and later ones."""

from __future__ import annotations

from typing import Annotated

import typer

from datastreamer.cli.shared.options import (
    EntryOutput,
    SourceArgument,
    SourceOptions,
    StreamVersionOption,
    number_option,
    read_moment,
    text_option,
)
from datastreamer.cli.verbs.cat import DecodeOption, PrefixOption, TypeOption, cat

LastOption = Annotated[int | None, number_option("N", "Begin N entries before the head [10].")]
SinceOption = Annotated[
    int | None,
    text_option("TIME", "Begin 90s, 10m, 2h or 1d ago, or at a time.", parser=read_moment),
]


def tail(
    source: SourceArgument,
    *,
    last: LastOption = None,
    since: SinceOption = None,
    types: TypeOption = None,
    prefixes: PrefixOption = None,
    decode: DecodeOption = None,
    stream_version: StreamVersionOption = None,
    output: EntryOutput,
    options: SourceOptions,
) -> None:
    """Print the last entries, then later ones as they are committed, until Ctrl-C.

    Examples:
      datastreamer tail stream.bin --since 10m
      datastreamer tail tcps://stream.example.org --last 100 --json
    """
    if last is not None and since is not None:
        raise typer.BadParameter("--last and --since exclude each other")
    cat(
        source,
        from_time=since,
        last=10 if last is None and since is None else last,
        follow=True,
        types=types,
        prefixes=prefixes,
        decode=decode,
        stream_version=stream_version,
        output=output,
        options=options,
    )
