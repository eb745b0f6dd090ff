"""`datastreamer zkevm batch` and `zkevm block`: print one, found by its bookmark.

`tree` draws it for people.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Annotated, Any

import typer

from datastreamer.cli.shared.exit_codes import Failure, write_out
from datastreamer.cli.shared.options import (
    Format,
    ReportOutput,
    SourceOptions,
    StreamArgument,
    StreamVersionOption,
    number_parser,
)
from datastreamer.cli.shared.output import json_line
from datastreamer.cli.shared.source import named_not_found, open_source
from datastreamer.zkevm.block_json import (
    DescribedEvent,
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
    shape = output.chosen()
    mark = BookmarkName("batch", number)
    entries = list(_described_entries(source, mark, stream_version, options, not no_open))
    _write(shape, "batch", batch_json(entries))


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
    shape = output.chosen()
    mark = BookmarkName("block", number)
    entries = list(_described_entries(source, mark, stream_version, options, not no_open))
    found = blocks_json(entries)
    if not found:
        first = entries[0][1]["entry"]
        raise Failure(f"{source}: no block follows the bookmark in entry {first}")
    _write(shape, "block", found[0])


def _write(shape: Format, kind: Kind, found: dict[str, Any]) -> None:
    if shape == "jsonl":
        write_out(json_line(found))
    else:
        from datastreamer.cli.verbs.zkevm.tree import batch_tree, block_tree, printed

        write_out(printed(batch_tree(found) if kind == "batch" else block_tree(found)))


def _described_entries(
    source: str, mark: BookmarkName, version: int | None, options: SourceOptions, opening: bool
) -> Iterator[DescribedEvent]:
    """The events of a batch or block with their values, beginning with its bookmark."""
    with open_source(source, options) as stream, named_not_found(source, str(mark)):
        header = stream.header()
        version = version or header.version
        runs = stream.batches(key_of(version, mark), header.total_entries)
        for found in marked_entries(mark.kind, chain.from_iterable(runs), version):
            yield described(found, opening)
