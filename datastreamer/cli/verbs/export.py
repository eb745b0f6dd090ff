"""`datastreamer export`: write entries as Parquet, JSON lines or CSV."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from datastreamer.cli.shared.exit_codes import Failure
from datastreamer.cli.shared.options import (
    FromTimeOption,
    SourceOptions,
    StreamArgument,
    StreamVersionOption,
    number_option,
)
from datastreamer.cli.shared.output import JsonResult, count
from datastreamer.cli.shared.progress import ProgressBar
from datastreamer.cli.shared.source import ServerSource, open_source
from datastreamer.cli.verbs.cat import PrefixOption, TypeOption, selection_of
from datastreamer.errors import DecodeFailed, ExtraMissing, NotFound, UsageError

OutArgument = Annotated[
    str,
    typer.Argument(
        metavar="OUT",
        help="Folder, where an earlier export is continued; or new .parquet, .jsonl or .csv file.",
    ),
]


TableOption = Annotated[
    Literal[
        "entries",
        "blocks",
        "block_ends",
        "transactions",
        "batches",
        "batch_ends",
        "ger_updates",
        "bookmarks",
        "all",
    ],
    typer.Option(
        metavar="TABLE",
        help="Set what a row is: entries, blocks, block_ends, transactions, batches, batch_ends, "
        "ger_updates or bookmarks; all: one folder for each table.",
    ),
]
FromOption = Annotated[
    int | None,
    number_option("N", "First entry [0, or the one after the earlier export].", name="--from"),
]
ToOption = Annotated[int | None, number_option("N", "Last entry, included [the head].")]
OnErrorOption = Annotated[
    Literal["raise", "null", "drop"],
    typer.Option(
        help="Set what to do about an entry that is not an event: fail, write nulls and a column "
        "with the reason, or drop it."
    ),
]


def export(
    source: StreamArgument,
    out: OutArgument,
    *,
    table: TableOption = "entries",
    start: FromOption = None,
    from_time: FromTimeOption = None,
    to: ToOption = None,
    types: TypeOption = None,
    prefixes: PrefixOption = None,
    on_error: OnErrorOption = "raise",
    stream_version: StreamVersionOption = None,
    options: SourceOptions,
    result: JsonResult,
) -> None:
    """Export entries to Parquet, JSON lines or CSV.

    In a folder, writes Parquet files that are named by their entries. The next export to the
    folder checks that its files belong to this stream, and adds the later entries. --type and
    --prefix apply to the table entries.

    Examples:
      datastreamer export stream.bin out.parquet
      datastreamer export 127.0.0.1:6900 tables --table transactions
    """
    if not out:
        raise typer.BadParameter("OUT is empty; name a folder or a new file")
    if start is not None and from_time is not None:
        raise typer.BadParameter("--from and --from-time exclude each other")
    if start is not None and to is not None and to < start:
        raise typer.BadParameter(f"--to {to} is less than --from {start}")
    where = selection_of(types, prefixes)
    if where is not None and table != "entries":
        raise typer.BadParameter(f"--type is for --table entries; {table} has its own types")
    from datastreamer import arrow

    with (
        open_source(source, options, batch_reads=from_time is not None) as stream,
        ProgressBar(f"exporting {source}", 1, left="no unfinished file is left") as progress,
    ):
        if from_time is not None:
            start = stream.entry_at(from_time)
        try:
            done = arrow.export(
                stream.client if isinstance(stream, ServerSource) else stream.stream,
                out,
                table,
                start=start,
                stop=None if to is None else to + 1,
                on_error=on_error,
                where=where,
                version=stream_version,
                advance=progress.reach,
            )
        except DecodeFailed as error:
            advice = "null or drop continues past such entries"
            if Path(out).is_dir():
                # Its files lack the column that null adds.
                advice = "drop continues past such entries; null needs another folder"
            raise Failure(f"{source}: {error}; --on-error {advice}") from None
        except ExtraMissing:
            raise
        except UsageError as error:
            raise typer.BadParameter(str(error)) from None
        except NotFound as error:
            raise Failure(f"{source}: {error}") from None
    rows = ", ".join(f"{number:,} {name}" for name, number in done.rows.items())
    if not done.next:
        text = f"{source} holds no entries"
    elif not done.files:
        text = f"{out} already has all entries before {done.next:,}"
    else:
        text = (
            f"{out}: {rows}, from entries {done.first:,} to {done.next - 1:,}, in "
            f"{count(len(done.files), 'new file')}"
        )
    result.report(
        text,
        {
            "first": done.first,
            "next": done.next,
            "rows": dict(done.rows),
            "files": [str(file) for file in done.files],
        },
    )
