"""`datastreamer export`: a stream, or a part of it, as Parquet, JSON lines or CSV."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from datastreamer.cli.shared import logs
from datastreamer.cli.shared.exit_codes import Failure
from datastreamer.cli.shared.options import (
    NO_TLS,
    SourceArgument,
    StreamTypeOption,
    StreamVersionOption,
    TLSOptions,
    number_option,
)
from datastreamer.cli.shared.progress import ProgressBar
from datastreamer.cli.shared.source import FileSource, ServerSource, open_source
from datastreamer.errors import DecodeFailed, NotFound

OutArgument = Annotated[
    str,
    typer.Argument(
        metavar="OUT",
        help="A folder, which is gone on with; or a new file: .parquet, .jsonl or .csv.",
    ),
]


class TableName(str, Enum):
    """The tables of `datastreamer.arrow`, and all of them."""

    entries = "entries"
    blocks = "blocks"
    block_ends = "block_ends"
    transactions = "transactions"
    batches = "batches"
    batch_ends = "batch_ends"
    ger_updates = "ger_updates"
    bookmarks = "bookmarks"
    all = "all"


class OnError(str, Enum):
    """What becomes of an entry that is no event."""

    fail = "raise"
    null = "null"
    drop = "drop"


TableOption = Annotated[
    TableName,
    typer.Option("--table", help="What the rows are [entries]; all: a folder for each table."),
]
FromOption = Annotated[
    int | None,
    number_option("--from", "N", "The first entry [0, or behind what is there]."),
]
ToOption = Annotated[int | None, number_option("--to", "N", "The last entry, included.")]
OnErrorOption = Annotated[
    OnError,
    typer.Option(
        "--on-error",
        help="What to do about an entry that is no event: fail there, have nulls and a column "
        "that says why, or leave it out.",
    ),
]


def export(
    source: SourceArgument,
    out: OutArgument,
    table: TableOption = TableName.entries,
    start: FromOption = None,
    to: ToOption = None,
    on_error: OnErrorOption = OnError.fail,
    stream_version: StreamVersionOption = None,
    stream_type: StreamTypeOption = None,
    tls: TLSOptions = NO_TLS,
) -> None:
    """Write what is committed now to files that other tools read.

    A folder gets Parquet files that are named by their entries. The next export to it writes
    what came since; what is there is checked to be of this stream, and never written again.
    """
    if not out:
        raise typer.BadParameter("OUT is empty: it is a folder, or a new file")
    if start is not None and to is not None and to < start:
        raise typer.BadParameter(f"--to {to} stands before --from {start}")
    from datastreamer import arrow

    with (
        open_source(source, stream_type, tls=tls) as stream,
        ProgressBar(f"exporting {source}", 1) as progress,
    ):
        assert isinstance(stream, FileSource | ServerSource)
        try:
            done = arrow.export(
                stream.stream if isinstance(stream, FileSource) else stream.client,
                out,
                table.value,
                start=start,
                stop=None if to is None else to + 1,
                on_error=on_error.value,
                version=stream_version,
                advance=progress.reach,
            )
        except DecodeFailed as error:
            advice = "null or drop goes on past such entries"
            if Path(out).is_dir():
                # What stands before is there now, without the column that null adds.
                advice = "drop goes on past such entries, and null does in another folder"
            raise Failure(f"{source}: {error}; --on-error {advice}") from None
        except NotFound as error:
            raise Failure(f"{source}: {error}") from None
    rows = ", ".join(f"{count:,} {name}" for name, count in done.rows.items())
    if not done.next:
        logs.say(f"{source} holds no entries yet")
    elif not done.files:
        logs.say(f"{out} has all entries before {done.next:,} already")
    elif table is TableName.entries:
        logs.say(f"{out}: {rows}, in {_files(len(done.files))}")
    else:
        logs.say(
            f"{out}: {rows}, from entries {done.first:,} to {done.next - 1:,}, in "
            f"{_files(len(done.files))}"
        )


def _files(count: int) -> str:
    return f"{count:,} new file{'' if count == 1 else 's'}"
