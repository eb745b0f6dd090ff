"""`datastreamer zkevm batch` and `zkevm block`: print one, found by its bookmark.

`tree` draws it for people.
"""

from __future__ import annotations

from itertools import chain
from typing import Annotated

import typer

from datastreamer.cli.shared.exit_codes import Failure, write_out
from datastreamer.cli.shared.options import (
    ReportOutput,
    SourceOptions,
    StreamArgument,
    StreamVersionOption,
    number_parser,
)
from datastreamer.cli.shared.output import json_line
from datastreamer.cli.shared.source import named_not_found, open_source
from datastreamer.zkevm.block_json import (
    batch_json,
    blocks_json,
    described,
    marked_entries,
)
from datastreamer.zkevm.bookmark_keys import BookmarkName, Kind, key_of

NumberArgument = Annotated[
    int,
    typer.Argument(metavar="N", parser=number_parser(), help="Number of the batch or block."),
]
NoOpenOption = Annotated[
    bool,
    typer.Option("--no-open", help="Do not decode transactions to fields, hash and sender."),
]


def batch(
    source: StreamArgument,
    number: NumberArgument,
    *,
    no_open: NoOpenOption = False,
    stream_version: StreamVersionOption = None,
    output: ReportOutput,
    options: SourceOptions,
) -> None:
    """Show a batch with its blocks and their transactions.

    Examples:
      datastreamer zkevm batch stream.bin 3
      datastreamer zkevm batch 127.0.0.1:6900 3 --json
    """
    _show("batch", source, number, no_open, stream_version, output, options)


def block(
    source: StreamArgument,
    number: NumberArgument,
    *,
    no_open: NoOpenOption = False,
    stream_version: StreamVersionOption = None,
    output: ReportOutput,
    options: SourceOptions,
) -> None:
    """Show a block with its transactions.

    Examples:
      datastreamer zkevm block stream.bin 7
      datastreamer zkevm block 127.0.0.1:6900 7 --json
    """
    _show("block", source, number, no_open, stream_version, output, options)


def _show(
    kind: Kind,
    source: str,
    number: int,
    no_open: bool,
    version: int | None,
    output: ReportOutput,
    options: SourceOptions,
) -> None:
    shape, mark = output.chosen(), BookmarkName(kind, number)
    with open_source(source, options) as stream, named_not_found(source, str(mark)):
        header = stream.header()
        version = version or header.version
        runs = stream.batches(key_of(version, mark), header.total_entries)
        entries = marked_entries(kind, chain.from_iterable(runs), version)
        events = [described(found, not no_open) for found in entries]
    if kind == "batch":
        shown = batch_json(events)
    elif blocks := blocks_json(events):
        shown = blocks[0]
    else:
        first = events[0][1]["entry"]
        raise Failure(f"{source}: no block follows the bookmark in entry {first}")
    if shape == "jsonl":
        write_out(json_line(shown))
    else:
        from datastreamer.cli.verbs.zkevm.tree import batch_tree, block_tree, printed

        write_out(printed(batch_tree(shown) if kind == "batch" else block_tree(shown)))
